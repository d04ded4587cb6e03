//! Pre-tokenisers: how the text is cut into words before pairs are merged, by the name in `tokenizer.ggml.pre`.
//!
//! A pre-tokeniser is a list of stages. Each stage cuts every fragment that the one before it left into its matches
//! and the gaps between them. `pre_patterns` has the stages of each name.
//!
//! The published patterns end in `\s+(?!\S)|\s+`: a run of spaces leaves its last one to the word that follows. That
//! is nearly the only look-ahead they need, so the patterns here end in `\s+` alone and [`Stage::end_of`] gives the last
//! space back. Everything then runs on an automaton in linear time, without backtracking or its stack.

use super::pre_patterns::{Cut, Known, WholeWords};
use regex::Regex;

/// What `tokenizer.ggml.pre` decides about the text.
pub(super) struct PreTokenizer {
    stages: Vec<Stage>,
    whole_words: WholeWords,
}

enum Stage {
    Matches {
        pattern: Regex,
        spaces: Spaces,
    },
    /// Groups of three, counted from the end of each run.
    Threes(Regex),
    /// White space in powers of two: Jais 2 lists them.
    PowersOfTwo(Regex),
}

/// The most characters of white space in a word of Jais 2.
const POWER_MAX: usize = 512;

/// How a match of white space ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Spaces {
    /// As it is.
    Whole,
    /// Before its last character: the pattern ends in `\s+`.
    GiveBack,
    /// The same, but a run that ends in a line break is matched by an alternative of its own, and stays whole.
    GiveBackButLineBreaks,
}

impl PreTokenizer {
    pub(super) fn new(known: &Known) -> PreTokenizer {
        PreTokenizer {
            stages: known.stages.iter().map(Stage::new).collect(),
            whole_words: known.whole_words,
        }
    }

    /// Whether this word, if it is a piece as it stands, becomes that piece, whatever the merges say.
    pub(super) fn stays_whole(&self, word: &str) -> bool {
        match self.whole_words {
            WholeWords::None => false,
            WholeWords::LineBreaks => word.bytes().all(|byte| byte == b'\n'),
            WholeWords::All => true,
        }
    }

    /// Calls `word` with each word of `text`, in order; together they are the text.
    pub(super) fn split<'t>(&self, text: &'t str, word: &mut dyn FnMut(&'t str)) {
        cut_by(&self.stages, text, word);
    }
}

fn cut_by<'t>(stages: &[Stage], text: &'t str, word: &mut dyn FnMut(&'t str)) {
    match stages.split_first() {
        Some((stage, rest)) => stage.cut(text, &mut |fragment| cut_by(rest, fragment, word)),
        None => word(text),
    }
}

impl Stage {
    fn new(cut: &Cut) -> Stage {
        let compiled = |pattern| Regex::new(pattern).expect("the built-in patterns compile");
        match *cut {
            Cut::At(pattern) => Stage::Matches {
                pattern: compiled(pattern),
                spaces: if !pattern.ends_with(r"|\s+") {
                    Spaces::Whole
                } else if pattern.contains(r"|\s*[\r\n]") {
                    Spaces::GiveBackButLineBreaks
                } else {
                    Spaces::GiveBack
                },
            },
            Cut::Threes(pattern) => Stage::Threes(compiled(pattern)),
            Cut::PowersOfTwo(pattern) => Stage::PowersOfTwo(compiled(pattern)),
        }
    }

    /// Cuts `text` into matches and the gaps between them.
    fn cut<'t>(&self, text: &'t str, fragment: &mut dyn FnMut(&'t str)) {
        let (Stage::Matches { pattern, .. } | Stage::Threes(pattern) | Stage::PowersOfTwo(pattern)) =
            self;
        let mut position = 0;
        while let Some(found) = pattern.find_at(text, position) {
            if found.start() > position {
                fragment(&text[position..found.start()]);
            }
            position = match self {
                Stage::Matches { spaces, .. } => {
                    let end = spaces.end_of(text, found.start(), found.end());
                    fragment(&text[found.start()..end]);
                    end
                }
                Stage::Threes(_) => {
                    in_threes(found.as_str(), fragment);
                    found.end()
                }
                // The whole run at once: what is matched is never looked at again, however long it is.
                Stage::PowersOfTwo(_) => {
                    let spaces = Spaces::GiveBackButLineBreaks;
                    let end = spaces.end_of(text, found.start(), found.end());
                    in_powers_of_two(&text[found.start()..end], fragment);
                    end
                }
            };
        }
        if position < text.len() {
            fragment(&text[position..]);
        }
    }
}

impl Spaces {
    /// The end that the published pattern would have found, where `start..end` is what the one here found; other
    /// matches end as they are. Only white space alone ends in white space, line breaks apart.
    fn end_of(self, text: &str, start: usize, end: usize) -> usize {
        let Some(last) = text[start..end].chars().next_back() else {
            return end;
        };
        let is_line_break = matches!(last, '\r' | '\n');
        if !last.is_whitespace() || (is_line_break && self != Spaces::GiveBack) {
            return end;
        }
        let shorter = end - last.len_utf8();
        let may_be_shorter = end < text.len() && shorter > start;
        match self {
            Spaces::GiveBack | Spaces::GiveBackButLineBreaks if may_be_shorter => shorter,
            _ => end,
        }
    }
}

/// The first group has what is left over: one character to three.
fn in_threes<'t>(run: &'t str, group: &mut dyn FnMut(&'t str)) {
    let count = run.chars().count();
    let mut start = 0;
    for (index, (place, _)) in run.char_indices().enumerate() {
        if index > 0 && (count - index).is_multiple_of(3) {
            group(&run[start..place]);
            start = place;
        }
    }
    group(&run[start..]);
}

/// White space without line breaks is cut, the longest power first; every other match stays whole.
fn in_powers_of_two<'t>(matched: &'t str, group: &mut dyn FnMut(&'t str)) {
    let is_cut = |character: char| character.is_whitespace() && !matches!(character, '\r' | '\n');
    if !matched.chars().next_back().is_some_and(is_cut) {
        return group(matched);
    }
    let mut rest = matched;
    let mut count = matched.chars().count();
    while count > 0 {
        let power = (1 << count.ilog2()).min(POWER_MAX);
        let place = rest.char_indices().nth(power);
        let (first, others) = rest.split_at(place.map_or(rest.len(), |(place, _)| place));
        group(first);
        rest = others;
        count -= power;
    }
}

#[cfg(test)]
mod tests {
    use super::super::pre_patterns::{NAMES, known};
    use super::*;
    use std::time::{Duration, Instant};

    fn named(name: &str) -> PreTokenizer {
        PreTokenizer::new(&known(name).unwrap())
    }

    fn check(name: &str, text: &str, expected: &[&str]) {
        let mut words = Vec::new();
        named(name).split(text, &mut |word| words.push(word));
        assert_eq!(words, expected, "{name} on {text:?}");
    }

    #[test]
    fn words_are_cut_as_the_published_patterns_cut_them() {
        check(
            "gpt-2",
            "Hello  world's 123!",
            &["Hello", " ", " world", "'s", " 123", "!"],
        );
        check("gpt-2", "a\n\n b ", &["a", "\n\n", " b", " "]);
        check("gpt-2", "a \n\tb", &["a", " \n", "\t", "b"]);
        check("gpt-2", "x\u{a0}\u{a0}y", &["x", "\u{a0}", "\u{a0}", "y"]);
        check("smollm", "ab 123", &["ab", " ", "1", "2", "3"]);
        check("default", "a1234, b", &["a", "123", "4", ",", " b"]);
        check(
            "llama-bpe",
            "I'LL go\r\n  now 12345 (ok)\n",
            &[
                "I", "'LL", " go", "\r\n", " ", " now", " ", "123", "45", " (", "ok", ")\n",
            ],
        );
        check("llama3", "a   \n \n  b", &["a", "   \n \n", " ", " b"]);
        check("qwen2", "n 42", &["n", " ", "4", "2"]);
        check(
            "tekken",
            "HelloWorld ÉCOLE 12",
            &["Hello", "World", " ÉCOLE", " ", "1", "2"],
        );
        check(
            "gpt-4o",
            "don't MiXeD 1234",
            &["don't", " Mi", "Xe", "D", " ", "123", "4"],
        );
        check(
            "falcon",
            "a<b> 1234",
            &["a", "<", "b", ">", " ", "123", "4"],
        );
        check(
            "deepseek-llm",
            "Hi, 世界 42\n",
            &["Hi", ",", " ", "世界", " ", "42", "\n"],
        );
        check(
            "deepseek-v3",
            "x=12345 日本",
            &["x", "=", "123", "45", " ", "日本"],
        );
        check("bloom", "Hi, you", &["Hi", ",", " you"]);
        check("starcoder", "", &[]);
        check(
            "kimi-k2",
            "汉字abc日1234 ok's",
            &["汉字", "abc", "日", "123", "4", " ok's"],
        );
        check("glm4", "a 12345", &["a", " ", "123", "45"]);
        check(
            "youtu",
            "한국어，text。42",
            &["한국어", "，", "text", "。", "4", "2"],
        );
        check(
            "chameleon",
            "IMGIMGABZ  x12.",
            &["IMGIMGABZ", "  ", "x", "1", "2", "."],
        );
        check(
            "exaone-moe",
            "two words 42/\n  x",
            &["two words", " ", "4", "2", "/\n", " ", " x"],
        );
        check("bailingmoe", "it'D \r\n x", &["it", "'D", " \r\n", " x"]);
        check("seed-coder", "a.\n\nb", &["a", ".", "\n\n", "b"]);
        check("laguna", "a\n\n b", &["a", "\n\n", " b"]);
        check("gemma4", "a b\n\nc d", &["a b", "\n\n", "c d"]);
        check("ufakzeka", "Ankara'da", &["Ankara", "'da"]);
        check(
            "spark2_5",
            "a1234. \n\nb",
            &["a", "1", "2", "3", "4", ".", " \n", "\n", "b"],
        );
    }

    #[test]
    fn numbers_are_grouped_from_the_right() {
        check(
            "superbpe",
            "pi 1234567 x",
            &["pi ", "1", "234", "567", " x"],
        );
        check("superbpe", "123456", &["123", "456"]);
        check("superbpe", "12²3456", &["12", "²", "3", "456"]);
        check("afmoe", "  1234 日本", &["  ", "1", "234", " ", "日本"]);
        check("tiny_aya", "n=12345", &["n", "=", "12", "345"]);
    }

    #[test]
    fn white_space_of_jais_2_comes_in_powers_of_two() {
        let check = |spaces: usize, then: &str, expected: &[usize]| {
            let text = format!("{}{then}", " ".repeat(spaces));
            let mut lengths = Vec::new();
            named("jais-2").split(&text, &mut |word| lengths.push(word.len()));
            assert_eq!(lengths, expected, "{spaces} spaces before {then:?}");
        };
        check(1, "", &[1]);
        check(2, "", &[2]);
        check(3, "", &[2, 1]);
        check(7, "", &[4, 2, 1]);
        check(1, "x", &[2]);
        check(2, "x", &[1, 2]);
        check(9, "x", &[8, 2]);
        check(512, "", &[512]);
        check(512, "x", &[256, 128, 64, 32, 16, 8, 4, 2, 1, 2]);
        check(513, "x", &[512, 2]);
        check(1100, "", &[512, 512, 64, 8, 4]);
        check(3, "\nx", &[4, 1]);
        check(1100, "x", &[512, 512, 64, 8, 2, 1, 2]);
        check(1100, "7", &[512, 512, 64, 8, 2, 1, 1, 1]);
        check(1100, "\n", &[1101]);
    }

    #[test]
    fn every_known_name_gives_back_the_whole_text() {
        let text = "  It's\r\n\t 3.14 naïve Ⅷ e\u{301} 日本語 🙂\u{200d}🙂 <|x|> \u{a0}\u{2003}_-/\\ \n\n  end  ";
        for name in NAMES.iter().flat_map(|(names, _)| *names) {
            let mut joined = String::new();
            named(name).split(text, &mut |word| {
                assert!(!word.is_empty());
                joined.push_str(word);
            });
            assert_eq!(joined, text, "{name}");
        }
        assert!(known("no such").is_none() && known("").is_none());
    }

    /// Three million spaces made the backtracking engines fail or overflow; here they are one word.
    #[test]
    fn long_runs_are_single_words() {
        let spaces = " ".repeat(3 << 20);
        for name in [
            "gpt-2",
            "llama3",
            "tekken",
            "deepseek-v3",
            "kimi-k2",
            "gemma4",
        ] {
            check(name, &spaces, &[&spaces]);
        }
        let text = format!("{spaces}x");
        check("qwen2", &text, &[&spaces[1..], " x"]);
    }

    /// Where each word were found by a look at the rest of the run, these would take minutes.
    #[test]
    fn long_runs_take_time_in_proportion_to_their_length() {
        const LIMIT: Duration = Duration::from_secs(5);
        let short = ["\t", "\u{a0}", "\n", "\n ", "a", "aA", "1", "日", "!", " x"];
        let runs = short.map(|part| (part, 1 << 17));
        for (names, known) in NAMES {
            let pre_tokenizer = PreTokenizer::new(known);
            for (part, bytes) in runs.into_iter().chain([(" ", 3 << 20)]) {
                let text = part.repeat(bytes / part.len()) + "x";
                let (start, mut length) = (Instant::now(), 0);
                pre_tokenizer.split(&text, &mut |word| {
                    length += word.len();
                    let spent = start.elapsed();
                    assert!(
                        spent < LIMIT,
                        "{names:?}: {length} bytes of {part:?} in {spent:?}"
                    );
                });
                assert_eq!(length, text.len(), "{names:?}: {part:?}");
            }
        }
    }
}

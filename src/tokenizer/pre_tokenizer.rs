//! Pre-tokenisers: how the text is cut into words before byte pairs are merged, by the name in `tokenizer.ggml.pre`.
//!
//! A pre-tokeniser is a list of stages. Each stage cuts every fragment that the one before it left into its matches
//! and the gaps between them. The patterns are those that the models were trained with; where llama.cpp approximates
//! one (Unicode categories in `tekken` and `gpt-4o`), the original stands here.
//!
//! The published patterns end in `\s+(?!\S)|\s+`: a run of spaces leaves its last one to the word that follows. That
//! is the only look-ahead they need, so the patterns here end in `\s+` alone and [`Stage::cut`] gives the last space
//! back. Everything then runs on an automaton in linear time, without backtracking or its stack.

use regex::Regex;

/// What `tokenizer.ggml.pre` decides, besides the patterns.
pub(super) struct PreTokenizer {
    stages: Vec<Stage>,
    /// A word that is a piece as it stands becomes that piece, whatever the merges say.
    pub(super) ignore_merges: bool,
    /// Whether the beginning-of-sequence token is added where the file does not say.
    pub(super) add_bos: bool,
}

struct Stage {
    pattern: Regex,
    /// Whether a run of white space gives back its last character: the pattern ends in `\s+`.
    gives_back_space: bool,
    /// Whether runs that end in a line break are matched by an alternative of their own, and stay whole.
    has_line_breaks: bool,
}

/// `tokenizer.ggml.pre` of files that name none, or one that is not known here.
pub(super) const FALLBACK: &str = "default";

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
const LLAMA3: &str = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const QWEN2: &str = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const QWEN35: &str = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?:'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?:'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+";
const SEED_CODER: &str = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+";
const DEEPSEEK3_CJK: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"##;
/// Letters with case, as the tokenizer of DeepSeek LLM lists them.
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+";
const DEEPSEEK_PUNCTUATION: &str =
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+";
const DEEPSEEK_CJK: &str = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

impl PreTokenizer {
    /// The pre-tokeniser of that name; `None` where it is not known.
    pub(super) fn named(name: &str) -> Option<PreTokenizer> {
        let (patterns, ignore_merges, add_bos): (&[&str], bool, bool) = match name {
            "default" => (
                &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
                false,
                false,
            ),
            "gpt-2" | "gpt2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "exaone4"
            | "jina-es" | "jina-de" | "jina-v2-es" | "jina-v2-de" | "jina-v1-en"
            | "jina-v2-code" | "roberta-bpe" | "gigachat" | "a.x-4.0" | "mellum"
            | "modern-bert" | "granite-docling" => (&[GPT2], false, false),
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone"
            | "minerva-7b" | "mellum2" => (&[r"\p{N}", GPT2], false, false),
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral"
            | "midm-2.0" | "lfm2" | "jina-v5-nano" => (&[LLAMA3], true, true),
            "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => (&[LLAMA3], false, false),
            "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "megrez" | "stablelm2"
            | "hunyuan" | "solar-open" | "grok-2" => (&[QWEN2], false, false),
            "qwen35" => (&[QWEN35], false, false),
            "tekken" => (&[TEKKEN], true, true),
            "gpt-4o" | "llama4" | "kanana2" | "talkie" | "minimax-m2" => (&[GPT4O], false, false),
            "seed-coder" => (&[SEED_CODER], false, false),
            "falcon" => (
                &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"],
                false,
                false,
            ),
            "deepseek-llm" => (
                &[
                    r"[\r\n]",
                    DEEPSEEK_LETTERS,
                    DEEPSEEK_PUNCTUATION,
                    r"\s+$",
                    DEEPSEEK_CJK,
                    r"\p{N}+",
                ],
                false,
                false,
            ),
            "deepseek-coder" => (
                &[
                    r"[\r\n]",
                    r"\s?\p{L}+",
                    r"\s?\p{P}+",
                    DEEPSEEK_CJK,
                    r"\p{N}",
                ],
                false,
                false,
            ),
            "deepseek-v3" | "hunyuan-dense" | "joyai-llm" | "hy_v4" => {
                (&[r"\p{N}{1,3}", DEEPSEEK3_CJK, DEEPSEEK3], false, false)
            }
            "poro-chat" | "bloom" | "gpt3-finnish" => (&[BLOOM], false, false),
            "viking" => (&[BLOOM, r"\p{N}"], false, false),
            _ => return None,
        };
        let stages = patterns.iter().map(|pattern| Stage::new(pattern)).collect();
        Some(PreTokenizer {
            stages,
            ignore_merges,
            add_bos,
        })
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
    fn new(pattern: &str) -> Stage {
        Stage {
            pattern: Regex::new(pattern).expect("the built-in patterns compile"),
            gives_back_space: pattern.ends_with(r"|\s+"),
            has_line_breaks: pattern.contains(r"|\s*[\r\n]+|"),
        }
    }

    /// Cuts `text` into matches and the gaps between them.
    fn cut<'t>(&self, text: &'t str, fragment: &mut dyn FnMut(&'t str)) {
        let mut position = 0;
        while let Some(found) = self.pattern.find_at(text, position) {
            if found.start() > position {
                fragment(&text[position..found.start()]);
            }
            let end = self.end_of(text, found.start(), found.end());
            fragment(&text[found.start()..end]);
            position = end;
        }
        if position < text.len() {
            fragment(&text[position..]);
        }
    }

    /// The end that `\s+(?!\S)|\s+` would have found, where `start..end` is what `\s+` found; other matches end as
    /// they are. Only white space alone ends in white space, line breaks apart.
    fn end_of(&self, text: &str, start: usize, end: usize) -> usize {
        let Some(last) = text[start..end].chars().next_back() else {
            return end;
        };
        let shorter = end - last.len_utf8();
        let is_space =
            last.is_whitespace() && !(self.has_line_breaks && matches!(last, '\r' | '\n'));
        if self.gives_back_space && is_space && end < text.len() && shorter > start {
            shorter
        } else {
            end
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, text: &str, expected: &[&str]) {
        let mut words = Vec::new();
        PreTokenizer::named(name)
            .unwrap()
            .split(text, &mut |word| words.push(word));
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
    }

    #[test]
    fn every_known_name_gives_back_the_whole_text() {
        let text = "  It's\r\n\t 3.14 naïve Ⅷ e\u{301} 日本語 🙂\u{200d}🙂 <|x|> \u{a0}\u{2003}_-/\\ \n\n  end  ";
        for name in [
            "default",
            "gpt-2",
            "smollm",
            "llama3",
            "llama-v3",
            "llama-bpe",
            "qwen2",
            "qwen35",
            "deepseek-llm",
            "deepseek-coder",
            "deepseek-v3",
            "falcon",
            "starcoder",
            "refact",
            "mpt",
            "olmo",
            "dbrx",
            "command-r",
            "tekken",
            "gpt-4o",
            "seed-coder",
            "bloom",
            "viking",
            "stablelm2",
            "glm4",
        ] {
            let mut joined = String::new();
            PreTokenizer::named(name).unwrap().split(text, &mut |word| {
                assert!(!word.is_empty());
                joined.push_str(word);
            });
            assert_eq!(joined, text, "{name}");
        }
        assert!(PreTokenizer::named("no such").is_none());
    }

    /// Three million spaces made the backtracking engines fail or overflow; here they are one word.
    #[test]
    fn long_runs_are_single_words() {
        let spaces = " ".repeat(3 << 20);
        for name in ["gpt-2", "llama3", "tekken", "deepseek-v3"] {
            check(name, &spaces, &[&spaces]);
        }
        let text = format!("{spaces}x");
        check("qwen2", &text, &[&spaces[1..], " x"]);
    }
}

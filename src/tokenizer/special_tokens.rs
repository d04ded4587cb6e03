//! Finds special tokens in text: the longest one at the leftmost place, before anything else is tokenised.

use super::vocabulary::{Kind, Vocabulary};
use std::ops::Range;

/// Longer texts of special tokens are not looked for, which bounds the work at each place of a text.
const TEXT_BYTES_MAX: usize = 1024;

/// Which special tokens may be found in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// All: control tokens stand for themselves.
    Parse,
    /// The text is plain. Only user-defined tokens are found, which are pieces of ordinary text that a model wants
    /// whole (runs of spaces, tags).
    Text,
}

/// A piece of text, or a special token that was found in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fragment {
    Text(Range<usize>),
    Token(u32),
}

/// What becomes of white space that follows a special token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpaceAfter {
    Kept,
    /// Phi-3: it is left out, but for after `<unk>`, `<s>` and `<|endoftext|>`. Their files do not say so.
    Dropped,
}

impl SpaceAfter {
    /// By `general.name`, as llama.cpp tells these models.
    pub(super) fn of_model(name: &str) -> SpaceAfter {
        let name = name.to_ascii_lowercase();
        match name.contains("phi-3") || name.contains("phi3") {
            true => SpaceAfter::Dropped,
            false => SpaceAfter::Kept,
        }
    }

    fn is_dropped(self, token: &[u8]) -> bool {
        const KEPT: [&[u8]; 3] = [b"<unk>", b"<s>", b"<|endoftext|>"];
        self == SpaceAfter::Dropped && !KEPT.contains(&token)
    }
}

pub(super) struct SpecialTokens {
    space_after: SpaceAfter,
    /// Ids in the order of their texts.
    sorted: Vec<u32>,
    /// The first bytes of their texts.
    first: [bool; 256],
}

impl SpecialTokens {
    pub(super) fn new(vocabulary: &Vocabulary, space_after: SpaceAfter) -> SpecialTokens {
        let mut sorted: Vec<u32> = (0..vocabulary.len() as u32)
            .filter(|&id| {
                matches!(
                    vocabulary.kind(id),
                    Kind::Control | Kind::Unknown | Kind::UserDefined
                ) && (1..=TEXT_BYTES_MAX).contains(&vocabulary.piece(id).len())
            })
            .collect();
        sorted.sort_unstable_by(|&a, &b| vocabulary.piece(a).cmp(vocabulary.piece(b)));
        let mut first = [false; 256];
        for &id in &sorted {
            first[usize::from(vocabulary.piece(id)[0])] = true;
        }
        SpecialTokens {
            space_after,
            sorted,
            first,
        }
    }

    /// Cuts `text` into special tokens and the text between them. `may_be_control` says whether a control (or
    /// unknown) token may stand at a range of the text; user-defined tokens always may.
    pub(super) fn partition(
        &self,
        vocabulary: &Vocabulary,
        text: &str,
        mut may_be_control: impl FnMut(u32, Range<usize>) -> bool,
    ) -> Vec<Fragment> {
        let bytes = text.as_bytes();
        let mut fragments = Vec::new();
        let mut text_start = 0;
        let mut position = 0;
        while position < bytes.len() {
            let found = if self.first[usize::from(bytes[position])] {
                self.longest_at(vocabulary, bytes, position, &mut may_be_control)
            } else {
                None
            };
            let Some((id, end)) = found else {
                position += 1;
                continue;
            };
            if text_start < position {
                fragments.push(Fragment::Text(text_start..position));
            }
            fragments.push(Fragment::Token(id));
            position = end;
            if self.space_after.is_dropped(vocabulary.piece(id)) {
                let is_space = |byte: &&u8| matches!(byte, b'\t'..=b'\r' | b' ');
                position += bytes[end..].iter().take_while(is_space).count();
            }
            text_start = position;
        }
        if text_start < bytes.len() {
            fragments.push(Fragment::Text(text_start..bytes.len()));
        }
        fragments
    }

    fn longest_at(
        &self,
        vocabulary: &Vocabulary,
        bytes: &[u8],
        start: usize,
        may_be_control: &mut impl FnMut(u32, Range<usize>) -> bool,
    ) -> Option<(u32, usize)> {
        let mut found = None;
        let mut candidates = &self.sorted[..];
        for depth in 0.. {
            // All candidates begin with `bytes[start..start + depth]`, and those that end here sort first.
            while let Some((&id, rest)) = candidates.split_first()
                && vocabulary.piece(id).len() == depth
            {
                candidates = rest;
                let end = start + depth;
                if vocabulary.kind(id) == Kind::UserDefined || may_be_control(id, start..end) {
                    found = Some((id, end));
                }
            }
            let Some(&next) = bytes.get(start + depth) else {
                break;
            };
            let from = candidates.partition_point(|&id| vocabulary.piece(id)[depth] < next);
            candidates = &candidates[from..];
            let to = candidates.partition_point(|&id| vocabulary.piece(id)[depth] == next);
            candidates = &candidates[..to];
            if candidates.is_empty() {
                break;
            }
        }
        found
    }

    /// The control and unknown tokens among them.
    pub(super) fn controls<'a>(
        &'a self,
        vocabulary: &'a Vocabulary,
    ) -> impl Iterator<Item = u32> + 'a {
        self.sorted
            .iter()
            .copied()
            .filter(|&id| vocabulary.kind(id) != Kind::UserDefined)
    }
}

#[cfg(test)]
mod tests {
    use super::super::vocabulary::Spelling;
    use super::*;

    #[track_caller]
    fn check(tokens: &[(&str, i64)], text: &str, special: Special, expected: &[&str]) {
        check_of("a model", tokens, text, special, expected);
    }

    #[track_caller]
    fn check_of(
        name: &str,
        tokens: &[(&str, i64)],
        text: &str,
        special: Special,
        expected: &[&str],
    ) {
        let texts: Vec<String> = tokens.iter().map(|t| t.0.to_string()).collect();
        let types: Vec<i64> = tokens.iter().map(|t| t.1).collect();
        let vocabulary = Vocabulary::new(&texts, Some(&types), Spelling::ByteLevel).unwrap();
        let fragments = SpecialTokens::new(&vocabulary, SpaceAfter::of_model(name)).partition(
            &vocabulary,
            text,
            |_, _| special == Special::Parse,
        );
        let shown: Vec<String> = fragments
            .into_iter()
            .map(|f| match f {
                Fragment::Text(range) => text[range].to_string(),
                Fragment::Token(id) => format!("#{id}"),
            })
            .collect();
        assert_eq!(shown, expected, "{text:?}");
    }

    #[test]
    fn the_longest_token_at_the_leftmost_place_is_found() {
        let tokens = [
            ("<s>", 3),
            ("<s><s>x", 3),
            ("  ", 4),
            ("    ", 4),
            ("<unk>", 2),
            ("a", 1),
        ];
        check(
            &tokens,
            "a<s><s>x<s>é",
            Special::Parse,
            &["a", "#1", "#0", "é"],
        );
        check(&tokens, "<s><s>", Special::Parse, &["#0", "#0"]);
        check(
            &tokens,
            "a       b<s>",
            Special::Text,
            &["a", "#3", "#2", " b<s>"],
        );
        check(&tokens, "<unk><s", Special::Parse, &["#4", "<s"]);
        check(&tokens, "", Special::Parse, &[]);
        check(&[("a", 1)], "a<s>", Special::Parse, &["a<s>"]);
    }

    #[test]
    fn white_space_after_the_special_tokens_of_phi_3_is_left_out() {
        let tokens = [("<s>", 3), ("<|user|>", 3), ("</s>", 4)];
        let text = "<s> <|user|>\n\x0b a\n<|user|> \t<|user|>\n";
        let dropped = ["#0", " ", "#1", "a\n", "#1", "#1"];
        for name in ["Phi3", "Phi-3-mini", "microsoft phi-3.5"] {
            check_of(name, &tokens, text, Special::Parse, &dropped);
        }
        let kept = ["#0", " ", "#1", "\n\x0b a\n", "#1", " \t", "#1", "\n"];
        check(&tokens, text, Special::Parse, &kept);
        // What is plain text keeps its white space.
        let plain = ["<|user|> a ", "#2", "b"];
        check_of("phi3", &tokens, "<|user|> a </s> b", Special::Text, &plain);
    }
}

//! Stop strings: where the text of one stream ends because the client said so.

/// Looks for stop strings in text that comes in pieces. The result does not depend on how the text is cut: the stop
/// string that is complete first ends the text (of several that end together, the one that begins first), and no
/// part of it is ever handed out.
#[derive(Clone, Debug, Default)]
pub(super) struct StopStrings {
    strings: Vec<String>,
    /// Text that may be the beginning of a stop string.
    held: String,
    stopped: bool,
}

/// What became of a piece of text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Stopped {
    /// Text that may be sent.
    pub(super) emit: String,
    /// The stop string that was found, as its place in the list given to [`StopStrings::new`] without empty strings;
    /// the text ends here.
    pub(super) matched: Option<usize>,
}

impl StopStrings {
    /// Empty strings are ignored: they would stop everything at once.
    pub(super) fn new(strings: impl IntoIterator<Item = String>) -> StopStrings {
        StopStrings {
            strings: strings.into_iter().filter(|s| !s.is_empty()).collect(),
            held: String::new(),
            stopped: false,
        }
    }

    /// Takes the next text of the stream. After a match, nothing comes out any more.
    pub(super) fn push(&mut self, text: &str) -> Stopped {
        if self.stopped {
            return Stopped::default();
        }
        if self.strings.is_empty() {
            return Stopped {
                emit: text.to_string(),
                matched: None,
            };
        }
        let mut rest = text;
        while let Some(character) = rest.chars().next() {
            self.held.push(character);
            rest = &rest[character.len_utf8()..];
            if let Some(matched) = self.complete() {
                self.held
                    .truncate(self.held.len() - self.strings[matched].len());
                self.stopped = true;
                return Stopped {
                    emit: std::mem::take(&mut self.held),
                    matched: Some(matched),
                };
            }
        }
        let emit = self.held.len() - self.promising();
        Stopped {
            emit: self.held.drain(..emit).collect(),
            matched: None,
        }
    }

    /// The end of the stream: what was held back is text after all.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The longest stop string that the held text ends in.
    fn complete(&self) -> Option<usize> {
        (0..self.strings.len())
            .filter(|&i| self.held.ends_with(&self.strings[i]))
            .max_by(|&a, &b| {
                self.strings[a]
                    .len()
                    .cmp(&self.strings[b].len())
                    .then(b.cmp(&a))
            })
    }

    /// Bytes of the longest suffix of the held text that a stop string begins with.
    fn promising(&self) -> usize {
        let longest = self.strings.iter().map(String::len).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest);
        (from..self.held.len())
            .filter(|&start| self.held.is_char_boundary(start))
            .find(|&start| {
                self.strings
                    .iter()
                    .any(|s| s.starts_with(&self.held[start..]))
            })
            .map_or(0, |start| self.held.len() - start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text and the match, for the given cutting and for every character on its own and all at once.
    fn check(stops: &[&str], pieces: &[&str], expected: &str, matched: Option<usize>) {
        let whole = pieces.concat();
        let characters: Vec<String> = whole.chars().map(String::from).collect();
        let cuttings = [
            pieces.iter().map(|p| p.to_string()).collect(),
            characters,
            vec![whole],
        ];
        for cutting in cuttings {
            let mut stop_strings = StopStrings::new(stops.iter().map(|s| s.to_string()));
            let mut text = String::new();
            let mut found = None;
            for piece in &cutting {
                let stopped = stop_strings.push(piece);
                text.push_str(&stopped.emit);
                found = found.or(stopped.matched);
                assert!(stops.iter().all(|s| s.is_empty() || !text.contains(s)));
            }
            text.push_str(&stop_strings.finish());
            assert_eq!(
                (text.as_str(), found),
                (expected, matched),
                "{stops:?} {cutting:?}"
            );
        }
    }

    #[test]
    fn text_ends_before_the_first_complete_stop_string() {
        let pieces = ["al", "pha D", "EF", "GHx"];
        check(&["DEFG"], &pieces, "alpha ", Some(0));
        check(&["pha"], &pieces, "al", Some(0));
        check(&["GH", "pha"], &pieces, "al", Some(1));
        check(&["EFG", "DEFG"], &pieces, "alpha ", Some(1));
        check(&["DEFH", "x"], &pieces, "alpha DEFGH", Some(1));
        check(&["nothing"], &pieces, "alpha DEFGHx", None);
        check(&["xyz"], &pieces, "alpha DEFGHx", None);
        check(&["aab"], &["aa", "aab"], "aa", Some(0));
        check(&["é🙂"], &["caf", "é🙂", "x"], "caf", Some(0));
        check(&["\n\n"], &["a\n", "b\n\n"], "a\nb", Some(0));
    }

    #[test]
    fn no_stop_strings_hold_nothing_back() {
        check(&[], &["a", "b"], "ab", None);
        check(&["", ""], &["a", "b"], "ab", None);
        assert_eq!(StopStrings::new([String::new()]).push("a").emit, "a");
    }

    #[test]
    fn only_what_may_still_match_is_held() {
        let mut stops = StopStrings::new(["DEFG".to_string()]);
        assert_eq!(stops.push("abc DE").emit, "abc ");
        assert_eq!(stops.push("X").emit, "DEX");
        assert_eq!(stops.push("DEFG more").emit, "");
        assert_eq!(stops.push("after"), Stopped::default());
    }
}

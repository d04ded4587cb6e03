//! Which characters of a rendered prompt a client wrote.
//!
//! A control token may only come from the template: a user who types `<|im_end|>` must not end a turn. A template is a
//! program that trims, splits, compares and joins the texts it is given, so the answer is found by rendering twice.
//! The first rendering, with the texts as they are, is the prompt. For the second, every character that a client
//! wrote is replaced by a mark, one private-use character for one character. White space, quotes, backslashes and
//! control characters stay, because templates trim and split at them and JSON escapes them. Where both renderings have
//! the same length and agree at every character that is not a mark, the marks are exactly the places of the clients'
//! characters. A control token is then honoured only where all its characters are the template's. That also covers
//! tokens that would arise where the template's text meets a client's, or one message another.
//!
//! The renderings can differ, when a template looks into the texts (`'</think>' in content`). Then the texts that the
//! template's own string literals spell are left unmarked: first those that have nothing in common with a control
//! token, then all, and control tokens that overlap with one of the latter are not honoured in this prompt. If even
//! that fails (a template that escapes texts in its own way), no control token is honoured that has any sign in
//! common with the clients' texts. In every case a doubt makes a token into plain text, never the other way round.

use std::ops::Range;

/// Where the control tokens of a prompt may stand.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Trust {
    /// Bytes that a client wrote: sorted, not touching.
    clients: Vec<Range<usize>>,
    /// Control tokens that are not honoured anywhere; sorted.
    refused: Vec<u32>,
}

impl Trust {
    /// Whether control token `id` may stand at this range of the prompt.
    pub(super) fn allows(&self, id: u32, range: Range<usize>) -> bool {
        let next = self.clients.partition_point(|c| c.end <= range.start);
        let free = self.clients.get(next).is_none_or(|c| c.start >= range.end);
        free && self.refused.binary_search(&id).is_err()
    }
}

/// A control token and its text.
pub(super) type Control = (u32, String);

/// Finds out which characters of `text` are the clients'. `texts` are all texts that clients wrote, `literals` the
/// template's; `render` renders with each text replaced by what it is given for it, or fails.
pub(super) fn establish(
    text: &str,
    controls: &[Control],
    texts: &[String],
    literals: &[String],
    mut render: impl FnMut(&dyn Fn(&str) -> String) -> Option<String>,
) -> Trust {
    // Marks cannot tell who wrote a token of white space alone.
    let mut refused: Vec<u32> = controls
        .iter()
        .filter(|(_, token)| token.chars().all(stays))
        .map(|&(id, _)| id)
        .collect();
    let occurring: Vec<&str> = literals
        .iter()
        .map(String::as_str)
        .filter(|literal| texts.iter().any(|text| text.contains(literal)))
        .collect();
    let harmless: Vec<&str> = occurring
        .iter()
        .copied()
        .filter(|literal| !controls.iter().any(|(_, token)| overlap(literal, token)))
        .collect();
    let mut attempts = vec![vec![]];
    for attempt in [harmless, occurring] {
        if Some(&attempt) != attempts.last() {
            attempts.push(attempt);
        }
    }
    for transparent in attempts {
        let marked = render(&|text| mark(text, &transparent));
        let Some(clients) = marked.and_then(|marked| places(text, &marked)) else {
            continue;
        };
        refused.extend(controls.iter().filter_map(|(id, token)| {
            transparent
                .iter()
                .any(|literal| overlap(literal, token))
                .then_some(*id)
        }));
        refused.sort_unstable();
        refused.dedup();
        return Trust { clients, refused };
    }
    tracing::warn!(
        "the chat template changes messages in a way that cannot be followed; control tokens that share signs with them are taken as text"
    );
    refused.extend(controls.iter().filter_map(|(id, token)| {
        let mut signs = token
            .chars()
            .filter(|c| !c.is_alphanumeric() && !stays(*c))
            .peekable();
        let told_apart = signs.peek().is_some()
            && !signs.any(|sign| texts.iter().any(|text| text.contains(sign)));
        (!told_apart).then_some(*id)
    }));
    refused.sort_unstable();
    refused.dedup();
    Trust {
        clients: Vec::new(),
        refused,
    }
}

/// Characters that are not marked.
fn stays(character: char) -> bool {
    character.is_whitespace() || character.is_control() || matches!(character, '"' | '\\')
}

/// Supplementary private use: plane 15 for the basic plane, 16 for the others. Different characters mostly get
/// different marks, so that texts that differ stay different to a template.
fn mark_of(character: char) -> char {
    let code = character as u32;
    let base = if code < 0x1_0000 { 0xF_0000 } else { 0x10_0000 };
    char::from_u32(base + code % 0xFFFE).unwrap_or('\u{F0000}')
}

fn is_mark(character: char) -> bool {
    character >= '\u{F0000}'
}

/// Marks every character but those that stay and those inside an occurrence of a transparent text.
fn mark(text: &str, transparent: &[&str]) -> String {
    let mut unmarked: Vec<Range<usize>> = Vec::new();
    for literal in transparent {
        let mut from = 0;
        while let Some(at) = text[from..].find(literal) {
            let start = from + at;
            unmarked.push(start..start + literal.len());
            // Occurrences may overlap.
            from = start + text[start..].chars().next().map_or(1, char::len_utf8);
        }
    }
    unmarked.sort_unstable_by_key(|range| range.start);
    let mut ranges = unmarked.into_iter().peekable();
    let mut unmarked_to = 0;
    text.char_indices()
        .map(|(at, character)| {
            while let Some(range) = ranges.next_if(|range| range.start <= at) {
                unmarked_to = unmarked_to.max(range.end);
            }
            if at < unmarked_to || stays(character) {
                character
            } else {
                mark_of(character)
            }
        })
        .collect()
}

/// The bytes of `text` where `marked` has marks, if the two are otherwise the same, character for character.
fn places(text: &str, marked: &str) -> Option<Vec<Range<usize>>> {
    let mut clients: Vec<Range<usize>> = Vec::new();
    let mut others = marked.chars();
    for (start, character) in text.char_indices() {
        let other = others.next()?;
        if is_mark(other) {
            let end = start + character.len_utf8();
            match clients.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => clients.push(start..end),
            }
        } else if other != character {
            return None;
        }
    }
    others.next().is_none().then_some(clients)
}

/// Whether an occurrence of one text can share bytes with an occurrence of the other.
fn overlap(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let meets = |a: &[u8], b: &[u8]| (1..=a.len().min(b.len())).any(|n| a[a.len() - n..] == b[..n]);
    let within = |a: &[u8], b: &[u8]| !a.is_empty() && b.windows(a.len()).any(|window| window == a);
    meets(a, b) || meets(b, a) || within(a, b) || within(b, a)
}

/// The string literals in a template's tags, white space apart.
pub(super) fn literals(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = source;
    while let Some(start) = rest.find('{') {
        rest = &rest[start + 1..];
        let close = match rest.chars().next() {
            Some('{') => "}}",
            Some('%') => "%}",
            Some('#') => {
                rest = rest.split_once("#}").map_or("", |(_, after)| after);
                continue;
            }
            _ => continue,
        };
        rest = literals_of_tag(&rest[1..], close, &mut found);
    }
    found.retain(|literal| !literal.chars().all(stays));
    found.sort_unstable();
    found.dedup();
    found
}

/// Collects up to the end of the tag and returns what follows it.
fn literals_of_tag<'s>(tag: &'s str, close: &str, found: &mut Vec<String>) -> &'s str {
    let mut at = 0;
    while let Some(character) = tag[at..].chars().next() {
        if tag[at..].starts_with(close) {
            return &tag[at + close.len()..];
        }
        at += character.len_utf8();
        if character != '\'' && character != '"' {
            continue;
        }
        let mut literal = String::new();
        let mut escaped = false;
        for inner in tag[at..].chars() {
            at += inner.len_utf8();
            match inner {
                _ if escaped => {
                    escaped = false;
                    literal.push(match inner {
                        'n' => '\n',
                        't' => '\t',
                        'r' => '\r',
                        other => other,
                    });
                }
                '\\' => escaped = true,
                _ if inner == character => break,
                _ => literal.push(inner),
            }
        }
        found.push(literal);
    }
    ""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_keep_length_and_white_space() {
        assert_eq!(
            mark(" a\n\"\\\t", &[]),
            format!(" {}\n\"\\\t", mark_of('a'))
        );
        let marked = mark("x</think>y", &["</think>"]);
        assert_eq!(marked, format!("{}</think>{}", mark_of('x'), mark_of('y')));
        assert_eq!(mark("aaa", &["aa"]), "aaa");
        assert!(
            ['a', 'é', '\u{FFFF}', '🙂', '\u{F0000}', '\u{10FFFF}']
                .into_iter()
                .all(|c| is_mark(mark_of(c)))
        );
    }

    #[test]
    fn places_are_those_of_the_marks() {
        let marked = format!("<|{}{}|> {}", mark_of('é'), mark_of('x'), mark_of('z'));
        assert_eq!(places("<|éx|> z", &marked), Some(vec![2..5, 8..9]));
        assert_eq!(places("<|éx|> zz", &marked), None);
        assert_eq!(places("<|éx|>", &marked), None);
        assert_eq!(places("<!éx|> z", &marked), None);
        assert_eq!(places("", ""), Some(vec![]));
    }

    #[test]
    fn trust_refuses_what_touches_a_client() {
        let trust = Trust {
            clients: vec![2..4, 8..9],
            refused: vec![7],
        };
        for (id, range, allowed) in [
            (1, 0..2, true),
            (1, 0..3, false),
            (1, 3..4, false),
            (1, 4..8, true),
            (1, 1..9, false),
            (1, 9..20, true),
            (7, 4..8, false),
        ] {
            assert_eq!(trust.allows(id, range.clone()), allowed, "{id} {range:?}");
        }
    }

    #[test]
    fn literals_are_those_of_tags() {
        let source = r#"a 'no' {{ 'x' + "y\n'" }}{# 'no' #}{%- if c == 'it\'s' and '%' -%} "no" {% endif %}{ 'no' }{{ ' ' + "}}" }}{{ 'open"#;
        assert_eq!(literals(source), ["%", "it's", "open", "x", "y\n'", "}}"]);
    }

    #[test]
    fn overlaps_are_found_at_both_ends_and_inside() {
        for (a, b, expected) in [
            ("</think>", "<|im_end|>", false),
            ("<", "<|im_end|>", true),
            ("x<|", "<|im_end|>", true),
            ("|>y", "<|im_end|>", true),
            ("user", "<|user|>", true),
            ("a<|im_end|>b", "<|im_end|>", true),
            ("", "x", false),
        ] {
            assert_eq!(
                (overlap(a, b), overlap(b, a)),
                (expected, expected),
                "{a} {b}"
            );
        }
    }
}

//! PTX text to tokens.

use super::PtxError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token<'a> {
    /// Names, directives and opcodes: letters, digits, `_ $ % .` and `::`, not beginning with a digit.
    Word(&'a str),
    Number(&'a str),
    /// Without its quotes.
    Text(&'a str),
    Mark(char),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Spanned<'a> {
    pub(super) token: Token<'a>,
    /// Counted from 1.
    pub(super) line: u32,
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

/// Where a word or number that begins at `start` ends.
fn word_end(bytes: &[u8], start: usize) -> usize {
    let number = bytes[start].is_ascii_digit();
    let bit_pattern = number
        && bytes
            .get(start + 1)
            .is_some_and(|byte| byte.is_ascii_alphabetic());
    let mut end = start;
    while end < bytes.len() {
        let exponent_sign = number
            && !bit_pattern
            && end > start
            && matches!(bytes[end], b'+' | b'-')
            && matches!(bytes[end - 1], b'e' | b'E');
        if is_word(bytes[end]) || exponent_sign {
            end += 1;
        } else if !number && bytes[end..].starts_with(b"::") {
            end += 2;
        } else {
            break;
        }
    }
    end
}

/// Splits a text; comments and preprocessor lines are left out.
pub(super) fn tokenize(text: &str) -> Result<Vec<Spanned<'_>>, PtxError> {
    let bytes = text.as_bytes();
    let mut tokens = Vec::with_capacity(bytes.len() / 4);
    let mut line = 1u32;
    let mut at = 0;
    while at < bytes.len() {
        let byte = bytes[at];
        let rest = &bytes[at..];
        if byte == b'\n' {
            line += 1;
            at += 1;
        } else if byte.is_ascii_whitespace() || byte == 0 {
            at += 1;
        } else if rest.starts_with(b"//") || byte == b'#' {
            at += rest
                .iter()
                .position(|&byte| byte == b'\n')
                .unwrap_or(rest.len());
        } else if rest.starts_with(b"/*") {
            let length = rest
                .windows(2)
                .skip(2)
                .position(|pair| pair == b"*/")
                .ok_or_else(|| PtxError::new(line, "a comment does not end"))?;
            line += rest[..length + 2]
                .iter()
                .filter(|&&byte| byte == b'\n')
                .count() as u32;
            at += length + 4;
        } else if byte == b'"' {
            let length = rest[1..]
                .iter()
                .position(|&byte| byte == b'"')
                .ok_or_else(|| PtxError::new(line, "a string does not end"))?;
            tokens.push(Spanned {
                token: Token::Text(&text[at + 1..at + 1 + length]),
                line,
            });
            at += length + 2;
        } else if is_word(byte) {
            let end = word_end(bytes, at);
            let word = &text[at..end];
            let token = if byte.is_ascii_digit() {
                Token::Number(word)
            } else {
                Token::Word(word)
            };
            tokens.push(Spanned { token, line });
            at = end;
        } else if byte.is_ascii() {
            tokens.push(Spanned {
                token: Token::Mark(byte as char),
                line,
            });
            at += 1;
        } else {
            return Err(PtxError::new(line, "a character outside ASCII"));
        }
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_what_compilers_write() {
        let text = "ld.global.L1::evict_last.f32 %f1, [%rd1+-4]; // note\n@!%p1 bra $L__BB0_2;\n/* a\nb */ 1.5E-3 0f3F800000";
        let tokens = tokenize(text).unwrap();
        let words: Vec<String> = tokens
            .iter()
            .map(|spanned| match spanned.token {
                Token::Word(word) | Token::Number(word) | Token::Text(word) => word.to_owned(),
                Token::Mark(mark) => mark.to_string(),
            })
            .collect();
        assert_eq!(
            words,
            [
                "ld.global.L1::evict_last.f32",
                "%f1",
                ",",
                "[",
                "%rd1",
                "+",
                "-",
                "4",
                "]",
                ";",
                "@",
                "!",
                "%p1",
                "bra",
                "$L__BB0_2",
                ";",
                "1.5E-3",
                "0f3F800000"
            ]
        );
        assert_eq!(tokens[10].line, 2);
        assert_eq!(tokens[16].line, 4);
    }
}

//! What is said on standard error: one line for a failure, figures, the log. Standard error may be a full disk or a
//! pipe whose reader has left (`2>&1 | head`); what cannot be written is lost, and nothing else comes of it.

use std::fmt;
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

/// Whether a bar is on the last line of the terminal. Held while something is written, so that lines and the bar do not
/// run into each other.
static HAS_BAR: Mutex<bool> = Mutex::new(false);

/// To the start of the line, which is blank then.
const ERASE: &str = "\r\u{1b}[K";

/// Standard error that never fails, so that neither a log line nor a message can end the program.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stderr;

impl Write for Stderr {
    /// A whole line comes at once. Where a bar is, the line takes its place, and the bar is shown again below.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut has_bar = HAS_BAR.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *has_bar, false) {
            drop(io::stderr().write_all(ERASE.as_bytes()));
        }
        drop(io::stderr().write_all(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a line.
pub(crate) fn say(line: fmt::Arguments<'_>) {
    let mut text = line.to_string();
    text.push('\n');
    drop(Stderr.write_all(text.as_bytes()));
}

/// Puts a line without an end on the terminal, in place of the one before.
pub(super) fn show_bar(line: &str) {
    let mut has_bar = HAS_BAR.lock().unwrap_or_else(PoisonError::into_inner);
    *has_bar = true;
    drop(io::stderr().write_all(format!("{ERASE}{line}").as_bytes()));
}

/// Takes it away, where there is one.
pub(super) fn erase_bar() {
    drop(Stderr.write(b""));
}

/// No line is longer than twice the longest path; what a key or a string of a file makes of it is cut.
const LINE_CHARACTERS_MAX: usize = 8192;

/// An error and its causes in one line, joined by colons. What a cause says anyway, or what is said for it, is said
/// once. A path may hold line breaks and escape sequences: they would forge lines, and become blanks.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    let mut told: Option<String> = None;
    for cause in error.chain().collect::<Vec<_>>().iter().rev() {
        let text = cause.to_string();
        told = Some(match told {
            None => text,
            Some(told) if told.contains(&text) => told,
            Some(told) if text.contains(&told) => text,
            Some(told) => format!("{text}: {told}"),
        });
    }
    let told = told.unwrap_or_default();
    let mut characters = told.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut line: String = characters.by_ref().take(LINE_CHARACTERS_MAX).collect();
    if characters.next().is_some() {
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};

    #[test]
    fn causes_are_told_once_and_in_one_line() {
        let check = |error: anyhow::Error, line: &str| assert_eq!(one_line(&error), line);
        let plain = || anyhow!("no such file (os error 2)");
        check(plain(), "no such file (os error 2)");
        check(
            plain().context("read a.toml"),
            "read a.toml: no such file (os error 2)",
        );
        check(
            plain()
                .context("read a.toml: no such file (os error 2); give another")
                .context("a.toml"),
            "read a.toml: no such file (os error 2); give another",
        );
        check(
            Err::<(), _>(anyhow!("a\nb"))
                .context("c\r\u{1b}[31md")
                .unwrap_err(),
            "c  [31md: a b",
        );
        let longest = "a".repeat(LINE_CHARACTERS_MAX);
        check(anyhow!(longest.clone()), &longest);
        check(anyhow!("{longest}b"), &format!("{longest}…"));
    }
}

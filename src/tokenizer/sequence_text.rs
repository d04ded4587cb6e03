//! One generated sequence as text: detokenised, and ended where the client said so.

use super::Detokenizer;
use super::stop_strings::StopStrings;

/// Turns the tokens of one sequence into text, and looks for the client's stop strings. Control tokens print nothing,
/// so a stop string that names one is looked for among the tokens.
pub struct SequenceText {
    detokenizer: Detokenizer,
    stop: StopStrings,
    stop_tokens: Vec<u32>,
}

/// What became of a token, or of the end.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Text that may be sent.
    pub text: String,
    /// A stop string was found: the text ends here.
    pub ended: Option<Ended>,
}

/// Where a stop string was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It names this token, which has no text.
    AtToken,
    /// This token completes it.
    AtString,
}

impl SequenceText {
    /// Empty stop strings are ignored.
    pub fn new(detokenizer: Detokenizer, stop: impl IntoIterator<Item = String>) -> SequenceText {
        let stop: Vec<String> = stop.into_iter().collect();
        SequenceText {
            stop_tokens: stop
                .iter()
                .filter_map(|string| detokenizer.tokenizer().control_token(string))
                .collect(),
            stop: StopStrings::new(stop),
            detokenizer,
        }
    }

    /// Takes the next token. Nothing comes out after the end.
    pub fn push(&mut self, id: u32) -> Piece {
        if self.stop_tokens.contains(&id) {
            return Piece {
                ended: Some(Ended::AtToken),
                ..self.finish()
            };
        }
        let text = self.detokenizer.push(id);
        self.look(&text)
    }

    /// The sequence is over: what was held back is text after all, unless its last characters complete a stop string.
    pub fn finish(&mut self) -> Piece {
        let text = self.detokenizer.finish();
        let mut piece = self.look(&text);
        piece.text.push_str(&self.stop.finish());
        piece
    }

    fn look(&mut self, text: &str) -> Piece {
        let stopped = self.stop.push(text);
        Piece {
            text: stopped.emit,
            ended: stopped.matched.map(|_| Ended::AtString),
        }
    }
}

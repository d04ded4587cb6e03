//! Text to tokens and back: the vocabulary of a GGUF file, byte-pair and SentencePiece encoding, incremental
//! decoding, stop strings and the chat template. Everything comes from the file's metadata.
//!
//! The engine asks for end tokens; the HTTP threads encode prompts and decode streams. A [`Tokenizer`] never changes
//! once loaded and is shared by `Arc`; each stream owns its [`SequenceText`].
//!
//! Token ids are those of llama.cpp for the same file and text, with these differences, all on the safe side: plain
//! text never merges into a control, unknown or byte token, even where its characters spell one; overlapping special
//! tokens are resolved leftmost first; byte-pair merges without a space and texts that occur twice are refused. And where
//! llama.cpp cuts words in another way than the model's own tokenizer, ours is the model's (see `pre_patterns`).

mod boundaries;
mod byte_level;
mod byte_pairs;
mod chat_messages;
mod chat_template;
mod detokenizer;
mod end_tokens;
mod folded_hash;
mod load;
mod merge_queue;
mod pre_patterns;
mod pre_tokenizer;
mod provenance;
mod python_json;
mod python_methods;
mod sentence_pieces;
mod sequence_text;
mod special_tokens;
mod stop_strings;
mod template_environment;
mod vocabulary;

#[cfg(test)]
mod chat_tests;
#[cfg(test)]
mod tests;

pub use chat_template::{ChatError, ChatOptions, ChatPrompt, ChatTemplate, TemplateSource};
pub use detokenizer::Detokenizer;
pub use sequence_text::{Ended, Piece, SequenceText};
pub use special_tokens::Special;

use crate::gguf::{GgufError, Metadata};
use std::borrow::Cow;
use std::ops::Range;
use vocabulary::{Kind, Spelling, Vocabulary};

/// Why a file's tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    #[error(transparent)]
    Metadata(#[from] GgufError),
    #[error("`{key}`: {problem}")]
    Invalid { key: &'static str, problem: String },
}

impl TokenizerError {
    fn invalid(key: &'static str, problem: impl Into<String>) -> TokenizerError {
        TokenizerError::Invalid {
            key,
            problem: problem.into(),
        }
    }
}

/// The vocabulary of one model and how text becomes its tokens.
pub struct Tokenizer {
    vocabulary: Vocabulary,
    specials: special_tokens::SpecialTokens,
    method: Method,
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: bool,
    /// Whether a text begins with a space that is not written (SentencePiece).
    add_space_prefix: bool,
    /// Sorted.
    end_of_generation: Vec<u32>,
}

enum Method {
    BytePairs {
        words: pre_tokenizer::PreTokenizer,
        pairs: byte_pairs::BytePairs,
    },
    SentencePieces(sentence_pieces::SentencePieces),
}

impl Tokenizer {
    /// Reads and checks the tokenizer of a file. Errors name the key; what is unusual but usable is logged.
    pub fn from_gguf(metadata: &Metadata) -> Result<Tokenizer, TokenizerError> {
        load::tokenizer(metadata)
    }

    /// The tokens of `text`, without a beginning-of-sequence token.
    pub fn encode(&self, text: &str, special: Special) -> Vec<u32> {
        self.encode_where(text, |_, _| special == Special::Parse)
    }

    /// The tokens of a raw prompt: control tokens stand for themselves, and the beginning-of-sequence token is put
    /// first where the model wants one and the text does not already begin with it.
    pub fn encode_prompt(&self, text: &str) -> Vec<u32> {
        self.with_bos(self.encode(text, Special::Parse))
    }

    /// `may_be_control(id, range)` says whether that range of the text may stand for a control token.
    fn encode_where(
        &self,
        text: &str,
        may_be_control: impl FnMut(u32, Range<usize>) -> bool,
    ) -> Vec<u32> {
        let fragments = self
            .specials
            .partition(&self.vocabulary, text, may_be_control);
        let mut tokens = Vec::new();
        match &self.method {
            Method::BytePairs { words, pairs } => {
                let mut scratch = byte_pairs::Scratch::default();
                for fragment in fragments {
                    match fragment {
                        special_tokens::Fragment::Token(id) => tokens.push(id),
                        special_tokens::Fragment::Text(range) => {
                            let fragment = self.as_pieces_spell(&text[range]);
                            words.split(&fragment, &mut |word| {
                                let whole = if words.stays_whole(word) {
                                    self.vocabulary.find(word.as_bytes())
                                } else {
                                    None
                                };
                                match whole {
                                    Some(id) => tokens.push(id),
                                    None => pairs.encode(
                                        &self.vocabulary,
                                        word,
                                        &mut scratch,
                                        &mut tokens,
                                    ),
                                }
                            });
                        }
                    }
                }
            }
            Method::SentencePieces(pieces) => {
                let mut scratch = sentence_pieces::Scratch::default();
                let mut after_special = true;
                for fragment in fragments {
                    match fragment {
                        special_tokens::Fragment::Token(id) => {
                            tokens.push(id);
                            after_special = true;
                        }
                        special_tokens::Fragment::Text(range) => {
                            let mut fragment = self.as_pieces_spell(&text[range]);
                            if self.add_space_prefix && after_special {
                                fragment = Cow::Owned(format!(" {fragment}"));
                            }
                            pieces.encode(&self.vocabulary, &fragment, &mut scratch, &mut tokens);
                            after_special = false;
                        }
                    }
                }
            }
        }
        tokens
    }

    /// Where pieces are written as SentencePiece writes them, its sign in a text is a space like any other.
    fn as_pieces_spell<'t>(&self, text: &'t str) -> Cow<'t, str> {
        if self.vocabulary.spelling() == Spelling::SentencePiece && text.contains('\u{2581}') {
            Cow::Owned(text.replace('\u{2581}', " "))
        } else {
            Cow::Borrowed(text)
        }
    }

    /// Puts the beginning-of-sequence token first where the model wants one and there is none yet.
    fn with_bos(&self, mut tokens: Vec<u32>) -> Vec<u32> {
        if let Some(bos) = self.bos
            && self.add_bos
            && tokens.first() != Some(&bos)
        {
            tokens.insert(0, bos);
        }
        tokens
    }

    /// The bytes that a token stands for in text: control tokens print nothing and are empty here, as is any id
    /// outside the vocabulary. Token boundaries need not be character boundaries.
    pub fn piece_bytes(&self, id: u32) -> &[u8] {
        match self.vocabulary.kind(id) {
            Kind::Control | Kind::Unknown | Kind::Unused => &[],
            Kind::Normal | Kind::UserDefined | Kind::Byte => self.vocabulary.piece(id),
        }
    }

    /// The bytes of a token, control tokens as their text: for log-probabilities and diagnosis.
    pub fn piece_bytes_with_control(&self, id: u32) -> &[u8] {
        self.vocabulary.piece(id)
    }

    /// The text of a whole sequence; bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let mut bytes: Vec<u8> = Vec::new();
        let mut prefix = self.add_space_prefix;
        for &id in tokens {
            let piece = self.piece_bytes(id);
            bytes.extend_from_slice(detokenizer::without_prefix(piece, &mut prefix));
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// All end tokens, in order of id.
    pub fn end_of_generation(&self) -> &[u32] {
        &self.end_of_generation
    }

    /// The control token whose text this is: what a stop string that names one stands for, since control tokens
    /// print nothing.
    pub fn control_token(&self, text: &str) -> Option<u32> {
        self.specials
            .controls(&self.vocabulary)
            .find(|&id| self.vocabulary.piece(id) == text.as_bytes())
    }

    pub fn vocabulary_size(&self) -> usize {
        self.vocabulary.len()
    }

    /// Bytes of text that one token can stand for at most, control tokens by their text. At least 1.
    pub fn longest_piece_bytes(&self) -> usize {
        let ids = 0..self.vocabulary.len() as u32;
        ids.map(|id| self.vocabulary.piece(id).len())
            .max()
            .unwrap_or(1)
            .max(1)
    }

    /// The beginning-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Whether prompts begin with [`Tokenizer::bos`].
    pub fn add_bos(&self) -> bool {
        self.add_bos && self.bos.is_some()
    }

    /// The text of a token as templates print it: `bos_token` and the like. Empty where there is none.
    fn text_of(&self, id: Option<u32>) -> String {
        id.map(|id| String::from_utf8_lossy(self.vocabulary.piece(id)).into_owned())
            .unwrap_or_default()
    }
}

const _: () = {
    const fn shared_between_threads<T: Send + Sync>() {}
    shared_between_threads::<Tokenizer>();
    shared_between_threads::<ChatTemplate>();
};

//! An opcode and its modifiers, each of which has to be taken by the lowering, so that none is overlooked.

use crate::ptx::PtxError;
use crate::ptx::float::Rounding;
use crate::ptx::types::Type;

#[derive(Debug)]
pub(super) struct Opcode<'a> {
    /// As written.
    pub(super) text: &'a str,
    pub(super) base: &'a str,
    rest: Vec<&'a str>,
    line: u32,
}

impl<'a> Opcode<'a> {
    pub(super) fn new(text: &'a str, line: u32) -> Opcode<'a> {
        let mut parts = text.split('.');
        let base = parts.next().unwrap_or("");
        Opcode {
            text,
            base,
            rest: parts.collect(),
            line,
        }
    }

    /// Removes a modifier; whether it was there.
    pub(super) fn take(&mut self, modifier: &str) -> bool {
        let found = self.rest.iter().position(|&part| part == modifier);
        if let Some(at) = found {
            self.rest.remove(at);
        }
        found.is_some()
    }

    /// Removes the first modifier that is one of several.
    pub(super) fn take_one<const N: usize>(&mut self, modifiers: [&str; N]) -> Option<&'a str> {
        let at = self.rest.iter().position(|part| modifiers.contains(part))?;
        Some(self.rest.remove(at))
    }

    /// Removes all modifiers that say nothing here.
    pub(super) fn ignore(&mut self, meaningless: impl Fn(&str) -> bool) {
        self.rest.retain(|part| !meaningless(part));
    }

    /// Removes the first modifier that `f` understands.
    pub(super) fn take_as<T>(&mut self, f: impl Fn(&str) -> Option<T>) -> Option<T> {
        let (at, value) = self
            .rest
            .iter()
            .enumerate()
            .find_map(|(at, part)| Some((at, f(part)?)))?;
        self.rest.remove(at);
        Some(value)
    }

    /// Removes the first type.
    pub(super) fn take_type(&mut self) -> Result<Type, PtxError> {
        self.take_as(Type::from_name).ok_or_else(|| self.unknown())
    }

    /// Removes a float operation's rounding, to nearest where there is none.
    pub(super) fn take_rounding(&mut self) -> Rounding {
        self.take_as(rounding).unwrap_or(Rounding::Nearest)
    }

    /// An error where modifiers are left.
    pub(super) fn finish(&self) -> Result<(), PtxError> {
        match self.rest.first() {
            None => Ok(()),
            Some(modifier) => Err(PtxError::new(
                self.line,
                format!(
                    "modifier `.{modifier}` of opcode `{}` is not known",
                    self.text
                ),
            )),
        }
    }

    pub(super) fn unknown(&self) -> PtxError {
        PtxError::new(self.line, format!("opcode `{}` is not known", self.text))
    }

    pub(super) fn error(&self, message: impl std::fmt::Display) -> PtxError {
        PtxError::new(self.line, format!("{message} in `{}`", self.text))
    }
}

pub(super) fn rounding(name: &str) -> Option<Rounding> {
    Some(match name {
        "rn" => Rounding::Nearest,
        "rz" => Rounding::Zero,
        "rm" => Rounding::Down,
        "rp" => Rounding::Up,
        _ => return None,
    })
}

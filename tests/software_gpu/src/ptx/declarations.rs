//! Declarations: registers, variables and their initial values, numbers.

use super::PtxError;
use super::lexer::Token;
use super::parser::Parser;
use super::syntax::{Operand, Statement, Variable};
use super::types::{Space, Type};

impl<'a> Parser<'a> {
    pub(super) fn registers(&mut self, body: &mut Vec<Statement<'a>>) -> Result<(), PtxError> {
        self.at += 1;
        let kind = self.type_name()?;
        loop {
            let name = self.word("a register")?;
            let count = if self.take_mark('<') {
                let count = self.small_number("a count")?;
                self.expect_mark('>')?;
                Some(u32::try_from(count).map_err(|_| self.unexpected("a smaller count"))?)
            } else {
                None
            };
            body.push(Statement::Registers { kind, name, count });
            if !self.take_mark(',') {
                return self.expect_mark(';');
            }
        }
    }

    fn type_name(&mut self) -> Result<Type, PtxError> {
        let line = self.line();
        let word = self.word("a type")?;
        word.strip_prefix('.')
            .and_then(Type::from_name)
            .ok_or_else(|| PtxError::new(line, format!("type `{word}` is not known")))
    }

    /// A declaration from its state space to the semicolon.
    pub(super) fn variables(&mut self) -> Result<Vec<Variable<'a>>, PtxError> {
        let space = match self.word("a state space")? {
            ".global" => Space::Global,
            ".const" => Space::Constant,
            ".shared" => Space::Shared,
            ".local" => Space::Local,
            ".param" => Space::Parameter,
            other => {
                return Err(PtxError::new(
                    self.line(),
                    format!("state space `{other}` is not known"),
                ));
            }
        };
        self.at -= 1;
        let variable = self.variable_of(space)?;
        if self.peek() == Some(Token::Mark(',')) {
            return Err(PtxError::new(
                self.line(),
                "several variables in one declaration",
            ));
        }
        self.expect_mark(';')?;
        Ok(vec![variable])
    }

    pub(super) fn variable_of(&mut self, space: Space) -> Result<Variable<'a>, PtxError> {
        let mut align = None;
        let mut vector = 1;
        let kind = loop {
            let line = self.line();
            match self.word("a type")? {
                ".global" | ".const" | ".shared" | ".local" | ".param" | ".ptr" => {}
                ".attribute" => {
                    self.expect_mark('(')?;
                    while !self.take_mark(')') {
                        self.at += 1;
                    }
                }
                ".align" => align = Some(self.small_number("an alignment")?),
                ".v2" => vector = 2,
                ".v4" => vector = 4,
                word => {
                    let kind = word.strip_prefix('.').and_then(Type::from_name);
                    break kind.ok_or_else(|| {
                        PtxError::new(line, format!("type `{word}` is not known"))
                    })?;
                }
            }
        };
        // `.param .u64 .ptr .global .align 16 name`: what a pointer points to says nothing about the parameter.
        while let Some(Token::Word(word)) = self.peek() {
            match word {
                ".ptr" | ".global" | ".shared" | ".const" | ".local" => self.at += 1,
                ".align" => {
                    self.at += 1;
                    self.small_number("an alignment")?;
                }
                _ => break,
            }
        }
        let name = self.word("a variable's name")?;
        let element = kind.bytes() * vector;
        let mut bytes = element;
        while self.take_mark('[') {
            let count = if self.peek() == Some(Token::Mark(']')) {
                0
            } else {
                self.small_number("a length")?
            };
            self.expect_mark(']')?;
            bytes = bytes
                .checked_mul(count)
                .filter(|&bytes| bytes <= 1 << 32)
                .ok_or_else(|| PtxError::new(self.line(), "an array too large"))?;
        }
        let mut initial = Vec::new();
        if self.take_mark('=') {
            self.initial(kind, &mut initial)?;
            if bytes == 0 {
                bytes = initial.len();
            }
            if initial.len() > bytes {
                return Err(PtxError::new(
                    self.line(),
                    format!("{name} has more values than elements"),
                ));
            }
        }
        Ok(Variable {
            space,
            name,
            align: align.unwrap_or(element).max(1),
            bytes,
            initial,
        })
    }

    fn initial(&mut self, kind: Type, bytes: &mut Vec<u8>) -> Result<(), PtxError> {
        if self.take_mark('{') {
            while !self.take_mark('}') {
                self.initial(kind, bytes)?;
                self.take_mark(',');
            }
            return Ok(());
        }
        let bits = match (self.number("a number")?, kind) {
            (Operand::Integer(value), Type::F32) => u64::from((value as f32).to_bits()),
            (Operand::Integer(value), Type::F64) => (value as f64).to_bits(),
            (Operand::Integer(value), _) => value,
            (Operand::Float32(bits), _) => u64::from(bits),
            (Operand::Float64(bits), Type::F32) => {
                u64::from((f64::from_bits(bits) as f32).to_bits())
            }
            (Operand::Float64(bits), _) => bits,
            _ => return Err(self.unexpected("a number")),
        };
        bytes.extend_from_slice(&bits.to_le_bytes()[..kind.bytes()]);
        Ok(())
    }

    /// A number with its sign, integer or float.
    pub(super) fn number(&mut self, wanted: &str) -> Result<Operand<'a>, PtxError> {
        let negative = self.take_mark('-');
        let Some(Token::Number(word)) = self.peek() else {
            return Err(self.unexpected(wanted));
        };
        let value = number(word).ok_or_else(|| self.unexpected("a number"))?;
        self.at += 1;
        Ok(match value {
            Operand::Integer(value) if negative => Operand::Integer(value.wrapping_neg()),
            Operand::Float32(bits) if negative => Operand::Float32(bits ^ 1 << 31),
            Operand::Float64(bits) if negative => Operand::Float64(bits ^ 1 << 63),
            value => value,
        })
    }
}

fn number(word: &str) -> Option<Operand<'static>> {
    let lower = word.to_ascii_lowercase();
    if let Some(bits) = lower.strip_prefix("0f").filter(|bits| bits.len() == 8) {
        return u32::from_str_radix(bits, 16).ok().map(Operand::Float32);
    }
    if let Some(bits) = lower.strip_prefix("0d").filter(|bits| bits.len() == 16) {
        return u64::from_str_radix(bits, 16).ok().map(Operand::Float64);
    }
    let digits = lower.strip_suffix('u').unwrap_or(&lower);
    let parsed = if let Some(digits) = digits.strip_prefix("0x") {
        u64::from_str_radix(digits, 16)
    } else if let Some(digits) = digits.strip_prefix("0b") {
        u64::from_str_radix(digits, 2)
    } else if digits.len() > 1
        && digits.starts_with('0')
        && digits.bytes().all(|byte| byte.is_ascii_digit())
    {
        u64::from_str_radix(digits, 8)
    } else if digits.contains(['.', 'e']) {
        return digits
            .parse::<f64>()
            .ok()
            .map(|value| Operand::Float64(value.to_bits()));
    } else {
        digits.parse()
    };
    parsed.ok().map(Operand::Integer)
}

#[cfg(test)]
mod tests {
    use super::super::parser::parse;
    use super::*;

    #[test]
    fn numbers_of_every_kind() {
        let integer = |word| match number(word) {
            Some(Operand::Integer(value)) => value,
            other => panic!("{word}: {other:?}"),
        };
        assert_eq!(integer("42"), 42);
        assert_eq!(integer("0x1F"), 31);
        assert_eq!(integer("0U"), 0);
        assert_eq!(integer("017"), 15);
        assert_eq!(integer("0b101"), 5);
        assert_eq!(integer("18446744073709551615"), u64::MAX);
        assert!(matches!(
            number("0f3F800000"),
            Some(Operand::Float32(0x3F80_0000))
        ));
        assert!(
            matches!(number("1.5"), Some(Operand::Float64(bits)) if f64::from_bits(bits) == 1.5)
        );
        assert!(number("0xG").is_none());
    }

    #[test]
    fn initial_values_fill_their_type() {
        let source = parse(".const .align 4 .u16 t[3] = {1, 0x203};").unwrap();
        let variable = &source.variables[0];
        assert_eq!((variable.bytes, variable.align), (6, 4));
        assert_eq!(variable.initial, [1, 0, 3, 2]);
    }
}

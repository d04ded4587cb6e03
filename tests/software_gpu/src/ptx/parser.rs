//! Tokens to [`Source`]: directives, declarations and statements, with names left unresolved.

use super::PtxError;
use super::lexer::{Spanned, Token, tokenize};
use super::syntax::{Entry, Guard, Instruction, Operand, Source, Statement, Variable};
use super::types::Space;

/// Parses a module.
pub(super) fn parse(text: &str) -> Result<Source<'_>, PtxError> {
    let tokens = tokenize(text)?;
    let mut parser = Parser { tokens, at: 0 };
    let mut source = Source::default();
    while let Some(token) = parser.peek() {
        match token {
            Token::Word(word) => parser.top_level(word, &mut source)?,
            Token::Mark(';') => parser.at += 1,
            _ => return Err(parser.unexpected("a directive")),
        }
    }
    Ok(source)
}

pub(super) struct Parser<'a> {
    tokens: Vec<Spanned<'a>>,
    pub(super) at: usize,
}

impl<'a> Parser<'a> {
    pub(super) fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.at).map(|spanned| spanned.token)
    }

    pub(super) fn line(&self) -> u32 {
        self.tokens
            .get(self.at)
            .or(self.tokens.last())
            .map_or(1, |spanned| spanned.line)
    }

    pub(super) fn unexpected(&self, wanted: &str) -> PtxError {
        let found = match self.peek() {
            Some(Token::Word(word) | Token::Number(word)) => format!("`{word}`"),
            Some(Token::Text(text)) => format!("\"{text}\""),
            Some(Token::Mark(mark)) => format!("`{mark}`"),
            None => "the end".to_owned(),
        };
        PtxError::new(self.line(), format!("{found} where {wanted} is expected"))
    }

    pub(super) fn take_mark(&mut self, mark: char) -> bool {
        let found = self.peek() == Some(Token::Mark(mark));
        self.at += usize::from(found);
        found
    }

    pub(super) fn expect_mark(&mut self, mark: char) -> Result<(), PtxError> {
        if self.take_mark(mark) {
            Ok(())
        } else {
            Err(self.unexpected(&format!("`{mark}`")))
        }
    }

    fn take_word(&mut self, word: &str) -> bool {
        let found = self.peek() == Some(Token::Word(word));
        self.at += usize::from(found);
        found
    }

    pub(super) fn word(&mut self, wanted: &str) -> Result<&'a str, PtxError> {
        let Some(Token::Word(word)) = self.peek() else {
            return Err(self.unexpected(wanted));
        };
        self.at += 1;
        Ok(word)
    }

    pub(super) fn small_number(&mut self, wanted: &str) -> Result<usize, PtxError> {
        match self.number(wanted)? {
            Operand::Integer(value) if value <= 1 << 40 => Ok(value as usize),
            _ => Err(PtxError::new(self.line(), format!("not {wanted}"))),
        }
    }

    /// `.loc` and `.file` end with their line.
    fn skip_line(&mut self) {
        let line = self.line();
        while self.peek().is_some() && self.line() == line {
            self.at += 1;
        }
    }

    fn skip_statement(&mut self) {
        while let Some(token) = self.peek() {
            self.at += 1;
            if token == Token::Mark(';') {
                break;
            }
        }
    }

    fn skip_braces(&mut self) -> Result<(), PtxError> {
        self.expect_mark('{')?;
        let mut depth = 1;
        while depth > 0 {
            match self.peek() {
                Some(Token::Mark('{')) => depth += 1,
                Some(Token::Mark('}')) => depth -= 1,
                None => return Err(self.unexpected("`}`")),
                _ => {}
            }
            self.at += 1;
        }
        Ok(())
    }

    fn top_level(&mut self, word: &'a str, source: &mut Source<'a>) -> Result<(), PtxError> {
        match word {
            ".version" | ".target" | ".address_size" | ".file" | ".loc" => self.skip_line(),
            ".pragma" => self.skip_statement(),
            ".visible" | ".extern" | ".weak" | ".common" => self.at += 1,
            ".section" => {
                self.at += 2;
                self.skip_braces()?;
            }
            ".entry" => {
                self.at += 1;
                let entry = self.entry()?;
                source.entries.push(entry);
            }
            ".func" => {
                self.at += 1;
                let results = self.parameters()?;
                let name = self.word("a function's name")?;
                source.functions.extend(self.entry_rest(name, results)?);
            }
            ".global" | ".const" | ".shared" => {
                let variables = self.variables()?;
                source.variables.extend(variables);
            }
            _ => {
                return Err(PtxError::new(
                    self.line(),
                    format!("directive `{word}` is not known"),
                ));
            }
        }
        Ok(())
    }

    fn entry(&mut self) -> Result<Entry<'a>, PtxError> {
        let name = self.word("a kernel's name")?;
        self.entry_rest(name, Vec::new())
            .and_then(|entry| {
                entry.ok_or_else(|| PtxError::new(self.line(), "a kernel without a body"))
            })
            .map_err(|error| error.in_kernel(name))
    }

    /// A list in parentheses, if there is one.
    fn parameters(&mut self) -> Result<Vec<Variable<'a>>, PtxError> {
        let mut parameters = Vec::new();
        if self.take_mark('(') {
            while !self.take_mark(')') {
                parameters.push(self.variable_of(Space::Parameter)?);
                self.take_mark(',');
            }
        }
        Ok(parameters)
    }

    /// What follows a name; nothing for a declaration.
    fn entry_rest(
        &mut self,
        name: &'a str,
        results: Vec<Variable<'a>>,
    ) -> Result<Option<Entry<'a>>, PtxError> {
        let parameters = self.parameters()?;
        let mut threads_max = None;
        // Hints (.minnctapersm ...) and limits up to the body.
        while self.peek() != Some(Token::Mark('{')) {
            if self.peek().is_none() || self.take_mark(';') {
                return Ok(None);
            }
            if self.take_word(".maxntid") || self.take_word(".reqntid") {
                let mut threads = self.small_number("a number of threads")? as u64;
                while self.take_mark(',') {
                    threads =
                        threads.saturating_mul(self.small_number("a number of threads")? as u64);
                }
                threads_max = Some(threads);
            } else {
                self.at += 1;
            }
        }
        self.at += 1;
        let mut body = Vec::new();
        let mut depth = 1;
        while depth > 0 {
            if self.take_mark('{') {
                depth += 1;
                body.push(Statement::ScopeBegin);
            } else if self.take_mark('}') {
                depth -= 1;
                body.push(Statement::ScopeEnd);
            } else {
                self.statement(&mut body)?;
            }
        }
        Ok(Some(Entry {
            name,
            results,
            parameters,
            threads_max,
            body,
        }))
    }

    fn statement(&mut self, body: &mut Vec<Statement<'a>>) -> Result<(), PtxError> {
        let word = match self.peek() {
            Some(Token::Mark('@')) => return self.instruction(body),
            Some(Token::Mark(';')) => {
                self.at += 1;
                return Ok(());
            }
            Some(Token::Word(word)) => word,
            _ => return Err(self.unexpected("a statement")),
        };
        if self.tokens.get(self.at + 1).map(|spanned| spanned.token) == Some(Token::Mark(':')) {
            let line = self.line();
            self.at += 2;
            if self.take_word(".branchtargets") {
                let mut labels = vec![self.word("a label")?];
                while self.take_mark(',') {
                    labels.push(self.word("a label")?);
                }
                self.expect_mark(';')?;
                body.push(Statement::BranchTargets { name: word, labels });
            } else {
                body.push(Statement::Label(word, line));
            }
            return Ok(());
        }
        match word {
            ".loc" | ".file" => self.skip_line(),
            ".pragma" => self.skip_statement(),
            ".reg" => self.registers(body)?,
            ".shared" | ".local" | ".const" | ".global" | ".param" => {
                body.extend(self.variables()?.into_iter().map(Statement::Variable));
            }
            _ if word.starts_with('.') => {
                return Err(PtxError::new(
                    self.line(),
                    format!("directive `{word}` is not known"),
                ));
            }
            _ => self.instruction(body)?,
        }
        Ok(())
    }

    fn instruction(&mut self, body: &mut Vec<Statement<'a>>) -> Result<(), PtxError> {
        let guard = if self.take_mark('@') {
            let negated = self.take_mark('!');
            Some(Guard {
                name: self.word("a predicate")?,
                negated,
            })
        } else {
            None
        };
        let line = self.line();
        let opcode = self.word("an opcode")?;
        let mut operands = Vec::new();
        while !self.take_mark(';') {
            operands.push(self.operand()?);
            if !self.take_mark(',') && self.peek() != Some(Token::Mark(';')) {
                return Err(self.unexpected("`,` or `;`"));
            }
        }
        body.push(Statement::Instruction(Instruction {
            guard,
            opcode,
            operands,
            line,
        }));
        Ok(())
    }

    fn operand(&mut self) -> Result<Operand<'a>, PtxError> {
        match self.peek() {
            Some(Token::Mark('{')) => {
                self.at += 1;
                let mut elements = Vec::new();
                while !self.take_mark('}') {
                    elements.push(self.operand()?);
                    self.take_mark(',');
                }
                Ok(Operand::Vector(elements))
            }
            Some(Token::Mark('[')) => {
                self.at += 1;
                let base = match self.peek() {
                    Some(Token::Word(word)) => {
                        self.at += 1;
                        Some(word)
                    }
                    _ => None,
                };
                let mut offset = 0i64;
                while !self.take_mark(']') {
                    self.take_mark('+');
                    match self.number("an offset")? {
                        Operand::Integer(value) => offset = offset.wrapping_add(value as i64),
                        _ => return Err(self.unexpected("an offset")),
                    }
                }
                Ok(Operand::Address { base, offset })
            }
            Some(Token::Mark('(')) => {
                self.at += 1;
                let mut names = Vec::new();
                while !self.take_mark(')') {
                    names.push(self.word("an argument")?);
                    self.take_mark(',');
                }
                Ok(Operand::List(names))
            }
            Some(Token::Mark('!')) => {
                self.at += 1;
                Ok(Operand::Not(self.word("a predicate")?))
            }
            Some(Token::Word(first)) => {
                self.at += 1;
                if self.take_mark('|') {
                    return Ok(Operand::Pair(first, self.word("a predicate")?));
                }
                Ok(Operand::Name(first))
            }
            Some(Token::Number(_) | Token::Mark('-')) => self.number("an operand"),
            _ => Err(self.unexpected("an operand")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directive_that_is_not_known_is_named() {
        let error = parse(".version 9.0\n.alias f, g;").unwrap_err();
        assert_eq!(
            (error.line, error.message.as_str()),
            (2, "directive `.alias` is not known")
        );
    }
}

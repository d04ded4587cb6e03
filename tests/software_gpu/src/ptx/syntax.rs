//! What the parser hands to the lowering: names unresolved, opcodes as written.

use super::types::{Space, Type};

#[derive(Debug, Default)]
pub(super) struct Source<'a> {
    /// `.global`, `.const` and `.shared` variables outside of kernels.
    pub(super) variables: Vec<Variable<'a>>,
    pub(super) entries: Vec<Entry<'a>>,
    /// `.func`s that have a body.
    pub(super) functions: Vec<Entry<'a>>,
}

#[derive(Clone, Debug)]
pub(super) struct Variable<'a> {
    pub(super) space: Space,
    pub(super) name: &'a str,
    pub(super) align: usize,
    /// Zero for an array without a length (`extern .shared`).
    pub(super) bytes: usize,
    /// May be shorter than `bytes`; the rest is zeros.
    pub(super) initial: Vec<u8>,
}

/// A kernel or a function.
#[derive(Debug)]
pub(super) struct Entry<'a> {
    pub(super) name: &'a str,
    /// Of a function.
    pub(super) results: Vec<Variable<'a>>,
    pub(super) parameters: Vec<Variable<'a>>,
    /// Most threads of a block, from `.maxntid` or `.reqntid`.
    pub(super) threads_max: Option<u64>,
    pub(super) body: Vec<Statement<'a>>,
}

#[derive(Debug)]
pub(super) enum Statement<'a> {
    Label(&'a str, u32),
    /// `.reg .b32 %r<5>` declares %r0 to %r4; without a count, the name itself.
    Registers {
        kind: Type,
        name: &'a str,
        count: Option<u32>,
    },
    Variable(Variable<'a>),
    /// `name: .branchtargets a, b;`
    BranchTargets {
        name: &'a str,
        labels: Vec<&'a str>,
    },
    Instruction(Instruction<'a>),
    ScopeBegin,
    ScopeEnd,
}

#[derive(Debug)]
pub(super) struct Instruction<'a> {
    pub(super) guard: Option<Guard<'a>>,
    /// With all modifiers.
    pub(super) opcode: &'a str,
    pub(super) operands: Vec<Operand<'a>>,
    pub(super) line: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Guard<'a> {
    pub(super) name: &'a str,
    pub(super) negated: bool,
}

#[derive(Clone, Debug)]
pub(super) enum Operand<'a> {
    /// A register, special register, variable, parameter or label; `_` too.
    Name(&'a str),
    /// `!name`
    Not(&'a str),
    /// As 64 bits of two's complement.
    Integer(u64),
    Float32(u32),
    Float64(u64),
    /// `[base+offset]`; no base where the address is a number.
    Address {
        base: Option<&'a str>,
        offset: i64,
    },
    Vector(Vec<Operand<'a>>),
    /// `(a, b)` of a call.
    List(Vec<&'a str>),
    /// `p|q`
    Pair(&'a str, &'a str),
}

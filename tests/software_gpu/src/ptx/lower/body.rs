//! One kernel while it is lowered: its names, virtual registers and code so far.

use std::collections::HashMap;

use super::calls::{self, Frame};
use super::opcode::Opcode;
use super::operands::Operands;
use super::{Layout, Place};
use super::{comparison, control, convert, float, half, integer, logic, memory};
use crate::ptx::PtxError;
use crate::ptx::alu::{Alu, Slots};
use crate::ptx::lanes::{NONE, Predicate, Register};
use crate::ptx::program::{Fixed, Instruction, Op};
use crate::ptx::syntax::{self, Entry, Statement};
use crate::ptx::types::{Space, Type};

/// Holds the carry of `add.cc` and its like.
pub(super) const CARRY: Predicate = 0;
/// Any predicate serves where an operation does not look at it.
pub(super) const ANY: Predicate = CARRY;

/// A kernel's code before its registers are allocated.
#[derive(Debug)]
pub(in crate::ptx) struct Lowered {
    pub(in crate::ptx) code: Vec<Instruction>,
    pub(in crate::ptx) registers: Vec<Virtual>,
    pub(in crate::ptx) predicates: usize,
    /// Of one thread.
    pub(in crate::ptx) local_bytes: usize,
}

#[derive(Clone, Copy, Debug)]
pub(in crate::ptx) struct Virtual {
    pub(in crate::ptx) wide: bool,
    pub(in crate::ptx) fixed: Option<Fixed>,
    /// Written and read within one PTX instruction.
    pub(in crate::ptx) temporary: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Name {
    Register(Register, Type),
    Predicate(Predicate),
}

pub(super) struct Body<'a> {
    pub(super) places: HashMap<&'a str, Place>,
    pub(super) functions: &'a [Entry<'a>],
    /// The functions that are being inlined, the innermost last.
    pub(super) frames: Vec<Frame>,
    pub(super) frames_so_far: u32,
    pub(super) local: Layout,
    pub(super) scopes: Vec<HashMap<String, Name>>,
    pub(super) code: Vec<Instruction>,
    registers: Vec<Virtual>,
    fixed: HashMap<Fixed, Register>,
    predicates: u32,
    /// Numbers of labels by frame and name, and where they are once they have been seen.
    labels: HashMap<(u32, &'a str), u32>,
    pub(super) label_positions: Vec<Option<u32>>,
    branch_tables: HashMap<&'a str, Vec<&'a str>>,
    pub(super) guard: (Predicate, bool),
    line: u32,
}

impl<'a> Body<'a> {
    pub(super) fn new(places: HashMap<&'a str, Place>, functions: &'a [Entry<'a>]) -> Body<'a> {
        Body {
            places,
            functions,
            frames: Vec::new(),
            frames_so_far: 0,
            local: Layout::default(),
            scopes: vec![HashMap::new()],
            code: Vec::new(),
            registers: Vec::new(),
            fixed: HashMap::new(),
            predicates: 1,
            labels: HashMap::new(),
            label_positions: Vec::new(),
            branch_tables: HashMap::new(),
            guard: (NONE, false),
            line: 0,
        }
    }

    pub(super) fn statement(&mut self, statement: &Statement<'a>) -> Result<(), PtxError> {
        match statement {
            Statement::Label(name, line) => {
                let label = self.label(name) as usize;
                let position = self.code.len() as u32;
                if self.label_positions[label].replace(position).is_some() {
                    return Err(PtxError::new(
                        *line,
                        format!("label `{name}` is defined twice"),
                    ));
                }
            }
            Statement::Registers { kind, name, count } => self.declare(*kind, name, *count),
            Statement::Variable(variable)
                if matches!(variable.space, Space::Local | Space::Parameter) =>
            {
                self.place_local(variable);
            }
            Statement::Variable(variable) => {
                if !self.places.contains_key(variable.name) {
                    return Err(
                        self.error(format!("variable `{}` in its state space", variable.name))
                    );
                }
            }
            Statement::BranchTargets { name, labels } => {
                self.branch_tables.insert(name, labels.clone());
            }
            Statement::ScopeBegin => self.scopes.push(HashMap::new()),
            Statement::ScopeEnd => {
                self.scopes.pop();
            }
            Statement::Instruction(instruction) => self.instruction(instruction)?,
        }
        Ok(())
    }

    fn declare(&mut self, kind: Type, name: &str, count: Option<u32>) {
        let names = match count {
            None => vec![name.to_owned()],
            Some(count) => (0..count).map(|index| format!("{name}{index}")).collect(),
        };
        for name in names {
            let value = if kind == Type::Predicate {
                Name::Predicate(self.new_predicate())
            } else {
                Name::Register(self.new_register(kind.is_wide(), false), kind)
            };
            if let Some(scope) = self.scopes.last_mut() {
                scope.insert(name, value);
            }
        }
    }

    fn instruction(&mut self, instruction: &syntax::Instruction<'a>) -> Result<(), PtxError> {
        self.line = instruction.line;
        self.guard = match instruction.guard {
            Some(guard) => (self.predicate_named(guard.name)?, guard.negated),
            None => (NONE, false),
        };
        let mut opcode = Opcode::new(instruction.opcode, instruction.line);
        let operands = Operands {
            operands: &instruction.operands,
            line: instruction.line,
        };
        let (body, op, x) = (self, &mut opcode, &operands);
        match op.base {
            "ld" | "ldu" => memory::load(body, op, x)?,
            "st" => memory::store(body, op, x)?,
            "atom" | "red" => memory::atomic(body, op, x)?,
            "cvta" => memory::convert_address(body, op, x)?,
            "isspacep" => memory::is_space(body, op, x)?,
            "prefetch" | "prefetchu" | "membar" | "fence" | "nanosleep" => return Ok(()),
            "mov" => logic::mov(body, op, x)?,
            "and" | "or" | "xor" | "not" | "cnot" | "shl" | "shr" | "shf" | "lop3" | "prmt" => {
                logic::lower(body, op, x)?;
            }
            "selp" | "slct" | "set" | "setp" | "testp" => comparison::lower(body, op, x)?,
            "cvt" => convert::lower(body, op, x)?,
            "bra" | "brx" | "ret" | "exit" | "trap" | "brkpt" => control::branch(body, op, x)?,
            "call" => calls::call(body, op, x)?,
            "bar" | "barrier" => control::barrier(body, op, x)?,
            "shfl" | "vote" | "activemask" | "redux" => control::warp(body, op, x)?,
            "add" | "sub" | "mul" | "mad" | "fma" | "div" | "rem" | "abs" | "neg" | "min"
            | "max" | "rcp" | "sqrt" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh"
            | "copysign" | "addc" | "subc" | "madc" | "mul24" | "mad24" | "sad" | "bfe" | "bfi"
            | "brev" | "popc" | "clz" | "bfind" | "dp4a" | "dp2a" => match op.take_type()? {
                kind @ (Type::F32 | Type::F64) => float::lower(body, op, kind, x)?,
                kind if kind.is_float() => half::lower(body, op, kind, x)?,
                kind => integer::lower(body, op, kind, x)?,
            },
            _ => return Err(op.unknown()),
        }
        opcode.finish()
    }

    /// The code with its labels resolved.
    pub(super) fn finish(mut self) -> Result<Lowered, PtxError> {
        // A kernel's end without `ret`.
        self.guard = (NONE, false);
        self.emit(Op::Exit);
        let names: HashMap<u32, &str> = self
            .labels
            .iter()
            .map(|(&(_, name), &label)| (label, name))
            .collect();
        let positions = self.label_positions;
        let resolve = |label: u32, line: u32| {
            positions[label as usize].ok_or_else(|| {
                PtxError::new(line, format!("label `{}` is not defined", names[&label]))
            })
        };
        for instruction in &mut self.code {
            match &mut instruction.op {
                Op::Branch { target } => *target = resolve(*target, instruction.line)?,
                Op::BranchTable { targets, .. } => {
                    for target in targets.iter_mut() {
                        *target = resolve(*target, instruction.line)?;
                    }
                }
                _ => {}
            }
        }
        Ok(Lowered {
            code: self.code,
            registers: self.registers,
            predicates: self.predicates as usize,
            local_bytes: self.local.bytes.next_multiple_of(16),
        })
    }

    pub(super) fn error(&self, message: impl Into<String>) -> PtxError {
        PtxError::new(self.line, message)
    }

    /// The number of a label, defined or not yet.
    pub(super) fn label(&mut self, name: &'a str) -> u32 {
        let frame = self.frames.last().map_or(0, |frame| frame.number);
        if let Some(&label) = self.labels.get(&(frame, name)) {
            return label;
        }
        let label = self.new_label();
        self.labels.insert((frame, name), label);
        label
    }

    pub(super) fn new_label(&mut self) -> u32 {
        self.label_positions.push(None);
        self.label_positions.len() as u32 - 1
    }

    pub(super) fn branch_table(&self, name: &str) -> Result<Vec<&'a str>, PtxError> {
        let table = self.branch_tables.get(name).cloned();
        table.ok_or_else(|| {
            self.error(format!(
                "branch targets `{name}` are not declared before their use"
            ))
        })
    }

    pub(super) fn emit(&mut self, op: Op) {
        let (guard, guard_negated) = self.guard;
        self.code.push(Instruction {
            op,
            guard,
            guard_negated,
            line: self.line,
        });
    }

    pub(super) fn new_register(&mut self, wide: bool, temporary: bool) -> Register {
        self.registers.push(Virtual {
            wide,
            fixed: None,
            temporary,
        });
        self.registers.len() as Register - 1
    }

    pub(super) fn temporary(&mut self, kind: Type) -> Register {
        self.new_register(kind.is_wide(), true)
    }

    pub(super) fn new_predicate(&mut self) -> Predicate {
        self.predicates += 1;
        self.predicates - 1
    }

    pub(super) fn fixed(&mut self, fixed: Fixed) -> Register {
        if let Some(&register) = self.fixed.get(&fixed) {
            return register;
        }
        let register = self.registers.len() as Register;
        self.registers.push(Virtual {
            wide: fixed.is_wide(),
            fixed: Some(fixed),
            temporary: false,
        });
        self.fixed.insert(fixed, register);
        register
    }

    /// A row that holds a number in each lane.
    pub(super) fn constant(&mut self, kind: Type, bits: u64) -> Register {
        let bits = if kind.is_wide() {
            bits
        } else {
            bits & (u64::MAX >> (64 - 8 * kind.bytes()))
        };
        self.fixed(Fixed::Constant {
            wide: kind.is_wide(),
            bits,
        })
    }

    pub(super) fn find(&self, name: &str) -> Option<Name> {
        self.scopes
            .iter()
            .rev()
            .find_map(|scope| scope.get(name))
            .copied()
    }

    pub(super) fn place(&self, name: &str) -> Option<Place> {
        self.places.get(name).copied()
    }

    /// Emits an operation from rows to a row.
    pub(super) fn alu(&mut self, run: Alu, d: Register, sources: &[Register], immediate: u32) {
        let source = |index: usize| sources.get(index).copied().unwrap_or(NONE);
        let slots = Slots {
            d,
            a: source(0),
            b: source(1),
            c: source(2),
            immediate,
            ..Slots::NONE
        };
        self.emit(Op::Alu { run, slots });
    }

    /// Emits an operation from operands 1, 2, ... of types `from` to operand 0 of type `to`.
    pub(super) fn compute(
        &mut self,
        operands: &Operands<'_, '_>,
        to: Type,
        from: &[Type],
        run: Alu,
    ) -> Result<(), PtxError> {
        operands.expect(from.len() + 1)?;
        let mut sources = Vec::with_capacity(3);
        for (index, &kind) in from.iter().enumerate() {
            sources.push(self.source(operands.get(index + 1)?, kind)?);
        }
        self.define(operands.get(0)?, to, |body, d| {
            body.alu(run, d, &sources, 0)
        })
    }
}

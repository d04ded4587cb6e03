//! What operands name: registers, predicates, numbers, special registers, addresses.

use super::body::{Body, Name};
use crate::ptx::PtxError;
use crate::ptx::alu::{Alu, unary};
use crate::ptx::lanes::{NONE, Predicate, Register};
use crate::ptx::program::{Address, Fixed, Op, Special};
use crate::ptx::syntax::Operand;
use crate::ptx::types::{Space, Type};

/// The operands of an instruction, with errors for missing ones.
pub(super) struct Operands<'s, 'a> {
    pub(super) operands: &'s [Operand<'a>],
    pub(super) line: u32,
}

impl<'s, 'a> Operands<'s, 'a> {
    pub(super) fn len(&self) -> usize {
        self.operands.len()
    }

    pub(super) fn get(&self, index: usize) -> Result<&'s Operand<'a>, PtxError> {
        self.operands
            .get(index)
            .ok_or_else(|| PtxError::new(self.line, format!("operand {} is missing", index + 1)))
    }

    /// An error where there are other than `count`.
    pub(super) fn expect(&self, count: usize) -> Result<(), PtxError> {
        if self.operands.len() == count {
            Ok(())
        } else {
            Err(PtxError::new(
                self.line,
                format!(
                    "{} operands where {count} are expected",
                    self.operands.len()
                ),
            ))
        }
    }
}

impl<'a> Body<'a> {
    pub(super) fn predicate_named(&self, name: &str) -> Result<Predicate, PtxError> {
        match self.find(name) {
            Some(Name::Predicate(predicate)) => Ok(predicate),
            _ => Err(self.error(format!("predicate `{name}` is not declared"))),
        }
    }

    /// A predicate that is written; none for `_`.
    pub(super) fn predicate_written(&self, name: &str) -> Result<Predicate, PtxError> {
        if name == "_" {
            Ok(NONE)
        } else {
            self.predicate_named(name)
        }
    }

    /// A predicate that is read, and whether it is negated.
    pub(super) fn predicate(&self, operand: &Operand<'_>) -> Result<(Predicate, bool), PtxError> {
        match operand {
            Operand::Name(name) => Ok((self.predicate_named(name)?, false)),
            Operand::Not(name) => Ok((self.predicate_named(name)?, true)),
            _ => Err(self.error("an operand that is not a predicate")),
        }
    }

    /// A register and its declared type.
    pub(super) fn register(&self, name: &str) -> Option<(Register, Type)> {
        match self.find(name) {
            Some(Name::Register(register, kind)) => Some((register, kind)),
            _ => None,
        }
    }

    /// The row that an operand is read from as a type.
    pub(super) fn source(
        &mut self,
        operand: &Operand<'_>,
        kind: Type,
    ) -> Result<Register, PtxError> {
        match *operand {
            Operand::Integer(value) => {
                let bits = match kind {
                    Type::F32 => u64::from((value as i64 as f32).to_bits()),
                    Type::F64 => (value as i64 as f64).to_bits(),
                    _ => value,
                };
                Ok(self.constant(kind, bits))
            }
            Operand::Float32(bits) if kind == Type::F64 => {
                Ok(self.constant(kind, f64::from(f32::from_bits(bits)).to_bits()))
            }
            Operand::Float32(bits) => Ok(self.constant(kind, u64::from(bits))),
            Operand::Float64(bits) if kind == Type::F32 => {
                Ok(self.constant(kind, u64::from((f64::from_bits(bits) as f32).to_bits())))
            }
            Operand::Float64(bits) => Ok(self.constant(kind, bits)),
            Operand::Name(name) => self.named_source(name, kind),
            _ => Err(self.error("an operand that is not a register or a number")),
        }
    }

    fn named_source(&mut self, name: &str, kind: Type) -> Result<Register, PtxError> {
        if let Some((register, declared)) = self.register(name) {
            if kind.is_wide() && !declared.is_wide() {
                return Err(self.error(format!(
                    "register `{name}` is narrower than the instruction's type"
                )));
            }
            if !kind.is_wide() && declared.is_wide() {
                let low = self.temporary(kind);
                self.alu(unary(|a: u64| a as u32), low, &[register], 0);
                return Ok(low);
            }
            return Ok(register);
        }
        if let Some(place) = self.place(name) {
            return Ok(self.constant(kind, place.address));
        }
        if matches!(name, "%clock" | "%clock_hi" | "%clock64" | "%globaltimer") {
            let d = self.temporary(kind);
            self.emit(Op::Clock {
                d,
                wide: kind.is_wide(),
            });
            return Ok(d);
        }
        match special(name) {
            // A wide type of a special register does not occur, but of those that are zero.
            Some(Special::Zero) => Ok(self.constant(kind, 0)),
            Some(special) if !kind.is_wide() => Ok(self.fixed(Fixed::Special(special))),
            _ => Err(self.error(format!("operand `{name}` is not declared"))),
        }
    }

    /// The register that an operand names as a destination and how wide it is; a temporary one for `_`.
    fn destination(
        &mut self,
        operand: &Operand<'_>,
        kind: Type,
    ) -> Result<(Register, Type), PtxError> {
        match operand {
            Operand::Name("_") => Ok((self.temporary(kind), kind)),
            Operand::Name(name) => self
                .register(name)
                .ok_or_else(|| self.error(format!("register `{name}` is not declared"))),
            _ => Err(self.error("a destination that is not a register")),
        }
    }

    /// Calls `emit` with the row that a value of a type is to be written to, then extends it where the register that
    /// the operand names is wider than the type.
    pub(super) fn define(
        &mut self,
        operand: &Operand<'_>,
        kind: Type,
        emit: impl FnOnce(&mut Body<'a>, Register),
    ) -> Result<(), PtxError> {
        let (register, declared) = self.destination(operand, kind)?;
        if kind.is_wide() && !declared.is_wide() {
            return Err(self.error("a destination narrower than the instruction's type"));
        }
        let extension: Alu = match (kind, declared.bytes()) {
            (Type::S8, 2 | 4) => unary(|a: i8| i32::from(a)),
            (Type::S16, 4) => unary(|a: i16| i32::from(a)),
            (Type::S8, 8) => unary(|a: i8| i64::from(a)),
            (Type::S16, 8) => unary(|a: i16| i64::from(a)),
            (Type::S32, 8) => unary(|a: i32| i64::from(a)),
            _ if !kind.is_wide() && declared.is_wide() => unary(|a: u32| u64::from(a)),
            _ => {
                emit(self, register);
                return Ok(());
            }
        };
        let narrow = self.temporary(kind);
        emit(self, narrow);
        self.alu(extension, register, &[narrow], 0);
        Ok(())
    }

    /// The space and address of a memory operand; a variable's space where the instruction names none.
    pub(super) fn address(
        &mut self,
        operand: &Operand<'_>,
        space: Space,
    ) -> Result<(Address, Space), PtxError> {
        let Operand::Address { base, offset } = *operand else {
            return Err(self.error("an operand that is not an address"));
        };
        let Some(name) = base else {
            return Ok((
                Address {
                    base: NONE,
                    wide: true,
                    offset,
                },
                space,
            ));
        };
        if let Some((base, kind)) = self.register(name) {
            if space == Space::Parameter && !self.frames.is_empty() {
                return Err(self.error("an address register for a function's parameters"));
            }
            return Ok((
                Address {
                    base,
                    wide: kind.is_wide(),
                    offset,
                },
                space,
            ));
        }
        let place = self
            .place(name)
            .ok_or_else(|| self.error(format!("address `{name}` is not declared")))?;
        // Parameters of calls are in local memory.
        let is_call = space == Space::Parameter && place.space == Space::Local;
        if space != Space::Generic && space != place.space && !is_call {
            return Err(self.error(format!(
                "variable `{name}` is not in the instruction's state space"
            )));
        }
        let offset = offset.wrapping_add(place.address as i64);
        Ok((
            Address {
                base: NONE,
                wide: true,
                offset,
            },
            place.space,
        ))
    }
}

fn special(name: &str) -> Option<Special> {
    let dimension = |rest: &str| ["x", "y", "z"].iter().position(|&axis| axis == rest);
    if let Some((base, rest)) = name.split_once('.') {
        let dimension = dimension(rest)?;
        return Some(match base {
            "%tid" => Special::Thread(dimension),
            "%ntid" => Special::BlockSize(dimension),
            "%ctaid" => Special::Block(dimension),
            "%nctaid" => Special::GridSize(dimension),
            _ => return None,
        });
    }
    Some(match name {
        "%laneid" => Special::LaneId,
        "%warpid" => Special::WarpId,
        "%nwarpid" => Special::WarpCount,
        "%smid" | "%gridid" => Special::Zero,
        "%nsmid" => Special::One,
        "WARP_SZ" => Special::WarpSize,
        "%lanemask_eq" => Special::LaneMaskEqual,
        "%lanemask_lt" => Special::LaneMaskLess,
        "%lanemask_le" => Special::LaneMaskLessEqual,
        "%lanemask_gt" => Special::LaneMaskGreater,
        "%lanemask_ge" => Special::LaneMaskGreaterEqual,
        "%dynamic_smem_size" => Special::DynamicSharedBytes,
        "%total_smem_size" => Special::TotalSharedBytes,
        _ => return None,
    })
}

//! Moves, logic and shifts.

use super::body::{ANY, Body};
use super::opcode::Opcode;
use super::operands::Operands;
use crate::ptx::PtxError;
use crate::ptx::alu::{Alu, binary, ternary, ternary_with, unary};
use crate::ptx::program::Op;
use crate::ptx::syntax::Operand;
use crate::ptx::types::Type;

pub(super) fn mov(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let kind = op.take_type()?;
    operands.expect(2)?;
    let (to, from) = (operands.get(0)?, operands.get(1)?);
    match (to, from) {
        _ if kind == Type::Predicate => predicate_move(body, to, from),
        (Operand::Vector(parts), _) => unpack(body, op, kind, parts, from),
        (_, Operand::Vector(parts)) => pack(body, op, kind, to, parts),
        _ => {
            let run = if kind.is_wide() {
                unary(|a: u64| a)
            } else {
                unary(|a: u32| a)
            };
            body.compute(operands, kind, &[kind], run)
        }
    }
}

fn predicate_move(
    body: &mut Body<'_>,
    to: &Operand<'_>,
    from: &Operand<'_>,
) -> Result<(), PtxError> {
    let (d, _) = body.predicate(to)?;
    let op = match *from {
        Operand::Integer(0) => Op::Predicates {
            run: |_, _| 0,
            d,
            a: ANY,
            b: ANY,
        },
        Operand::Integer(_) => Op::Predicates {
            run: |_, _| u32::MAX,
            d,
            a: ANY,
            b: ANY,
        },
        _ => {
            let (a, negated) = body.predicate(from)?;
            Op::Predicates {
                run: if negated { |a, _| !a } else { |a, _| a },
                d,
                a,
                b: a,
            }
        }
    };
    body.emit(op);
    Ok(())
}

/// `mov.b64 {low, high}, wide` and its like.
fn unpack(
    body: &mut Body<'_>,
    op: &Opcode<'_>,
    kind: Type,
    parts: &[Operand<'_>],
    from: &Operand<'_>,
) -> Result<(), PtxError> {
    let source = body.source(from, kind)?;
    let (part, runs): (Type, &[Alu]) = match (kind.bytes(), parts.len()) {
        (8, 2) => (
            Type::B32,
            &[unary(|a: u64| a as u32), unary(|a: u64| (a >> 32) as u32)],
        ),
        (8, 4) => (
            Type::B16,
            &[
                unary(|a: u64| a as u16),
                unary(|a: u64| (a >> 16) as u16),
                unary(|a: u64| (a >> 32) as u16),
                unary(|a: u64| (a >> 48) as u16),
            ],
        ),
        (4, 2) => (
            Type::B16,
            &[unary(|a: u32| a as u16), unary(|a: u32| (a >> 16) as u16)],
        ),
        (4, 4) => (
            Type::B8,
            &[
                unary(|a: u32| a as u8),
                unary(|a: u32| (a >> 8) as u8),
                unary(|a: u32| (a >> 16) as u8),
                unary(|a: u32| (a >> 24) as u8),
            ],
        ),
        (2, 2) => (
            Type::B8,
            &[unary(|a: u16| a as u8), unary(|a: u16| (a >> 8) as u8)],
        ),
        _ => return Err(op.unknown()),
    };
    for (part_operand, &run) in parts.iter().zip(runs) {
        if !matches!(part_operand, Operand::Name("_")) {
            body.define(part_operand, part, |body, d| body.alu(run, d, &[source], 0))?;
        }
    }
    Ok(())
}

/// `mov.b64 wide, {low, high}` and its like.
fn pack(
    body: &mut Body<'_>,
    op: &Opcode<'_>,
    kind: Type,
    to: &Operand<'_>,
    parts: &[Operand<'_>],
) -> Result<(), PtxError> {
    let part = match (kind.bytes(), parts.len()) {
        (8, 2) => Type::B32,
        (8, 4) | (4, 2) => Type::B16,
        (4, 4) | (2, 2) => Type::B8,
        _ => return Err(op.unknown()),
    };
    let mut sources = Vec::new();
    for operand in parts {
        sources.push(body.source(operand, part)?);
    }
    let run = match (kind.bytes(), parts.len()) {
        (8, 2) => binary(|a: u32, b: u32| u64::from(a) | u64::from(b) << 32),
        (8, 4) => binary(|a: u32, b: u32| u64::from(a) | u64::from(b) << 32),
        (4, 2) => binary(|a: u16, b: u16| u32::from(a) | u32::from(b) << 16),
        (4, 4) => binary(|a: u16, b: u16| u32::from(a) | u32::from(b) << 16),
        _ => binary(|a: u8, b: u8| u16::from(a) | u16::from(b) << 8),
    };
    if sources.len() == 4 {
        let halves: (Alu, Type) = if kind.is_wide() {
            (
                binary(|a: u16, b: u16| u32::from(a) | u32::from(b) << 16),
                Type::B32,
            )
        } else {
            (
                binary(|a: u8, b: u8| u16::from(a) | u16::from(b) << 8),
                Type::B16,
            )
        };
        let (low, high) = (body.temporary(halves.1), body.temporary(halves.1));
        body.alu(halves.0, low, &sources[..2], 0);
        body.alu(halves.0, high, &sources[2..], 0);
        sources = vec![low, high];
    }
    body.define(to, kind, |body, d| body.alu(run, d, &sources, 0))
}

pub(super) fn lower(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    if op.base == "shf" {
        return funnel_shift(body, op, operands);
    }
    if op.base == "prmt" {
        return permute(body, op, operands);
    }
    let kind = op.take_type()?;
    if kind == Type::Predicate {
        return predicates(body, op, operands);
    }
    let wide = kind.is_wide();
    match op.base {
        "and" | "or" | "xor" => {
            let run = match (op.base, wide) {
                ("and", false) => binary(|a: u32, b: u32| a & b),
                ("and", true) => binary(|a: u64, b: u64| a & b),
                ("or", false) => binary(|a: u32, b: u32| a | b),
                ("or", true) => binary(|a: u64, b: u64| a | b),
                (_, false) => binary(|a: u32, b: u32| a ^ b),
                (_, true) => binary(|a: u64, b: u64| a ^ b),
            };
            body.compute(operands, kind, &[kind; 2], run)
        }
        "not" => {
            let run = if wide {
                unary(|a: u64| !a)
            } else {
                unary(|a: u32| !a)
            };
            body.compute(operands, kind, &[kind], run)
        }
        "cnot" => {
            let run = match kind.bytes() {
                2 => unary(|a: u16| u16::from(a == 0)),
                4 => unary(|a: u32| u32::from(a == 0)),
                _ => unary(|a: u64| u64::from(a == 0)),
            };
            body.compute(operands, kind, &[kind], run)
        }
        "shl" | "shr" => {
            let run = shift(op, kind)?;
            body.compute(operands, kind, &[kind, Type::U32], run)
        }
        _ => lop3(body, op, kind, operands),
    }
}

/// Shifts by the width or more shift everything out.
fn shift(op: &Opcode<'_>, kind: Type) -> Result<Alu, PtxError> {
    Ok(match (op.base, kind) {
        ("shl", Type::B16) => binary(|a: u16, b: u32| if b < 16 { a << b } else { 0 }),
        ("shl", Type::B32) => binary(|a: u32, b: u32| if b < 32 { a << (b & 31) } else { 0 }),
        ("shl", Type::B64) => binary(|a: u64, b: u32| if b < 64 { a << (b & 63) } else { 0 }),
        ("shr", Type::B16 | Type::U16) => binary(|a: u16, b: u32| if b < 16 { a >> b } else { 0 }),
        ("shr", Type::B32 | Type::U32) => {
            binary(|a: u32, b: u32| if b < 32 { a >> (b & 31) } else { 0 })
        }
        ("shr", Type::B64 | Type::U64) => {
            binary(|a: u64, b: u32| if b < 64 { a >> (b & 63) } else { 0 })
        }
        ("shr", Type::S16) => binary(|a: i16, b: u32| a >> b.min(15)),
        ("shr", Type::S32) => binary(|a: i32, b: u32| a >> b.min(31)),
        ("shr", Type::S64) => binary(|a: i64, b: u32| a >> b.min(63)),
        _ => return Err(op.unknown()),
    })
}

fn predicates(
    body: &mut Body<'_>,
    op: &Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let (d, _) = body.predicate(operands.get(0)?)?;
    let (a, a_negated) = body.predicate(operands.get(1)?)?;
    if op.base == "not" {
        operands.expect(2)?;
        body.emit(Op::Predicates {
            run: if a_negated { |a, _| a } else { |a, _| !a },
            d,
            a,
            b: a,
        });
        return Ok(());
    }
    operands.expect(3)?;
    let (b, b_negated) = body.predicate(operands.get(2)?)?;
    if a_negated || b_negated {
        return Err(op.error("a negated predicate"));
    }
    let run: fn(u32, u32) -> u32 = match op.base {
        "and" => |a, b| a & b,
        "or" => |a, b| a | b,
        "xor" => |a, b| a ^ b,
        _ => return Err(op.unknown()),
    };
    body.emit(Op::Predicates { run, d, a, b });
    Ok(())
}

fn lop3(
    body: &mut Body<'_>,
    op: &Opcode<'_>,
    kind: Type,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    operands.expect(5)?;
    let Operand::Integer(table @ 0..=255) = *operands.get(4)? else {
        return Err(op.unknown());
    };
    if kind != Type::B32 {
        return Err(op.unknown());
    }
    let run = ternary_with(|a: u32, b: u32, c: u32, table: u32| {
        let bit = |index: u32| (table >> index & 1).wrapping_neg();
        let choose = |condition: u32, one: u32, zero: u32| zero ^ condition & (one ^ zero);
        let ab = choose(b, choose(c, bit(7), bit(6)), choose(c, bit(5), bit(4)));
        let b = choose(b, choose(c, bit(3), bit(2)), choose(c, bit(1), bit(0)));
        choose(a, ab, b)
    });
    let mut sources = [0; 3];
    for (index, source) in sources.iter_mut().enumerate() {
        *source = body.source(operands.get(index + 1)?, kind)?;
    }
    body.define(operands.get(0)?, kind, |body, d| {
        body.alu(run, d, &sources, table as u32)
    })
}

fn funnel_shift(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let left = op.take("l");
    let right = !left && op.take("r");
    let (clamps, wraps) = (op.take("clamp"), op.take("wrap"));
    op.take("b32");
    if !left && !right || clamps == wraps {
        return Err(op.unknown());
    }
    let run = match (left, clamps) {
        (true, false) => ternary(|a: u32, b: u32, c: u32| (joined(a, b) << (c & 31) >> 32) as u32),
        (true, true) => ternary(|a: u32, b: u32, c: u32| (joined(a, b) << c.min(32) >> 32) as u32),
        (false, false) => ternary(|a: u32, b: u32, c: u32| (joined(a, b) >> (c & 31)) as u32),
        (false, true) => ternary(|a: u32, b: u32, c: u32| (joined(a, b) >> c.min(32)) as u32),
    };
    body.compute(operands, Type::B32, &[Type::B32, Type::B32, Type::U32], run)
}

#[inline(always)]
fn joined(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn permute(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let mode = op.take_one(["f4e", "b4e", "rc8", "ecl", "ecr", "rc16"]);
    op.take("b32");
    let run = match mode {
        None => ternary(|a: u32, b: u32, c: u32| {
            let bytes = joined(a, b);
            (0..4).fold(0, |result, i| {
                let selector = c >> (4 * i);
                let byte = (bytes >> (8 * (selector & 7))) as u32 & 255;
                let value = if selector & 8 != 0 {
                    (byte >> 7) * 255
                } else {
                    byte
                };
                result | value << (8 * i)
            })
        }),
        Some("f4e") => {
            ternary(|a: u32, b: u32, c: u32| joined(a, b).rotate_right(8 * (c & 3)) as u32)
        }
        Some("b4e") => ternary(|a: u32, b: u32, c: u32| {
            (0..4).fold(0, |result, i| {
                let index = (c & 3).wrapping_sub(i) & 7;
                result | ((joined(a, b) >> (8 * index)) as u32 & 255) << (8 * i)
            })
        }),
        Some("rc8") => ternary(|a: u32, _: u32, c: u32| (a >> (8 * (c & 3)) & 255) * 0x0101_0101),
        Some("rc16") => {
            ternary(|a: u32, _: u32, c: u32| (a >> (16 * (c & 1)) & 0xFFFF) * 0x0001_0001)
        }
        Some("ecl") => ternary(|a: u32, _: u32, c: u32| selected(a, |i| i.max(c & 3))),
        Some(_) => ternary(|a: u32, _: u32, c: u32| selected(a, |i| i.min(c & 3))),
    };
    body.compute(operands, Type::B32, &[Type::B32, Type::B32, Type::U32], run)
}

/// Byte i of the result is the byte of `a` that `index` says.
#[inline(always)]
fn selected(a: u32, index: impl Fn(u32) -> u32) -> u32 {
    (0..4).fold(0, |result, i| {
        result | (a >> (8 * index(i)) & 255) << (8 * i)
    })
}

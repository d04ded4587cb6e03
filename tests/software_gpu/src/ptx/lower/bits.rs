//! Bit fields, counts of bits, and dot products of packed bytes.

use super::body::Body;
use super::opcode::Opcode;
use super::operands::Operands;
use crate::ptx::PtxError;
use crate::ptx::alu::{Alu, binary, each_ternary, ternary, unary};
use crate::ptx::types::Type;

pub(super) fn lower(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    kind: Type,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let wide = kind.is_wide();
    if kind.bytes() < 4 {
        return Err(op.unknown());
    }
    match op.base {
        "brev" => {
            let run = if wide {
                unary(|a: u64| a.reverse_bits())
            } else {
                unary(|a: u32| a.reverse_bits())
            };
            body.compute(operands, kind, &[kind], run)
        }
        "popc" => {
            let run = if wide {
                unary(|a: u64| a.count_ones())
            } else {
                unary(|a: u32| a.count_ones())
            };
            body.compute(operands, Type::U32, &[kind], run)
        }
        "clz" => {
            let run = if wide {
                unary(|a: u64| a.leading_zeros())
            } else {
                unary(|a: u32| a.leading_zeros())
            };
            body.compute(operands, Type::U32, &[kind], run)
        }
        "bfind" => {
            let run = match (kind, op.take("shiftamt")) {
                (Type::U32, false) => unary(|a: u32| 31u32.wrapping_sub(a.leading_zeros())),
                (Type::U64, false) => unary(|a: u64| 63u32.wrapping_sub(a.leading_zeros())),
                (Type::S32, false) => {
                    unary(|a: i32| 31u32.wrapping_sub(signless(a).leading_zeros()))
                }
                (Type::S64, false) => {
                    unary(|a: i64| 63u32.wrapping_sub(signless_64(a).leading_zeros()))
                }
                (Type::U32, true) => {
                    unary(|a: u32| if a == 0 { u32::MAX } else { a.leading_zeros() })
                }
                (Type::U64, true) => {
                    unary(|a: u64| if a == 0 { u32::MAX } else { a.leading_zeros() })
                }
                (Type::S32, true) => unary(|a: i32| {
                    if signless(a) == 0 {
                        u32::MAX
                    } else {
                        signless(a).leading_zeros()
                    }
                }),
                (Type::S64, true) => unary(|a: i64| {
                    if signless_64(a) == 0 {
                        u32::MAX
                    } else {
                        signless_64(a).leading_zeros()
                    }
                }),
                _ => return Err(op.unknown()),
            };
            body.compute(operands, Type::U32, &[kind], run)
        }
        "bfe" => {
            let run = match kind {
                Type::U32 => {
                    ternary(|a: u32, b: u32, c: u32| extract(u64::from(a), b, c, 32) as u32)
                }
                Type::U64 => ternary(|a: u64, b: u32, c: u32| extract(a, b, c, 64)),
                Type::S32 => each_ternary(|a: i32, b: u32, c: u32| {
                    extract_signed(i64::from(a), b, c, 32) as i32
                }),
                Type::S64 => each_ternary(|a: i64, b: u32, c: u32| extract_signed(a, b, c, 64)),
                _ => return Err(op.unknown()),
            };
            body.compute(operands, kind, &[kind, Type::U32, Type::U32], run)
        }
        _ => insert(body, op, kind, operands),
    }
}

fn signless(a: i32) -> u32 {
    (if a < 0 { !a } else { a }) as u32
}

fn signless_64(a: i64) -> u64 {
    (if a < 0 { !a } else { a }) as u64
}

/// A mask of the low bits.
#[inline(always)]
fn low_bits(count: u32) -> u64 {
    if count >= 64 {
        u64::MAX
    } else {
        (1 << count) - 1
    }
}

/// `length` bits of `a` from `position` on; only the lowest eight bits of both count.
#[inline(always)]
fn extract(a: u64, position: u32, length: u32, width: u32) -> u64 {
    let (position, length) = (position & 255, length & 255);
    let shifted = if position >= width { 0 } else { a >> position };
    shifted & low_bits(length)
}

/// As `extract`, filled up with the field's highest bit, or with the sign of `a` where the field ends beyond it.
#[inline(always)]
fn extract_signed(a: i64, position: u32, length: u32, width: u32) -> i64 {
    let (position, length) = (position & 255, length & 255);
    if length == 0 {
        return 0;
    }
    let shifted = a >> position.min(63);
    let sign = if position + length > width {
        a < 0
    } else {
        shifted >> (length - 1) & 1 != 0
    };
    let field = shifted as u64 & low_bits(length);
    (if sign {
        field | !low_bits(length)
    } else {
        field
    }) as i64
}

fn insert(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    kind: Type,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    operands.expect(5)?;
    let value = body.source(operands.get(1)?, kind)?;
    let base = body.source(operands.get(2)?, kind)?;
    let position = body.source(operands.get(3)?, Type::U32)?;
    let length = body.source(operands.get(4)?, Type::U32)?;
    // The mask of the field, then the bits of both under it.
    let field = body.temporary(kind);
    let shifted = body.temporary(kind);
    let (mask, shift, merge) = match kind.bytes() {
        4 => (
            binary(|position: u32, length: u32| field_mask(position, length, 32) as u32),
            binary(|value: u32, position: u32| value.checked_shl(position & 255).unwrap_or(0)),
            ternary(|field: u32, value: u32, base: u32| base & !field | value & field),
        ),
        8 => (
            binary(|position: u32, length: u32| field_mask(position, length, 64)),
            binary(|value: u64, position: u32| value.checked_shl(position & 255).unwrap_or(0)),
            ternary(|field: u64, value: u64, base: u64| base & !field | value & field),
        ),
        _ => return Err(op.unknown()),
    };
    body.alu(mask, field, &[position, length], 0);
    body.alu(shift, shifted, &[value, position], 0);
    body.define(operands.get(0)?, kind, |body, d| {
        body.alu(merge, d, &[field, shifted, base], 0)
    })
}

#[inline(always)]
fn field_mask(position: u32, length: u32, width: u32) -> u64 {
    let (position, length) = (position & 255, length & 255);
    if position >= width {
        0
    } else {
        low_bits(length) << position
    }
}

pub(super) fn dot(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    first: Type,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let second = op.take_type()?;
    let half = if op.base == "dp2a" {
        op.take_one(["lo", "hi"])
    } else {
        Some("lo")
    };
    let run: Alu = match (op.base, first, second, half) {
        ("dp4a", Type::U32, Type::U32, _) => ternary(|a: u32, b: u32, c: u32| {
            (0..4).fold(c, |sum, i| {
                sum.wrapping_add((a >> (8 * i) & 255) * (b >> (8 * i) & 255))
            })
        }),
        ("dp4a", Type::S32, Type::S32, _) => ternary(|a: u32, b: u32, c: i32| {
            (0..4).fold(c, |sum, i| {
                sum.wrapping_add(signed_byte(a, i) * signed_byte(b, i))
            })
        }),
        ("dp4a", Type::S32, Type::U32, _) => ternary(|a: u32, b: u32, c: i32| {
            (0..4).fold(c, |sum, i| {
                sum.wrapping_add(signed_byte(a, i) * (b >> (8 * i) & 255) as i32)
            })
        }),
        ("dp4a", Type::U32, Type::S32, _) => ternary(|a: u32, b: u32, c: i32| {
            (0..4).fold(c, |sum, i| {
                sum.wrapping_add((a >> (8 * i) & 255) as i32 * signed_byte(b, i))
            })
        }),
        ("dp2a", Type::U32, Type::U32, Some("lo")) => ternary(|a: u32, b: u32, c: u32| {
            (0..2).fold(c, |sum, i| {
                sum.wrapping_add((a >> (16 * i) & 0xFFFF) * (b >> (8 * i) & 255))
            })
        }),
        ("dp2a", Type::U32, Type::U32, Some("hi")) => ternary(|a: u32, b: u32, c: u32| {
            (0..2).fold(c, |sum, i| {
                sum.wrapping_add((a >> (16 * i) & 0xFFFF) * (b >> (8 * i + 16) & 255))
            })
        }),
        ("dp2a", Type::S32, Type::S32, Some("lo")) => ternary(|a: u32, b: u32, c: i32| {
            (0..2).fold(c, |sum, i| {
                sum.wrapping_add(signed_short(a, i) * signed_byte(b, i))
            })
        }),
        ("dp2a", Type::S32, Type::S32, Some("hi")) => ternary(|a: u32, b: u32, c: i32| {
            (0..2).fold(c, |sum, i| {
                sum.wrapping_add(signed_short(a, i) * signed_byte(b, i + 2))
            })
        }),
        _ => return Err(op.unknown()),
    };
    let sum = if first == Type::U32 && second == Type::U32 {
        Type::U32
    } else {
        Type::S32
    };
    body.compute(operands, sum, &[Type::B32, Type::B32, sum], run)
}

#[inline(always)]
fn signed_byte(word: u32, index: u32) -> i32 {
    (word << (24 - 8 * index)) as i32 >> 24
}

#[inline(always)]
fn signed_short(word: u32, index: u32) -> i32 {
    (word << (16 - 16 * index)) as i32 >> 16
}

//! Integer arithmetic.

use super::bits;
use super::body::{Body, CARRY};
use super::opcode::Opcode;
use super::operands::Operands;
use crate::ptx::PtxError;
use crate::ptx::alu::{Alu, Slots, binary, carrying, each_binary, ternary, unary};
use crate::ptx::lanes::NONE;
use crate::ptx::program::Op;
use crate::ptx::types::Type;

/// The operation for a type, as Rust's type of that name.
macro_rules! for_integer {
    ($op:expr, $kind:expr, $t:ident => $alu:expr) => {
        match $kind {
            Type::B16 | Type::U16 => {
                type $t = u16;
                $alu
            }
            Type::B32 | Type::U32 => {
                type $t = u32;
                $alu
            }
            Type::B64 | Type::U64 => {
                type $t = u64;
                $alu
            }
            Type::S16 => {
                type $t = i16;
                $alu
            }
            Type::S32 => {
                type $t = i32;
                $alu
            }
            Type::S64 => {
                type $t = i64;
                $alu
            }
            _ => return Err($op.unknown()),
        }
    };
}
pub(super) use for_integer;

pub(super) fn lower(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    kind: Type,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    match op.base {
        "add" | "sub" | "addc" | "subc" => add(body, op, kind, operands),
        "madc" => {
            let sets_carry = op.take("cc");
            carry_product(body, op, kind, operands, 2 | u32::from(sets_carry))
        }
        "mul" | "mad" => multiply(body, op, kind, operands),
        "mul24" | "mad24" => multiply_24(body, op, kind, operands),
        "dp4a" | "dp2a" => bits::dot(body, op, kind, operands),
        "bfe" | "bfi" | "brev" | "popc" | "clz" | "bfind" => bits::lower(body, op, kind, operands),
        "div" => body.compute(operands, kind, &[kind; 2], divide(op, kind)?),
        "rem" => body.compute(operands, kind, &[kind; 2], remainder(op, kind)?),
        "abs" => {
            let run = match kind {
                Type::S16 => unary(|a: i16| a.wrapping_abs()),
                Type::S32 => unary(|a: i32| a.wrapping_abs()),
                Type::S64 => unary(|a: i64| a.wrapping_abs()),
                _ => return Err(op.unknown()),
            };
            body.compute(operands, kind, &[kind], run)
        }
        "neg" => {
            let run = for_integer!(op, kind, T => unary(|a: T| a.wrapping_neg()));
            body.compute(operands, kind, &[kind], run)
        }
        "min" => {
            let run = for_integer!(op, kind, T => binary(|a: T, b: T| a.min(b)));
            body.compute(operands, kind, &[kind; 2], run)
        }
        "max" => {
            let run = for_integer!(op, kind, T => binary(|a: T, b: T| a.max(b)));
            body.compute(operands, kind, &[kind; 2], run)
        }
        "sad" => {
            let run = for_integer!(op, kind, T => ternary(|a: T, b: T, c: T| c.wrapping_add(a.abs_diff(b) as T)));
            body.compute(operands, kind, &[kind; 3], run)
        }
        _ => Err(op.unknown()),
    }
}

fn add(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    kind: Type,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let subtracts = op.base.starts_with("sub");
    let reads_carry = op.base.ends_with('c');
    let sets_carry = op.take("cc");
    if op.take("sat") {
        let run = match (kind, subtracts) {
            (Type::S32, false) => binary(|a: i32, b: i32| a.saturating_add(b)),
            (Type::S32, true) => binary(|a: i32, b: i32| a.saturating_sub(b)),
            _ => return Err(op.unknown()),
        };
        return body.compute(operands, kind, &[kind; 2], run);
    }
    if !reads_carry && !sets_carry {
        let run = if subtracts {
            for_integer!(op, kind, T => binary(|a: T, b: T| a.wrapping_sub(b)))
        } else {
            for_integer!(op, kind, T => binary(|a: T, b: T| a.wrapping_add(b)))
        };
        return body.compute(operands, kind, &[kind; 2], run);
    }
    operands.expect(3)?;
    if kind.bytes() < 4 {
        return Err(op.unknown());
    }
    let run = sum_with_carry(kind, subtracts);
    let (a, b) = (
        body.source(operands.get(1)?, kind)?,
        body.source(operands.get(2)?, kind)?,
    );
    let immediate = u32::from(sets_carry) | u32::from(reads_carry) << 1;
    body.define(operands.get(0)?, kind, |body, d| {
        body.emit(Op::Alu {
            run,
            slots: Slots {
                d,
                a,
                b,
                c: NONE,
                r: CARRY,
                immediate,
                ..Slots::NONE
            },
        });
    })
}

/// Addition and subtraction with a carry in and out.
trait Carry: Sized {
    fn carrying_sum(self, other: Self, carry: bool) -> (Self, bool);
    fn borrowing_difference(self, other: Self, borrow: bool) -> (Self, bool);
}

macro_rules! carry {
    ($($type:ty)*) => {$(
        impl Carry for $type {
            fn carrying_sum(self, other: $type, carry: bool) -> ($type, bool) {
                let (sum, first) = self.overflowing_add(other);
                let (sum, second) = sum.overflowing_add(<$type>::from(carry));
                (sum, first | second)
            }
            fn borrowing_difference(self, other: $type, borrow: bool) -> ($type, bool) {
                let (difference, first) = self.overflowing_sub(other);
                let (difference, second) = difference.overflowing_sub(<$type>::from(borrow));
                (difference, first | second)
            }
        }
    )*};
}
carry!(u32 u64);

fn multiply(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    kind: Type,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let adds = op.base == "mad";
    if op.take("cc") {
        return carry_product(body, op, kind, operands, 1);
    }
    if op.take("wide") {
        let (run, to): (Alu, Type) = match (kind, adds) {
            (Type::U16, false) => (
                binary(|a: u16, b: u16| u32::from(a) * u32::from(b)),
                Type::U32,
            ),
            (Type::S16, false) => (
                binary(|a: i16, b: i16| i32::from(a) * i32::from(b)),
                Type::S32,
            ),
            (Type::U32, false) => (
                binary(|a: u32, b: u32| u64::from(a) * u64::from(b)),
                Type::U64,
            ),
            (Type::S32, false) => (
                binary(|a: i32, b: i32| i64::from(a) * i64::from(b)),
                Type::S64,
            ),
            (Type::U16, true) => (
                ternary(|a: u16, b: u16, c: u32| (u32::from(a) * u32::from(b)).wrapping_add(c)),
                Type::U32,
            ),
            (Type::S16, true) => (
                ternary(|a: i16, b: i16, c: i32| (i32::from(a) * i32::from(b)).wrapping_add(c)),
                Type::S32,
            ),
            (Type::U32, true) => (
                ternary(|a: u32, b: u32, c: u64| (u64::from(a) * u64::from(b)).wrapping_add(c)),
                Type::U64,
            ),
            (Type::S32, true) => (
                ternary(|a: i32, b: i32, c: i64| (i64::from(a) * i64::from(b)).wrapping_add(c)),
                Type::S64,
            ),
            _ => return Err(op.unknown()),
        };
        let from = [kind, kind, to];
        return body.compute(operands, to, &from[..2 + usize::from(adds)], run);
    }
    if op.take("hi") {
        let run = match (kind, adds) {
            (Type::U16, false) => binary(|a: u16, b: u16| a.high_product(b)),
            (Type::S16, false) => binary(|a: i16, b: i16| a.high_product(b)),
            (Type::U32, false) => binary(|a: u32, b: u32| a.high_product(b)),
            (Type::S32, false) => binary(|a: i32, b: i32| a.high_product(b)),
            (Type::U64, false) => binary(|a: u64, b: u64| a.high_product(b)),
            (Type::S64, false) => binary(|a: i64, b: i64| a.high_product(b)),
            (Type::S32, true) if op.take("sat") => {
                ternary(|a: i32, b: i32, c: i32| a.high_product(b).saturating_add(c))
            }
            (Type::U16, true) => {
                ternary(|a: u16, b: u16, c: u16| a.high_product(b).wrapping_add(c))
            }
            (Type::S16, true) => {
                ternary(|a: i16, b: i16, c: i16| a.high_product(b).wrapping_add(c))
            }
            (Type::U32, true) => {
                ternary(|a: u32, b: u32, c: u32| a.high_product(b).wrapping_add(c))
            }
            (Type::S32, true) => {
                ternary(|a: i32, b: i32, c: i32| a.high_product(b).wrapping_add(c))
            }
            (Type::U64, true) => {
                ternary(|a: u64, b: u64, c: u64| a.high_product(b).wrapping_add(c))
            }
            (Type::S64, true) => {
                ternary(|a: i64, b: i64, c: i64| a.high_product(b).wrapping_add(c))
            }
            _ => return Err(op.unknown()),
        };
        return body.compute(operands, kind, &[kind; 3][..2 + usize::from(adds)], run);
    }
    if !op.take("lo") {
        return Err(op.unknown());
    }
    let run = if adds {
        for_integer!(op, kind, T => ternary(|a: T, b: T, c: T| a.wrapping_mul(b).wrapping_add(c)))
    } else {
        for_integer!(op, kind, T => binary(|a: T, b: T| a.wrapping_mul(b)))
    };
    body.compute(operands, kind, &[kind; 3][..2 + usize::from(adds)], run)
}

/// `mad.cc` and `madc`: half of a product and an addition with a carry, which is `carry` for [`carrying`].
fn carry_product(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    kind: Type,
    operands: &Operands<'_, '_>,
    carry: u32,
) -> Result<(), PtxError> {
    let high = op.take("hi");
    if !high && !op.take("lo") {
        return Err(op.unknown());
    }
    let product = match (kind, high) {
        (Type::U32 | Type::S32, false) => binary(|a: u32, b: u32| a.wrapping_mul(b)),
        (Type::U64 | Type::S64, false) => binary(|a: u64, b: u64| a.wrapping_mul(b)),
        (Type::U32, true) => binary(|a: u32, b: u32| a.high_product(b)),
        (Type::S32, true) => binary(|a: i32, b: i32| a.high_product(b)),
        (Type::U64, true) => binary(|a: u64, b: u64| a.high_product(b)),
        (Type::S64, true) => binary(|a: i64, b: i64| a.high_product(b)),
        _ => return Err(op.unknown()),
    };
    operands.expect(4)?;
    let (a, b) = (
        body.source(operands.get(1)?, kind)?,
        body.source(operands.get(2)?, kind)?,
    );
    let c = body.source(operands.get(3)?, kind)?;
    let half = body.temporary(kind);
    body.alu(product, half, &[a, b], 0);
    let run = sum_with_carry(kind, false);
    body.define(operands.get(0)?, kind, |body, d| {
        let slots = Slots {
            d,
            a: half,
            b: c,
            r: CARRY,
            immediate: carry,
            ..Slots::NONE
        };
        body.emit(Op::Alu { run, slots });
    })
}

/// For 32 and 64 bits.
fn sum_with_carry(kind: Type, subtracts: bool) -> Alu {
    match (kind.is_wide(), subtracts) {
        (false, false) => carrying(|a: u32, b: u32, carry| a.carrying_sum(b, carry)),
        (false, true) => carrying(|a: u32, b: u32, borrow| a.borrowing_difference(b, borrow)),
        (true, false) => carrying(|a: u64, b: u64, carry| a.carrying_sum(b, carry)),
        (true, true) => carrying(|a: u64, b: u64, borrow| a.borrowing_difference(b, borrow)),
    }
}

/// The upper half of a product.
trait HighProduct {
    fn high_product(self, other: Self) -> Self;
}

macro_rules! high_product {
    ($($type:ty, $double:ty;)*) => {$(
        impl HighProduct for $type {
            #[inline(always)]
            fn high_product(self, other: $type) -> $type {
                (<$double>::from(self) * <$double>::from(other) >> <$type>::BITS) as $type
            }
        }
    )*};
}
high_product! { u16, u32; i16, i32; u32, u64; i32, i64; u64, u128; i64, i128; }

fn multiply_24(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    kind: Type,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let adds = op.base == "mad24";
    let high = op.take("hi");
    if !high && !op.take("lo") {
        return Err(op.unknown());
    }
    let run = match (kind, high, adds) {
        (Type::U32, false, false) => binary(|a: u32, b: u32| unsigned_24(a, b) as u32),
        (Type::U32, true, false) => binary(|a: u32, b: u32| (unsigned_24(a, b) >> 16) as u32),
        (Type::S32, false, false) => binary(|a: i32, b: i32| signed_24(a, b) as i32),
        (Type::S32, true, false) => binary(|a: i32, b: i32| (signed_24(a, b) >> 16) as i32),
        (Type::U32, false, true) => {
            ternary(|a: u32, b: u32, c: u32| (unsigned_24(a, b) as u32).wrapping_add(c))
        }
        (Type::U32, true, true) => {
            ternary(|a: u32, b: u32, c: u32| ((unsigned_24(a, b) >> 16) as u32).wrapping_add(c))
        }
        (Type::S32, false, true) => {
            ternary(|a: i32, b: i32, c: i32| (signed_24(a, b) as i32).wrapping_add(c))
        }
        (Type::S32, true, true) => {
            ternary(|a: i32, b: i32, c: i32| ((signed_24(a, b) >> 16) as i32).wrapping_add(c))
        }
        _ => return Err(op.unknown()),
    };
    body.compute(operands, kind, &[kind; 3][..2 + usize::from(adds)], run)
}

fn unsigned_24(a: u32, b: u32) -> u64 {
    u64::from(a & 0xFF_FFFF) * u64::from(b & 0xFF_FFFF)
}

fn signed_24(a: i32, b: i32) -> i64 {
    i64::from(a << 8 >> 8) * i64::from(b << 8 >> 8)
}

/// Division by zero gives all ones, as on the hardware.
fn divide(op: &Opcode<'_>, kind: Type) -> Result<Alu, PtxError> {
    Ok(match kind {
        Type::U16 => each_binary(|a: u16, b: u16| a.checked_div(b).unwrap_or(u16::MAX)),
        Type::U32 => each_binary(|a: u32, b: u32| a.checked_div(b).unwrap_or(u32::MAX)),
        Type::U64 => each_binary(|a: u64, b: u64| a.checked_div(b).unwrap_or(u64::MAX)),
        Type::S16 => each_binary(|a: i16, b: i16| if b == 0 { -1 } else { a.wrapping_div(b) }),
        Type::S32 => each_binary(|a: i32, b: i32| if b == 0 { -1 } else { a.wrapping_div(b) }),
        Type::S64 => each_binary(|a: i64, b: i64| if b == 0 { -1 } else { a.wrapping_div(b) }),
        _ => return Err(op.unknown()),
    })
}

/// The remainder of a division by zero is the dividend.
fn remainder(op: &Opcode<'_>, kind: Type) -> Result<Alu, PtxError> {
    Ok(
        for_integer!(op, kind, T => each_binary(|a: T, b: T| if b == 0 { a } else { a.wrapping_rem(b) })),
    )
}

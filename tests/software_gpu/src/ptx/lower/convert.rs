//! `cvt`: between integers and floats of all widths.

use super::body::Body;
use super::float::Modifiers;
use super::opcode::{Opcode, rounding};
use super::operands::Operands;
use crate::ptx::PtxError;
use crate::ptx::alu::{Alu, binary, each_unary, unary};
use crate::ptx::float::{
    BrainHalf, Flushed, Half, PairOf, Rounding, ShortFloat, f32_to_half_rounded, flush, round_pair,
    saturate,
};
use crate::ptx::lanes::Lane;
use crate::ptx::types::Type;

pub(super) fn lower(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let integral = op.take_as(integral_rounding);
    let direction = op.take_as(rounding);
    let modifiers = Modifiers::take(op);
    let (to, from) = (op.take_type()?, op.take_type()?);
    if matches!(to, Type::F16x2 | Type::Bf16x2) {
        return pair(body, op, to, from, direction, operands);
    }
    let run = match (to.is_float(), from.is_float()) {
        (false, false) => integer_to_integer(op, to, from, modifiers)?,
        (false, true) => {
            float_to_integer(op, to, from, integral.unwrap_or(Integral::Zero), modifiers)?
        }
        (true, false) => integer_to_float(op, to, from, direction, modifiers)?,
        (true, true) => float_to_float(op, to, from, direction, integral, modifiers)?,
    };
    body.compute(operands, to, &[from], run)
}

/// How a float becomes a whole number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Integral {
    Nearest,
    Zero,
    Down,
    Up,
}

fn integral_rounding(name: &str) -> Option<Integral> {
    Some(match name {
        "rni" => Integral::Nearest,
        "rzi" => Integral::Zero,
        "rmi" => Integral::Down,
        "rpi" => Integral::Up,
        _ => return None,
    })
}

/// Integers by way of 64 bits with their sign, or of 128 for saturation.
trait Integer: Lane {
    const LEAST: i128;
    const MOST: i128;
    fn extend(self) -> i64;
    fn truncate(value: i64) -> Self;
    fn exact(self) -> i128;
}

macro_rules! integer {
    ($($type:ty)*) => {$(
        impl Integer for $type {
            const LEAST: i128 = <$type>::MIN as i128;
            const MOST: i128 = <$type>::MAX as i128;
            #[inline(always)]
            fn extend(self) -> i64 {
                self as i64
            }
            #[inline(always)]
            fn truncate(value: i64) -> $type {
                value as $type
            }
            #[inline(always)]
            fn exact(self) -> i128 {
                self as i128
            }
        }
    )*};
}
integer!(u8 u16 u32 u64 i8 i16 i32 i64);

/// An expression for an integer type.
macro_rules! for_any_integer {
    ($op:expr, $kind:expr, $t:ident => $alu:expr) => {
        match $kind {
            Type::B8 | Type::U8 => {
                type $t = u8;
                $alu
            }
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
            Type::S8 => {
                type $t = i8;
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

fn integer_to_integer(
    op: &Opcode<'_>,
    to: Type,
    from: Type,
    modifiers: Modifiers,
) -> Result<Alu, PtxError> {
    fn plain<S: Integer, D: Integer>() -> Alu {
        unary(|a: S| D::truncate(a.extend()))
    }
    fn saturating<S: Integer, D: Integer>() -> Alu {
        each_unary(|a: S| D::truncate(a.exact().clamp(D::LEAST, D::MOST) as i64))
    }
    if modifiers.flush {
        return Err(op.unknown());
    }
    Ok(
        for_any_integer!(op, from, S => for_any_integer!(op, to, D => {
            if modifiers.saturate { saturating::<S, D>() } else { plain::<S, D>() }
        })),
    )
}

/// To an integer the way Rust's `as` does: clamped to its range, zero for NaN.
fn float_to_integer(
    op: &Opcode<'_>,
    to: Type,
    from: Type,
    integral: Integral,
    modifiers: Modifiers,
) -> Result<Alu, PtxError> {
    // Clamping is what happens anyway.
    macro_rules! from_f32 {
        ($source:ty, $value:expr) => {
            for_any_integer!(op, to, D => match integral {
                Integral::Nearest => unary(|a: $source| $value(a).round_ties_even() as D),
                Integral::Zero => unary(|a: $source| $value(a) as D),
                Integral::Down => unary(|a: $source| $value(a).floor() as D),
                Integral::Up => unary(|a: $source| $value(a).ceil() as D),
            })
        };
    }
    Ok(match from {
        Type::F32 if modifiers.flush => from_f32!(f32, flush),
        Type::F32 => from_f32!(f32, f32::from),
        _ if modifiers.flush => return Err(op.unknown()),
        Type::F64 => from_f32!(f64, f64::from),
        Type::F16 => from_f32!(Half, Half::widen),
        Type::Bf16 => from_f32!(BrainHalf, BrainHalf::widen),
        _ => return Err(op.unknown()),
    })
}

/// The exact value as a sum of two f64.
fn split(value: i128) -> (f64, f64) {
    let high = value as f64;
    (high, (value - high as i128) as f64)
}

fn integer_to_float(
    op: &Opcode<'_>,
    to: Type,
    from: Type,
    direction: Option<Rounding>,
    modifiers: Modifiers,
) -> Result<Alu, PtxError> {
    // Whole numbers are never subnormal.
    if modifiers.saturate {
        return Err(op.unknown());
    }
    fn directed<S: Integer>(direction: Rounding) -> Alu {
        fn round<S: Integer>(a: S, direction: Rounding) -> f32 {
            let (high, low) = split(a.exact());
            round_pair(high, low, direction)
        }
        match direction {
            Rounding::Down => each_unary(|a: S| round(a, Rounding::Down)),
            Rounding::Up => each_unary(|a: S| round(a, Rounding::Up)),
            _ => each_unary(|a: S| round(a, Rounding::Zero)),
        }
    }
    Ok(
        for_any_integer!(op, from, S => match (to, direction.unwrap_or(Rounding::Nearest)) {
            (Type::F32, Rounding::Nearest) => unary(|a: S| a as f32),
            (Type::F32, direction) => directed::<S>(direction),
            (Type::F64, Rounding::Nearest) => unary(|a: S| a as f64),
            // Exact whatever the direction.
            (Type::F64, _) if from.bytes() < 8 => unary(|a: S| a as f64),
            (Type::F16, Rounding::Nearest) => each_unary(|a: S| short_from_integer::<Half>(a.exact())),
            (Type::Bf16, Rounding::Nearest) => each_unary(|a: S| short_from_integer::<BrainHalf>(a.exact())),
            _ => return Err(op.unknown()),
        }),
    )
}

/// Rounded once: to odd in f32, then to the short format.
fn short_from_integer<T: ShortFloat>(value: i128) -> T {
    let (high, low) = split(value);
    let truncated = round_pair(high, low, Rounding::Zero);
    let exact = truncated as i128 == value;
    T::narrow(if exact {
        truncated
    } else {
        f32::from_bits(truncated.to_bits() | 1)
    })
}

fn float_to_float(
    op: &Opcode<'_>,
    to: Type,
    from: Type,
    direction: Option<Rounding>,
    integral: Option<Integral>,
    modifiers: Modifiers,
) -> Result<Alu, PtxError> {
    if to == from {
        return same_float(op, to, direction.is_some(), integral, modifiers);
    }
    if integral.is_some() {
        return Err(op.unknown());
    }
    let direction = direction.unwrap_or(Rounding::Nearest);
    Ok(match (from, to, modifiers.flush, modifiers.saturate) {
        (Type::F16, Type::F32, _, false) => unary(|a: Half| a.widen()),
        (Type::F16, Type::F32, _, true) => unary(|a: Half| saturate(a.widen())),
        (Type::Bf16, Type::F32, false, false) => unary(|a: BrainHalf| a.widen()),
        (Type::Bf16, Type::F32, true, false) => unary(|a: BrainHalf| flush(a.widen())),
        (Type::F16, Type::F64, false, false) => unary(|a: Half| f64::from(a.widen())),
        (Type::Bf16, Type::F64, false, false) => unary(|a: BrainHalf| f64::from(a.widen())),
        (Type::F32, Type::F16, false, false) => f32_to_f16(direction),
        (Type::F32, Type::F16, true, false) if direction == Rounding::Nearest => {
            unary(|a: f32| Half::narrow(flush(a)))
        }
        (Type::F32, Type::F16, false, true) if direction == Rounding::Nearest => {
            unary(|a: f32| Half::narrow(saturate(a)))
        }
        (Type::F32, Type::Bf16, false, false) if direction == Rounding::Nearest => {
            unary(|a: f32| BrainHalf::narrow(a))
        }
        (Type::F32, Type::Bf16, false, false) if direction == Rounding::Zero => {
            unary(|a: f32| BrainHalf::of_bits((a.to_bits() >> 16) as u16 | u16::from(a.is_nan())))
        }
        (Type::F64, Type::F16, false, false) if direction == Rounding::Nearest => {
            each_unary(|a: f64| Half::narrow(to_odd(a)))
        }
        (Type::F32, Type::F64, false, false) => unary(|a: f32| f64::from(a)),
        (Type::F32, Type::F64, true, false) => unary(|a: f32| f64::from(flush(a))),
        (Type::F32, Type::F64, false, true) => unary(|a: f32| f64::from(saturate(a))),
        (Type::F64, Type::F32, flushes, saturates) => {
            f64_to_f32(op, direction, flushes, saturates)?
        }
        _ => return Err(op.unknown()),
    })
}

fn f32_to_f16(direction: Rounding) -> Alu {
    match direction {
        Rounding::Nearest => unary(|a: f32| Half::narrow(a)),
        Rounding::Zero => each_unary(|a: f32| Half(f32_to_half_rounded(a, Rounding::Zero))),
        Rounding::Down => each_unary(|a: f32| Half(f32_to_half_rounded(a, Rounding::Down))),
        Rounding::Up => each_unary(|a: f32| Half(f32_to_half_rounded(a, Rounding::Up))),
    }
}

fn f64_to_f32(
    op: &Opcode<'_>,
    direction: Rounding,
    flushes: bool,
    saturates: bool,
) -> Result<Alu, PtxError> {
    Ok(match (direction, flushes, saturates) {
        (Rounding::Nearest, false, false) => unary(|a: f64| a as f32),
        (Rounding::Nearest, true, false) => unary(|a: f64| flush(a as f32)),
        (Rounding::Nearest, false, true) => unary(|a: f64| saturate(a as f32)),
        (Rounding::Zero, false, false) => each_unary(|a: f64| round_pair(a, 0.0, Rounding::Zero)),
        (Rounding::Down, false, false) => each_unary(|a: f64| round_pair(a, 0.0, Rounding::Down)),
        (Rounding::Up, false, false) => each_unary(|a: f64| round_pair(a, 0.0, Rounding::Up)),
        _ => return Err(op.unknown()),
    })
}

/// An f32 whose last bit tells that something was cut off.
fn to_odd(value: f64) -> f32 {
    let truncated = round_pair(value, 0.0, Rounding::Zero);
    if f64::from(truncated) == value || value.is_nan() {
        truncated
    } else {
        f32::from_bits(truncated.to_bits() | 1)
    }
}

/// To a whole number of the same type, or only flushed or clamped.
fn same_float(
    op: &Opcode<'_>,
    kind: Type,
    directed: bool,
    integral: Option<Integral>,
    modifiers: Modifiers,
) -> Result<Alu, PtxError> {
    if directed {
        return Err(op.unknown());
    }
    Ok(
        match (kind, integral, modifiers.flush, modifiers.saturate) {
            (Type::F32, Some(Integral::Nearest), false, false) => {
                unary(|a: f32| a.round_ties_even())
            }
            (Type::F32, Some(Integral::Zero), false, false) => unary(|a: f32| a.trunc()),
            (Type::F32, Some(Integral::Down), false, false) => unary(|a: f32| a.floor()),
            (Type::F32, Some(Integral::Up), false, false) => unary(|a: f32| a.ceil()),
            (Type::F32, Some(Integral::Nearest), true, false) => {
                unary(|a: f32| flush(a).round_ties_even())
            }
            (Type::F32, Some(Integral::Zero), true, false) => unary(|a: f32| flush(a).trunc()),
            (Type::F32, Some(Integral::Down), true, false) => unary(|a: f32| flush(a).floor()),
            (Type::F32, Some(Integral::Up), true, false) => unary(|a: f32| flush(a).ceil()),
            (Type::F32, None, false, false) => unary(|a: f32| a),
            (Type::F32, None, true, false) => unary(|a: Flushed| a),
            (Type::F32, None, false, true) => unary(|a: f32| saturate(a)),
            (Type::F32, None, true, true) => unary(|a: f32| saturate(flush(a))),
            (Type::F64, Some(Integral::Nearest), false, false) => {
                unary(|a: f64| a.round_ties_even())
            }
            (Type::F64, Some(Integral::Zero), false, false) => unary(|a: f64| a.trunc()),
            (Type::F64, Some(Integral::Down), false, false) => unary(|a: f64| a.floor()),
            (Type::F64, Some(Integral::Up), false, false) => unary(|a: f64| a.ceil()),
            (Type::F16, Some(Integral::Nearest), false, false) => {
                unary(|a: Half| Half::narrow(a.widen().round_ties_even()))
            }
            (Type::F16, Some(Integral::Zero), false, false) => {
                unary(|a: Half| Half::narrow(a.widen().trunc()))
            }
            (Type::F16, Some(Integral::Down), false, false) => {
                unary(|a: Half| Half::narrow(a.widen().floor()))
            }
            (Type::F16, Some(Integral::Up), false, false) => {
                unary(|a: Half| Half::narrow(a.widen().ceil()))
            }
            _ => return Err(op.unknown()),
        },
    )
}

/// `cvt.rn.f16x2.f32 d, a, b`: the first source becomes the upper half.
fn pair(
    body: &mut Body<'_>,
    op: &Opcode<'_>,
    to: Type,
    from: Type,
    direction: Option<Rounding>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let run = match (to, from, direction) {
        (Type::F16x2, Type::F32, Some(Rounding::Nearest)) => {
            binary(|a: f32, b: f32| PairOf(Half::narrow(b), Half::narrow(a)))
        }
        (Type::Bf16x2, Type::F32, Some(Rounding::Nearest)) => {
            binary(|a: f32, b: f32| PairOf(BrainHalf::narrow(b), BrainHalf::narrow(a)))
        }
        _ => return Err(op.unknown()),
    };
    body.compute(operands, to, &[from, from], run)
}

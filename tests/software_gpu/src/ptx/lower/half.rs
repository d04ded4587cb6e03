//! Arithmetic on binary16 and bfloat16, single and in pairs.

use super::body::Body;
use super::float::or_nan;
use super::opcode::Opcode;
use super::operands::Operands;
use crate::ptx::PtxError;
use crate::ptx::alu::{Alu, binary, each_unary, ternary, unary};
use crate::ptx::float::{BrainHalf, Half, PairOf, ShortFloat, maximum, minimum, saturate};
use crate::ptx::types::Type;

pub(super) fn lower(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    kind: Type,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let (run, arity) = match kind {
        Type::F16 | Type::F16x2 => operation::<Half>(op, kind == Type::F16x2)?,
        _ => operation::<BrainHalf>(op, kind == Type::Bf16x2)?,
    };
    body.compute(operands, kind, &[kind; 3][..arity], run)
}

fn unary_of<T: ShortFloat>(pair: bool, f: impl Fn(f32) -> f32 + Copy + 'static) -> Alu {
    let one = move |a: T| T::narrow(f(a.widen()));
    if pair {
        unary(move |a: PairOf<T>| PairOf(one(a.0), one(a.1)))
    } else {
        unary(one)
    }
}

fn binary_of<T: ShortFloat>(pair: bool, f: impl Fn(f32, f32) -> f32 + Copy + 'static) -> Alu {
    let one = move |a: T, b: T| T::narrow(f(a.widen(), b.widen()));
    if pair {
        binary(move |a: PairOf<T>, b: PairOf<T>| PairOf(one(a.0, b.0), one(a.1, b.1)))
    } else {
        binary(one)
    }
}

fn ternary_of<T: ShortFloat>(pair: bool, f: impl Fn(T, T, T) -> T + Copy + 'static) -> Alu {
    if pair {
        ternary(move |a: PairOf<T>, b: PairOf<T>, c: PairOf<T>| {
            PairOf(f(a.0, b.0, c.0), f(a.1, b.1, c.1))
        })
    } else {
        ternary(f)
    }
}

/// A sign bit changed without a look at the rest, so that NaN keeps its bits.
fn sign_of<T: ShortFloat>(pair: bool, f: impl Fn(u16) -> u16 + Copy + 'static) -> Alu {
    let one = move |a: T| T::of_bits(f(a.bits()));
    if pair {
        unary(move |a: PairOf<T>| PairOf(one(a.0), one(a.1)))
    } else {
        unary(one)
    }
}

/// The operation and its number of operands. Sums, differences and products of short floats are computed in f32, whose
/// precision is more than twice theirs, so rounding twice does no harm.
fn operation<T: ShortFloat>(op: &mut Opcode<'_>, pair: bool) -> Result<(Alu, usize), PtxError> {
    // Without a subnormal on the way, `.ftz` would say nothing; with one it would, so it is refused as unknown.
    let approximate = op.take("approx");
    let saturates = op.take("sat");
    op.take("rn");
    if saturates {
        return Ok(match op.base {
            "add" => (binary_of::<T>(pair, |a, b| saturate(a + b)), 2),
            "sub" => (binary_of::<T>(pair, |a, b| saturate(a - b)), 2),
            "mul" => (binary_of::<T>(pair, |a, b| saturate(a * b)), 2),
            "fma" => (
                ternary_of::<T>(pair, |a, b, c| {
                    T::narrow(saturate(T::fused(a, b, c).widen()))
                }),
                3,
            ),
            _ => return Err(op.unknown()),
        });
    }
    let base = op.base;
    Ok(match base {
        "add" => (binary_of::<T>(pair, |a, b| a + b), 2),
        "sub" => (binary_of::<T>(pair, |a, b| a - b), 2),
        "mul" => (binary_of::<T>(pair, |a, b| a * b), 2),
        "fma" if op.take("relu") => (
            ternary_of::<T>(pair, |a, b, c| {
                T::narrow(maximum(T::fused(a, b, c).widen(), 0.0))
            }),
            3,
        ),
        "fma" => (ternary_of::<T>(pair, T::fused), 3),
        "min" if op.take("NaN") => (binary_of::<T>(pair, |a, b| or_nan(a, b, minimum(a, b))), 2),
        "max" if op.take("NaN") => (binary_of::<T>(pair, |a, b| or_nan(a, b, maximum(a, b))), 2),
        "min" => (binary_of::<T>(pair, minimum), 2),
        "max" => (binary_of::<T>(pair, maximum), 2),
        "neg" => (sign_of::<T>(pair, |bits| bits ^ 0x8000), 1),
        "abs" => (sign_of::<T>(pair, |bits| bits & 0x7FFF), 1),
        "ex2" if approximate => {
            let one = |a: T| T::narrow(f64::from(a.widen()).exp2() as f32);
            let run = if pair {
                each_unary(move |a: PairOf<T>| PairOf(one(a.0), one(a.1)))
            } else {
                each_unary(one)
            };
            (run, 1)
        }
        "tanh" if approximate => (unary_of::<T>(pair, |a| f64::from(a).tanh() as f32), 1),
        _ => return Err(op.unknown()),
    })
}

//! Arithmetic on f32 and f64.

use super::body::Body;
use super::opcode::Opcode;
use super::operands::Operands;
use crate::ptx::PtxError;
use crate::ptx::alu::{Alu, binary, each_binary, each_ternary, each_unary, ternary, unary};
use crate::ptx::float::{
    Flushed, FlushedSaturated, Plain, Real, Rounding, Saturated, add_rounded, fused_rounded,
    maximum, maximum_f64, minimum, minimum_f64, multiply_rounded,
};
use crate::ptx::types::Type;

/// What flushes subnormals and what clamps to 0..=1.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Modifiers {
    pub(super) flush: bool,
    pub(super) saturate: bool,
}

impl Modifiers {
    pub(super) fn take(op: &mut Opcode<'_>) -> Modifiers {
        Modifiers {
            flush: op.take("ftz"),
            saturate: op.take("sat"),
        }
    }
}

/// An operation on f32 values for each combination of modifiers.
macro_rules! with_modifiers {
    ($modifiers:expr, $constructor:ident, |$($x:ident),+| $body:expr) => {{
        let modifiers: Modifiers = $modifiers;
        match (modifiers.flush, modifiers.saturate) {
            (false, false) => with_modifiers!(@ Plain, $constructor, [$($x)*] $body),
            (true, false) => with_modifiers!(@ Flushed, $constructor, [$($x)*] $body),
            (false, true) => with_modifiers!(@ Saturated, $constructor, [$($x)*] $body),
            (true, true) => with_modifiers!(@ FlushedSaturated, $constructor, [$($x)*] $body),
        }
    }};
    (@ $real:ident, $constructor:ident, [$($x:ident)*] $body:expr) => {
        $constructor(|$($x: $real),*| {
            $(let $x: f32 = $x.value();)*
            $real::new($body)
        })
    };
}

pub(super) fn lower(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    kind: Type,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let modifiers = Modifiers::take(op);
    let (run, arity) = if kind == Type::F32 {
        match op.base {
            "add" | "sub" | "mul" | "fma" | "mad" => arithmetic(op, modifiers)?,
            _ => function(op, modifiers)?,
        }
    } else if modifiers.flush || modifiers.saturate {
        return Err(op.unknown());
    } else {
        double(op)?
    };
    body.compute(operands, kind, &[kind; 3][..arity], run)
}

/// The operation and its number of operands.
fn arithmetic(op: &mut Opcode<'_>, modifiers: Modifiers) -> Result<(Alu, usize), PtxError> {
    let rounding = op.take_rounding();
    Ok(match (op.base, rounding) {
        ("add", Rounding::Nearest) => (with_modifiers!(modifiers, binary, |a, b| a + b), 2),
        ("sub", Rounding::Nearest) => (with_modifiers!(modifiers, binary, |a, b| a - b), 2),
        ("mul", Rounding::Nearest) => (with_modifiers!(modifiers, binary, |a, b| a * b), 2),
        ("fma" | "mad", Rounding::Nearest) => (
            with_modifiers!(modifiers, ternary, |a, b, c| a.mul_add(b, c)),
            3,
        ),
        ("add", Rounding::Zero) => (
            with_modifiers!(modifiers, each_binary, |a, b| add_rounded(
                a,
                b,
                Rounding::Zero
            )),
            2,
        ),
        ("add", Rounding::Down) => (
            with_modifiers!(modifiers, each_binary, |a, b| add_rounded(
                a,
                b,
                Rounding::Down
            )),
            2,
        ),
        ("add", Rounding::Up) => (
            with_modifiers!(modifiers, each_binary, |a, b| add_rounded(
                a,
                b,
                Rounding::Up
            )),
            2,
        ),
        ("sub", Rounding::Zero) => (
            with_modifiers!(modifiers, each_binary, |a, b| add_rounded(
                a,
                -b,
                Rounding::Zero
            )),
            2,
        ),
        ("sub", Rounding::Down) => (
            with_modifiers!(modifiers, each_binary, |a, b| add_rounded(
                a,
                -b,
                Rounding::Down
            )),
            2,
        ),
        ("sub", Rounding::Up) => (
            with_modifiers!(modifiers, each_binary, |a, b| add_rounded(
                a,
                -b,
                Rounding::Up
            )),
            2,
        ),
        ("mul", Rounding::Zero) => (
            with_modifiers!(modifiers, each_binary, |a, b| multiply_rounded(
                a,
                b,
                Rounding::Zero
            )),
            2,
        ),
        ("mul", Rounding::Down) => (
            with_modifiers!(modifiers, each_binary, |a, b| multiply_rounded(
                a,
                b,
                Rounding::Down
            )),
            2,
        ),
        ("mul", Rounding::Up) => (
            with_modifiers!(modifiers, each_binary, |a, b| multiply_rounded(
                a,
                b,
                Rounding::Up
            )),
            2,
        ),
        ("fma" | "mad", Rounding::Zero) => (
            with_modifiers!(modifiers, each_ternary, |a, b, c| fused_rounded(
                a,
                b,
                c,
                Rounding::Zero
            )),
            3,
        ),
        ("fma" | "mad", Rounding::Down) => (
            with_modifiers!(modifiers, each_ternary, |a, b, c| fused_rounded(
                a,
                b,
                c,
                Rounding::Down
            )),
            3,
        ),
        ("fma" | "mad", Rounding::Up) => (
            with_modifiers!(modifiers, each_ternary, |a, b, c| fused_rounded(
                a,
                b,
                c,
                Rounding::Up
            )),
            3,
        ),
        _ => return Err(op.unknown()),
    })
}

/// Division, roots, exponentials and the like. The approximations are computed in f64, so they are as good as f32 can
/// be; the hardware's are a few units of the last place off.
fn function(op: &mut Opcode<'_>, modifiers: Modifiers) -> Result<(Alu, usize), PtxError> {
    let approximate = op.take_one(["approx", "full"]).is_some();
    let rounded = op.take("rn");
    let wants = |accepted: bool| if accepted { Ok(()) } else { Err(op.unknown()) };
    let base = op.base;
    Ok(match base {
        "div" => {
            wants(approximate || rounded)?;
            (with_modifiers!(modifiers, binary, |a, b| a / b), 2)
        }
        "rcp" => {
            wants(approximate || rounded)?;
            (with_modifiers!(modifiers, unary, |a| 1.0 / a), 1)
        }
        "sqrt" => {
            wants(approximate || rounded)?;
            (with_modifiers!(modifiers, unary, |a| a.sqrt()), 1)
        }
        "rsqrt" => {
            wants(approximate)?;
            (
                with_modifiers!(modifiers, unary, |a| (1.0 / f64::from(a).sqrt()) as f32),
                1,
            )
        }
        "ex2" => {
            wants(approximate)?;
            (
                with_modifiers!(modifiers, each_unary, |a| f64::from(a).exp2() as f32),
                1,
            )
        }
        "lg2" => {
            wants(approximate)?;
            (
                with_modifiers!(modifiers, each_unary, |a| f64::from(a).log2() as f32),
                1,
            )
        }
        "sin" => {
            wants(approximate)?;
            (
                with_modifiers!(modifiers, each_unary, |a| f64::from(a).sin() as f32),
                1,
            )
        }
        "cos" => {
            wants(approximate)?;
            (
                with_modifiers!(modifiers, each_unary, |a| f64::from(a).cos() as f32),
                1,
            )
        }
        "tanh" => {
            wants(approximate)?;
            (
                with_modifiers!(modifiers, each_unary, |a| f64::from(a).tanh() as f32),
                1,
            )
        }
        "abs" => (with_modifiers!(modifiers, unary, |a| a.abs()), 1),
        "neg" => (with_modifiers!(modifiers, unary, |a| -a), 1),
        "copysign" => (binary(|a: f32, b: f32| b.copysign(a)), 2),
        "min" if op.take("NaN") => (
            with_modifiers!(modifiers, binary, |a, b| or_nan(a, b, minimum(a, b))),
            2,
        ),
        "max" if op.take("NaN") => (
            with_modifiers!(modifiers, binary, |a, b| or_nan(a, b, maximum(a, b))),
            2,
        ),
        "min" => (with_modifiers!(modifiers, binary, |a, b| minimum(a, b)), 2),
        "max" => (with_modifiers!(modifiers, binary, |a, b| maximum(a, b)), 2),
        _ => return Err(op.unknown()),
    })
}

#[inline(always)]
pub(super) fn or_nan(a: f32, b: f32, value: f32) -> f32 {
    if a.is_nan() || b.is_nan() {
        f32::NAN
    } else {
        value
    }
}

fn double(op: &mut Opcode<'_>) -> Result<(Alu, usize), PtxError> {
    // Only to nearest: the directed ones are refused as unknown modifiers.
    let rounded = op.take("rn");
    let approximate = op.take("approx");
    let base = op.base;
    Ok(match base {
        "add" => (binary(|a: f64, b: f64| a + b), 2),
        "sub" => (binary(|a: f64, b: f64| a - b), 2),
        "mul" => (binary(|a: f64, b: f64| a * b), 2),
        "fma" | "mad" if rounded => (ternary(|a: f64, b: f64, c: f64| a.mul_add(b, c)), 3),
        "div" if rounded => (binary(|a: f64, b: f64| a / b), 2),
        "rcp" if rounded => (unary(|a: f64| 1.0 / a), 1),
        "sqrt" if rounded => (unary(|a: f64| a.sqrt()), 1),
        "rsqrt" if approximate => (unary(|a: f64| 1.0 / a.sqrt()), 1),
        "abs" => (unary(|a: f64| a.abs()), 1),
        "neg" => (unary(|a: f64| -a), 1),
        "min" => (binary(|a: f64, b: f64| minimum_f64(a, b)), 2),
        "max" => (binary(|a: f64, b: f64| maximum_f64(a, b)), 2),
        "copysign" => (binary(|a: f64, b: f64| b.copysign(a)), 2),
        _ => return Err(op.unknown()),
    })
}

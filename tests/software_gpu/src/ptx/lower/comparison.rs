//! Comparisons and selections.

use super::body::Body;
use super::integer::for_integer;
use super::opcode::Opcode;
use super::operands::Operands;
use crate::ptx::PtxError;
use crate::ptx::alu::{Alu, Slots, combine, compare, select, ternary};
use crate::ptx::float::{BrainHalf, Flushed, Half, PairOf, Plain, Real, ShortFloat};
use crate::ptx::lanes::{Lane, NONE, Predicate};
use crate::ptx::program::Op;
use crate::ptx::syntax::Operand;
use crate::ptx::types::Type;

pub(super) fn lower(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    match op.base {
        "setp" => set_predicate(body, op, operands),
        "set" => set(body, op, operands),
        "selp" => select_by_predicate(body, op, operands),
        "slct" => select_by_sign(body, op, operands),
        _ => test_property(body, op, operands),
    }
}

/// A comparison's relation; the unordered ones are true for NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Relation {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    UnorderedEqual,
    UnorderedNotEqual,
    UnorderedLess,
    UnorderedLessEqual,
    UnorderedGreater,
    UnorderedGreaterEqual,
    Numbers,
    Unordered,
}

fn relation(name: &str) -> Option<Relation> {
    Some(match name {
        "eq" => Relation::Equal,
        "ne" => Relation::NotEqual,
        "lt" | "lo" => Relation::Less,
        "le" | "ls" => Relation::LessEqual,
        "gt" | "hi" => Relation::Greater,
        "ge" | "hs" => Relation::GreaterEqual,
        "equ" => Relation::UnorderedEqual,
        "neu" => Relation::UnorderedNotEqual,
        "ltu" => Relation::UnorderedLess,
        "leu" => Relation::UnorderedLessEqual,
        "gtu" => Relation::UnorderedGreater,
        "geu" => Relation::UnorderedGreaterEqual,
        "num" => Relation::Numbers,
        "nan" => Relation::Unordered,
        _ => return None,
    })
}

/// A comparison of floats that `convert` makes of lanes.
fn compare_floats<T: Lane, F: PartialOrd + Copy + 'static>(
    relation: Relation,
    convert: impl Fn(T) -> F + Copy + 'static,
) -> Alu {
    let c = convert;
    let ordered = |a: F, b: F| a.partial_cmp(&b).is_some();
    match relation {
        Relation::Equal => compare(move |a: T, b: T| c(a) == c(b)),
        // Ordered: false for NaN.
        Relation::NotEqual => compare(move |a: T, b: T| c(a) < c(b) || c(a) > c(b)),
        Relation::Less => compare(move |a: T, b: T| c(a) < c(b)),
        Relation::LessEqual => compare(move |a: T, b: T| c(a) <= c(b)),
        Relation::Greater => compare(move |a: T, b: T| c(a) > c(b)),
        Relation::GreaterEqual => compare(move |a: T, b: T| c(a) >= c(b)),
        Relation::UnorderedEqual => compare(move |a: T, b: T| c(a) == c(b) || !ordered(c(a), c(b))),
        Relation::UnorderedNotEqual => compare(move |a: T, b: T| c(a) != c(b)),
        Relation::UnorderedLess => compare(move |a: T, b: T| c(a) < c(b) || !ordered(c(a), c(b))),
        Relation::UnorderedLessEqual => {
            compare(move |a: T, b: T| c(a) <= c(b) || !ordered(c(a), c(b)))
        }
        Relation::UnorderedGreater => {
            compare(move |a: T, b: T| c(a) > c(b) || !ordered(c(a), c(b)))
        }
        Relation::UnorderedGreaterEqual => {
            compare(move |a: T, b: T| c(a) >= c(b) || !ordered(c(a), c(b)))
        }
        Relation::Numbers => compare(move |a: T, b: T| ordered(c(a), c(b))),
        Relation::Unordered => compare(move |a: T, b: T| !ordered(c(a), c(b))),
    }
}

fn compare_integers(op: &Opcode<'_>, kind: Type, relation: Relation) -> Result<Alu, PtxError> {
    Ok(match relation {
        Relation::Equal => for_integer!(op, kind, T => compare(|a: T, b: T| a == b)),
        Relation::NotEqual => for_integer!(op, kind, T => compare(|a: T, b: T| a != b)),
        Relation::Less => for_integer!(op, kind, T => compare(|a: T, b: T| a < b)),
        Relation::LessEqual => for_integer!(op, kind, T => compare(|a: T, b: T| a <= b)),
        Relation::Greater => for_integer!(op, kind, T => compare(|a: T, b: T| a > b)),
        Relation::GreaterEqual => for_integer!(op, kind, T => compare(|a: T, b: T| a >= b)),
        _ => return Err(op.unknown()),
    })
}

fn comparison(
    op: &mut Opcode<'_>,
    kind: Type,
    relation: Relation,
    flush: bool,
) -> Result<Alu, PtxError> {
    Ok(match kind {
        Type::F32 if flush => compare_floats(relation, |a: Flushed| a.value()),
        Type::F32 => compare_floats(relation, |a: Plain| a.value()),
        _ if flush => return Err(op.unknown()),
        Type::F64 => compare_floats(relation, |a: f64| a),
        Type::F16 => compare_floats(relation, |a: Half| a.widen()),
        Type::Bf16 => compare_floats(relation, |a: BrainHalf| a.widen()),
        _ if kind.is_float() => return Err(op.unknown()),
        _ => compare_integers(op, kind, relation)?,
    })
}

/// The relation, and what it is to be combined with.
fn relation_and_combination(op: &mut Opcode<'_>) -> Result<(Relation, u32), PtxError> {
    // The relation comes first; `.and`, `.or` and `.xor` are no relations.
    let relation = op.take_as(relation).ok_or_else(|| op.unknown())?;
    let combination = match op.take_one(["and", "or", "xor"]) {
        Some("and") => combine::AND,
        Some("or") => combine::OR,
        Some(_) => combine::XOR,
        None => combine::NOTHING,
    };
    Ok((relation, combination))
}

fn set_predicate(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let (relation, combination) = relation_and_combination(op)?;
    let kind = op.take_type()?;
    let flush = op.take("ftz");
    let (p, q) = match operands.get(0)? {
        Operand::Name(p) => (body.predicate_written(p)?, NONE),
        Operand::Pair(p, q) => (body.predicate_written(p)?, body.predicate_written(q)?),
        _ => return Err(op.error("a destination that is not a predicate")),
    };
    let (a, b) = (
        body.source(operands.get(1)?, kind)?,
        body.source(operands.get(2)?, kind)?,
    );
    let (r, immediate) = combined_with(body, operands, combination)?;
    let slots = Slots {
        d: NONE,
        a,
        b,
        c: NONE,
        p,
        q,
        r,
        immediate,
    };
    if matches!(kind, Type::F16x2 | Type::Bf16x2) {
        // Each half has its own predicate.
        let (low, high) = match kind {
            Type::F16x2 => halves::<Half>(relation),
            _ => halves::<BrainHalf>(relation),
        };
        body.emit(Op::Alu {
            run: low,
            slots: Slots { q: NONE, ..slots },
        });
        body.emit(Op::Alu {
            run: high,
            slots: Slots {
                p: q,
                q: NONE,
                ..slots
            },
        });
        return Ok(());
    }
    let run = comparison(op, kind, relation, flush)?;
    body.emit(Op::Alu { run, slots });
    Ok(())
}

fn halves<T: ShortFloat>(relation: Relation) -> (Alu, Alu) {
    (
        compare_floats(relation, |a: PairOf<T>| a.0.widen()),
        compare_floats(relation, |a: PairOf<T>| a.1.widen()),
    )
}

/// The predicate that a comparison is combined with: the fourth operand.
fn combined_with(
    body: &Body<'_>,
    operands: &Operands<'_, '_>,
    combination: u32,
) -> Result<(Predicate, u32), PtxError> {
    if combination == combine::NOTHING {
        operands.expect(3)?;
        return Ok((NONE, combine::NOTHING));
    }
    operands.expect(4)?;
    let (r, negated) = body.predicate(operands.get(3)?)?;
    Ok((r, combination | if negated { combine::NEGATED } else { 0 }))
}

/// `set`: ones, or 1.0, where the comparison holds.
fn set(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let (relation, combination) = relation_and_combination(op)?;
    let (to, kind) = (op.take_type()?, op.take_type()?);
    let flush = op.take("ftz");
    let one = match to {
        Type::U32 | Type::S32 | Type::B32 => u64::from(u32::MAX),
        Type::F32 => u64::from(1f32.to_bits()),
        _ => return Err(op.unknown()),
    };
    let run = comparison(op, kind, relation, flush)?;
    let (a, b) = (
        body.source(operands.get(1)?, kind)?,
        body.source(operands.get(2)?, kind)?,
    );
    let (r, immediate) = combined_with(body, operands, combination)?;
    let p = body.new_predicate();
    body.emit(Op::Alu {
        run,
        slots: Slots {
            d: NONE,
            a,
            b,
            c: NONE,
            p,
            q: NONE,
            r,
            immediate,
        },
    });
    let (one, zero) = (body.constant(to, one), body.constant(to, 0));
    body.define(operands.get(0)?, to, |body, d| {
        let slots = Slots {
            d,
            a: one,
            b: zero,
            r: p,
            ..Slots::NONE
        };
        body.emit(Op::Alu {
            run: select(|a: u32| a),
            slots,
        });
    })
}

fn select_by_predicate(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let kind = op.take_type()?;
    operands.expect(4)?;
    let (a, b) = (
        body.source(operands.get(1)?, kind)?,
        body.source(operands.get(2)?, kind)?,
    );
    let (r, negated) = body.predicate(operands.get(3)?)?;
    let run = if kind.is_wide() {
        select(|a: u64| a)
    } else {
        select(|a: u32| a)
    };
    body.define(operands.get(0)?, kind, |body, d| {
        let slots = Slots {
            d,
            a,
            b,
            r,
            immediate: u32::from(negated),
            ..Slots::NONE
        };
        body.emit(Op::Alu { run, slots });
    })
}

/// `slct`: the first where the third is not negative.
fn select_by_sign(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let (kind, sign) = (op.take_type()?, op.take_type()?);
    let flush = op.take("ftz");
    let run = match (kind.bytes(), sign, flush) {
        (4, Type::S32, false) => ternary(|a: u32, b: u32, c: i32| if c >= 0 { a } else { b }),
        (8, Type::S32, false) => ternary(|a: u64, b: u64, c: i32| if c >= 0 { a } else { b }),
        (4, Type::F32, false) => ternary(|a: u32, b: u32, c: f32| if c >= 0.0 { a } else { b }),
        (8, Type::F32, false) => ternary(|a: u64, b: u64, c: f32| if c >= 0.0 { a } else { b }),
        (4, Type::F32, true) => {
            ternary(|a: u32, b: u32, c: Flushed| if c.value() >= 0.0 { a } else { b })
        }
        (8, Type::F32, true) => {
            ternary(|a: u64, b: u64, c: Flushed| if c.value() >= 0.0 { a } else { b })
        }
        _ => return Err(op.unknown()),
    };
    body.compute(operands, kind, &[kind, kind, sign], run)
}

fn test_property(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let property = op.take_one([
        "finite",
        "infinite",
        "number",
        "notanumber",
        "normal",
        "subnormal",
    ]);
    let kind = op.take_type()?;
    operands.expect(2)?;
    let Operand::Name(p) = operands.get(0)? else {
        return Err(op.unknown());
    };
    let p = body.predicate_written(p)?;
    let a = body.source(operands.get(1)?, kind)?;
    // For PTX zero is normal.
    let run = match (kind, property) {
        (Type::F32, Some("finite")) => compare(|a: f32, _: f32| a.is_finite()),
        (Type::F32, Some("infinite")) => compare(|a: f32, _: f32| a.is_infinite()),
        (Type::F32, Some("number")) => compare(|a: f32, _: f32| !a.is_nan()),
        (Type::F32, Some("notanumber")) => compare(|a: f32, _: f32| a.is_nan()),
        (Type::F32, Some("normal")) => compare(|a: f32, _: f32| a.is_normal() || a == 0.0),
        (Type::F32, Some("subnormal")) => compare(|a: f32, _: f32| a.is_subnormal()),
        (Type::F64, Some("finite")) => compare(|a: f64, _: f64| a.is_finite()),
        (Type::F64, Some("infinite")) => compare(|a: f64, _: f64| a.is_infinite()),
        (Type::F64, Some("number")) => compare(|a: f64, _: f64| !a.is_nan()),
        (Type::F64, Some("notanumber")) => compare(|a: f64, _: f64| a.is_nan()),
        (Type::F64, Some("normal")) => compare(|a: f64, _: f64| a.is_normal() || a == 0.0),
        (Type::F64, Some("subnormal")) => compare(|a: f64, _: f64| a.is_subnormal()),
        _ => return Err(op.unknown()),
    };
    body.emit(Op::Alu {
        run,
        slots: Slots {
            a,
            b: a,
            p,
            ..Slots::NONE
        },
    });
    Ok(())
}

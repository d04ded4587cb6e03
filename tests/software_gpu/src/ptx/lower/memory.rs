//! Loads, stores, atomics and conversions between address spaces.

use super::body::Body;
use super::opcode::Opcode;
use super::operands::Operands;
use crate::ptx::PtxError;
use crate::ptx::alu::{Slots, compare, unary};
use crate::ptx::float::{BrainHalf, Half, ShortFloat};
use crate::ptx::lanes::{NONE, Register};
use crate::ptx::program::{Atomic, Element, Op, Transfer};
use crate::ptx::syntax::Operand;
use crate::ptx::types::{Space, Type, window};

fn space(name: &str) -> Option<Space> {
    Some(match name {
        "global" => Space::Global,
        "shared" | "shared::cta" => Space::Shared,
        "local" => Space::Local,
        "const" => Space::Constant,
        "param" | "param::entry" | "param::func" => Space::Parameter,
        _ => return None,
    })
}

/// Cache hints, and orders of memory, which a grid whose blocks run one after another keeps anyway.
fn is_hint(part: &str) -> bool {
    const HINTS: [&str; 22] = [
        "weak",
        "volatile",
        "relaxed",
        "acquire",
        "release",
        "acq_rel",
        "cta",
        "cluster",
        "gpu",
        "sys",
        "ca",
        "cg",
        "cs",
        "lu",
        "cv",
        "wb",
        "wt",
        "nc",
        "evict_last",
        "evict_first",
        "evict_normal",
        "no_allocate",
    ];
    HINTS.contains(&part) || part.starts_with("L1::") || part.starts_with("L2::")
}

/// The type that memory has, for a register of some width.
fn element(kind: Type, wide: bool) -> Element {
    match (kind.bytes(), kind.is_signed(), wide) {
        (1, true, false) => Element::S8ToNarrow,
        (1, true, true) => Element::S8ToWide,
        (1, false, _) => Element::U8,
        (2, true, false) => Element::S16ToNarrow,
        (2, true, true) => Element::S16ToWide,
        (2, false, _) => Element::U16,
        (4, true, true) => Element::S32ToWide,
        (4, _, _) => Element::U32,
        _ => Element::U64,
    }
}

struct Shape {
    space: Space,
    kind: Type,
    count: usize,
}

fn shape(op: &mut Opcode<'_>) -> Result<Shape, PtxError> {
    op.ignore(is_hint);
    let space = op.take_as(space).unwrap_or(Space::Generic);
    let count = match op.take_one(["v2", "v4"]) {
        Some("v2") => 2,
        Some(_) => 4,
        None => 1,
    };
    let kind = op.take_type()?;
    if kind == Type::Predicate || kind.bytes() * count > 16 {
        return Err(op.unknown());
    }
    Ok(Shape { space, kind, count })
}

/// The registers of a vector operand, or of the one that it is.
fn elements<'s, 'a>(
    op: &Opcode<'_>,
    operand: &'s Operand<'a>,
    count: usize,
) -> Result<&'s [Operand<'a>], PtxError> {
    match operand {
        Operand::Vector(elements) if elements.len() == count => Ok(elements),
        Operand::Vector(_) => Err(op.error("a vector of another length")),
        _ if count == 1 => Ok(std::slice::from_ref(operand)),
        _ => Err(op.error("an operand that is not a vector")),
    }
}

pub(super) fn load(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let Shape { space, kind, count } = shape(op)?;
    if operands.len() != 2 {
        return Err(op.error("a cache policy or a missing operand"));
    }
    let (address, space) = body.address(operands.get(1)?, space)?;
    let mut registers = [NONE; 4];
    let mut wide = kind.is_wide();
    for (register, operand) in registers
        .iter_mut()
        .zip(elements(op, operands.get(0)?, count)?)
    {
        let Operand::Name(name) = operand else {
            return Err(op.error("a destination that is not a register"));
        };
        if *name == "_" {
            continue;
        }
        let (found, declared) = body
            .register(name)
            .ok_or_else(|| op.error(format!("register `{name}` that is not declared")))?;
        if declared.bytes() < kind.bytes() {
            return Err(op.error(format!("register `{name}` that is too narrow")));
        }
        wide = declared.is_wide();
        *register = found;
    }
    let element = element(kind, wide);
    body.emit(Op::Load(Box::new(Transfer {
        space,
        address,
        element,
        wide,
        count,
        registers,
    })));
    Ok(())
}

pub(super) fn store(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let Shape { space, kind, count } = shape(op)?;
    if operands.len() != 2 {
        return Err(op.error("a cache policy or a missing operand"));
    }
    let (address, space) = body.address(operands.get(0)?, space)?;
    if matches!(space, Space::Constant | Space::Parameter) {
        return Err(op.error("a store to a space that is only read"));
    }
    let mut registers = [NONE; 4];
    for (register, operand) in registers
        .iter_mut()
        .zip(elements(op, operands.get(1)?, count)?)
    {
        *register = body.source(operand, kind)?;
    }
    // Signs do not matter when bits are cut off.
    let element = match kind.bytes() {
        1 => Element::U8,
        2 => Element::U16,
        4 => Element::U32,
        _ => Element::U64,
    };
    let wide = kind.is_wide();
    body.emit(Op::Store(Box::new(Transfer {
        space,
        address,
        element,
        wide,
        count,
        registers,
    })));
    Ok(())
}

pub(super) fn atomic(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    op.ignore(|part| is_hint(part) || part == "noftz");
    let space = op.take_as(space).unwrap_or(Space::Generic);
    let kind = op.take_type()?;
    let operation = op
        .take_one([
            "add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec",
        ])
        .ok_or_else(|| op.unknown())?;
    let run = atomic_operation(operation, kind).ok_or_else(|| op.unknown())?;
    let returns = op.base == "atom";
    let first = usize::from(returns);
    operands.expect(first + 2 + usize::from(operation == "cas"))?;
    let (address, space) = body.address(operands.get(first)?, space)?;
    if !matches!(space, Space::Generic | Space::Global | Space::Shared) {
        return Err(op.unknown());
    }
    let a = body.source(operands.get(first + 1)?, kind)?;
    let b = if operation == "cas" {
        body.source(operands.get(first + 2)?, kind)?
    } else {
        NONE
    };
    let atomic = |d: Register| {
        Op::Atomic(Box::new(Atomic {
            space,
            address,
            bytes: kind.bytes(),
            run,
            d,
            a,
            b,
        }))
    };
    if returns {
        body.define(operands.get(0)?, kind, |body, d| body.emit(atomic(d)))
    } else {
        body.emit(atomic(NONE));
        Ok(())
    }
}

/// The new value from the old one, the first and the second operand, all as bits.
fn atomic_operation(operation: &str, kind: Type) -> Option<fn(u64, u64, u64) -> u64> {
    Some(match (operation, kind) {
        ("exch", _) if kind.bytes() >= 4 => |_, a, _| a,
        ("cas", _) => |old, a, b| if old == a { b } else { old },
        ("and", Type::B32 | Type::B64) => |old, a, _| old & a,
        ("or", Type::B32 | Type::B64) => |old, a, _| old | a,
        ("xor", Type::B32 | Type::B64) => |old, a, _| old ^ a,
        ("add", Type::U32 | Type::S32) => {
            |old, a, _| u64::from((old as u32).wrapping_add(a as u32))
        }
        ("add", Type::U64 | Type::S64) => |old, a, _| old.wrapping_add(a),
        ("add", Type::F32) => {
            |old, a, _| u64::from((f32::from_bits(old as u32) + f32::from_bits(a as u32)).to_bits())
        }
        ("add", Type::F64) => |old, a, _| (f64::from_bits(old) + f64::from_bits(a)).to_bits(),
        ("add", Type::F16) => |old, a, _| add_short::<Half>(old, a),
        ("add", Type::Bf16) => |old, a, _| add_short::<BrainHalf>(old, a),
        ("add", Type::F16x2) => {
            |old, a, _| add_short::<Half>(old, a) | add_short::<Half>(old >> 16, a >> 16) << 16
        }
        ("add", Type::Bf16x2) => |old, a, _| {
            add_short::<BrainHalf>(old, a) | add_short::<BrainHalf>(old >> 16, a >> 16) << 16
        },
        ("min", Type::U32) => |old, a, _| u64::from((old as u32).min(a as u32)),
        ("min", Type::S32) => |old, a, _| u64::from((old as i32).min(a as i32) as u32),
        ("min", Type::U64) => |old, a, _| old.min(a),
        ("min", Type::S64) => |old, a, _| (old as i64).min(a as i64) as u64,
        ("max", Type::U32) => |old, a, _| u64::from((old as u32).max(a as u32)),
        ("max", Type::S32) => |old, a, _| u64::from((old as i32).max(a as i32) as u32),
        ("max", Type::U64) => |old, a, _| old.max(a),
        ("max", Type::S64) => |old, a, _| (old as i64).max(a as i64) as u64,
        ("inc", Type::U32) => |old, a, _| if old as u32 >= a as u32 { 0 } else { old + 1 },
        ("dec", Type::U32) => |old, a, _| {
            if old == 0 || old as u32 > a as u32 {
                a
            } else {
                old - 1
            }
        },
        _ => return None,
    })
}

fn add_short<T: ShortFloat>(old: u64, a: u64) -> u64 {
    u64::from(T::narrow(T::of_bits(old as u16).widen() + T::of_bits(a as u16).widen()).bits())
}

fn window_of(space: Space) -> u64 {
    match space {
        Space::Shared => window::SHARED,
        Space::Local => window::LOCAL,
        Space::Constant => window::CONSTANT,
        Space::Parameter => window::PARAMETER,
        Space::Global | Space::Generic => 0,
    }
}

/// `cvta`: a generic address tells its space in its upper bits; one of global memory is the same as a generic one.
pub(super) fn convert_address(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let to_space = op.take("to");
    let space = op.take_as(space).ok_or_else(|| op.unknown())?;
    let kind = op.take_type()?;
    if !kind.is_wide() {
        return Err(op.unknown());
    }
    let run = match (space, to_space) {
        (Space::Global, _) => unary(|a: u64| a),
        (_, true) => unary(|a: u64| a & window::OFFSET),
        (Space::Shared, false) => unary(|a: u64| a | window_of(Space::Shared)),
        (Space::Local, false) => unary(|a: u64| a | window_of(Space::Local)),
        (Space::Constant, false) => unary(|a: u64| a | window_of(Space::Constant)),
        (_, false) => unary(|a: u64| a | window_of(Space::Parameter)),
    };
    body.compute(operands, kind, &[kind], run)
}

pub(super) fn is_space(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    fn in_window(a: u64, space: Space) -> bool {
        a >> window::SHIFT == window_of(space) >> window::SHIFT
    }
    let space = op.take_as(space).ok_or_else(|| op.unknown())?;
    operands.expect(2)?;
    let Operand::Name(p) = operands.get(0)? else {
        return Err(op.unknown());
    };
    let p = body.predicate_written(p)?;
    let a = body.source(operands.get(1)?, Type::U64)?;
    let run = match space {
        Space::Global => compare(|a: u64, _: u64| {
            in_window(a, Space::Global) || a >> window::SHIFT == window::MODULE >> window::SHIFT
        }),
        Space::Shared => compare(|a: u64, _: u64| in_window(a, Space::Shared)),
        Space::Local => compare(|a: u64, _: u64| in_window(a, Space::Local)),
        Space::Constant => compare(|a: u64, _: u64| in_window(a, Space::Constant)),
        _ => compare(|a: u64, _: u64| in_window(a, Space::Parameter)),
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

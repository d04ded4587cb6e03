//! Branches, barriers and what the lanes of a warp tell each other.

use super::body::Body;
use super::opcode::Opcode;
use super::operands::Operands;
use crate::ptx::PtxError;
use crate::ptx::lanes::NONE;
use crate::ptx::program::{Barrier, BarrierReduction, Op, Reduction, Shuffle, ShuffleMode, Vote};
use crate::ptx::syntax::Operand;
use crate::ptx::types::Type;

pub(super) fn branch<'a>(
    body: &mut Body<'a>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, 'a>,
) -> Result<(), PtxError> {
    op.take("uni");
    let base = op.base;
    match base {
        "bra" => {
            operands.expect(1)?;
            let Operand::Name(label) = operands.get(0)? else {
                return Err(op.error("an operand that is no label"));
            };
            let target = body.label(label);
            body.emit(Op::Branch { target });
        }
        "brx" => {
            op.take("idx");
            operands.expect(2)?;
            let index = body.source(operands.get(0)?, Type::U32)?;
            let Operand::Name(table) = operands.get(1)? else {
                return Err(op.error("an operand that is no table"));
            };
            let labels = body.branch_table(table)?;
            let targets = labels.into_iter().map(|label| body.label(label)).collect();
            body.emit(Op::BranchTable { index, targets });
        }
        "ret" => match body.frames.last() {
            Some(frame) => {
                let target = frame.end;
                body.emit(Op::Branch { target });
            }
            None => body.emit(Op::Exit),
        },
        "exit" => body.emit(Op::Exit),
        _ => body.emit(Op::Trap),
    }
    Ok(())
}

pub(super) fn barrier(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    op.take("cta");
    if op.take("warp") {
        op.take("sync");
        operands.expect(1)?;
        let members = body.source(operands.get(0)?, Type::B32)?;
        body.emit(Op::WarpBarrier { members });
        return Ok(());
    }
    let aligned = op.base == "bar" || op.take("aligned");
    op.take("aligned");
    let action = op.take_one(["sync", "arrive", "red"]);
    let mut barrier = Barrier {
        id: NONE,
        threads: NONE,
        waits: true,
        aligned,
        reduction: None,
    };
    let mut rest = 0;
    match action {
        Some("sync") => {}
        Some("arrive") => barrier.waits = false,
        Some(_) => {
            let kind = op.take_one(["popc", "and", "or"]);
            op.take_type()?;
            rest = 1;
            let last = operands.len().checked_sub(1).ok_or_else(|| op.unknown())?;
            let (source, negated) = body.predicate(operands.get(last)?)?;
            let Operand::Name(to) = operands.get(0)? else {
                return Err(op.unknown());
            };
            let (kind, d, p) = match kind {
                Some("popc") => {
                    let (d, _) = body.register(to).ok_or_else(|| op.unknown())?;
                    (Reduction::Count, d, NONE)
                }
                Some("and") => (Reduction::And, NONE, body.predicate_named(to)?),
                Some(_) => (Reduction::Or, NONE, body.predicate_named(to)?),
                None => return Err(op.unknown()),
            };
            barrier.reduction = Some(BarrierReduction {
                kind,
                source,
                negated,
                d,
                p,
            });
        }
        None => return Err(op.unknown()),
    }
    barrier.id = body.source(operands.get(rest)?, Type::U32)?;
    if operands.len() > 2 * rest + 1 {
        barrier.threads = body.source(operands.get(rest + 1)?, Type::U32)?;
    }
    body.emit(Op::Barrier(Box::new(barrier)));
    Ok(())
}

pub(super) fn warp(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let base = op.base;
    match base {
        "activemask" => {
            op.take("b32");
            operands.expect(1)?;
            body.define(operands.get(0)?, Type::B32, |body, d| {
                body.emit(Op::ActiveMask { d })
            })
        }
        // The forms without `.sync` are gone since compute capability 7.0.
        _ if !op.take("sync") => Err(op.unknown()),
        "shfl" => shuffle(body, op, operands),
        "vote" => vote(body, op, operands),
        _ => reduce(body, op, operands),
    }
}

fn shuffle(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let mode = match op.take_one(["up", "down", "bfly", "idx"]) {
        Some("up") => ShuffleMode::Up,
        Some("down") => ShuffleMode::Down,
        Some("bfly") => ShuffleMode::Butterfly,
        Some(_) => ShuffleMode::Index,
        None => return Err(op.unknown()),
    };
    op.take("b32");
    operands.expect(5)?;
    let (to, p) = match operands.get(0)? {
        Operand::Pair(d, p) => (Operand::Name(d), body.predicate_written(p)?),
        other => (other.clone(), NONE),
    };
    let a = body.source(operands.get(1)?, Type::B32)?;
    let lane = body.source(operands.get(2)?, Type::B32)?;
    let clamp = body.source(operands.get(3)?, Type::B32)?;
    let members = body.source(operands.get(4)?, Type::B32)?;
    body.define(&to, Type::B32, |body, d| {
        body.emit(Op::Shuffle(Box::new(Shuffle {
            mode,
            d,
            p,
            a,
            lane,
            clamp,
            members,
        })));
    })
}

fn vote(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let kind = match op.take_one(["all", "any", "uni", "ballot"]) {
        Some("all") => Vote::All,
        Some("any") => Vote::Any,
        Some("uni") => Vote::Uniform,
        Some(_) => Vote::Ballot,
        None => return Err(op.unknown()),
    };
    op.take("pred");
    op.take("b32");
    operands.expect(3)?;
    let (source, negated) = body.predicate(operands.get(1)?)?;
    let members = body.source(operands.get(2)?, Type::B32)?;
    if kind == Vote::Ballot {
        return body.define(operands.get(0)?, Type::B32, |body, d| {
            body.emit(Op::Vote {
                kind,
                source,
                negated,
                members,
                d,
                p: NONE,
            });
        });
    }
    let (p, _) = body.predicate(operands.get(0)?)?;
    body.emit(Op::Vote {
        kind,
        source,
        negated,
        members,
        d: NONE,
        p,
    });
    Ok(())
}

fn reduce(
    body: &mut Body<'_>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, '_>,
) -> Result<(), PtxError> {
    let kind = op.take_type()?;
    let operation = op.take_one(["add", "min", "max", "and", "or", "xor"]);
    let run: fn(u32, u32) -> u32 = match (operation, kind) {
        (Some("add"), Type::U32 | Type::S32) => u32::wrapping_add,
        (Some("min"), Type::U32) => |a, b| a.min(b),
        (Some("max"), Type::U32) => |a, b| a.max(b),
        (Some("min"), Type::S32) => |a, b| (a as i32).min(b as i32) as u32,
        (Some("max"), Type::S32) => |a, b| (a as i32).max(b as i32) as u32,
        (Some("and"), Type::B32) => |a, b| a & b,
        (Some("or"), Type::B32) => |a, b| a | b,
        (Some("xor"), Type::B32) => |a, b| a ^ b,
        _ => return Err(op.unknown()),
    };
    operands.expect(3)?;
    let a = body.source(operands.get(1)?, kind)?;
    let members = body.source(operands.get(2)?, Type::B32)?;
    body.define(operands.get(0)?, kind, |body, d| {
        body.emit(Op::Reduce { run, d, a, members })
    })
}

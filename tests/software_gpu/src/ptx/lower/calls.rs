//! Functions, which have no place of their own: a call is replaced by the function's body, with its variables and the
//! parameters of the call in local memory.

use std::collections::HashMap;

use super::Place;
use super::body::Body;
use super::opcode::Opcode;
use super::operands::Operands;
use crate::ptx::PtxError;
use crate::ptx::lanes::NONE;
use crate::ptx::syntax::{Operand, Variable};
use crate::ptx::types::Space;

/// Calls within calls; more are taken for a recursion, which has no end here.
const DEPTH_MAX: usize = 16;

/// A call that is being replaced.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    /// Tells its labels from those of other calls; 0 is the kernel's own.
    pub(super) number: u32,
    /// The label to which it returns.
    pub(super) end: u32,
}

impl<'a> Body<'a> {
    pub(super) fn place_local(&mut self, variable: &Variable<'a>) {
        let address = self.local.place(variable.align, variable.bytes) as u64;
        let place = Place {
            space: Space::Local,
            address,
        };
        self.places.insert(variable.name, place);
    }
}

/// `call (results), function, (arguments)`, of which both lists may be missing.
pub(super) fn call<'a>(
    body: &mut Body<'a>,
    op: &mut Opcode<'_>,
    operands: &Operands<'_, 'a>,
) -> Result<(), PtxError> {
    op.take("uni");
    let mut rest = operands.operands.iter().peekable();
    let results = match rest.next_if(|operand| matches!(operand, Operand::List(_))) {
        Some(Operand::List(names)) => names.as_slice(),
        _ => &[],
    };
    let Some(Operand::Name(name)) = rest.next() else {
        return Err(op.error("a call of what is no function"));
    };
    let arguments = match rest.next() {
        Some(Operand::List(names)) => names.as_slice(),
        _ => &[],
    };
    let functions = body.functions;
    let function = functions.iter().find(|function| function.name == *name);
    let function =
        function.ok_or_else(|| op.error(format!("function `{name}`, which has no body,")))?;
    if body.guard.0 != NONE || rest.next().is_some() {
        return Err(op.error("a guard or a prototype"));
    }
    if body.frames.len() == DEPTH_MAX {
        return Err(op.error("a recursion"));
    }
    if results.len() != function.results.len() || arguments.len() != function.parameters.len() {
        return Err(op.error(format!("other arguments than those of `{name}`")));
    }
    let formal = function.results.iter().chain(&function.parameters);
    for (variable, actual) in formal.zip(results.iter().chain(arguments)) {
        let place = body
            .place(actual)
            .ok_or_else(|| op.error(format!("argument `{actual}`, which is not declared,")))?;
        body.places.insert(variable.name, place);
    }
    let end = body.new_label();
    body.frames_so_far += 1;
    let number = body.frames_so_far;
    body.frames.push(Frame { number, end });
    let scopes = std::mem::replace(&mut body.scopes, vec![HashMap::new()]);
    for statement in &function.body {
        body.statement(statement)?;
    }
    body.scopes = scopes;
    body.frames.pop();
    body.label_positions[end as usize] = Some(body.code.len() as u32);
    Ok(())
}

//! From syntax to programs: lays out variables, resolves names and turns each PTX instruction into one operation or few.
//!
//! [`body`] holds what is known while a kernel is lowered, [`operands`] resolves names; the others lower one family of
//! opcodes each.

mod bits;
pub(super) mod body;
mod calls;
mod comparison;
mod control;
mod convert;
mod float;
mod half;
mod integer;
mod logic;
mod memory;
mod opcode;
mod operands;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::PtxError;
use super::allocation::allocate;
use super::program::{BLOCK_THREADS_MAX, Kernel, ModuleData, Op, Parameter};
use super::syntax::{Entry, Operand, Source, Statement, Variable};
use super::types::{Space, window};
use body::Body;

/// A variable's space and its address there.
#[derive(Clone, Copy, Debug)]
struct Place {
    space: Space,
    address: u64,
}

/// Hands out addresses in ascending order.
#[derive(Clone, Copy, Debug, Default)]
struct Layout {
    bytes: usize,
}

impl Layout {
    fn place(&mut self, align: usize, bytes: usize) -> usize {
        let offset = self.bytes.next_multiple_of(align.max(1));
        self.bytes = offset + bytes;
        offset
    }
}

/// Lowers all kernels of a module.
pub(super) fn lower<'a>(source: &'a Source<'a>, text: &str) -> Result<Vec<Kernel>, PtxError> {
    let mut places = HashMap::new();
    let mut constant = Vec::new();
    let mut global = Vec::new();
    for variable in &source.variables {
        let (bytes, base) = match variable.space {
            Space::Constant => (&mut constant, 0),
            Space::Global => (&mut global, window::MODULE),
            // Laid out by each kernel that uses it.
            _ => continue,
        };
        let address = base + append(bytes, variable) as u64;
        places.insert(
            variable.name,
            Place {
                space: variable.space,
                address,
            },
        );
    }
    let module = Arc::new(ModuleData {
        text: text.to_owned(),
        constant,
        global: Mutex::new(global),
    });
    source
        .entries
        .iter()
        .map(|entry| {
            lower_entry(entry, source, &places, Arc::clone(&module))
                .map_err(|error| error.in_kernel(entry.name))
        })
        .collect()
}

/// Adds a variable with its initial value; its offset.
fn append(bytes: &mut Vec<u8>, variable: &Variable<'_>) -> usize {
    let offset = bytes.len().next_multiple_of(variable.align);
    bytes.resize(offset, 0);
    bytes.extend_from_slice(&variable.initial);
    bytes.resize(offset + variable.bytes, 0);
    offset
}

fn lower_entry<'a>(
    entry: &'a Entry<'a>,
    source: &'a Source<'a>,
    places: &HashMap<&'a str, Place>,
    module: Arc<ModuleData>,
) -> Result<Kernel, PtxError> {
    let mut places = places.clone();
    let mut block = Layout::default();
    let mut parameters = Vec::new();
    for parameter in &entry.parameters {
        let offset = block.place(parameter.align, parameter.bytes);
        parameters.push(Parameter {
            offset,
            bytes: parameter.bytes,
        });
        places.insert(
            parameter.name,
            Place {
                space: Space::Parameter,
                address: offset as u64,
            },
        );
    }
    let shared = place_shared_variables(entry, source, &mut places);

    let mut body = Body::new(places, &source.functions);
    for statement in &entry.body {
        body.statement(statement)?;
    }
    let mut lowered = body.finish()?;
    let allocation = allocate(&mut lowered);
    Ok(Kernel {
        name: entry.name.to_owned(),
        parameters,
        parameter_bytes: block.bytes,
        static_shared_bytes: shared,
        threads_max: entry
            .threads_max
            .unwrap_or(BLOCK_THREADS_MAX)
            .min(BLOCK_THREADS_MAX),
        local_bytes: lowered.local_bytes,
        shared_grain: shared_grain(&lowered.code),
        code: lowered.code,
        fixed: allocation.fixed,
        rows: allocation.rows,
        poisoned: allocation.poisoned,
        predicates: lowered.predicates,
        module,
    })
}

/// Lays out the shared variables that a kernel declares or uses; their bytes.
fn place_shared_variables<'a>(
    entry: &Entry<'a>,
    source: &Source<'a>,
    places: &mut HashMap<&'a str, Place>,
) -> usize {
    let mut shared = Layout::default();
    let mut dynamic = Vec::new();
    let used = source.variables.iter().filter(|variable| {
        variable.space == Space::Shared
            && source
                .functions
                .iter()
                .chain([entry])
                .flat_map(|entry| &entry.body)
                .any(|statement| names(statement, variable.name))
    });
    let declared = entry.body.iter().filter_map(|statement| match statement {
        Statement::Variable(variable) => Some(variable),
        _ => None,
    });
    for variable in declared.chain(used) {
        let layout = match variable.space {
            Space::Shared if variable.bytes == 0 => {
                dynamic.push(variable);
                continue;
            }
            Space::Shared => &mut shared,
            _ => continue,
        };
        let address = layout.place(variable.align, variable.bytes) as u64;
        places.insert(
            variable.name,
            Place {
                space: variable.space,
                address,
            },
        );
    }
    // All arrays without a length begin together, behind the others.
    if let Some(align) = dynamic.iter().map(|variable| variable.align.max(16)).max() {
        shared.place(align, 0);
        for variable in dynamic {
            places.insert(
                variable.name,
                Place {
                    space: Space::Shared,
                    address: shared.bytes as u64,
                },
            );
        }
    }
    shared.bytes
}

/// Whether an instruction names a variable.
fn names(statement: &Statement<'_>, name: &str) -> bool {
    fn operand_names(operand: &Operand<'_>, name: &str) -> bool {
        match operand {
            Operand::Name(found)
            | Operand::Address {
                base: Some(found), ..
            } => *found == name,
            Operand::Vector(elements) => {
                elements.iter().any(|element| operand_names(element, name))
            }
            _ => false,
        }
    }
    match statement {
        Statement::Instruction(instruction) => instruction
            .operands
            .iter()
            .any(|operand| operand_names(operand, name)),
        _ => false,
    }
}

/// The least bytes that an access may touch in shared memory, at most 4.
fn shared_grain(code: &[super::program::Instruction]) -> usize {
    let may_be_shared = |space: Space| matches!(space, Space::Shared | Space::Generic);
    code.iter()
        .filter_map(|instruction| match &instruction.op {
            Op::Load(transfer) | Op::Store(transfer) if may_be_shared(transfer.space) => {
                Some(transfer.element.bytes())
            }
            Op::Atomic(atomic) if may_be_shared(atomic.space) => Some(atomic.bytes),
            _ => None,
        })
        .min()
        .map_or(4, |bytes| bytes.min(4))
}

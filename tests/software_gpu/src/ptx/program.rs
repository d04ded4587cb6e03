//! A kernel as it is executed: instructions with resolved operands.

use std::sync::{Arc, Mutex};

use super::alu::{Alu, Slots};
use super::lanes::{NONE, Predicate, Register};
use super::types::Space;

/// Most threads of any block.
pub(super) const BLOCK_THREADS_MAX: u64 = 1024;

/// One parameter's place in the parameter block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    pub offset: usize,
    pub bytes: usize,
}

/// One `.entry` of a module, ready to run.
#[derive(Debug)]
pub struct Kernel {
    pub(super) name: String,
    pub(super) parameters: Vec<Parameter>,
    pub(super) parameter_bytes: usize,
    /// Without `extern .shared` arrays, rounded up to their alignment, so they begin here.
    pub(super) static_shared_bytes: usize,
    /// Most threads of a block that it was compiled for.
    pub(super) threads_max: u64,
    /// Per thread.
    pub(super) local_bytes: usize,
    pub(super) code: Vec<Instruction>,
    /// What the first rows hold; the allocated registers follow.
    pub(super) fixed: Vec<(Register, Fixed)>,
    /// Rows of a warp's register file.
    pub(super) rows: usize,
    /// Rows that may be read before they are written, poisoned when a block starts.
    pub(super) poisoned: Vec<Register>,
    pub(super) predicates: usize,
    /// The least bytes that one access to shared memory may touch: the grain of the race check.
    pub(super) shared_grain: usize,
    pub(super) module: Arc<ModuleData>,
}

/// What the kernels of a module share.
#[derive(Debug)]
pub(super) struct ModuleData {
    /// The lines of the PTX text, for messages.
    pub(super) text: String,
    pub(super) constant: Vec<u8>,
    /// Variables in global memory, of which a kernel sees [`super::types::window::MODULE`] addresses.
    pub(super) global: Mutex<Vec<u8>>,
}

impl Kernel {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    pub fn parameter_bytes(&self) -> usize {
        self.parameter_bytes
    }

    pub fn static_shared_bytes(&self) -> usize {
        self.static_shared_bytes
    }

    /// Most threads of a block that it can be launched with.
    pub fn threads_max(&self) -> u64 {
        self.threads_max
    }

    pub fn local_bytes(&self) -> usize {
        self.local_bytes
    }

    /// `line 12 (ld.global.f32 %f1, [%rd1];)`
    pub(super) fn describe(&self, instruction: usize) -> String {
        let line = self
            .code
            .get(instruction)
            .map_or(0, |instruction| instruction.line);
        let text = self
            .module
            .text
            .lines()
            .nth((line as usize).saturating_sub(1))
            .unwrap_or("")
            .trim();
        format!("line {line} ({text})")
    }
}

/// A row that instructions only read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Fixed {
    Constant { wide: bool, bits: u64 },
    Special(Special),
}

impl Fixed {
    pub(super) fn is_wide(self) -> bool {
        match self {
            Fixed::Constant { wide, .. } => wide,
            Fixed::Special(_) => false,
        }
    }
}

/// Special registers; the number is a dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Special {
    Thread(usize),
    BlockSize(usize),
    Block(usize),
    GridSize(usize),
    LaneId,
    WarpId,
    WarpCount,
    /// `%smid`, `%gridid` and others that say nothing here.
    Zero,
    One,
    WarpSize,
    LaneMaskEqual,
    LaneMaskLess,
    LaneMaskLessEqual,
    LaneMaskGreater,
    LaneMaskGreaterEqual,
    DynamicSharedBytes,
    TotalSharedBytes,
}

#[derive(Clone, Debug)]
pub(super) struct Instruction {
    pub(super) op: Op,
    /// The lanes that execute it; [`NONE`] for all.
    pub(super) guard: Predicate,
    pub(super) guard_negated: bool,
    pub(super) line: u32,
}

/// The number of an instruction; before labels are resolved, of a label.
pub(super) type Target = u32;

#[derive(Clone, Debug)]
pub(super) enum Op {
    Alu {
        run: Alu,
        slots: Slots,
    },
    /// A predicate from two predicates: `d = a op b`.
    Predicates {
        run: fn(u32, u32) -> u32,
        d: Predicate,
        a: Predicate,
        b: Predicate,
    },
    Load(Box<Transfer>),
    Store(Box<Transfer>),
    Atomic(Box<Atomic>),
    Branch {
        target: Target,
    },
    BranchTable {
        index: Register,
        targets: Box<[Target]>,
    },
    Exit,
    Trap,
    Barrier(Box<Barrier>),
    WarpBarrier {
        members: Register,
    },
    Shuffle(Box<Shuffle>),
    Vote {
        kind: Vote,
        source: Predicate,
        negated: bool,
        members: Register,
        d: Register,
        p: Predicate,
    },
    Reduce {
        run: fn(u32, u32) -> u32,
        d: Register,
        a: Register,
        members: Register,
    },
    ActiveMask {
        d: Register,
    },
    /// The clock's low or all bits.
    Clock {
        d: Register,
        wide: bool,
    },
}

/// An address: `base` (64 bits a lane if `wide`), if there is one, + `offset`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Address {
    pub(super) base: Register,
    pub(super) wide: bool,
    pub(super) offset: i64,
}

/// How bytes in memory become a register's bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    U8,
    S8ToNarrow,
    S8ToWide,
    U16,
    S16ToNarrow,
    S16ToWide,
    U32,
    S32ToWide,
    U64,
}

impl Element {
    pub(super) fn bytes(self) -> usize {
        match self {
            Element::U8 | Element::S8ToNarrow | Element::S8ToWide => 1,
            Element::U16 | Element::S16ToNarrow | Element::S16ToWide => 2,
            Element::U32 | Element::S32ToWide => 4,
            Element::U64 => 8,
        }
    }
}

/// A load or a store of one to four elements.
#[derive(Clone, Debug)]
pub(super) struct Transfer {
    pub(super) space: Space,
    pub(super) address: Address,
    pub(super) element: Element,
    /// Whether the registers have 64 bits.
    pub(super) wide: bool,
    pub(super) count: usize,
    /// Destinations or sources; [`NONE`] for `_`.
    pub(super) registers: [Register; 4],
}

impl Transfer {
    pub(super) fn bytes(&self) -> usize {
        self.element.bytes() * self.count
    }
}

/// `atom` and `red`: the new value from the old one and up to two operands.
#[derive(Clone, Debug)]
pub(super) struct Atomic {
    pub(super) space: Space,
    pub(super) address: Address,
    pub(super) bytes: usize,
    pub(super) run: fn(u64, u64, u64) -> u64,
    pub(super) d: Register,
    pub(super) a: Register,
    pub(super) b: Register,
}

#[derive(Clone, Debug)]
pub(super) struct Barrier {
    pub(super) id: Register,
    /// Threads that take part; [`NONE`] for all of the block.
    pub(super) threads: Register,
    /// `bar.arrive` does not wait.
    pub(super) waits: bool,
    /// All lanes of a warp must come to the same one.
    pub(super) aligned: bool,
    pub(super) reduction: Option<BarrierReduction>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct BarrierReduction {
    pub(super) kind: Reduction,
    pub(super) source: Predicate,
    pub(super) negated: bool,
    /// Of a count.
    pub(super) d: Register,
    /// Of `and` and `or`.
    pub(super) p: Predicate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reduction {
    Count,
    And,
    Or,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ShuffleMode {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Clone, Debug)]
pub(super) struct Shuffle {
    pub(super) mode: ShuffleMode,
    pub(super) d: Register,
    /// Whether the source lane was in range.
    pub(super) p: Predicate,
    pub(super) a: Register,
    pub(super) lane: Register,
    pub(super) clamp: Register,
    pub(super) members: Register,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

/// Whether an instruction reads or writes a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Read,
    Write,
}

impl Op {
    /// Calls `visit` for each register, those that are read before those that are written.
    pub(super) fn visit_registers(&mut self, mut visit: impl FnMut(&mut Register, Role)) {
        let mut visit = |register: &mut Register, role: Role| {
            if *register != NONE {
                visit(register, role);
            }
        };
        match self {
            Op::Alu { slots, .. } => {
                visit(&mut slots.a, Role::Read);
                visit(&mut slots.b, Role::Read);
                visit(&mut slots.c, Role::Read);
                visit(&mut slots.d, Role::Write);
            }
            Op::Load(transfer) => {
                visit(&mut transfer.address.base, Role::Read);
                transfer
                    .registers
                    .iter_mut()
                    .for_each(|register| visit(register, Role::Write));
            }
            Op::Store(transfer) => {
                visit(&mut transfer.address.base, Role::Read);
                transfer
                    .registers
                    .iter_mut()
                    .for_each(|register| visit(register, Role::Read));
            }
            Op::Atomic(atomic) => {
                visit(&mut atomic.address.base, Role::Read);
                visit(&mut atomic.a, Role::Read);
                visit(&mut atomic.b, Role::Read);
                visit(&mut atomic.d, Role::Write);
            }
            Op::BranchTable { index, .. } => visit(index, Role::Read),
            Op::Barrier(barrier) => {
                visit(&mut barrier.id, Role::Read);
                visit(&mut barrier.threads, Role::Read);
                if let Some(reduction) = &mut barrier.reduction {
                    visit(&mut reduction.d, Role::Write);
                }
            }
            Op::WarpBarrier { members } => visit(members, Role::Read),
            Op::Shuffle(shuffle) => {
                visit(&mut shuffle.a, Role::Read);
                visit(&mut shuffle.lane, Role::Read);
                visit(&mut shuffle.clamp, Role::Read);
                visit(&mut shuffle.members, Role::Read);
                visit(&mut shuffle.d, Role::Write);
            }
            Op::Vote { members, d, .. } => {
                visit(members, Role::Read);
                visit(d, Role::Write);
            }
            Op::Reduce { d, a, members, .. } => {
                visit(a, Role::Read);
                visit(members, Role::Read);
                visit(d, Role::Write);
            }
            Op::ActiveMask { d } | Op::Clock { d, .. } => visit(d, Role::Write),
            Op::Predicates { .. } | Op::Branch { .. } | Op::Exit | Op::Trap => {}
        }
    }
}

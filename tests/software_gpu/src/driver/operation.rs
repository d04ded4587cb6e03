//! Operations: what a stream holds, and how reports name it.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::clock::{Clock, Step};
use super::memory::Allocation;
use crate::ptx::Kernel;
use crate::seam::Launch;

/// One piece of work in a stream, with all that the call said about it.
pub(super) struct Operation {
    /// Its place in its stream: the actor is the stream's, the time counts its operations from 1.
    pub(super) step: Step,
    /// Operations of other streams that must be over before this one starts.
    pub(super) after: Vec<Step>,
    /// All that happens before it, and itself.
    pub(super) clock: Clock,
    pub(super) label: Arc<Label>,
    pub(super) work: Work,
}

pub(super) enum Work {
    ToDevice {
        destination: u64,
        source: HostSource,
        bytes: u64,
    },
    ToHost {
        destination: HostAddress,
        source: u64,
        bytes: u64,
    },
    OnDevice {
        destination: u64,
        source: u64,
        bytes: u64,
    },
    /// Repeats `pattern` (1, 2 or 4 bytes) over `bytes` bytes.
    Fill {
        destination: u64,
        pattern: Pattern,
        bytes: u64,
    },
    Launch {
        kernel: Arc<Kernel>,
        launch: Launch,
        parameters: Box<[u8]>,
    },
    Record(Arc<Recording>),
    /// Its place in the stream is all there is to it.
    Wait,
    HostFunction(HostFunction),
    /// The memory was had at the call.
    Allocate,
    Free(Allocation),
}

/// What a copy to the device reads.
pub(super) enum HostSource {
    /// Page-locked memory, read when the copy runs.
    PageLocked(HostAddress),
    /// Pageable memory, staged at the call.
    Staged(Box<[u8]>),
}

/// An address of the program's own memory, kept until the operation runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostAddress(pub(super) usize);

/// The little-endian bytes that a fill repeats.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pattern {
    pub(super) value: u32,
    pub(super) bytes: usize,
}

/// A call of `cuLaunchHostFunc`.
pub(super) struct HostFunction {
    pub(super) function: unsafe extern "C" fn(*mut libc::c_void),
    pub(super) argument: usize,
}

/// One recording of an event: the position in a stream that it stands for.
#[derive(Debug)]
pub(super) struct Recording {
    pub(super) step: Step,
    pub(super) clock: Clock,
    /// When the work before it was over.
    pub(super) over: OnceLock<Instant>,
}

/// How reports name an operation.
#[derive(Debug)]
pub(super) struct Label {
    pub(super) what: What,
    /// Counts all operations of the device from 1, in the order of the calls.
    pub(super) number: u64,
    pub(super) stream: StreamName,
}

#[derive(Debug)]
pub(super) enum What {
    ToDevice {
        bytes: u64,
        /// A synchronous copy from pageable memory: the call may return before its transfer ends.
        staged: bool,
    },
    ToHost {
        bytes: u64,
    },
    OnDevice {
        bytes: u64,
    },
    Fill {
        bytes: u64,
    },
    Kernel(Arc<str>),
    Record,
    Wait,
    HostFunction,
    Allocate {
        bytes: u64,
    },
    Free,
    /// An allocation by `cuMemAlloc`, which is in no stream.
    HostAllocate {
        bytes: u64,
    },
}

/// A stream's number: the null stream's is 0, the others count from 1 as they are created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamName(pub(super) u64);

impl fmt::Display for StreamName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => formatter.write_str("null stream"),
            number => write!(formatter, "stream {number}"),
        }
    }
}

impl fmt::Display for Label {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.what {
            What::ToDevice {
                bytes,
                staged: false,
            } => write!(formatter, "copy of {bytes} bytes to the device"),
            What::ToDevice {
                bytes,
                staged: true,
            } => {
                write!(
                    formatter,
                    "copy of {bytes} bytes from pageable memory to the device"
                )
            }
            What::ToHost { bytes } => write!(formatter, "copy of {bytes} bytes to the host"),
            What::OnDevice { bytes } => write!(formatter, "copy of {bytes} bytes on the device"),
            What::Fill { bytes } => write!(formatter, "fill of {bytes} bytes"),
            What::Kernel(name) => write!(formatter, "kernel {name}"),
            What::Record => formatter.write_str("event record"),
            What::Wait => formatter.write_str("event wait"),
            What::HostFunction => formatter.write_str("host function"),
            What::Allocate { bytes } => write!(formatter, "allocation of {bytes} bytes"),
            What::Free => formatter.write_str("free"),
            What::HostAllocate { bytes } => {
                return write!(formatter, "allocation of {bytes} bytes by cuMemAlloc");
            }
        }?;
        write!(formatter, " ({}, operation {})", self.stream, self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_name_kind_stream_and_number() {
        let label = |what, stream| {
            Label {
                what,
                number: 7,
                stream: StreamName(stream),
            }
            .to_string()
        };
        assert_eq!(
            label(What::Kernel("add".into()), 2),
            "kernel add (stream 2, operation 7)"
        );
        assert_eq!(
            label(What::ToHost { bytes: 64 }, 0),
            "copy of 64 bytes to the host (null stream, operation 7)"
        );
    }
}

//! What the driver and the interpreter know of each other.
//!
//! The interpreter never sees an allocation or a stream: it asks a [`GlobalMemory`] for each access. The driver never
//! sees an instruction: it hands a [`Launch`] to [`crate::ptx::run`] and gets back nothing or a [`Fault`].

use std::fmt;

/// How a kernel touches memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

/// Why a kernel cannot go on; a sentence without a full stop.
#[derive(Clone, Debug)]
pub struct Fault(pub String);

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Fault {}

/// Global memory as a kernel sees it.
pub trait GlobalMemory {
    /// Checks that `bytes` bytes at `address` lie in one live allocation, notes the access for the order checker, and
    /// says where in this process they are.
    ///
    /// Called for every lane's access (1 to 16 bytes), except that lanes which touch adjacent bytes come as one range
    /// (up to 512 bytes), so an access may span granules. It must be quick in the usual case: same allocation and
    /// same granule as the last time. Atomic operations come as a read and a write. Alignment is checked by the
    /// caller. The pointer must stay valid until the launch ends.
    fn access(&mut self, address: u64, bytes: usize, access: Access) -> Result<*mut u8, Fault>;
}

/// The shape of one kernel launch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Launch {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Bytes of `extern .shared` memory behind the kernel's own.
    pub dynamic_shared_bytes: u32,
    /// Permutes the order in which the grid's blocks (and the warps of a block) run; none is ascending.
    pub block_order_seed: Option<u64>,
}

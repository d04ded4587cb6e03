//! The properties of the device: those of a small Turing card (compute capability 7.5), the oldest that CUDA 13 knows.

/// Shared memory of a block without asking for more.
pub(super) const SHARED_BYTES: u32 = 48 << 10;
/// Shared memory of a block at most, after `cuFuncSetAttribute`.
pub(super) const SHARED_BYTES_OPT_IN: u32 = 64 << 10;
pub(super) const BLOCK_THREADS_MAX: u32 = 1024;
pub(super) const BLOCK_MAX: [u32; 3] = [1024, 1024, 64];
pub(super) const GRID_MAX: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
pub(super) const MULTIPROCESSORS: i32 = 40;
pub(super) const MULTIPROCESSOR_THREADS: i32 = 1024;
/// Least and greatest priority of streams.
pub(super) const PRIORITIES: (i32, i32) = (0, -5);
pub(super) const NAME: &str = "software GPU (compute capability 7.5)";
/// CUDA 13.0.
pub(super) const DRIVER_VERSION: i32 = 13_000;

/// The value of a `CUdevice_attribute`; none for a number that CUDA 13.0 does not know. What this device cannot do is 0.
pub(super) fn device_attribute(attribute: u32) -> Option<i32> {
    let value = match attribute {
        1 => BLOCK_THREADS_MAX as i32,
        2..=4 => BLOCK_MAX[attribute as usize - 2] as i32,
        5..=7 => GRID_MAX[attribute as usize - 5] as i32,
        // Shared memory of a block; constant memory; warp size; pitch; registers of a block.
        8 => SHARED_BYTES as i32,
        9 => 65_536,
        10 => 32,
        11 => i32::MAX,
        12 => 65_536,
        // Clock in kHz; texture alignment; overlap of copies and kernels; multiprocessors.
        13 => 1_590_000,
        14 => 512,
        15 => 1,
        16 => MULTIPROCESSORS,
        // Concurrent kernels; memory clock in kHz; bus width; L2; threads of a multiprocessor; copy engines; one address
        // space.
        31 => 1,
        36 => 5_001_000,
        37 => 256,
        38 => 4 << 20,
        39 => MULTIPROCESSOR_THREADS,
        40 => 3,
        41 => 1,
        75 => 7,
        76 => 5,
        // Stream priorities; L1 for global and local memory; shared memory and registers of a multiprocessor.
        78..=80 => 1,
        81 => SHARED_BYTES_OPT_IN as i32,
        82 => 65_536,
        // Single to double precision performance; shared memory of a block after asking.
        87 => 32,
        97 => SHARED_BYTES_OPT_IN as i32,
        // Page-locking of the program's memory; blocks of a multiprocessor; memory pools.
        99 => 1,
        106 => 16,
        115 => 1,
        // No NUMA node.
        131 | 134 => -1,
        _ if (1..=148).contains(&attribute) => 0,
        _ => return None,
    };
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_is_a_turing_card_with_memory_pools() {
        for (attribute, value) in [
            (75, 7),
            (76, 5),
            (16, 40),
            (10, 32),
            (115, 1),
            (1, 1024),
            (6, 65_535),
            (83, 0),
        ] {
            assert_eq!(
                device_attribute(attribute),
                Some(value),
                "attribute {attribute}"
            );
        }
        assert_eq!(device_attribute(0), None);
        assert_eq!(device_attribute(5000), None);
    }
}

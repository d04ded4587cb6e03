//! Memory asked for before it is needed; and memory that is only read, to see how fast that goes.

use std::hint::black_box;

use super::ComputePool;

/// Asks for the memory ahead of the next `bytes` bytes: soon needed to the first-level cache, later needed to the
/// second. For memory that is walked in order: the processor's own prefetcher stops at each 4 KiB page.
#[inline(always)]
pub(super) fn ahead(at: *const u8, bytes: usize) {
    const NEAR: usize = 1536;
    const FAR: usize = 16 << 10;
    for line in (0..bytes).step_by(64) {
        line_to_first_level(at.wrapping_add(NEAR + line));
        line_to_second_level(at.wrapping_add(FAR + line));
    }
}

/// `ahead` for block I of `COUNT` blocks of `bytes` bytes each, which lie one after another from `start` on: spread over
/// the blocks, each cache line once.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn ahead_of_block<const I: usize, const COUNT: usize>(start: *const u8, bytes: usize) {
    let first = (I * bytes).next_multiple_of(64);
    let end = if I + 1 == COUNT {
        COUNT * bytes
    } else {
        ((I + 1) * bytes).next_multiple_of(64)
    };
    ahead(start.wrapping_add(first), end - first);
}

/// Asks for what will be read soon, to the first-level cache: worth it where that is not the next in address.
#[inline(always)]
pub(super) fn whole<T>(of: &[T]) {
    lines(of.as_ptr().cast(), size_of_val(of));
}

/// The same for `bytes` bytes at an address that nothing need lie at.
#[inline(always)]
pub(super) fn lines(at: *const u8, bytes: usize) {
    for offset in (0..bytes).step_by(64) {
        line_to_first_level(at.wrapping_add(offset));
    }
}

/// Asks for a cache line. An address that is not mapped does no harm.
#[inline(always)]
fn line_to_first_level(_at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        #[expect(unsafe_code, reason = "a processor intrinsic")]
        // SAFETY: SSE is part of x86-64; a prefetch reads nothing, whatever the address.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(_at.cast());
        }
    }
}

/// The same, not as near.
#[inline(always)]
fn line_to_second_level(_at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        #[expect(unsafe_code, reason = "a processor intrinsic")]
        // SAFETY: as above.
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(_at.cast());
        }
    }
}

/// Loads every byte with all threads of `pool`, in order and asked for ahead, as the products read their weights: how
/// long it takes is the limit of a product that reads its weights once.
pub fn read_all(pool: &ComputePool, bytes: &[u8]) {
    // Far more than starting on it costs, far less than a thread's share.
    let chunks: Vec<&[u8]> = bytes.chunks(1 << 20).collect();
    pool.run(chunks.len(), &|index| {
        // Sixteen sums, so that no load waits for another's sum.
        let mut sums = [0u64; 16];
        for part in chunks[index].as_chunks::<128>().0 {
            ahead(part.as_ptr(), part.len());
            for (sum, word) in sums.iter_mut().zip(part.as_chunks::<8>().0) {
                *sum ^= u64::from_le_bytes(*word);
            }
        }
        black_box(sums);
    });
}

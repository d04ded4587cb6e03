//! How fast the threads of a pool read memory: the limit of a step that reads its weights once.

use super::rounds::median;
use crate::kernels::{ComputePool, read_all};
use crate::memory::{Arena, MemoryError, Region};
use crate::weights::checksum;
use std::sync::Arc;
use std::time::Instant;

/// Passes of a measurement.
const PASSES: usize = 3;

/// What has one checksum.
const STRETCH_BYTES: usize = 8 << 20;

/// Memory that no cache holds, and the rates at which it was read.
pub struct MemoryRate {
    region: Region,
    /// Bytes per second of each pass.
    passes: Vec<f64>,
}

impl MemoryRate {
    /// Takes `bytes` of anonymous memory, in huge pages where the kernel gives them, and writes all of it.
    ///
    /// # Errors
    /// The system does not give so much.
    pub fn new(bytes: usize) -> Result<MemoryRate, MemoryError> {
        let arena = Arc::new(Arena::new("host", bytes)?);
        let mut region = Region::allocate_low(&arena, bytes)?;
        // Pages that were never written are all the same page of zeros.
        region.bytes_mut().fill(0x5A);
        Ok(MemoryRate {
            region,
            passes: Vec::new(),
        })
    }

    /// Reads everything a few times with all threads of `pool`: one pass takes some ten milliseconds, and another
    /// program may disturb it.
    pub fn measure(&mut self, pool: &ComputePool) {
        for _ in 0..PASSES {
            let started = Instant::now();
            read_all(pool, self.region.bytes());
            let seconds = started.elapsed().as_secs_f64();
            if seconds > 0.0 {
                self.passes.push(self.region.bytes().len() as f64 / seconds);
            }
        }
    }

    /// Reads everything once as the verifier of reads does, on this thread, in stretches as long as parts of groups are.
    pub fn measure_checksums(&mut self) {
        let started = Instant::now();
        for stretch in self.region.bytes().chunks(STRETCH_BYTES) {
            std::hint::black_box(checksum(stretch));
        }
        let seconds = started.elapsed().as_secs_f64();
        if seconds > 0.0 {
            self.passes.push(self.region.bytes().len() as f64 / seconds);
        }
    }

    /// Forgets what was measured: other threads are next.
    pub fn restart(&mut self) {
        self.passes.clear();
    }

    /// Bytes per second: the median of all passes, as what is held against it is a median; 0 before the first.
    pub fn bytes_per_second(&self) -> f64 {
        median(&self.passes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_pass_counts() {
        let mut rate = MemoryRate::new(3 << 20).unwrap();
        assert_eq!(rate.bytes_per_second(), 0.0);
        let pool = ComputePool::new(2);
        rate.measure(&pool);
        rate.measure(&pool);
        assert_eq!(rate.passes.len(), 2 * PASSES);
        let mut sorted = rate.passes.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted[PASSES - 1]..=sorted[PASSES];
        assert!(middle.contains(&rate.bytes_per_second()));
        rate.restart();
        assert_eq!(rate.bytes_per_second(), 0.0);
        rate.measure_checksums();
        assert!(rate.passes.len() == 1 && rate.bytes_per_second() > 0.0);
    }
}

//! How fast weights are copied from the host arena to the device's, by the stream that serves: one thread on the
//! emulated device, the copy engine of a GPU.

use crate::memory::{Arena, CudaDevice, CudaError, Event, MemoryError, Region, RegionCopies};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// What is copied in one piece.
const GROUP_BYTES: usize = 64 << 20;
/// On the device: those that pass through a ring.
const DESTINATIONS: usize = 4;
/// Copies that are queued at once, so that the stream does not wait for the next.
const QUEUED: usize = 2;

/// Why copies are not measured.
#[derive(Debug, thiserror::Error)]
pub enum CopyRateError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Device(#[from] CudaError),
    #[error(
        "start the copy thread: {0}; raise the limit on threads (the control group's, `ulimit -u`)"
    )]
    Thread(#[from] std::io::Error),
    #[error("the copies ended early")]
    Ended,
}

/// Memory on both sides of a link.
pub struct CopyRate {
    host: Arc<Arena>,
    device: Arc<Arena>,
    sources: Vec<Arc<Region>>,
    /// What holds the bytes of `sources` after a measurement.
    destinations: Vec<Region>,
}

impl CopyRate {
    /// Takes about `bytes` of RAM, and at most 256 MiB of the device, which is a GPU or more RAM.
    ///
    /// # Errors
    /// One side does not have so much.
    pub fn new(bytes: usize, gpu: Option<&Arc<CudaDevice>>) -> Result<CopyRate, CopyRateError> {
        let group = (bytes / (2 * DESTINATIONS))
            .clamp(1 << 20, GROUP_BYTES)
            .next_multiple_of(1 << 20);
        let count = (bytes / group).max(DESTINATIONS);
        let mut host = Arena::new("host", count * group)?;
        let device = match gpu {
            Some(gpu) => {
                // What is not locked is copied all the same, and the rate shows it.
                let (locked, refusal) = host.lock_pages(gpu);
                if let Some(refusal) = refusal {
                    tracing::warn!("{locked} bytes are locked to their pages: {refusal}");
                }
                Arena::on_cuda("device", DESTINATIONS * group, gpu)?
            }
            None => Arena::new("device", DESTINATIONS * group)?,
        };
        let (host, device) = (Arc::new(host), Arc::new(device));
        let mut sources = Vec::with_capacity(count);
        for _ in 0..count {
            let mut source = Region::allocate_low(&host, group)?;
            super::product_rate::fill(source.bytes_mut());
            sources.push(Arc::new(source));
        }
        let mut destinations = Vec::with_capacity(DESTINATIONS);
        for _ in 0..DESTINATIONS {
            let mut destination = Region::allocate_low(&device, group)?;
            if gpu.is_none() {
                // Pages are given at the first write.
                destination.clear();
            }
            destinations.push(destination);
        }
        Ok(CopyRate {
            host,
            device,
            sources,
            destinations,
        })
    }

    /// Bytes per second while copies follow one another for `window`.
    ///
    /// # Errors
    /// A GPU failed, or the system has no thread left.
    pub fn measure(&mut self, window: Duration) -> Result<f64, CopyRateError> {
        let (sender, ended) = channel();
        let stream = RegionCopies::start(
            Arc::clone(&self.host),
            Arc::clone(&self.device),
            None,
            Box::new(move |copied| drop(sender.send(copied))),
        )?;
        let mut next = 0;
        let mut copy = |destination: Region| {
            let source = Arc::clone(&self.sources[next % self.sources.len()]);
            let bytes = source.bytes_total();
            next += 1;
            stream.copy(next as u64, source, destination, bytes, Event::recorded());
        };
        let waiting = self.destinations.split_off(QUEUED);
        let mut idle = std::collections::VecDeque::from(waiting);
        for destination in self.destinations.drain(..) {
            copy(destination);
        }
        // Counted from the end of the first: threads have started and pages are there.
        let mut from: Option<Instant> = None;
        let (mut bytes, mut seconds) = (0, 0.0);
        let mut outstanding = QUEUED;
        while outstanding > 0 {
            let copied = ended.recv().map_err(|_| CopyRateError::Ended)?;
            let now = Instant::now();
            let elapsed = from.map(|from| now - from);
            match elapsed {
                None => from = Some(now),
                Some(elapsed) => {
                    bytes += copied.source.bytes_total();
                    seconds = elapsed.as_secs_f64();
                }
            }
            idle.push_back(copied.destination.ok_or(CopyRateError::Ended)?);
            match idle.pop_front() {
                // At least one copy is counted: each that follows the first one is.
                Some(destination) if elapsed.is_none_or(|elapsed| elapsed < window) => {
                    copy(destination);
                }
                unused => {
                    idle.extend(unused);
                    outstanding -= 1;
                }
            }
        }
        self.destinations.extend(idle);
        if let Some(gpu) = self.device.cuda() {
            gpu.check()?;
        }
        Ok(bytes as f64 / seconds.max(f64::MIN_POSITIVE))
    }

    /// What was copied to, with the bytes of weights in it.
    pub(super) fn copied(&self) -> &[Region] {
        &self.destinations
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_copied_is_there_and_gave_a_rate() {
        let mut copies = CopyRate::new(8 << 20, None).unwrap();
        for _ in 0..2 {
            let rate = copies.measure(Duration::from_millis(5)).unwrap();
            assert!(rate > 0.0 && rate.is_finite(), "{rate}");
            assert_eq!(copies.copied().len(), DESTINATIONS);
        }
        let source = copies.sources[0].bytes();
        assert!(
            copies
                .copied()
                .iter()
                .all(|region| region.bytes() == source)
        );
    }
}

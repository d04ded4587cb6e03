//! How fast a file is read past the page cache, by the reader that serves: on one rung of its ladder, with requests of
//! one length and so many of them in flight.

use crate::memory::{
    Arena, FilePlace, MAX_BLOCK_BYTES, MemoryError, ReadError, ReaderChoice, Region, RegionPiece,
    RegionRead, RegionReader, Requests, Rung,
};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use rustix::time::{ClockId, clock_gettime};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// What is read in one piece, from its start to its end: a group of weights is as long.
const RANGE_BYTES: u64 = 16 << 20;
/// Small files are cut into so many ranges at least, so that there is an order to shuffle.
const RANGES_MIN: u64 = 8;
/// Room for the most requests that are measured, 32 of 4 MiB, and two ranges that wait behind them.
const REGIONS: usize = 10;
/// Reads go on so long before they are counted: queues fill, and threads start.
const RAMP: Duration = Duration::from_millis(100);
/// Between two looks at the clock.
const LOOK: Duration = Duration::from_millis(10);

/// Why storage is not measured.
#[derive(Debug, thiserror::Error)]
pub enum StorageRateError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("{file} has no bytes to read", file = .0.display())]
    Empty(PathBuf),
    #[error("open {file}: {source}", file = file.display())]
    Open {
        file: PathBuf,
        source: std::io::Error,
    },
}

/// A way of reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadWay {
    pub rung: Rung,
    pub requests: Requests,
}

/// What a way of reading reaches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadingRate {
    pub bytes_per_second: f64,
    /// For each second of processor time that this process took meanwhile, the kernel's work for it included; `None`
    /// where that was too little to measure. What interrupts cost is not in it.
    pub bytes_per_processor_second: Option<f64>,
}

/// A file that is read.
pub struct StorageRate {
    path: PathBuf,
    file_bytes: u64,
    arena: Arc<Arena>,
    idle: Vec<Region>,
    /// The file in ranges, in random order. They are read one after another and from the first again, over all
    /// measurements: what was read lately is read again last, so that a cache of the drive's helps least.
    ranges: Vec<u64>,
    range_bytes: u64,
    next: usize,
    tickets: u64,
}

impl StorageRate {
    /// # Errors
    /// The file cannot be had or has nothing in it, or the system does not give the memory to read into.
    pub fn new(path: &Path, seed: u64) -> Result<StorageRate, StorageRateError> {
        let open = |source| StorageRateError::Open {
            file: path.to_owned(),
            source,
        };
        let file_bytes = std::fs::metadata(path).map_err(open)?.len();
        if file_bytes == 0 {
            return Err(StorageRateError::Empty(path.to_owned()));
        }
        let block = u64::from(MAX_BLOCK_BYTES);
        let range_bytes = (file_bytes / RANGES_MIN / block * block).clamp(block, RANGE_BYTES);
        // Of the last range the file may lack some: it is left out unless it is the only one.
        let mut ranges: Vec<u64> = (0..(file_bytes / range_bytes).max(1))
            .map(|index| index * range_bytes)
            .collect();
        ranges.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));

        let region_bytes = range_bytes as usize;
        let arena = Arc::new(Arena::new("host", REGIONS * region_bytes)?);
        let mut idle = Vec::with_capacity(REGIONS);
        for _ in 0..REGIONS {
            let mut region = Region::allocate_low(&arena, region_bytes)?;
            // Pages are given at the first write, and giving them is not reading.
            region.bytes_mut().fill(1);
            idle.push(region);
        }
        Ok(StorageRate {
            path: path.to_owned(),
            file_bytes,
            arena,
            idle,
            ranges,
            range_bytes,
            next: 0,
            tickets: 0,
        })
    }

    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// The rung that a server takes, and why no better one.
    ///
    /// # Errors
    /// The one that was asked for cannot be had.
    pub fn rung(&self, choice: ReaderChoice) -> Result<(Rung, String), StorageRateError> {
        let arena = Arc::clone(&self.arena);
        let reader = RegionReader::start(
            &FilePlace::alone(&self.path),
            arena,
            choice,
            Box::new(|_| {}),
        )?;
        Ok((reader.rung(), reader.rung_reason().to_owned()))
    }

    /// Reads for `window`, and some more before and after it.
    ///
    /// # Errors
    /// A rung is refused, or a read fails.
    pub fn measure(
        &mut self,
        way: ReadWay,
        window: Duration,
    ) -> Result<ReadingRate, StorageRateError> {
        let (sender, ended) = channel::<RegionRead>();
        let reader = RegionReader::start_on(
            &FilePlace::alone(&self.path),
            Arc::clone(&self.arena),
            way.rung,
            way.requests,
            Box::new(move |read| drop(sender.send(read))),
        )?;
        let in_requests = way.requests.bytes_max as u64 * u64::from(way.requests.in_flight_max);
        let wanted = in_requests.div_ceil(self.range_bytes).saturating_add(2);
        let wanted = self.idle.len().min(wanted as usize);
        for region in self.idle.split_off(self.idle.len() - wanted) {
            self.read(&reader, region);
        }

        let started = Instant::now();
        let (mut from, mut to): (Option<Mark>, Option<Mark>) = (None, None);
        let mut failed = None;
        let mut outstanding = wanted;
        while outstanding > 0 {
            let read = match ended.recv_timeout(LOOK) {
                Ok(read) => Some(read),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            match &from {
                None if started.elapsed() >= RAMP => from = Some(Mark::now(&reader)),
                Some(from) if to.is_none() && from.at.elapsed() >= window => {
                    to = Some(Mark::now(&reader));
                }
                _ => {}
            }
            let Some(read) = read else { continue };
            if let Err(error) = read.result {
                failed.get_or_insert(error);
            }
            if to.is_none() && failed.is_none() {
                self.read(&reader, read.region);
            } else {
                outstanding -= 1;
                self.idle.push(read.region);
            }
        }
        if let Some(error) = failed {
            return Err(error.into());
        }
        // Reads go on until there is an end to the window.
        let marks = from.zip(to);
        let rate = marks.map_or(ReadingRate::NONE, |(from, to)| from.until(&to));
        Ok(rate)
    }

    fn read(&mut self, reader: &RegionReader, region: Region) {
        let piece = RegionPiece {
            file_offset: self.ranges[self.next],
            offset: 0,
            bytes: region.bytes_total(),
        };
        self.next = (self.next + 1) % self.ranges.len();
        self.tickets += 1;
        reader.read(self.tickets, region, &[piece]);
    }
}

impl ReadingRate {
    const NONE: ReadingRate = ReadingRate {
        bytes_per_second: 0.0,
        bytes_per_processor_second: None,
    };
}

/// What had been read at a time, and what it had cost.
struct Mark {
    at: Instant,
    bytes: u64,
    processor: Duration,
}

impl Mark {
    fn now(reader: &RegionReader) -> Mark {
        Mark {
            at: Instant::now(),
            bytes: reader.totals().bytes,
            processor: processor_time(),
        }
    }

    fn until(&self, end: &Mark) -> ReadingRate {
        let bytes = (end.bytes - self.bytes) as f64;
        let processor = end.processor.saturating_sub(self.processor).as_secs_f64();
        ReadingRate {
            bytes_per_second: bytes / (end.at - self.at).as_secs_f64().max(f64::MIN_POSITIVE),
            bytes_per_processor_second: (processor > 0.0 && bytes > 0.0).then(|| bytes / processor),
        }
    }
}

/// What all threads of this process have taken of the processors, those of the kernel that work for it included.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNGS: [Rung; 4] = [
        Rung::IoUringRegistered,
        Rung::IoUring,
        Rung::PreadDirect,
        Rung::PreadBuffered,
    ];

    #[test]
    fn every_way_reads_files_of_any_length() {
        // The first ends inside its only block, the second inside a range.
        for bytes in [100, 300_001, 1 << 20] {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            std::io::Write::write_all(&mut file, &vec![7; bytes]).unwrap();
            let mut storage = StorageRate::new(file.path(), 1).unwrap();
            assert_eq!(storage.file_bytes(), bytes as u64);
            for rung in RUNGS {
                for (bytes_max, in_flight_max) in [(4096, 1), (1 << 20, 32)] {
                    let way = ReadWay {
                        rung,
                        requests: Requests {
                            bytes_max,
                            in_flight_max,
                        },
                    };
                    let rate = match storage.measure(way, Duration::from_millis(20)) {
                        Ok(rate) => rate,
                        Err(error) => {
                            println!("skipped: {rung}: {error}");
                            continue;
                        }
                    };
                    assert!(rate.bytes_per_second > 0.0, "{way:?}: {rate:?}");
                    assert_eq!(storage.idle.len(), REGIONS, "{way:?}");
                }
            }
            let (rung, reason) = storage.rung(ReaderChoice::Pread).unwrap();
            assert!(matches!(rung, Rung::PreadDirect | Rung::PreadBuffered));
            assert!(reason.contains("asked for"), "{reason}");
        }
    }

    #[test]
    fn a_file_without_bytes_and_one_that_is_not_there_are_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = StorageRate::new(file.path(), 1).err().unwrap().to_string();
        assert!(error.contains("no bytes"), "{error}");
        let error = StorageRate::new(Path::new("/none.gguf"), 1).err().unwrap();
        assert!(error.to_string().contains("/none.gguf"), "{error}");
    }

    #[test]
    fn ranges_cover_the_file_once_in_another_order() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(100 << 20).unwrap();
        let storage = StorageRate::new(file.path(), 1).unwrap();
        // 12.5 MiB each, and the last of eight ends with the file.
        let expected: Vec<u64> = (0..8).map(|index| index * (100 << 20) / 8).collect();
        assert_ne!(storage.ranges, expected);
        let mut sorted = storage.ranges.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, expected);
    }
}

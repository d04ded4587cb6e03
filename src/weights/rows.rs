//! Embedding rows: gathered one by one from wherever their group rests. Rows on storage are read into a buffer of their
//! own, so that they need no ring entry; computation waits for them, which counts as a stall. Rows on a CUDA device stay
//! there, and their addresses are gathered.

use super::checksums::Stretch;
use super::lease::LeaseError;
use super::verify::CHECKSUM_RETRIES_MAX;
use super::{Home, Weights};
use crate::memory::{DeviceAddress, ReadError, Region, RegionPiece};
use crate::placement::{GroupId, Tier};
use std::ops::Range;
use std::time::Duration;

/// Rows of the token embedding and the group that holds them.
#[derive(Clone, Debug)]
pub(super) struct EmbeddingSlice {
    pub(super) rows: Range<u64>,
    pub(super) group: GroupId,
    pub(super) part: usize,
}

/// Embedding rows in the order in which they were asked for.
#[derive(Debug, Default)]
pub struct GatheredRows {
    /// One row after the other, as they are stored; those of rows on a CUDA device are not filled in.
    pub bytes: Vec<u8>,
    /// Which rows rest on a CUDA device, and at which address.
    pub on_device: Vec<(usize, DeviceAddress)>,
}

/// Where a row is that needs no read.
enum Resident<'a> {
    Host(&'a [u8]),
    Device(DeviceAddress),
}

impl Weights {
    /// The embedding rows of `ids`. Ids must be below the number of rows. Rows that rest on storage are read; waiting for
    /// them counts as a stall.
    pub(super) fn gather_rows(
        &self,
        ids: &[u32],
        cancelled: &dyn Fn() -> bool,
    ) -> Result<GatheredRows, LeaseError> {
        let row_bytes = self.embedding.row_bytes() as usize;
        let mut rows = vec![0; ids.len() * row_bytes];
        let mut on_device = Vec::new();
        let mut absent: Vec<(u32, usize)> = Vec::new();
        for (index, &id) in ids.iter().enumerate() {
            let target = &mut rows[index * row_bytes..(index + 1) * row_bytes];
            match self.resident_row(u64::from(id)) {
                Some(Resident::Host(row)) => target.copy_from_slice(row),
                Some(Resident::Device(address)) => on_device.push((index, address)),
                None => absent.push((id, index)),
            }
        }
        // The same token often occurs more than once in a prompt: it is read once.
        absent.sort_unstable();
        let mut runs: Vec<&[(u32, usize)]> = absent.chunk_by(|a, b| a.0 == b.0).collect();
        while !runs.is_empty() {
            if cancelled() {
                return Err(LeaseError::Cancelled);
            }
            let batch = runs.len().min(self.plan.gather.rows as usize).max(1);
            let rest = runs.split_off(batch);
            self.read_rows(&runs, &mut rows, cancelled)?;
            runs = rest;
        }
        Ok(GatheredRows {
            bytes: rows,
            on_device,
        })
    }

    fn resident_row(&self, id: u64) -> Option<Resident<'_>> {
        let slice = self.embedding_slice(id);
        let row_bytes = self.embedding.row_bytes();
        let row = id - slice.rows.start;
        let row = match &self.shared.homes()[slice.group.0 as usize] {
            Home::Mapped => {
                let start = self.embedding.file_offset + id * row_bytes;
                self.mapped.as_ref()?.bytes(start, row_bytes)
            }
            Home::Resident(region) => {
                let group = &self.plan.groups[slice.group.0 as usize];
                let start = group.parts[slice.part].entry_offset + row * row_bytes;
                if region.cuda().is_some() {
                    let address = region.device_address(start as usize, row_bytes as usize);
                    return Some(Resident::Device(address));
                }
                &region.bytes()[start as usize..(start + row_bytes) as usize]
            }
            Home::Streamed | Home::Rows => return None,
        };
        Some(Resident::Host(row))
    }

    fn embedding_slice(&self, id: u64) -> &EmbeddingSlice {
        let index = self
            .embedding_slices
            .partition_point(|slice| slice.rows.end <= id);
        &self.embedding_slices[index]
    }

    /// Reads one batch of rows; each run holds one id and the places that want it.
    fn read_rows(
        &self,
        runs: &[&[(u32, usize)]],
        rows: &mut [u8],
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), LeaseError> {
        let row_bytes = self.embedding.row_bytes();
        let alignment = self.plan.read_alignment;
        let slot_bytes = self.plan.gather.row_bytes;
        let Some(region) = self.gather.borrow_mut().take() else {
            unreachable!("the plan has no gather buffer, but rows rest on storage");
        };
        let offset_of = |id: u32| self.embedding.file_offset + u64::from(id) * row_bytes;
        let pieces: Vec<RegionPiece> = runs
            .iter()
            .enumerate()
            .map(|(slot, run)| {
                let start = offset_of(run[0].0) / alignment * alignment;
                let end = (offset_of(run[0].0) + row_bytes).next_multiple_of(alignment);
                RegionPiece {
                    file_offset: start,
                    offset: slot * slot_bytes as usize,
                    bytes: (end - start) as usize,
                }
            })
            .collect();
        let row_in = |slot: usize, id: u32| {
            let start = slot as u64 * slot_bytes + offset_of(id) % alignment;
            start as usize..(start + row_bytes) as usize
        };
        // Each row is a stretch of its own: what a read brings depends on the prompt, a row does not.
        let stretches: Vec<(Stretch, Range<usize>)> = runs
            .iter()
            .enumerate()
            .map(|(slot, run)| {
                let stretch = Stretch {
                    offset: offset_of(run[0].0),
                    bytes: row_bytes,
                };
                (stretch, row_in(slot, run[0].0))
            })
            .collect();
        let (region, result, waited) = self.read_verified(region, &pieces, &stretches, cancelled);
        if result.is_ok() {
            for (run, (_, place)) in runs.iter().zip(&stretches) {
                let row = &region.bytes()[place.clone()];
                for &(_, index) in run.iter() {
                    rows[index * row_bytes as usize..][..row_bytes as usize].copy_from_slice(row);
                }
            }
        }
        *self.gather.borrow_mut() = Some(region);
        self.count_stall(Tier::Storage, waited);
        let group = self.embedding_slice(u64::from(runs[0][0].0)).group;
        let bytes = runs.len() as u64 * slot_bytes;
        self.trace().rows_read(group.0, bytes, waited);
        result.map_err(|source| match source {
            ReadError::GivenUp => LeaseError::Cancelled,
            source => self.read_error(group, source),
        })
    }

    /// Reads and verifies, again where the bytes differ from those of the first read. Says for how long.
    fn read_verified(
        &self,
        mut region: Region,
        pieces: &[RegionPiece],
        stretches: &[(Stretch, Range<usize>)],
        cancelled: &dyn Fn() -> bool,
    ) -> (Region, Result<(), ReadError>, Duration) {
        let mut waited = Duration::ZERO;
        let mut is_due = self.checks.as_ref().is_some_and(|checks| checks.is_due());
        for tries in 1.. {
            let (back, result, time) = self.shared.read_now(region, pieces, cancelled);
            region = back;
            waited += time;
            let (Ok(_), Some(checks)) = (&result, &self.checks) else {
                return (region, result.map(|_| ()), waited);
            };
            let bytes = region.bytes();
            let read = stretches
                .iter()
                .map(|(stretch, place)| (*stretch, &bytes[place.clone()]));
            match checks.check(read, is_due) {
                Ok(_) => return (region, Ok(()), waited),
                Err(mismatch) if tries > CHECKSUM_RETRIES_MAX => {
                    let error = checks.error(mismatch, tries);
                    return (region, Err(error), waited);
                }
                Err(mismatch) => checks.count_retry(mismatch),
            }
            is_due = true;
        }
        unreachable!("tries end");
    }
}

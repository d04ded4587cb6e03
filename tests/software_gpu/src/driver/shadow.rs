//! The order checker: who wrote each word of device memory last, and who has read it since.
//!
//! When an operation runs, what it touched goes through [`Pass`]. A word's last writer, and for a write its readers too,
//! must come before the operation by its vector clock; otherwise nothing orders the two and another run may have them
//! the other way round. As operations run in an order that their clocks allow, nothing that ran earlier can be meant to
//! come after, so looking back is enough to find an unordered pair from either side.
//!
//! A word whose last writer is its allocation holds nothing yet, which finds reads of memory that was never written. A
//! copy on the device counts as a write of its target, whatever it copied.
//!
//! Words are 4 bytes: kernels that use different bytes of one word count as using the same. All words of a granule (256 bytes) usually have the same history, so a granule has one cell, and
//! only where histories differ one cell for each word. A cell names its writer and a set of readers by number; numbers
//! whose operations can conflict with nothing any more are given up by [`Shadow::collect`].
//!
//! One lock is around all of it; the GPU thread makes the passes, host threads only note allocations.

use std::collections::HashMap;
use std::sync::Arc;

use super::clock::{Clock, Step};
use super::memory::Allocation;
use super::operation::Label;
use super::pass::Pass;
use super::settings::Unwritten;
use super::touch::GRANULE_BYTES;

/// Authors below this number are nobody: whoever has no number any more.
pub(super) const FIRST_AUTHOR: u32 = 2;
/// Written before all that can still happen.
pub(super) const SETTLED: u32 = 0;
/// Allocated before all that can still happen and not written since.
pub(super) const SETTLED_ALLOCATION: u32 = 1;

/// The history of one granule or word: a writer, and the set of those who have read since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cell(pub(super) u64);

impl Cell {
    pub(super) const fn new(writer: u32, readers: u32) -> Cell {
        Cell(writer as u64 | (readers as u64) << 32)
    }

    pub(super) fn writer(self) -> u32 {
        self.0 as u32
    }

    pub(super) fn readers(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The cell of a granule whose words have cells of their own.
    pub(super) fn split(index: u32) -> Cell {
        Cell::new(u32::MAX, index)
    }

    pub(super) fn as_split(self) -> Option<usize> {
        (self.writer() == u32::MAX).then_some(self.readers() as usize)
    }
}

/// Who has touched memory.
pub(super) struct Author {
    pub(super) step: Step,
    pub(super) label: Arc<Label>,
    pub(super) is_allocation: bool,
}

pub(super) struct Shadow {
    pub(super) base: u64,
    /// A cell for each granule of the device's range. Plain numbers, so that the system gives zero pages for them.
    pub(super) cells: Vec<u64>,
    pub(super) splits: Vec<[Cell; 64]>,
    pub(super) free_splits: Vec<u32>,
    /// Number [`FIRST_AUTHOR`] is at index 0.
    pub(super) authors: Vec<Author>,
    /// Set 0 is empty and not here.
    pub(super) reader_sets: Vec<Box<[u32]>>,
    /// The number of authors at which giving up numbers is worth a walk.
    collect_at: usize,
}

impl Shadow {
    pub(super) fn new(base: u64, range_bytes: u64) -> Shadow {
        Shadow {
            base,
            cells: vec![0; (range_bytes / GRANULE_BYTES) as usize],
            splits: Vec::new(),
            free_splits: Vec::new(),
            authors: Vec::new(),
            reader_sets: Vec::new(),
            collect_at: 1 << 14,
        }
    }

    /// Notes a new allocation: all its words are unwritten, and whoever touches them must come after `step`.
    pub(super) fn allocate(&mut self, allocation: &Allocation, step: Step, label: Arc<Label>) {
        let author = self.author(step, label, true);
        self.set(allocation, Cell::new(author, 0));
    }

    /// Forgets the history of an allocation that is no more.
    pub(super) fn forget(&mut self, allocation: &Allocation) {
        self.set(allocation, Cell::new(SETTLED, 0));
    }

    /// Begins the check of one operation.
    pub(super) fn pass<'a>(
        &'a mut self,
        step: Step,
        clock: &'a Clock,
        label: Arc<Label>,
        unwritten: Unwritten,
    ) -> Pass<'a> {
        let me = self.author(step, label, false);
        Pass::new(self, me, clock, unwritten)
    }

    /// The number of operations that the history names.
    #[cfg(test)]
    pub(super) fn authors(&self) -> usize {
        self.authors.len()
    }

    /// Whether [`Shadow::collect`] is worth its time.
    pub(super) fn is_crowded(&self) -> bool {
        self.authors.len() >= self.collect_at
    }

    /// Gives up the numbers of all steps that are before whatever still comes: those that `settled` has reached.
    pub(super) fn collect(&mut self, settled: &Clock, allocations: &[Allocation]) {
        let mut renumbering = Renumbering {
            authors: vec![None; self.authors.len()],
            sets: HashMap::new(),
            kept: Vec::new(),
            kept_sets: Vec::new(),
            settled,
        };
        let (authors, sets) = (&self.authors, &self.reader_sets);
        for allocation in allocations {
            for granule in granules(self.base, allocation) {
                let cell = Cell(self.cells[granule]);
                match cell.as_split() {
                    None => self.cells[granule] = renumbering.cell(authors, sets, cell).0,
                    Some(split) => {
                        for word in &mut self.splits[split] {
                            *word = renumbering.cell(authors, sets, *word);
                        }
                    }
                }
            }
        }
        let mut old: Vec<Option<Author>> = std::mem::take(&mut self.authors)
            .into_iter()
            .map(Some)
            .collect();
        self.reader_sets = renumbering.kept_sets;
        self.authors = renumbering
            .kept
            .iter()
            .filter_map(|index| old[*index].take())
            .collect();
        self.collect_at = (2 * self.authors.len()).max(1 << 14);
    }

    fn author(&mut self, step: Step, label: Arc<Label>, is_allocation: bool) -> u32 {
        self.authors.push(Author {
            step,
            label,
            is_allocation,
        });
        FIRST_AUTHOR + self.authors.len() as u32 - 1
    }

    fn set(&mut self, allocation: &Allocation, cell: Cell) {
        for granule in granules(self.base, allocation) {
            if let Some(split) = Cell(self.cells[granule]).as_split() {
                self.free_splits.push(split as u32);
            }
            self.cells[granule] = cell.0;
        }
    }

    pub(super) fn new_split(&mut self, words: [Cell; 64]) -> Cell {
        match self.free_splits.pop() {
            Some(split) => {
                self.splits[split as usize] = words;
                Cell::split(split)
            }
            None => {
                self.splits.push(words);
                Cell::split(self.splits.len() as u32 - 1)
            }
        }
    }
}

/// The granules of an allocation; it starts on one and owns its last whole.
fn granules(base: u64, allocation: &Allocation) -> std::ops::Range<usize> {
    let first = (allocation.start - base) / GRANULE_BYTES;
    first as usize..(allocation.end() - base).div_ceil(GRANULE_BYTES) as usize
}

/// New numbers for the authors and reader sets that are still needed.
struct Renumbering<'a> {
    /// For each old author, its new number.
    authors: Vec<Option<u32>>,
    sets: HashMap<u32, u32>,
    /// The old indices of the authors kept.
    kept: Vec<usize>,
    kept_sets: Vec<Box<[u32]>>,
    settled: &'a Clock,
}

impl Renumbering<'_> {
    fn cell(&mut self, authors: &[Author], sets: &[Box<[u32]>], cell: Cell) -> Cell {
        let readers = match cell.readers() {
            0 => 0,
            set => match self.sets.get(&set) {
                Some(new) => *new,
                None => {
                    let readers = sets[set as usize - 1]
                        .iter()
                        .map(|reader| self.author(authors, *reader));
                    let readers: Box<[u32]> =
                        readers.filter(|reader| *reader >= FIRST_AUTHOR).collect();
                    let new = if readers.is_empty() {
                        0
                    } else {
                        self.kept_sets.push(readers);
                        self.kept_sets.len() as u32
                    };
                    self.sets.insert(set, new);
                    new
                }
            },
        };
        Cell::new(self.author(authors, cell.writer()), readers)
    }

    fn author(&mut self, authors: &[Author], number: u32) -> u32 {
        if number < FIRST_AUTHOR {
            return number;
        }
        let index = (number - FIRST_AUTHOR) as usize;
        if let Some(new) = self.authors[index] {
            return new;
        }
        let author = &authors[index];
        let new = match (author.step.is_before(self.settled), author.is_allocation) {
            (true, true) => SETTLED_ALLOCATION,
            (true, false) => SETTLED,
            (false, _) => {
                self.kept.push(index);
                FIRST_AUTHOR + self.kept.len() as u32 - 1
            }
        };
        self.authors[index] = Some(new);
        new
    }
}

#[cfg(test)]
#[path = "tests/shadow.rs"]
mod tests;

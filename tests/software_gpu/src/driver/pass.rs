//! The order checker's look at one operation: each word it used against the word's history.
//!
//! A word's last writer, and for a write its readers too, must come before the operation by its vector clock.

use std::collections::HashMap;
use std::sync::Arc;

use super::clock::Clock;
use super::operation::Label;
use super::settings::Unwritten;
use super::shadow::{Cell, FIRST_AUTHOR, SETTLED, SETTLED_ALLOCATION, Shadow};
use super::touch::{GRANULE_BYTES, WORD_BYTES, word_mask};
use crate::seam::Access;

/// What a pass has found.
#[derive(Debug)]
pub(super) enum Finding {
    /// Two accesses, one of them a write, that nothing orders.
    Unordered {
        address: u64,
        access: Access,
        other: Arc<Label>,
        other_access: Access,
    },
    /// A read of what nothing has written.
    Unwritten { address: u64 },
}

/// How an operation has used some words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Read,
    Write,
    /// Read what was there, then wrote.
    ReadThenWrite,
    /// Wrote some bytes of the word: it is no longer unwritten, and its other bytes are somebody else's.
    WriteEdge,
}

/// The check of one operation.
pub(super) struct Pass<'a> {
    shadow: &'a mut Shadow,
    me: u32,
    clock: &'a Clock,
    unwritten: Unwritten,
    /// For a reader set, the set with me in it.
    sets: HashMap<u32, u32>,
    /// The last step made: neighbours usually have the same history.
    last: Option<(Cell, Use, bool, Cell)>,
    findings: Vec<Finding>,
}

impl<'a> Pass<'a> {
    /// `me` is the operation's number as an author.
    pub(super) fn new(
        shadow: &'a mut Shadow,
        me: u32,
        clock: &'a Clock,
        unwritten: Unwritten,
    ) -> Pass<'a> {
        Pass {
            shadow,
            me,
            clock,
            unwritten,
            sets: HashMap::new(),
            last: None,
            findings: Vec::new(),
        }
    }

    /// A kernel's use of one granule: the words it read before it wrote them, and those it wrote.
    pub(super) fn granule(&mut self, granule: u64, reads: u64, writes: u64) {
        self.touch(granule, reads & !writes, Use::Read);
        self.touch(granule, writes & !reads, Use::Write);
        self.touch(granule, reads & writes, Use::ReadThenWrite);
    }

    /// A copy's or fill's use of a range. Of words that it shares with others only the written mark is taken.
    pub(super) fn range(&mut self, address: u64, bytes: u64, access: Access) {
        let start = address - self.shadow.base;
        let end = start + bytes;
        let (outer, inner) = (
            start / WORD_BYTES..end.div_ceil(WORD_BYTES),
            start.div_ceil(WORD_BYTES)..end / WORD_BYTES,
        );
        let inner = if inner.start < inner.end {
            inner
        } else {
            outer.clone()
        };
        let whole = match access {
            Access::Read => Use::Read,
            Access::Write => Use::Write,
        };
        self.words(inner.start, inner.end, whole);
        if access == Access::Write {
            self.words(outer.start, inner.start, Use::WriteEdge);
            self.words(inner.end, outer.end, Use::WriteEdge);
        }
    }

    /// What was found, at most once for each pair of operations and kind.
    pub(super) fn finish(self) -> Vec<Finding> {
        self.findings
    }

    fn words(&mut self, start: u64, end: u64, used: Use) {
        let mut word = start;
        while word < end {
            let last = (word / 64 * 64 + 63).min(end - 1);
            self.touch(word / 64, word_mask(word % 64, last % 64), used);
            word = last + 1;
        }
    }

    /// The words of `mask` in one granule.
    fn touch(&mut self, granule: u64, mask: u64, used: Use) {
        if mask == 0 {
            return;
        }
        let index = granule as usize;
        let address = self.shadow.base + granule * GRANULE_BYTES;
        let cell = Cell(self.shadow.cells[index]);
        let Some(split) = cell.as_split() else {
            let new = self.step(
                cell,
                used,
                address + u64::from(mask.trailing_zeros()) * WORD_BYTES,
                true,
            );
            if mask == u64::MAX {
                self.shadow.cells[index] = new.0;
            } else if new != cell {
                let words =
                    std::array::from_fn(|word| if mask >> word & 1 == 1 { new } else { cell });
                self.shadow.cells[index] = self.shadow.new_split(words).0;
            }
            return;
        };
        for word in (0..64).filter(|word| mask >> word & 1 == 1) {
            let old = self.shadow.splits[split][word];
            self.shadow.splits[split][word] =
                self.step(old, used, address + word as u64 * WORD_BYTES, false);
        }
        let words = &self.shadow.splits[split];
        if words.iter().all(|word| *word == words[0]) {
            self.shadow.cells[index] = words[0].0;
            self.shadow.free_splits.push(split as u32);
        }
    }

    /// Checks one use against the history of a cell; returns the history with it.
    #[inline]
    fn step(&mut self, cell: Cell, used: Use, address: u64, whole: bool) -> Cell {
        // What is found depends on the cell only, and is reported once.
        if let Some((last_cell, last_use, last_whole, new)) = self.last
            && (last_cell, last_use, last_whole) == (cell, used, whole)
        {
            return new;
        }
        let new = self.check(cell, used, address, whole);
        self.last = Some((cell, used, whole, new));
        new
    }

    fn check(&mut self, cell: Cell, used: Use, address: u64, whole: bool) -> Cell {
        let writer = cell.writer();
        if used == Use::WriteEdge {
            // Written by nobody, so that whoever owns the other bytes need not come after me.
            let writer = if self.is_unwritten(writer) {
                SETTLED
            } else {
                writer
            };
            return Cell::new(writer, cell.readers());
        }
        let reads = used != Use::Write;
        let access = if reads { Access::Read } else { Access::Write };
        let ordered = self.expect_before(writer, Access::Write, access, address);
        let wanted =
            self.unwritten == Unwritten::Word || self.unwritten == Unwritten::Granule && whole;
        if reads && ordered && wanted && self.is_unwritten(writer) {
            let known = self
                .findings
                .iter()
                .any(|finding| matches!(finding, Finding::Unwritten { .. }));
            if !known {
                self.findings.push(Finding::Unwritten { address });
            }
        }
        if used == Use::Read {
            return Cell::new(writer, self.with_me(cell.readers()));
        }
        if cell.readers() != 0 {
            let readers = self.shadow.reader_sets[cell.readers() as usize - 1].clone();
            for reader in readers {
                self.expect_before(reader, Access::Read, Access::Write, address);
            }
        }
        Cell::new(self.me, 0)
    }

    fn is_unwritten(&self, writer: u32) -> bool {
        match writer {
            SETTLED => false,
            SETTLED_ALLOCATION => true,
            number => self.shadow.authors[(number - FIRST_AUTHOR) as usize].is_allocation,
        }
    }

    /// Whether an author comes before me; if it does not, that is a finding.
    fn expect_before(
        &mut self,
        author: u32,
        other_access: Access,
        access: Access,
        address: u64,
    ) -> bool {
        if self.is_before(author) {
            return true;
        }
        let other = self.shadow.authors[(author - FIRST_AUTHOR) as usize]
            .label
            .clone();
        let known = self.findings.iter().any(|finding| match finding {
            Finding::Unordered { other: known, .. } => Arc::ptr_eq(known, &other),
            Finding::Unwritten { .. } => false,
        });
        if !known {
            self.findings.push(Finding::Unordered {
                address,
                access,
                other,
                other_access,
            });
        }
        false
    }

    fn is_before(&self, author: u32) -> bool {
        author < FIRST_AUTHOR
            || author == self.me
            || self.shadow.authors[(author - FIRST_AUTHOR) as usize]
                .step
                .is_before(self.clock)
    }

    /// A reader set with me in it. Readers that come before me need not stay: who comes after me comes after them.
    fn with_me(&mut self, set: u32) -> u32 {
        if let Some(new) = self.sets.get(&set) {
            return *new;
        }
        let mut readers: Vec<u32> = match set {
            0 => Vec::new(),
            _ => self.shadow.reader_sets[set as usize - 1].to_vec(),
        };
        readers.retain(|reader| !self.is_before(*reader));
        let new = if readers.is_empty() && set != 0 {
            self.with_me(0)
        } else {
            readers.push(self.me);
            self.shadow.reader_sets.push(readers.into());
            self.shadow.reader_sets.len() as u32
        };
        self.sets.insert(set, new);
        self.sets.insert(new, new);
        new
    }
}

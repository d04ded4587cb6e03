//! What loading does next, so that the drive never stands idle for want of a read. Pure: tests walk through it.

/// Regions that are read into at the same time: at least so many, and more until they have as many bytes as keep a drive
/// busy while this program hears of the first that has landed. The reader has half of those bytes in flight at most;
/// groups are as small as the plan's slices. Few enough to see progress, and far below what the reader queues.
const READS_MIN: usize = 4;
pub(super) const READS_MAX: usize = 256;
const READ_BYTES: u64 = 64 << 20;

/// Reads under way, or regions to read into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct InFlight {
    reads: usize,
    bytes: u64,
}

impl InFlight {
    /// Whether one more is wanted.
    pub(super) fn wants_more(self) -> bool {
        self.reads < READS_MIN || (self.bytes < READ_BYTES && self.reads < READS_MAX)
    }

    pub(super) fn add(&mut self, bytes: u64) {
        self.reads += 1;
        self.bytes += bytes;
    }

    pub(super) fn remove(&mut self, bytes: u64) {
        self.reads -= 1;
        self.bytes -= bytes;
    }
}

/// Of groups on their way through staging regions to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    /// Read the next group into a free region.
    Read,
    /// Wait for the copy that began first: its region is free then.
    AwaitCopy,
    /// Wait for the read that began first, and copy.
    AwaitRead,
}

/// Where the groups are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Staged {
    /// Groups that are still to be read.
    pub(super) waiting: usize,
    pub(super) free_regions: usize,
    pub(super) reads: usize,
    pub(super) copies: usize,
}

impl Staged {
    /// `None`: all groups are there, or no region is to be had. A copy is waited for before a read is: its region is
    /// wanted for the read that follows, and the other reads are on their way meanwhile.
    pub(super) fn next_move(self) -> Option<Move> {
        match self {
            Staged {
                waiting: 1..,
                free_regions: 1..,
                ..
            } => Some(Move::Read),
            Staged { copies: 1.., .. } => Some(Move::AwaitCopy),
            Staged { reads: 1.., .. } => Some(Move::AwaitRead),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    #[test]
    fn small_groups_are_read_many_at_once_and_large_ones_a_few() {
        let reads_of = |bytes: u64| {
            let mut in_flight = InFlight::default();
            while in_flight.wants_more() {
                in_flight.add(bytes);
            }
            in_flight.reads
        };
        for (bytes, reads) in [
            (128 << 20, READS_MIN),
            (16 << 20, 4),
            (4 << 20, 16),
            (256 << 10, 256),
            (4096, READS_MAX),
            (0, READS_MAX),
        ] {
            assert_eq!(reads_of(bytes), reads, "groups of {bytes} bytes");
        }
        let mut in_flight = InFlight::default();
        in_flight.add(5);
        in_flight.remove(5);
        assert_eq!(in_flight, InFlight::default());
    }

    /// Walks `groups` groups through `regions` regions, where a read takes 1 on a drive that does one after the other and
    /// a copy `copy` on such a link. The time that it takes.
    fn walk(groups: usize, regions: usize, copy: f64) -> f64 {
        let (mut now, mut drive, mut link) = (0.0_f64, 0.0_f64, 0.0_f64);
        let mut staged = Staged {
            waiting: groups,
            free_regions: regions,
            reads: 0,
            copies: 0,
        };
        let mut reads = VecDeque::new();
        let mut copies = VecDeque::new();
        while let Some(next) = staged.next_move() {
            match next {
                Move::Read => {
                    staged.waiting -= 1;
                    staged.free_regions -= 1;
                    drive = drive.max(now) + 1.0;
                    reads.push_back(drive);
                }
                Move::AwaitRead => {
                    assert!(
                        staged.waiting == 0 || staged.reads == regions,
                        "a drive with one read has nothing to put in order: {staged:?}"
                    );
                    now = now.max(reads.pop_front().unwrap());
                    link = link.max(now) + copy;
                    copies.push_back(link);
                }
                Move::AwaitCopy => {
                    now = now.max(copies.pop_front().unwrap());
                    staged.free_regions += 1;
                }
            }
            (staged.reads, staged.copies) = (reads.len(), copies.len());
        }
        assert_eq!((staged.waiting, staged.free_regions), (0, regions));
        now
    }

    #[test]
    fn with_two_regions_or_more_the_slower_of_drive_and_link_is_never_idle() {
        for regions in 2..6 {
            for copy in [0.0_f64, 0.25, 1.0, 3.0] {
                for groups in [1, 2, 3, 50] {
                    let slower = copy.max(1.0) * groups as f64;
                    let took = walk(groups, regions, copy);
                    let at_the_ends = copy + 1.0;
                    assert!(took <= slower + at_the_ends, "{regions}, {copy}: {took}");
                }
            }
        }
        // With one, they take turns.
        assert!((walk(50, 1, 0.5) - 75.0).abs() < 1e-9);
    }

    #[test]
    fn without_a_region_nothing_moves() {
        let staged = Staged {
            waiting: 3,
            free_regions: 0,
            reads: 0,
            copies: 0,
        };
        assert_eq!(staged.next_move(), None);
    }
}

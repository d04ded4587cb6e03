//! Waits that are left out on purpose, and copies and launches that are refused: whether a program waits where it has to, and asks
//! whether all went well, shows when one of them is taken away.

use std::sync::atomic::{AtomicU64, Ordering};

/// The calls of one kind that are still to come before the one that is left out; 0: none is.
#[derive(Default)]
pub(super) struct LeftOut {
    to_come: AtomicU64,
}

/// `cuStreamWaitEvent`.
pub(super) static STREAM_WAITS: LeftOut = LeftOut {
    to_come: AtomicU64::new(0),
};
/// `cuEventSynchronize`.
pub(super) static EVENT_SYNCHRONISATIONS: LeftOut = LeftOut {
    to_come: AtomicU64::new(0),
};

/// `cuMemcpyHtoDAsync`.
pub(super) static COPIES_TO_DEVICE: LeftOut = LeftOut {
    to_come: AtomicU64::new(0),
};

/// `cuLaunchKernel`.
pub(super) static LAUNCHES: LeftOut = LeftOut {
    to_come: AtomicU64::new(0),
};

impl LeftOut {
    /// Leaves out the wait with this number, counted from 1 and from now. Gives what was still to come of the last order:
    /// 0 where that wait has been left out.
    pub(super) fn order(&self, number: u64) -> u64 {
        self.to_come.swap(number, Ordering::Relaxed)
    }

    /// A wait comes: whether it is the one.
    pub(super) fn comes(&self) -> bool {
        let before = self
            .to_come
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |to_come| {
                to_come.checked_sub(1)
            });
        before == Ok(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wait_is_left_out_and_no_other() {
        let waits = LeftOut::default();
        assert!(!waits.comes());
        assert_eq!(waits.order(3), 0);
        assert_eq!([waits.comes(), waits.comes()], [false, false]);
        assert_eq!(waits.order(2), 1);
        assert_eq!(
            [waits.comes(), waits.comes(), waits.comes()],
            [false, true, false]
        );
        assert_eq!(waits.order(0), 0);
    }
}

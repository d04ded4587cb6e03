//! Vector clocks: who knows of whose work.
//!
//! An actor is the host (all its threads together, because a hand-over between them cannot be seen) or one stream.
//! Each counts its own steps; a clock says, for every actor, up to which step its work is known to be over. A step is
//! before an operation exactly when the operation's clock has reached it.

/// The host's place in every clock. A stream's place is its slot plus one.
pub(super) const HOST: usize = 0;

/// One step of one actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) actor: usize,
    pub(super) time: u64,
}

impl Step {
    /// Whether whoever has this clock comes after this step.
    pub(super) fn is_before(self, clock: &Clock) -> bool {
        clock.time(self.actor) >= self.time
    }
}

/// The last step of each actor that is known to be over; actors that are not listed are at zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Clock(Vec<u64>);

impl Clock {
    pub(super) fn time(&self, actor: usize) -> u64 {
        self.0.get(actor).copied().unwrap_or(0)
    }

    /// Moves one actor on; a clock never goes back.
    pub(super) fn reach(&mut self, step: Step) {
        if self.0.len() <= step.actor {
            self.0.resize(step.actor + 1, 0);
        }
        let time = &mut self.0[step.actor];
        *time = (*time).max(step.time);
    }

    /// Learns all that `other` knows.
    pub(super) fn join(&mut self, other: &Clock) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// Keeps only what `other` knows too.
    pub(super) fn meet(&mut self, other: &Clock) {
        self.0.truncate(other.0.len());
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).min(*theirs);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clock(times: &[u64]) -> Clock {
        Clock(times.to_vec())
    }

    #[test]
    fn join_takes_the_later_step_of_each_actor() {
        let mut joined = clock(&[3, 1]);
        joined.join(&clock(&[2, 4, 7]));
        assert_eq!(joined, clock(&[3, 4, 7]));
    }

    #[test]
    fn meet_takes_the_earlier_step_of_each_actor() {
        let mut met = clock(&[3, 1, 9]);
        met.meet(&clock(&[2, 4]));
        assert_eq!(met, clock(&[2, 1]));
        assert_eq!(met.time(2), 0);
    }

    #[test]
    fn a_step_is_before_the_clocks_that_have_reached_it() {
        let step = Step { actor: 2, time: 5 };
        assert!(!step.is_before(&clock(&[9, 9])));
        assert!(!step.is_before(&clock(&[9, 9, 4])));
        assert!(step.is_before(&clock(&[0, 0, 5])));
    }
}

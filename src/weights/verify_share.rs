//! Which share of later reads is verified, and what that costs a step. Pure: no clock, no thread.

use std::time::Duration;

/// Of a step's time, so much may verifying take under [`VerifyShare::Auto`].
const COST_MAX: f64 = 0.03;

/// One thread verifies. Where it is busy for more of a step's time than this, steps wait for it.
const BUSY_MAX: f64 = 0.8;

/// The share never falls below this one: each group still has its turn within some twenty steps.
const SHARE_MIN: f64 = 0.05;

/// The share grows again by this factor at most from one step to the next, and falls at once.
const GROWTH: f64 = 1.25;

/// The share of later reads that is verified.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum VerifyShare {
    /// All; where that takes more than `COST_MAX` of steps, fewer.
    Auto,
    /// From 0 (none, and none is recorded) to 1.
    Fixed(f64),
}

/// What is known of a step after it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StepCost {
    /// From its beginning to its end.
    pub(super) step: Duration,
    /// In which computation waited for weights: processors are free then.
    pub(super) waited: Duration,
    /// Processor time that verifying took meanwhile.
    pub(super) verifying: Duration,
    /// Processors that this process may use, all of which compute.
    pub(super) processors: u32,
}

impl StepCost {
    /// The share of the step's time in which the thread that verifies was busy.
    fn busy(self) -> f64 {
        let step = self.step.as_secs_f64();
        if step > 0.0 {
            self.verifying.as_secs_f64() / step
        } else {
            0.0
        }
    }

    /// The share of the step's time that verifying has added at most: what did not fit into the waiting was taken from
    /// processors that would have computed.
    fn ratio(self) -> f64 {
        let processors = f64::from(self.processors.max(1));
        let idle = self.waited.as_secs_f64() * processors;
        let taken = (self.verifying.as_secs_f64() - idle).max(0.0);
        let step = self.step.as_secs_f64() * processors;
        if step > 0.0 { taken / step } else { 0.0 }
    }
}

impl VerifyShare {
    /// Whether anything is verified at all.
    pub(super) fn is_on(self) -> bool {
        match self {
            VerifyShare::Auto => true,
            VerifyShare::Fixed(share) => share > 0.0,
        }
    }

    pub(super) fn at_first(self) -> f64 {
        match self {
            VerifyShare::Auto => 1.0,
            VerifyShare::Fixed(share) => share,
        }
    }

    /// The share of the next step's reads, after a step at `share` has cost so much.
    pub(super) fn after(self, share: f64, cost: StepCost) -> f64 {
        if let VerifyShare::Fixed(fixed) = self {
            return fixed;
        }
        // What fits below each bound, if verifying takes time in proportion.
        let below = |max: f64, now: f64| {
            if now > 0.0 { share * max / now } else { 1.0 }
        };
        below(COST_MAX, cost.ratio())
            .min(below(BUSY_MAX, cost.busy()))
            .min(share * GROWTH)
            .clamp(SHARE_MIN, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(step: f64, waited: f64, verifying: f64) -> StepCost {
        StepCost {
            step: Duration::from_secs_f64(step),
            waited: Duration::from_secs_f64(waited),
            verifying: Duration::from_secs_f64(verifying),
            processors: 2,
        }
    }

    #[track_caller]
    fn check(share: f64, cost: StepCost, expected: f64) {
        let after = VerifyShare::Auto.after(share, cost);
        assert!((after - expected).abs() < 1e-9, "{after}, not {expected}");
    }

    #[test]
    fn all_reads_are_verified_while_that_costs_little() {
        assert_eq!(VerifyShare::Auto.at_first(), 1.0);
        // 3 % of two processors for ten seconds are 0.6.
        check(1.0, cost(10.0, 0.0, 0.5), 1.0);
        check(1.0, cost(10.0, 0.0, 0.6), 1.0);
        // While computation waits, verifying takes nothing from it.
        check(1.0, cost(10.0, 5.0, 7.9), 1.0);
        check(1.0, cost(0.0, 0.0, 0.0), 1.0);
    }

    #[test]
    fn the_share_falls_to_what_may_be_spent_and_no_further() {
        check(1.0, cost(10.0, 0.0, 1.2), 0.5);
        check(1.0, cost(10.0, 0.1, 1.4), 0.5);
        check(0.5, cost(10.0, 0.0, 1.2), 0.25);
        check(1.0, cost(1.0, 0.0, 2.0), SHARE_MIN);
    }

    /// Then the time in which steps wait is the time that verifying takes.
    #[test]
    fn the_thread_that_verifies_is_not_what_steps_wait_for() {
        check(1.0, cost(1.0, 0.9, 1.0), 0.8);
        check(0.5, cost(1.0, 0.9, 0.8), 0.5);
    }

    #[test]
    fn the_share_grows_again_step_by_step() {
        check(0.5, cost(10.0, 0.0, 0.3), 0.625);
        check(0.5, cost(10.0, 0.0, 0.55), 0.5 * 0.6 / 0.55);
        check(0.5, cost(10.0, 3.0, 1.0), 0.625);
        check(0.9, cost(10.0, 3.0, 1.0), 1.0);
    }

    #[test]
    fn a_share_that_was_given_stays() {
        let fixed = VerifyShare::Fixed(0.3);
        assert_eq!(fixed.after(0.3, cost(1.0, 0.0, 2.0)), 0.3);
        assert!(fixed.is_on() && !VerifyShare::Fixed(0.0).is_on());
    }
}

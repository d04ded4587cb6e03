//! How often something is tried again, and after what pause.

use super::client::Trouble;
use super::part::has_bytes;
use super::{Limits, PullError};
use std::path::Path;
use std::time::Duration;

/// Tries one after the other that came to nothing.
pub(super) struct Tries {
    limits: Limits,
    failed: u32,
}

/// What to say before the next one, and how long to wait for it.
#[derive(Debug)]
pub(super) struct NextTry {
    pub(super) text: String,
    pub(super) pause: Duration,
}

/// Pauses double up to here.
const PAUSE_MAX: Duration = Duration::from_secs(30);

impl Tries {
    pub(super) fn new(limits: Limits) -> Tries {
        Tries { limits, failed: 0 }
    }

    /// Whether to try again. `reached` is whether the server has sent something before: a host that is not there is a wrong
    /// name, one that was there a network that comes back.
    ///
    /// # Errors
    ///
    /// It does not help, or was tried often enough. `part` is the file that grows, where there is one.
    pub(super) fn next(
        &mut self,
        trouble: Trouble,
        reached: bool,
        part: Option<&Path>,
    ) -> Result<NextTry, PullError> {
        let (reason, wait) = match trouble {
            Trouble::Final(error) => return Err(error),
            Trouble::Unreachable(reason) if !reached => return Err(PullError::Refused(reason)),
            Trouble::Unreachable(reason) => (reason, None),
            Trouble::Passing { reason, wait } => (reason, wait),
        };
        self.failed += 1;
        if self.failed >= self.limits.tries {
            return Err(PullError::GaveUp {
                reason,
                tries: self.failed,
                part: part.filter(|part| has_bytes(part)).map(Path::to_owned),
            });
        }
        let doublings = (self.failed - 1).min(16);
        let pause = self
            .limits
            .pause
            .saturating_mul(1 << doublings)
            .min(PAUSE_MAX);
        let pause = pause.max(wait.unwrap_or_default());
        Ok(NextTry {
            text: format!(
                "{reason}; next try in {:.1} s ({} of {})",
                pause.as_secs_f64(),
                self.failed + 1,
                self.limits.tries
            ),
            pause,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_tries_end() {
        let limits = Limits {
            tries: 8,
            ..Limits::default()
        };
        let mut tries = Tries::new(limits);
        let mut next = |wait: u64| {
            let wait = Some(Duration::from_secs(wait));
            let reason = "why".to_owned();
            let trouble = Trouble::Passing { reason, wait };
            tries
                .next(trouble, false, None)
                .map(|next| next.pause.as_secs())
        };
        let pauses: Vec<u64> = [0, 0, 0, 50, 0, 0, 0]
            .map(|wait| next(wait).unwrap())
            .into();
        assert_eq!(pauses, [1, 2, 4, 50, 16, 30, 30]);
        let error = next(0).unwrap_err().to_string();
        assert!(
            error.contains("8 tries") && error.contains("why"),
            "{error}"
        );
    }

    #[test]
    fn what_was_never_reached_is_not_tried_again() {
        let next = |reached| {
            let trouble = Trouble::Unreachable("no host".to_owned());
            Tries::new(Limits::default()).next(trouble, reached, None)
        };
        assert!(matches!(next(false), Err(PullError::Refused(_))));
        assert!(next(true).is_ok());
    }
}

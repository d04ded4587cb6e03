//! How far something long is: a bar on standard error that is rewritten in place on a terminal, a line every few seconds
//! elsewhere.

use super::stderr::{erase_bar, say, show_bar};
use std::cell::RefCell;
use std::io::IsTerminal;
use std::time::{Duration, Instant};
use strata::config::{LogLevel, format_bytes};
use strata::weights::LoadProgress;

const BAR_PERIOD: Duration = Duration::from_millis(100);
const LINE_PERIOD: Duration = Duration::from_secs(5);
/// Of the bar alone. With what stands beside it, less than the 80 columns of a small terminal.
const BAR_COLUMNS: usize = 20;

/// Bytes done of bytes in all.
pub(super) struct Progress {
    /// As in "loading".
    verb: &'static str,
    is_terminal: bool,
    began: Instant,
    /// Bytes that were there when it began.
    base: u64,
    /// When something was shown last, since then.
    shown: Option<Duration>,
}

impl Progress {
    pub(super) fn new(verb: &'static str) -> Progress {
        Progress {
            verb,
            is_terminal: std::io::stderr().is_terminal(),
            began: Instant::now(),
            base: 0,
            shown: None,
        }
    }

    /// Of something that goes on after so many bytes.
    pub(super) fn after(verb: &'static str, base: u64) -> Progress {
        Progress {
            base,
            ..Progress::new(verb)
        }
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Shows it where it is time to; `elsewhere` takes the line that is for no terminal. A `total` of 0 is not known.
    pub(super) fn show(&mut self, done: u64, total: u64, elsewhere: impl FnOnce(&str)) {
        match self.line_at(self.elapsed(), done, total) {
            Some(line) if self.is_terminal => show_bar(&line),
            Some(line) => elsewhere(&line),
            None => {}
        }
    }

    /// What to show at a time since the beginning, if anything.
    fn line_at(&mut self, elapsed: Duration, done: u64, total: u64) -> Option<String> {
        let (period, last) = match self.is_terminal {
            true => (BAR_PERIOD, self.shown),
            // A line of the log is for what takes longer than anybody waits for without one.
            false => (LINE_PERIOD, Some(self.shown.unwrap_or_default())),
        };
        if last.is_some_and(|last| elapsed.saturating_sub(last) < period) {
            return None;
        }
        self.shown = Some(elapsed);
        let verb = self.verb;
        let share = (done as f64 / total.max(1) as f64).min(1.0);
        let (percent, rate) = (100.0 * share, rate(done.saturating_sub(self.base), elapsed));
        let has_total = total > 0 || done == 0;
        let (done, total) = (format_bytes(done), format_bytes(total));
        Some(match self.is_terminal {
            _ if !has_total => format!("{verb}: {done}, {rate}"),
            true => {
                let filled = "#".repeat((share * BAR_COLUMNS as f64) as usize);
                format!(
                    "{verb} [{filled:-<BAR_COLUMNS$}] {percent:3.0} %, {done} of {total}, {rate}"
                )
            }
            false => format!("{verb}: {done} of {total} ({percent:.0} %), {rate}"),
        })
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        erase_bar();
    }
}

fn rate(bytes: u64, time: Duration) -> String {
    match gigabytes_per_second(bytes, time) {
        // Networks and slow drives.
        rate if 0.0 < rate && rate < 0.1 => format!("{:.1} MB/s", rate * 1e3),
        rate => format!("{rate:.2} GB/s"),
    }
}

fn gigabytes_per_second(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / 1e9 / time.as_secs_f64().max(1e-9)
}

/// Shows how far a model's loading is, and at its end what it came to. On a terminal that is for people and not the log's,
/// which `generate` and `bench` keep short; with a log of errors alone there is no bar.
pub(super) struct LoadingProgress {
    progress: RefCell<Progress>,
    shows_bar: bool,
}

impl LoadingProgress {
    pub(super) fn new(log: LogLevel) -> LoadingProgress {
        let progress = Progress::new("loading");
        LoadingProgress {
            shows_bar: progress.is_terminal && !matches!(log, LogLevel::Off | LogLevel::Error),
            progress: RefCell::new(progress),
        }
    }

    pub(super) fn hear(&self, now: LoadProgress) {
        let (done, total) = (now.loaded_bytes, now.total_bytes);
        let mut progress = self.progress.borrow_mut();
        if done < total {
            if self.shows_bar || !progress.is_terminal {
                progress.show(done, total, |line| tracing::info!("{line}"));
            }
        } else if total > 0 {
            let line = loaded(total, progress.elapsed());
            match self.shows_bar {
                true => say(format_args!("{line}")),
                false => tracing::info!("{line}"),
            }
        }
    }
}

fn loaded(bytes: u64, time: Duration) -> String {
    format!(
        "loaded {} in {:.1} s ({:.2} GB/s)",
        format_bytes(bytes),
        time.as_secs_f64(),
        gigabytes_per_second(bytes, time)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn progress(is_terminal: bool) -> Progress {
        Progress {
            is_terminal,
            ..Progress::new("loading")
        }
    }

    /// What is shown at these milliseconds, with so many tenths of 10 GiB done.
    fn shown(is_terminal: bool, times: &[(u64, u64)]) -> Vec<String> {
        let mut progress = progress(is_terminal);
        let at = |&(milliseconds, tenths): &(u64, u64)| {
            progress.line_at(Duration::from_millis(milliseconds), tenths * GIB, 10 * GIB)
        };
        times.iter().filter_map(at).collect()
    }

    #[test]
    fn a_bar_moves_ten_times_a_second() {
        let times = [(0, 0), (50, 1), (100, 2), (199, 5), (200, 10)];
        assert_eq!(
            shown(true, &times),
            [
                "loading [--------------------]   0 %, 0 B of 10.00 GiB, 0.00 GB/s",
                "loading [####----------------]  20 %, 2.00 GiB of 10.00 GiB, 21.47 GB/s",
                "loading [####################] 100 %, 10.00 GiB of 10.00 GiB, 53.69 GB/s",
            ]
        );
        assert!(shown(true, &times).iter().all(|line| line.len() < 80));
    }

    #[test]
    fn a_log_hears_of_it_every_few_seconds() {
        let times = [(0, 0), (4_999, 1), (5_000, 1), (9_000, 5), (11_000, 6)];
        assert_eq!(
            shown(false, &times),
            [
                "loading: 1.00 GiB of 10.00 GiB (10 %), 0.21 GB/s",
                "loading: 6.00 GiB of 10.00 GiB (60 %), 0.59 GB/s",
            ]
        );
    }

    #[test]
    fn what_has_no_size_and_what_grew_show_too() {
        let mut progress = progress(true);
        let line = progress.line_at(Duration::ZERO, 0, 0).unwrap();
        assert!(line.contains(" 0 %"), "{line}");
        let line = progress.line_at(Duration::from_secs(1), 3, 2).unwrap();
        assert!(line.contains("100 %"), "{line}");
    }

    #[test]
    fn what_comes_from_a_network_is_slow_and_may_have_no_end() {
        let at = |progress: &mut Progress, done: u64, total: u64| {
            progress.is_terminal = true;
            progress
                .line_at(Duration::from_secs(10), done, total)
                .unwrap()
        };
        let mut progress = Progress::after("fetching", 3 * GIB);
        let line = at(&mut progress, 3 * GIB + 500_000_000, 4 * GIB);
        assert!(line.ends_with("3.47 GiB of 4.00 GiB, 50.0 MB/s"), "{line}");
        let mut progress = Progress::new("fetching");
        let line = at(&mut progress, 2 * GIB, 0);
        assert_eq!(line, "fetching: 2.00 GiB, 0.21 GB/s");
    }

    #[test]
    fn the_end_says_how_much_how_long_and_how_fast() {
        assert_eq!(
            loaded(24 * GIB / 10, Duration::from_millis(1_777)),
            "loaded 2.40 GiB in 1.8 s (1.45 GB/s)"
        );
    }
}

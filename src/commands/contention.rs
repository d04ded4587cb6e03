//! Whether this process had the processors while it measured: the kernel counts how long each thread was ready to run
//! and did not.

use std::collections::HashMap;
use std::path::Path;

/// Nanoseconds of each thread since it started: it ran, and it waited for a processor.
type Times = HashMap<String, [u64; 2]>;

/// The threads as they were when it began.
pub(super) struct Contention {
    before: Times,
}

impl Contention {
    pub(super) fn begin() -> Contention {
        Contention {
            before: times(Path::new("/proc/self/task")),
        }
    }

    /// The share of the time since then that the threads that are here now waited, of what they would have run; `None`
    /// where the kernel does not say, or nothing ran.
    pub(super) fn share(&self) -> Option<f64> {
        waited(&self.before, &times(Path::new("/proc/self/task")))
    }
}

/// As the kernel tells them: <https://docs.kernel.org/scheduler/sched-stats.html#proc-pid-schedstat>.
fn times(tasks: &Path) -> Times {
    let entries = std::fs::read_dir(tasks).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let text = std::fs::read_to_string(entry.path().join("schedstat")).ok()?;
            let mut numbers = text.split_whitespace().map(str::parse);
            let (ran, waited) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
            Some((
                entry.file_name().to_string_lossy().into_owned(),
                [ran, waited],
            ))
        })
        .collect()
}

fn waited(before: &Times, after: &Times) -> Option<f64> {
    let mut sums = [0; 2];
    for (thread, now) in after {
        let then = before.get(thread).copied().unwrap_or_default();
        for index in 0..2 {
            sums[index] += now[index].saturating_sub(then[index]);
        }
    }
    let [ran, waited] = sums.map(|nanoseconds| nanoseconds as f64);
    (ran > 0.0).then(|| waited / (ran + waited))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_of_what_threads_would_have_run() {
        let folder = tempfile::tempdir().unwrap();
        let write = |thread: &str, text: &str| {
            std::fs::create_dir_all(folder.path().join(thread)).unwrap();
            std::fs::write(folder.path().join(thread).join("schedstat"), text).unwrap();
        };
        write("1", "1000 500 7\n");
        write("2", "0 0 0\n");
        write("3", "no numbers\n");
        let before = times(folder.path());
        assert_eq!(before.len(), 2);
        assert_eq!(waited(&before, &before), None);
        write("1", "1600 600 8\n");
        write("2", "100 0 0\n");
        write("4", "50 150 0\n");
        // 600 + 100 + 50 ran, 100 + 150 waited.
        assert_eq!(waited(&before, &times(folder.path())), Some(0.25));
        assert!(times(Path::new("/none")).is_empty());
    }
}

//! Looks once a second at how much memory is left, and warns before the kernel ends the process without a word: once for
//! each shortage, with what the process was doing, what it holds beside what the plan says, what most likely is the cause,
//! and what to try first. A thread of its own: it sleeps, reads files of the kernel, and owns nothing.

use super::memory_report::{Holding, MemoryView};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;
use strata::config::{EarlierKills, FreeMemory, earlier_kills, format_bytes, free_host_memory};
use strata::memory::Phase;
use strata::placement::{Plan, Tier};

const PERIOD: Duration = Duration::from_secs(1);
/// Below this much memory left it is short: so little may go between two looks, and the kernel needs some to give more.
const RESERVE_BYTES: u64 = 64 << 20;
/// Of a large limit, and of one so small that the constant would be most of what `auto` leaves.
const RESERVE_SHARE: u64 = 100;
const RESERVE_SHARE_MAX: u64 = 16;
/// What the process may hold beyond its plan before that, and not another program, is what is suspected.
const OUTSIDE_USUAL_BYTES: u64 = 256 << 20;
/// Items of the overhead that a warning names.
const ITEMS_MAX: usize = 3;

/// Watches until it is dropped.
pub(crate) struct MemoryWatch {
    /// Dropped to end the thread.
    end: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl MemoryWatch {
    /// A system that gives no thread for it is served without.
    pub(super) fn start(view: Arc<MemoryView>) -> MemoryWatch {
        let (end, ended) = sync_channel(0);
        let thread = std::thread::Builder::new()
            .name("memory watch".to_owned())
            .spawn(move || {
                let mut shortage = Shortage::default();
                while ended.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                    // Where the kernel does not tell there is nothing to watch.
                    if let Ok(free) = free_host_memory()
                        && shortage.begins(free)
                    {
                        let phase = Phase::now();
                        tracing::warn!("{}", warning(phase, free, &view.holding()));
                    }
                }
            });
        let thread = thread
            .inspect_err(|error| tracing::warn!("memory is not watched: start a thread: {error}"))
            .ok();
        MemoryWatch {
            end: Some(end),
            thread,
        }
    }
}

impl Drop for MemoryWatch {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            // A panic in it has been reported when it happened.
            let _ = thread.join();
        }
    }
}

/// What should stay free.
fn reserve(limit: u64) -> u64 {
    (limit / RESERVE_SHARE)
        .max(RESERVE_BYTES)
        .min(limit / RESERVE_SHARE_MAX)
}

/// Whether memory is short; it is no more when twice the reserve is free.
#[derive(Debug, Default)]
struct Shortage(bool);

impl Shortage {
    /// Whether a shortage begins with what is free now.
    fn begins(&mut self, free: FreeMemory) -> bool {
        let reserve = reserve(free.limit);
        if free.bytes < reserve {
            return !std::mem::replace(&mut self.0, true);
        }
        self.0 &= free.bytes < 2 * reserve;
        false
    }
}

/// The likeliest cause, and what to try first.
fn advice(phase: Phase, holding: &Holding) -> (&'static str, &'static str) {
    let usual = holding.planned.saturating_add(OUTSIDE_USUAL_BYTES);
    match phase {
        Phase::Decoding(_) | Phase::Serving if holding.resident <= usual => (
            "another program on the machine or in the control group, for this process holds little beside its plan",
            "see what has grown (`ps aux --sort=-rss`) and end or bound it; a smaller --host-memory leaves it more",
        ),
        Phase::Decoding(_) | Phase::Serving => (
            "what this process holds beside its plan: many clients, long prompts or answers at once",
            "give a smaller --parallel or --queue, or a smaller --host-memory, which leaves more of a reserve",
        ),
        _ => (phase.likeliest_cause(), phase.first_action()),
    }
}

fn warning(phase: Phase, free: FreeMemory, holding: &Holding) -> String {
    let (cause, action) = advice(phase, holding);
    let mut outside = holding.outside.clone();
    outside.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let items: Vec<String> = outside
        .iter()
        .filter(|(_, bytes)| *bytes > 0)
        .take(ITEMS_MAX)
        .map(|(what, bytes)| format!("{} {what}", format_bytes(*bytes)))
        .collect();
    let items = match items.as_slice() {
        [] => String::new(),
        items => format!(" (outside the budgets: {})", items.join(", ")),
    };
    format!(
        "memory runs out while {phase}: {} of {} are left ({}), less than the reserve of {}; this process holds {}{items}, \
         and its plan says {}; most likely {cause}; first {action}",
        format_bytes(free.bytes),
        format_bytes(free.limit),
        free.limited_by,
        format_bytes(reserve(free.limit)),
        format_bytes(holding.resident),
        format_bytes(holding.planned),
    )
}

/// Says that memory has run out here before, once, at start.
pub(super) fn warn_of_earlier_kills(plan: &Plan) {
    if let Some(kills) = earlier_kills() {
        tracing::warn!("{}", of_earlier_kills(&kills, plan.arena_bytes(Tier::Host)));
    }
}

fn of_earlier_kills(kills: &EarlierKills, host_bytes: u64) -> String {
    let processes = match kills.count {
        1 => "1 process of this control group has".to_owned(),
        count => format!("{count} processes of this control group have"),
    };
    format!(
        "{processes} been ended for lack of memory ({}); where strata was among them, first give a smaller --host-memory (this \
         plan takes {}) or raise the group's limit",
        kills.file.display(),
        format_bytes(host_bytes)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;

    fn free(bytes: u64, limit: u64) -> FreeMemory {
        FreeMemory {
            bytes,
            limit,
            limited_by: "cgroup v2 limit",
        }
    }

    #[test]
    fn a_reserve_is_a_share_of_large_and_of_small_limits() {
        for (limit, expected) in [
            (64 * GIB, 64 * GIB / 100),
            (2 * GIB, 64 * MIB),
            (GIB, 64 * MIB),
            (160 * MIB, 10 * MIB),
            (0, 0),
        ] {
            assert_eq!(reserve(limit), expected, "{limit}");
        }
    }

    #[test]
    fn each_shortage_is_told_once() {
        let mut shortage = Shortage::default();
        let looks = [
            (500, false),
            (63, true),
            (10, false),
            // Hardly more than the reserve: the same shortage.
            (100, false),
            (60, false),
            (128, false),
            (63, true),
            (0, false),
        ];
        for (index, (mebibytes, expected)) in looks.into_iter().enumerate() {
            let begins = shortage.begins(free(mebibytes * MIB, 2 * GIB));
            assert_eq!(begins, expected, "look {index}");
        }
    }

    fn holding(resident: u64, planned: u64) -> Holding {
        Holding {
            resident,
            planned,
            outside: vec![
                ("tokenizer and vocabulary", 20 * MIB),
                ("chat template", 0),
                ("activations, requests and connections", 900 * MIB),
            ],
        }
    }

    #[test]
    fn a_warning_has_the_figures_the_cause_and_what_to_do() {
        let as_planned = holding(5 * GIB, 5 * GIB);
        let grown = holding(7 * GIB, 5 * GIB);
        for (phase, holding, parts) in [
            (
                Phase::Loading,
                &as_planned,
                ["while loading", "budgets", "--host-memory"],
            ),
            (
                Phase::FirstStep(512),
                &grown,
                ["first step, 512", "reserve", "--step-width"],
            ),
            (
                Phase::Prompt(64),
                &grown,
                ["step, 64 tokens", "activations", "--step-width"],
            ),
            (
                Phase::Serving,
                &as_planned,
                ["while serving", "another program", "ps aux"],
            ),
            (
                Phase::Decoding(3),
                &grown,
                ["while decoding", "clients", "--parallel"],
            ),
        ] {
            let line = warning(phase, free(50 * MIB, 8 * GIB), holding);
            let figures = [
                "50.00 MiB of 8.00 GiB are left (cgroup v2 limit)",
                "reserve of 81.92 MiB",
                "900.00 MiB activations, requests and connections, 20.00 MiB tokenizer",
                "its plan says 5.00 GiB",
            ];
            for part in figures.iter().chain(&parts) {
                assert!(line.contains(part), "{line:?} lacks {part:?}");
            }
            assert!(!line.contains("chat template"), "{line}");
        }
        let before_the_arenas = Holding {
            outside: Vec::new(),
            ..as_planned
        };
        let line = warning(Phase::Loading, free(1, GIB), &before_the_arenas);
        assert!(line.contains("holds 5.00 GiB, and"), "{line}");
    }

    #[test]
    fn earlier_kills_come_with_their_source_and_what_to_do() {
        let kills = |count| EarlierKills {
            count,
            file: "/sys/fs/cgroup/memory.events".into(),
        };
        let one = of_earlier_kills(&kills(1), 3 * GIB);
        for part in ["1 process of", "memory.events", "3.00 GiB", "--host-memory"] {
            assert!(one.contains(part), "{one}");
        }
        assert!(of_earlier_kills(&kills(7), 0).starts_with("7 processes of"));
    }

    #[test]
    fn a_watch_ends_when_it_is_dropped() {
        let (end, ended) = sync_channel(0);
        let thread = std::thread::spawn(move || {
            assert_eq!(
                ended.recv_timeout(Duration::from_secs(600)),
                Err(RecvTimeoutError::Disconnected)
            );
        });
        drop(MemoryWatch {
            end: Some(end),
            thread: Some(thread),
        });
    }
}

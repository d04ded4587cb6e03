//! A model is computed while its storage misbehaves: logits are equal to the bit to those without faults, or the step
//! fails with file, offset and group in the message, and the next step computes as if nothing had been. Wrong bits are in
//! `flipped_bits.rs`.

#[path = "support/faults.rs"]
mod faults;
#[path = "support/models.rs"]
mod models;
#[path = "support/run.rs"]
mod run;

use faults::{assert_names_the_read, model, placements, reference, step};
use run::settings;
use std::cell::Cell;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use strata::kernels::ComputePool;
use strata::memory::{FaultControl, Faults, FaultyReader, Limits};
use strata::metrics::Metrics;
use strata::model::{LoadedModel, PlannedModel, StepError, places};
use strata::placement::PlanRequest;
use strata::weights::{Loading, ModelFile};

fn load(path: &Path, request: &PlanRequest, seed: u64) -> (LoadedModel, FaultControl) {
    let faulty = faults::load(path, request, seed, settings());
    (faulty.loaded, faulty.control)
}

/// Only a broken program takes so long.
const FOREVER: Duration = Duration::from_secs(60);

#[test]
fn short_reads_interruptions_and_reordering_change_nothing() {
    let (_folder, path) = model();
    let expected = reference(&path);
    for (name, request) in placements() {
        for seed in 0..3 {
            let (mut loaded, control) = load(&path, &request, seed);
            control.set(Faults {
                short_reads: 0.4,
                interruptions: 0.2,
                reorder: true,
                ..Faults::default()
            });
            for _ in 0..4 {
                let logits = step(&mut loaded, &|| false).unwrap();
                assert!(logits == expected, "{name}, seed {seed}: other logits");
            }
        }
    }
}

/// Every place of the file fails once, as it is read.
#[test]
fn errors_that_pass_change_nothing_and_are_counted() {
    let (_folder, path) = model();
    let expected = reference(&path);
    let everything = (0..std::fs::metadata(&path).unwrap().len()).step_by(512);
    for (name, request) in placements() {
        let mut faulty = faults::load(&path, &request, 5, settings());
        assert_eq!(faulty.retries("error"), 0);
        faulty.control.set(Faults {
            broken_once: everything.clone().collect(),
            reorder: true,
            ..Faults::default()
        });
        for _ in 0..3 {
            let logits = step(&mut faulty.loaded, &|| false).unwrap();
            assert!(logits == expected, "{name}: other logits");
        }
        let retries = faulty.retries("error");
        assert!(retries > 3, "{name}: {retries} tries");
        assert_eq!(faulty.retries("short"), 0);
        let reads = (faulty.loaded.traffic)().reads;
        assert_eq!(reads.retries[0], retries, "{name}");
    }
}

#[test]
fn stalls_change_nothing_but_the_time() {
    let (_folder, path) = model();
    let expected = reference(&path);
    for (name, request) in placements() {
        let (mut loaded, control) = load(&path, &request, 6);
        control.set(Faults {
            stalls: 0.02,
            short_reads: 0.2,
            reorder: true,
            ..Faults::default()
        });
        let began = Instant::now();
        let mut steps = 0;
        // Until a read has stalled.
        while steps < 3 || (began.elapsed() < Duration::from_millis(100) && steps < 1000) {
            let logits = step(&mut loaded, &|| false).unwrap();
            assert!(logits == expected, "{name}: other logits");
            steps += 1;
        }
    }
}

#[test]
fn errors_fail_steps_by_name_and_the_next_step_is_right() {
    let (_folder, path) = model();
    let expected = reference(&path);
    for (name, request) in placements() {
        for seed in 0..2 {
            let (mut loaded, control) = load(&path, &request, seed);
            for _ in 0..6 {
                // Most pass with a further try.
                control.set(Faults {
                    errors: 0.4,
                    short_reads: 0.3,
                    reorder: true,
                    ..Faults::default()
                });
                match step(&mut loaded, &|| false) {
                    Ok(logits) => assert!(logits == expected, "{name}, seed {seed}"),
                    Err(error) => {
                        assert_names_the_read(&error);
                        control.set(Faults::default());
                        let logits = step(&mut loaded, &|| false).unwrap();
                        assert!(logits == expected, "{name}, seed {seed}: after {error}");
                    }
                }
            }
            // With luck none has failed. Where nothing can be read, what was read ahead does not last.
            control.set(Faults {
                errors: 1.0,
                ..Faults::default()
            });
            let failure = (0..10).find_map(|_| match step(&mut loaded, &|| false) {
                Ok(logits) => {
                    assert!(logits == expected, "{name}, seed {seed}");
                    None
                }
                Err(error) => Some(error),
            });
            let failure = failure.unwrap_or_else(|| panic!("{name}, seed {seed}: no step failed"));
            assert_names_the_read(&failure);
            control.set(Faults::default());
            let logits = step(&mut loaded, &|| false).unwrap();
            assert!(logits == expected, "{name}, seed {seed}: after {failure}");
        }
    }
}

#[test]
fn a_place_that_cannot_be_read_fails_every_step_until_it_can() {
    let (_folder, path) = model();
    let expected = reference(&path);
    let middle = std::fs::metadata(&path).unwrap().len() / 2;
    for (name, request) in placements() {
        let (mut loaded, control) = load(&path, &request, 1);
        // Wide enough to meet something that streams.
        let broken: Vec<u64> = (0..64).map(|i| middle + 4096 * i).collect();
        control.change(|faults| faults.broken = broken);
        // What was read ahead is good.
        let _ = step(&mut loaded, &|| false);
        for _ in 0..5 {
            assert_names_the_read(&step(&mut loaded, &|| false).unwrap_err());
        }
        control.set(Faults::default());
        assert!(step(&mut loaded, &|| false).unwrap() == expected, "{name}");

        control.change(|faults| faults.shrunk_to = Some(middle));
        let _ = step(&mut loaded, &|| false);
        let error = step(&mut loaded, &|| false).unwrap_err();
        assert!(error.to_string().contains("shrank"), "{error}");
        control.set(Faults::default());
        assert!(step(&mut loaded, &|| false).unwrap() == expected, "{name}");
    }
}

/// As on a network file system, whose server has forgotten the file.
#[test]
fn a_stale_handle_fails_one_step_and_the_next_reads_through_another() {
    let (_folder, path) = model();
    let expected = reference(&path);
    let whole = std::fs::read(&path).unwrap();
    for (name, request) in placements() {
        let (mut loaded, control) = load(&path, &request, 7);
        let fails = |loaded: &mut LoadedModel| {
            control.change(|faults| faults.stale = true);
            // What was read ahead is good.
            let error = (0..3).find_map(|_| step(loaded, &|| false).err());
            let error = error.unwrap_or_else(|| panic!("{name}: no step failed"));
            assert_names_the_read(&error);
        };
        for _ in 0..2 {
            fails(&mut loaded);
            assert!(step(&mut loaded, &|| false).unwrap() == expected, "{name}");
        }
        // It cannot be opened: each step fails, until it can. What is there then has other times than before.
        fails(&mut loaded);
        std::fs::remove_file(&path).unwrap();
        for _ in 0..3 {
            assert_names_the_read(&step(&mut loaded, &|| false).unwrap_err());
        }
        std::fs::write(&path, &whole).unwrap();
        assert!(step(&mut loaded, &|| false).unwrap() == expected, "{name}");
    }
}

/// After a step, the next one's first groups are read ahead. A failure that nobody waits for is old when the next
/// request comes.
#[test]
fn a_failure_while_nobody_computes_does_not_fail_the_next_step() {
    let (_folder, path) = model();
    let expected = reference(&path);
    let everything = (0..std::fs::metadata(&path).unwrap().len()).step_by(512);
    for (name, request) in placements() {
        let (mut loaded, control) = load(&path, &request, 4);
        let leases = Cell::new(0);
        let count = || {
            leases.set(leases.get() + 1);
            false
        };
        assert!(step(&mut loaded, &count).unwrap() == expected, "{name}");
        let leases = leases.get();
        let mut survived = 0;
        // Where the last groups rest in memory, the last reads of a step are long before its end.
        for attempt in 0..3 * leases {
            let (asked, completed) = (Cell::new(0), Cell::new(None));
            // Nothing can be read from this lease on, and no read is tried again.
            let break_towards_the_end = || {
                asked.set(asked.get() + 1);
                if asked.get() == leases - attempt % leases {
                    control.change(|faults| {
                        faults.broken = everything.clone().collect();
                        faults.error_code = Some(libc::EBADF);
                    });
                    completed.set(Some(control.completed()));
                }
                false
            };
            let outcome = step(&mut loaded, &break_towards_the_end);
            if let (Ok(logits), Some(before)) = (outcome, completed.get()) {
                assert!(logits == expected, "{name}");
                // One may have been under way when they broke; the second has failed.
                let two_ended = || control.completed() >= before + 2;
                let until = Instant::now() + Duration::from_millis(10);
                while !two_ended() && Instant::now() < until {
                    std::thread::yield_now();
                }
                survived += u32::from(two_ended());
            }
            while control.submitted() != control.completed() {
                std::thread::yield_now();
            }
            control.set(Faults::default());
            let logits = step(&mut loaded, &|| false);
            assert!(
                logits.as_ref() == Ok(&expected),
                "{name}: {:?}",
                logits.err()
            );
        }
        assert!(
            survived > 0,
            "{name}: no read failed beside a step that succeeded"
        );
    }
}

/// Nothing completes: a step that waits for a group hears all the same that nobody wants it, and of what it has asked for
/// only the requests are read that are under way.
#[test]
fn a_cancelled_wait_ends_with_the_requests_in_flight() {
    const IN_FLIGHT: u64 = 2;
    let few = |reader: FaultyReader| {
        reader.with_limits(Limits {
            block_bytes: 512,
            in_flight_max: IN_FLIGHT as u32,
            request_bytes_max: 16 << 10,
            border_bytes: 64 << 10,
        })
    };
    let (_folder, path) = model();
    let expected = reference(&path);
    for (name, request) in placements() {
        let mut faulty = faults::load_with(&path, &request, 4, settings(), few);
        let control = faulty.control.clone();
        // The thread that gives the reads up may be held up for longer than what nobody wants takes: then once more.
        let stayed = (0..20).any(|_| {
            control.change(|faults| faults.held = true);
            let (cancelled, heard) = (AtomicBool::new(false), AtomicBool::new(false));
            let asked = || {
                let cancelled = cancelled.load(Ordering::Relaxed);
                heard.fetch_or(cancelled, Ordering::Relaxed);
                cancelled
            };
            let (outcome, submitted) = std::thread::scope(|scope| {
                let watch = scope.spawn(|| {
                    while control.submitted() - control.completed() < IN_FLIGHT {
                        std::thread::yield_now();
                    }
                    let submitted = control.submitted();
                    cancelled.store(true, Ordering::Relaxed);
                    let until = Instant::now() + FOREVER;
                    while !heard.load(Ordering::Relaxed) && Instant::now() < until {
                        std::thread::yield_now();
                    }
                    let heard = heard.load(Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(20));
                    control.set(Faults::default());
                    assert!(heard, "{name}: the wait does not ask");
                    submitted
                });
                let outcome = step(&mut faulty.loaded, &asked);
                (outcome, watch.join().unwrap())
            });
            assert_eq!(outcome, Err(StepError::Cancelled), "{name}");
            let after = control.submitted();
            assert_eq!(after, control.completed(), "{name}");
            let next = step(&mut faulty.loaded, &|| false);
            assert!(next.unwrap() == expected, "{name}");
            after == submitted
        });
        assert!(stayed, "{name}: what nobody wants is read");
    }
}

#[test]
fn cancelled_steps_leave_nothing_behind() {
    let (_folder, path) = model();
    let expected = reference(&path);
    for (name, request) in placements() {
        let (mut loaded, control) = load(&path, &request, 2);
        control.set(Faults {
            short_reads: 0.3,
            reorder: true,
            // Reads are in flight when the step is given up.
            read_time: Duration::from_micros(50),
            ..Faults::default()
        });
        for leases in 0..40 {
            let asked = Cell::new(0);
            let cancelled = || {
                asked.set(asked.get() + 1);
                asked.get() > leases
            };
            match step(&mut loaded, &cancelled) {
                Err(error) => {
                    assert_eq!(error, StepError::Cancelled);
                    // Everything in flight has landed: memory that is used again is nobody else's.
                    assert_eq!(control.submitted(), control.completed(), "{name}, {leases}");
                }
                Ok(logits) => assert!(logits == expected, "{name}, {leases}"),
            }
            if leases % 5 == 0 {
                assert!(
                    step(&mut loaded, &|| false).unwrap() == expected,
                    "{name}, {leases}"
                );
            }
        }
    }
}

/// A model that cannot be read while it is loaded says which group could not.
#[test]
fn errors_while_loading_name_the_group() {
    let (_folder, path) = model();
    let size = std::fs::metadata(&path).unwrap().len();
    for (name, request) in placements() {
        let planned = PlannedModel::open(&path, &request).unwrap();
        for broken in (0..size).step_by(64 << 10) {
            let faults = Faults {
                broken: (broken..broken + (64 << 10)).step_by(512).collect(),
                ..Faults::default()
            };
            let reader = FaultyReader::open(&places(&planned.gguf), broken, faults).unwrap();
            let file = ModelFile::Through(Box::new(reader));
            let loading = Loading {
                settings: settings(),
                metrics: &Metrics::new(),
                progress: &|_| true,
            };
            let loaded = planned.load_from(file, ComputePool::new(1), &loading);
            if let Err(error) = loaded {
                let error = error.to_string();
                assert!(
                    error.contains("load ") && error.contains("faulty.gguf"),
                    "{name}: {error}"
                );
            }
        }
    }
}

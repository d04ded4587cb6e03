//! Bits of the model file are wrong in what reads return, after the first one: no token is computed from them. With all
//! reads verified, logits are equal to the bit to those without faults, or the step fails and says what to do.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/faults.rs"]
mod faults;
#[path = "support/flip.rs"]
mod flip;
#[path = "support/models.rs"]
mod models;
#[path = "support/run.rs"]
mod run;

use faults::{Faulty, PROMPT, assert_names_the_read, model, placements, reference, step};
use flip::flip;
use run::{all_resident, settings};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;
use strata::gguf::Gguf;
use strata::memory::{Faults, FaultyReader};
use strata::metrics::Metrics;
use strata::model::{LoadedModel, OpenError, PlannedModel, StepError, places};
use strata::placement::{PlanRequest, Tier};
use strata::weights::{Loading, ModelFile, VerifyShare, WeightsSettings};

/// Loaded, and computed once: every group that streams, and every row of the prompt, has been read.
fn load(path: &Path, request: &PlanRequest, expected: &[u32]) -> Faulty {
    let mut faulty = faults::load(path, request, 3, settings());
    assert!(step(&mut faulty.loaded, &|| false).unwrap() == expected);
    faulty
}

/// Two steps: what was read ahead of the first is good. Every one that succeeds is right; says why the last did not.
fn two_steps(faulty: &mut Faulty, expected: &[u32], name: &str) -> Option<String> {
    let mut last = None;
    for _ in 0..2 {
        last = match step(&mut faulty.loaded, &|| false) {
            Ok(logits) => {
                assert!(logits == expected, "{name}: a wrong bit was computed with");
                None
            }
            Err(error) => {
                assert_names_the_read(&error);
                Some(error.to_string())
            }
        };
    }
    last
}

/// The groups of a message: "attention", "feed-forward", ...
fn kind(message: &str) -> &'static str {
    let kinds = [
        "attention",
        "feed-forward",
        "output head",
        "token embedding",
    ];
    let found = kinds.into_iter().find(|kind| message.contains(kind));
    found.unwrap_or_else(|| panic!("{message}"))
}

#[test]
fn a_bit_that_stays_wrong_fails_steps_until_it_is_right() {
    let (_folder, path) = model();
    let expected = reference(&path);
    let size = std::fs::metadata(&path).unwrap().len();
    for (name, request) in placements() {
        let mut faulty = load(&path, &request, &expected);
        let mut kinds = BTreeSet::new();
        for place in 0..60 {
            let offset = size * (2 * place + 1) / 120;
            faulty
                .control
                .change(|faults| faults.flipped = vec![offset]);
            // A place that is read in no step, or of which no weight is made, harms nothing.
            if let Some(message) = two_steps(&mut faulty, &expected, name) {
                assert!(message.contains("other bytes than at first"), "{message}");
                assert!(message.contains("restart the server"), "{message}");
                kinds.insert(kind(&message));
                assert!(faulty.retries("checksum") > 0);
            }
            faulty.control.set(Faults::default());
            let logits = step(&mut faulty.loaded, &|| false);
            assert!(logits.as_ref() == Ok(&expected), "{name}: {logits:?}");
        }
        assert!(kinds.len() >= 2, "{name}: only {kinds:?} failed");
    }
}

#[test]
fn a_bit_that_is_wrong_once_is_read_again() {
    let (_folder, path) = model();
    let expected = reference(&path);
    let size = std::fs::metadata(&path).unwrap().len();
    for (name, request) in placements() {
        let mut faulty = load(&path, &request, &expected);
        let before = faulty.retries("checksum");
        faulty.control.set(Faults {
            flipped_once: (0..60).map(|place| size * (2 * place + 1) / 120).collect(),
            reorder: true,
            ..Faults::default()
        });
        assert_eq!(two_steps(&mut faulty, &expected, name), None);
        let retries = faulty.retries("checksum") - before;
        assert!(retries > 2, "{name}: {retries} reads were tried again");
        assert!(faulty.verified_bytes() > 0, "{name}");
    }
}

#[test]
fn bits_that_are_wrong_at_random_give_no_token() {
    let (_folder, path) = model();
    let expected = reference(&path);
    for (name, request) in placements() {
        let mut faulty = load(&path, &request, &expected);
        let mut failed = 0;
        for chance in [0.02, 0.02, 0.02, 0.5, 1.0] {
            faulty.control.set(Faults {
                flipped_bits: chance,
                short_reads: 0.1,
                errors: 0.02,
                reorder: true,
                ..Faults::default()
            });
            failed += u32::from(two_steps(&mut faulty, &expected, name).is_some());
        }
        assert!(failed > 0, "{name}: no step failed");
        faulty.control.set(Faults::default());
        let logits = step(&mut faulty.loaded, &|| false);
        assert!(logits.as_ref() == Ok(&expected), "{name}: {logits:?}");
    }
}

#[test]
fn a_wrong_bit_in_an_embedding_row_gives_no_token() {
    let (_folder, path) = model();
    let expected = reference(&path);
    let gguf = Gguf::open(&path).unwrap();
    let (_, embedding) = gguf.tensor("token_embd.weight").unwrap();
    let mut gathered = 0;
    for (name, request) in placements() {
        let planned = PlannedModel::open(&path, &request).unwrap();
        if planned.plan.gather.rows == 0 {
            continue;
        }
        gathered += 1;
        let mut faulty = load(&path, &request, &expected);
        for id in PROMPT {
            let row = embedding.file_offset + u64::from(id) * embedding.row_bytes();
            for byte in [0, embedding.row_bytes() / 2, embedding.row_bytes() - 1] {
                let offset = row + byte;
                faulty
                    .control
                    .change(|faults| faults.flipped = vec![offset]);
                let message = two_steps(&mut faulty, &expected, name);
                // The row of another embedding group may rest in memory.
                if let Some(message) = message {
                    assert!(message.contains("token embedding"), "{message}");
                    assert!(message.contains("other bytes than at first"), "{message}");
                    let before = faulty.retries("checksum");
                    faulty.control.set(Faults {
                        flipped_once: vec![offset],
                        ..Faults::default()
                    });
                    assert_eq!(two_steps(&mut faulty, &expected, name), None);
                    assert_eq!(faulty.retries("checksum"), before + 1);
                } else {
                    panic!("{name}: row {id}, byte {byte} harms nothing");
                }
                faulty.control.set(Faults::default());
            }
        }
    }
    assert!(gathered > 0, "no plan has the embedding on storage");
}

/// For comparison, and so that the tests above can fail.
#[test]
fn where_nothing_is_verified_wrong_bits_are_computed_with_and_never_crash() {
    let (_folder, path) = model();
    let expected = reference(&path);
    for (name, request) in placements() {
        let unverified = WeightsSettings {
            verify_share: VerifyShare::Fixed(0.0),
            ..settings()
        };
        let mut faulty = faults::load(&path, &request, 3, unverified);
        let loaded = &mut faulty.loaded;
        let mut wrong = 0;
        faulty.control.change(|faults| faults.flipped_bits = 0.8);
        for _ in 0..10 {
            match step(loaded, &|| false) {
                Ok(logits) => wrong += u32::from(logits != expected),
                Err(StepError::Numeric(_)) => wrong += 1,
                Err(error) => panic!("{name}: {error}"),
            }
        }
        assert!(wrong > 0, "{name}: wrong bits change nothing");
        faulty.control.set(Faults::default());
        // What was read ahead has wrong bits yet.
        let _ = step(&mut faulty.loaded, &|| false);
        assert!(
            step(&mut faulty.loaded, &|| false).unwrap() == expected,
            "{name}"
        );
        assert_eq!(faulty.verified_bytes(), 0);
    }
}

#[test]
fn a_share_of_reads_is_verified() {
    let (_folder, path) = model();
    for (name, request) in placements() {
        let bytes_of = |share| {
            let settings = WeightsSettings {
                verify_share: VerifyShare::Fixed(share),
                ..settings()
            };
            let mut faulty = faults::load(&path, &request, 3, settings);
            // Reads are chosen by chance: many come near to the share.
            for _ in 0..80 {
                step(&mut faulty.loaded, &|| false).unwrap();
            }
            faulty.verified_bytes() as f64
        };
        let (all, some) = (bytes_of(1.0), bytes_of(0.25));
        assert!(
            some > 0.15 * all && some < 0.35 * all,
            "{name}: {some} of {all}"
        );
    }
}

/// A model with a folder for checksums, which every run of these tests has for itself.
fn load_with(
    checksums: &Path,
    path: &Path,
    request: &PlanRequest,
    faults: Faults,
) -> Result<LoadedModel, OpenError> {
    let planned = PlannedModel::open(path, request).unwrap();
    let reader = FaultyReader::open(&places(&planned.gguf), 1, faults).unwrap();
    let loading = Loading {
        settings: WeightsSettings {
            checksums: Some(checksums.to_owned()),
            ..settings()
        },
        metrics: &Metrics::new(),
        progress: &|_| true,
    };
    let pool = strata::kernels::ComputePool::new(2);
    planned.load_from(ModelFile::Through(Box::new(reader)), pool, &loading)
}

#[test]
fn a_file_that_was_changed_under_its_time_is_refused_by_a_later_run() {
    let (folder, path) = model();
    let checksums = folder.path().join("checksums");
    let expected = reference(&path);
    let resident = PlanRequest {
        map_file: false,
        ..all_resident()
    };
    let gguf = Gguf::open(&path).unwrap();
    let offset_of = |name: &str| gguf.tensor(name).unwrap().1.file_offset + 5;
    let start = |request: &PlanRequest| {
        let mut loaded = load_with(&checksums, &path, request, Faults::default())?;
        Ok::<_, OpenError>(step(&mut loaded, &|| false))
    };
    let side_files = || std::fs::read_dir(&checksums).unwrap().count();

    assert!(start(&resident).unwrap().unwrap() == expected);
    assert_eq!(side_files(), 1);
    assert!(start(&resident).unwrap().unwrap() == expected);
    for (tensor, group) in [
        ("blk.2.ffn_up.weight", "layer 2 feed-forward"),
        ("token_embd.weight", "token embedding"),
        ("output_norm.weight", "norms and biases"),
    ] {
        flip(&path, offset_of(tensor));
        let error = start(&resident).unwrap_err().to_string();
        for part in [
            group,
            "faulty.gguf",
            "byte ",
            "earlier run",
            "delete ",
            checksums.to_str().unwrap(),
        ] {
            assert!(error.contains(part), "{error:?} lacks {part:?}");
        }
        // As the message says.
        let (_, named) = error.split_once("delete ").unwrap();
        let (named, _) = named.split_once(" and start").unwrap();
        std::fs::remove_file(named).unwrap();
        assert!(start(&resident).unwrap().is_ok());
        flip(&path, offset_of(tensor));
        assert!(start(&resident).is_err());
        std::fs::remove_file(named).unwrap();
        assert!(start(&resident).unwrap().unwrap() == expected);
    }

    // A file whose time has changed is another file.
    flip(&path, offset_of("blk.2.ffn_up.weight"));
    let touched = File::options().write(true).open(&path).unwrap();
    touched.set_modified(std::time::SystemTime::now()).unwrap();
    assert!(start(&resident).unwrap().is_ok());
    assert_eq!(side_files(), 1);
}

/// Groups and rows that stream have their first read in a step.
#[test]
fn first_reads_of_a_later_run_are_verified_in_steps_too() {
    let (folder, path) = model();
    let expected = reference(&path);
    let size = std::fs::metadata(&path).unwrap().len();
    for (index, (name, request)) in placements().into_iter().enumerate() {
        let checksums = folder.path().join(index.to_string());
        let load = |faults| load_with(&checksums, &path, &request, faults);
        let mut first = load(Faults::default()).unwrap();
        assert!(step(&mut first, &|| false).unwrap() == expected);
        drop(first);
        let (mut at_load, mut in_step) = (0, 0);
        for place in 0..30 {
            let faults = Faults {
                flipped: vec![size * (2 * place + 1) / 60],
                ..Faults::default()
            };
            let message = match load(faults) {
                Err(error) => {
                    at_load += 1;
                    error.to_string()
                }
                Ok(mut loaded) => match step(&mut loaded, &|| false) {
                    Ok(logits) => {
                        assert!(logits == expected, "{name}: a wrong bit was computed with");
                        continue;
                    }
                    Err(error) => {
                        in_step += 1;
                        error.to_string()
                    }
                },
            };
            assert!(message.contains("earlier run"), "{name}: {message}");
        }
        assert!(at_load > 0 && in_step > 0, "{name}: {at_load}, {in_step}");
    }
}

/// Another plan cuts other groups: it finds nothing to compare with, and leaves what is there.
#[test]
fn another_plan_starts_beside_the_checksums_of_the_first() {
    let (folder, path) = model();
    let checksums = folder.path().join("checksums");
    let expected = reference(&path);
    let plans = placements();
    let wide = PlanRequest {
        slice_bytes: Some(256 << 10),
        host_budget: 2 << 20,
        ..plans[3].1.clone()
    };
    for request in [&plans[3].1, &wide, &plans[3].1] {
        let mut loaded = load_with(&checksums, &path, request, Faults::default()).unwrap();
        for _ in 0..2 {
            assert!(step(&mut loaded, &|| false).unwrap() == expected);
        }
    }
    let planned = PlannedModel::open(&path, &plans[3].1).unwrap();
    assert!(planned.plan.weight_home_bytes(Tier::Host) > 0);
}

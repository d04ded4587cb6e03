//! A token's logits are bit-identical under every plan, ring size, reader, device, chunking and company.

use crate::models::{RandomOptions, random};
use crate::run::{MIB, Sequence, all_resident, load, settings, smallest_budgets, smollm2};
use crate::synthesised;
use std::path::Path;
use strata::gguf::{Architecture, TensorType};
use strata::memory::ReaderChoice;
use strata::model::{Batch, LoadedModel, PlannedModel};
use strata::placement::{DeviceKind, ExecutorChoice, PlanRequest, Tier};
use strata::weights::Loading;

/// A way to place a model.
struct Placement {
    name: &'static str,
    request: PlanRequest,
    reader: ReaderChoice,
    /// The tiers that must be home to weights for the placement to show anything.
    homes: &'static [Tier],
}

/// Placements of a model whose budgets are these: the smallest that leave something on every tier.
fn placements(device_budget: u64, host_budget: u64, context: u32) -> Vec<Placement> {
    let base = PlanRequest {
        context,
        map_file: false,
        step_width: None,
        ..all_resident()
    };
    placements_of(base, device_budget, host_budget, MIB / 2)
}

/// The same of a request, with these as the small slices.
fn placements_of(
    base: PlanRequest,
    device_budget: u64,
    host_budget: u64,
    small_slices: u64,
) -> Vec<Placement> {
    use Tier::{Device, Host, Storage};
    let cpu = |host_budget| PlanRequest {
        host_budget,
        ..base.clone()
    };
    let emulated = |device_budget, host_budget, executor| PlanRequest {
        device: DeviceKind::Emulated,
        device_budget: Some(device_budget),
        host_budget,
        executor,
        ..base.clone()
    };
    let both = device_budget + host_budget;
    let place = |name, request, reader, homes| Placement {
        name,
        request,
        reader,
        homes,
    };
    vec![
        place(
            "cpu, copied, all resident",
            cpu(8 << 30),
            ReaderChoice::Auto,
            &[Host],
        ),
        place(
            "cpu, most streams",
            cpu(both),
            ReaderChoice::Auto,
            &[Host, Storage],
        ),
        place(
            "cpu, two ring entries, pread",
            PlanRequest {
                ring_entries: Some(2),
                ..cpu(both)
            },
            ReaderChoice::Pread,
            &[Host, Storage],
        ),
        place(
            "cpu, small slices, seven ring entries",
            PlanRequest {
                slice_bytes: Some(small_slices),
                ring_entries: Some(7),
                ..cpu(both)
            },
            ReaderChoice::Auto,
            &[Host, Storage],
        ),
        place(
            "emulated, three tiers, streamed to the device",
            emulated(device_budget, host_budget, ExecutorChoice::Device),
            ReaderChoice::Auto,
            &[Device, Host, Storage],
        ),
        place(
            "emulated, three tiers, the host computes",
            emulated(device_budget, host_budget, ExecutorChoice::Host),
            ReaderChoice::Auto,
            &[Device, Host, Storage],
        ),
        place(
            "emulated, three tiers, the host computes narrow steps",
            emulated(device_budget, host_budget, ExecutorChoice::HostUpTo(20)),
            ReaderChoice::Auto,
            &[Device, Host, Storage],
        ),
        place(
            "emulated, three tiers, two ring entries, pread",
            PlanRequest {
                ring_entries: Some(2),
                ..emulated(device_budget, host_budget, ExecutorChoice::Device)
            },
            ReaderChoice::Pread,
            &[Device, Host, Storage],
        ),
        place(
            "emulated, host large",
            emulated(device_budget, 4 << 30, ExecutorChoice::Device),
            ReaderChoice::Auto,
            &[Device, Host],
        ),
        place(
            "emulated, all on the device",
            emulated(4 << 30, host_budget, ExecutorChoice::Device),
            ReaderChoice::Auto,
            &[Device],
        ),
    ]
}

fn open(path: &Path, placement: &Placement) -> LoadedModel {
    let planned = PlannedModel::open(path, &placement.request)
        .unwrap_or_else(|error| panic!("{}: {error}", placement.name));
    for &tier in placement.homes {
        assert!(
            planned.plan.weight_home_bytes(tier) > 0,
            "{}: nothing rests on {tier}",
            placement.name
        );
    }
    let settings = strata::weights::WeightsSettings {
        reader: placement.reader,
        ..settings()
    };
    planned
        .load(
            strata::kernels::ComputePool::new(2),
            &Loading {
                settings,
                metrics: &strata::metrics::Metrics::new(),
                progress: &|_| true,
            },
        )
        .unwrap_or_else(|error| panic!("{}: {error}", placement.name))
}

/// Groups that rest in memory are multiplied by in the run of the one before them: a step asks for fewer leases than it
/// has groups, and gives the same bits.
#[test]
fn groups_that_rest_in_memory_are_leased_together() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    random(&path, &RandomOptions::default());
    let resident = |slice_bytes| Placement {
        name: "all resident",
        request: PlanRequest {
            map_file: false,
            slice_bytes: Some(slice_bytes),
            ..all_resident()
        },
        reader: ReaderChoice::Auto,
        homes: &[Tier::Host],
    };
    let leases = |slice_bytes| {
        let placement = resident(slice_bytes);
        let planned = PlannedModel::open(&path, &placement.request).expect("a plan");
        let mut loaded = open(&path, &placement);
        let mut sequence = Sequence::new(0, 1);
        let batch = Batch {
            runs: vec![sequence.run(&[1, 2, 3], true)],
        };
        let asked = std::cell::Cell::new(0);
        let cancelled = || {
            asked.set(asked.get() + 1);
            false
        };
        let logits = loaded.model.forward(&batch, &cancelled).expect("a step");
        (planned.plan.groups.len(), asked.get(), logits)
    };
    let (few_groups, _, expected) = leases(128 << 20);
    let (groups, leases, found) = leases(4 << 10);
    assert!(groups > 3 * few_groups, "{groups} and {few_groups} groups");
    assert!(3 * leases < groups, "{leases} leases of {groups} groups");
    assert!(found == expected, "other logits");
}

/// A prompt of pseudo-random tokens.
fn prompt(length: usize, vocabulary: u32, seed: u32) -> Vec<u32> {
    (0..length as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed * 97)) % vocabulary)
        .collect()
}

/// How a prompt is computed.
#[derive(Clone, Copy, Debug)]
struct Manner {
    chunk: usize,
    /// Another sequence takes part in every step.
    company: bool,
}

/// The bits of the logits of the prompt's last token and of three tokens forced after it.
fn logits(loaded: &mut LoadedModel, prompt: &[u32], manner: Manner) -> Vec<Vec<u32>> {
    let pages = (prompt.len() + 3).div_ceil(32) as u32;
    let mut sequence = Sequence::new(0, pages);
    let mut other = Sequence::new(pages, pages);
    let other_prompt: Vec<u32> = prompt.iter().rev().copied().collect();
    let mut outcome = Vec::new();
    let forced = [5, 11, 2];
    let chunks = prompt.chunks(manner.chunk).chain(forced.chunks(1));
    for (index, chunk) in chunks.enumerate() {
        let last = sequence.tokens.len() + chunk.len() >= prompt.len();
        let mut runs = Vec::new();
        // The other sequence stands before ours in one step and behind it in the next, one token or three wide.
        let beside = &other_prompt[other.tokens.len()..]
            [..[1, 3][index % 2].min(other_prompt.len() - other.tokens.len())];
        let ours = sequence.run(chunk, last);
        if manner.company && !beside.is_empty() {
            let theirs = other.run(beside, index % 3 == 0);
            runs.push(theirs);
            runs.insert(index % 2, ours);
        } else {
            runs.push(ours);
        }
        let position = runs
            .iter()
            .take_while(|run| run.tokens.as_ptr() != chunk.as_ptr())
            .filter(|run| run.wants_logits)
            .count();
        let rows = loaded.model.forward(&Batch { runs }, &|| false).unwrap();
        if last {
            assert!(rows[position].iter().all(|logit| logit.is_finite()));
            outcome.push(rows[position].iter().map(|logit| logit.to_bits()).collect());
        }
    }
    outcome
}

fn assert_same(reference: &[Vec<u32>], ours: &[Vec<u32>], what: &str) {
    assert_eq!(reference.len(), ours.len(), "{what}");
    for (token, (reference, ours)) in reference.iter().zip(ours).enumerate() {
        let differing = reference.iter().zip(ours).filter(|(a, b)| a != b).count();
        assert_eq!(
            differing,
            0,
            "{what}: {differing} of {} logits of token {token} differ",
            ours.len()
        );
    }
}

#[test]
fn smollm2_everywhere() {
    let path = smollm2();
    let prompt = prompt(520, 49_152, 1);
    let alone = |chunk| Manner {
        chunk,
        company: false,
    };
    let mapped = all_resident();
    let mut loaded = load(&path, &mapped, settings());
    let reference = logits(&mut loaded, &prompt, alone(512));
    for chunk in [1, 7, 64] {
        let ours = logits(&mut loaded, &prompt, alone(chunk));
        assert_same(&reference, &ours, &format!("mapped, chunks of {chunk}"));
    }
    for placement in placements(56 * MIB, 32 * MIB, 544) {
        let mut loaded = open(&path, &placement);
        for (chunk, company) in [(64, false), (512, false), (130, true)] {
            let ours = logits(&mut loaded, &prompt, Manner { chunk, company });
            let what = format!("{}, chunks of {chunk}, company: {company}", placement.name);
            assert_same(&reference, &ours, &what);
        }
    }
    // Chunks of one token read every streamed weight once a token: a shorter prompt does.
    let prompt = &prompt[..40];
    let reference = logits(&mut loaded, prompt, alone(512));
    for placement in placements(56 * MIB, 32 * MIB, 544) {
        let mut loaded = open(&path, &placement);
        for (chunk, company) in [(1, false), (7, true)] {
            let ours = logits(&mut loaded, prompt, Manner { chunk, company });
            let what = format!("{}, chunks of {chunk}, company: {company}", placement.name);
            assert_same(&reference, &ours, &what);
        }
    }
}

#[test]
fn every_architecture_everywhere() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.gguf");
    for architecture in Architecture::ALL {
        let options = RandomOptions {
            architecture,
            layers: 14,
            width: 256,
            heads: 4,
            kv_heads: 2,
            ffn: 512,
            kind: TensorType::Q4K,
            ..RandomOptions::default()
        };
        random(&path, &options);
        check_small(&path, architecture.name());
    }
}

/// Layers with a window keep so few pages that a prompt writes over its own several times.
#[test]
fn few_pages_for_windows_give_the_bits_of_many() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gemma3.gguf");
    let options = RandomOptions {
        architecture: Architecture::Gemma3,
        layers: 8,
        ..RandomOptions::default()
    };
    random(&path, &options);
    let with_steps_of = |step_width| PlanRequest {
        context: 480,
        step_width: Some(step_width),
        ..all_resident()
    };
    let pages = |request: &PlanRequest| {
        let planned = PlannedModel::open(&path, request).unwrap();
        let window = planned.plan.kv.window.unwrap();
        (window.sequences, window.pages_of_sequence)
    };
    let all = with_steps_of(512);
    // All of the context, and no more: the window of 24 positions and the step would have 18 pages.
    assert_eq!(pages(&all), (2, 15));
    let prompt = prompt(470, 256, 5);
    let alone = Manner {
        chunk: 470,
        company: false,
    };
    let reference = logits(&mut load(&path, &all, settings()), &prompt, alone);
    for (step_width, of_sequence) in [(40, 3), (16, 3), (9, 2), (4, 2)] {
        let request = with_steps_of(step_width);
        assert_eq!(pages(&request), (2, of_sequence), "steps of {step_width}");
        let mut loaded = load(&path, &request, settings());
        for company in [false, true] {
            // Company takes up to three tokens of a step.
            let chunk = step_width as usize - if company { 3 } else { 0 };
            let ours = logits(&mut loaded, &prompt, Manner { chunk, company });
            let what = format!("steps of {step_width}, company: {company}");
            assert_same(&reference, &ours, &what);
        }
    }
}

fn check_small(path: &Path, name: &str) {
    let base = PlanRequest {
        context: 160,
        map_file: false,
        step_width: Some(128),
        slice_bytes: Some(256 << 10),
        ..all_resident()
    };
    let budgets = |executor| {
        smallest_budgets(path, |device_budget, host_budget| PlanRequest {
            device: DeviceKind::Emulated,
            device_budget: Some(device_budget),
            host_budget,
            executor,
            ..base.clone()
        })
    };
    let prompt = prompt(120, 256, 3);
    let mut loaded = load(path, &base, settings());
    let alone = |chunk| Manner {
        chunk,
        company: false,
    };
    let reference = logits(&mut loaded, &prompt, alone(120));
    // Each executor asks for more on its own side.
    let (device, _) = budgets(ExecutorChoice::Device);
    let (_, host) = budgets(ExecutorChoice::Host);
    for placement in placements_of(base.clone(), device, host, 64 << 10) {
        let mut loaded = open(path, &placement);
        for (chunk, company) in [(120, false), (1, false), (7, true), (50, true)] {
            let ours = logits(&mut loaded, &prompt, Manner { chunk, company });
            let placement = placement.name;
            let what = format!("{name}, {placement}, chunks of {chunk}, company: {company}");
            assert_same(&reference, &ours, &what);
        }
    }
}

#[test]
fn a_model_of_a_billion_weights_everywhere() {
    let path = synthesised::tinyllama();
    let long = prompt(520, 32_000, 2);
    let short = &long[..20];
    let mut loaded = load(&path, &all_resident(), settings());
    let mut reference =
        |prompt: &[u32], chunk, company| logits(&mut loaded, prompt, Manner { chunk, company });
    let of_long = reference(&long, 512, false);
    assert_same(
        &of_long,
        &reference(&long, 64, true),
        "mapped, chunks of 64 in company",
    );
    assert_same(&of_long, &reference(&long, 7, false), "mapped, chunks of 7");
    let of_short = reference(short, 512, false);
    assert_same(
        &of_short,
        &reference(short, 1, true),
        "mapped, chunks of 1 in company",
    );
    for placement in placements(64 * MIB, 128 * MIB, 544) {
        let mut loaded = open(&path, &placement);
        // Chunks of one token read every streamed weight once a token: the short prompt does for small ones.
        for (prompt, expected, chunk, company) in [
            (&long[..], &of_long, 512, false),
            (&long[..], &of_long, 64, true),
            (short, &of_short, 7, true),
            (short, &of_short, 1, false),
        ] {
            let ours = logits(&mut loaded, prompt, Manner { chunk, company });
            let what = format!("{}, chunks of {chunk}, company: {company}", placement.name);
            assert_same(expected, &ours, &what);
        }
    }
}

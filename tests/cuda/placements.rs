//! On the device a token has the bits that it has on the host, under every plan, ring size, chunking and company, and for
//! every type of weights.

use crate::device::{Device, device};
use crate::models::{RandomOptions, VocabularyKind, random};
use crate::run::{MIB, Sequence, all_resident, load, root, settings, smallest_budgets, smollm2};
use std::path::Path;
use strata::gguf::{Architecture, TensorType, Value};
use strata::kernels::ComputePool;
use strata::metrics::Metrics;
use strata::model::{Batch, LoadedModel, PlannedModel};
use strata::placement::{DeviceKind, ExecutorChoice, PlanRequest, Tier};
use strata::weights::Loading;

pub(crate) const KIB: u64 = 1 << 10;

/// A way to place a model.
pub(crate) struct Placement {
    pub(crate) name: &'static str,
    pub(crate) request: PlanRequest,
    /// The tiers that must be home to weights for the placement to show anything.
    pub(crate) homes: &'static [Tier],
}

/// What a request for the device is made of: the reference's, without the mapping.
pub(crate) fn on_device(reference: &PlanRequest, device: u64, host: u64) -> PlanRequest {
    PlanRequest {
        device: DeviceKind::Cuda,
        device_budget: Some(device),
        host_budget: host,
        map_file: false,
        ..reference.clone()
    }
}

/// Placements of a small model: on one tier, on two and on all three.
fn placements(path: &Path, reference: &PlanRequest) -> Vec<Placement> {
    use Tier::{Device, Host, Storage};
    let place = |name, request, homes| Placement {
        name,
        request,
        homes,
    };
    let spread = |reference: &PlanRequest| {
        let (device, host) =
            smallest_budgets(path, |device, host| on_device(reference, device, host));
        on_device(reference, device, host)
    };
    let with_executor = |executor| PlanRequest {
        executor,
        ..reference.clone()
    };
    let streamed = spread(reference);
    vec![
        place(
            "all on the device",
            on_device(reference, 1 << 30, 1 << 30),
            &[Device],
        ),
        place("three tiers", streamed.clone(), &[Device, Host, Storage]),
        place(
            "two ring entries, host large",
            PlanRequest {
                ring_entries: Some(2),
                host_budget: 1 << 30,
                ..streamed
            },
            &[Device, Host],
        ),
        place(
            "three tiers, the host multiplies by what does not rest on the device",
            spread(&with_executor(ExecutorChoice::Host)),
            &[Device, Host, Storage],
        ),
        place(
            "three tiers, the host multiplies in narrow steps",
            spread(&with_executor(ExecutorChoice::HostUpTo(4))),
            &[Device, Host, Storage],
        ),
    ]
}

pub(crate) fn open(device: &Device, path: &Path, placement: &Placement) -> LoadedModel {
    let name = placement.name;
    let loading = Loading {
        settings: settings(),
        metrics: &Metrics::new(),
        progress: &|_| true,
    };
    plan(device, path, placement)
        .load(ComputePool::new(2), &loading)
        .unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Checks that the placement shows something.
pub(crate) fn plan(device: &Device, path: &Path, placement: &Placement) -> PlannedModel {
    let name = placement.name;
    let mut planned = PlannedModel::open(path, &placement.request)
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    for &tier in placement.homes {
        assert!(
            planned.plan.weight_home_bytes(tier) > 0,
            "{name}: nothing rests on {tier}:\n{}",
            planned.plan.report()
        );
    }
    planned.gpu = Some(device.gpu.clone());
    planned
}

/// The bits of the logits of the last tokens: a prompt in chunks, with another sequence beside it if asked, then tokens one
/// by one.
pub(crate) fn logits(
    loaded: &mut LoadedModel,
    prompt: &[u32],
    chunk: usize,
    company: bool,
) -> Vec<Vec<u32>> {
    let pages = (prompt.len() + 3).div_ceil(32) as u32;
    let mut ours = Sequence::new(0, pages);
    let mut other = Sequence::new(pages, pages);
    let mut outcome = Vec::new();
    let forced = [5, 11, 2];
    for chunk in prompt.chunks(chunk).chain(forced.chunks(1)) {
        let last = ours.tokens.len() + chunk.len() >= prompt.len();
        let mut runs = Vec::new();
        let beside = &prompt[other.tokens.len()..][..2.min(prompt.len() - other.tokens.len())];
        if company && !beside.is_empty() {
            runs.push(other.run(beside, false));
        }
        runs.push(ours.run(chunk, last));
        let rows = loaded.model.forward(&Batch { runs }, &|| false).unwrap();
        if last {
            outcome.push(rows[0].iter().map(|logit| logit.to_bits()).collect());
        }
    }
    outcome
}

#[track_caller]
pub(crate) fn assert_same(reference: &[Vec<u32>], ours: &[Vec<u32>], what: &str) {
    assert_eq!(reference.len(), ours.len(), "{what}");
    for (token, (reference, ours)) in reference.iter().zip(ours).enumerate() {
        let differing = reference.iter().zip(ours).filter(|(a, b)| a != b).count();
        let of = ours.len();
        assert_eq!(
            differing, 0,
            "{what}: {differing} of {of} logits of token {token} differ"
        );
    }
}

/// Pseudo-random tokens.
pub(crate) fn prompt(length: u32, vocabulary: u32) -> Vec<u32> {
    (0..length)
        .map(|i| i.wrapping_mul(2_654_435_761).wrapping_add(97) % vocabulary)
        .collect()
}

/// Where layers have windows, of 24 positions: one in three has none.
fn every_third_layer_sees_all(architecture: Architecture) -> Vec<(String, Value)> {
    match architecture {
        Architecture::Gemma3 => vec![(
            "gemma3.attention.sliding_window_pattern".to_owned(),
            3u32.into(),
        )],
        _ => Vec::new(),
    }
}

/// A small model, and its request.
fn small(architecture: Architecture, kind: TensorType, tied: bool, path: &Path) -> PlanRequest {
    let options = RandomOptions {
        architecture,
        metadata: every_third_layer_sees_all(architecture),
        layers: 3,
        width: 256,
        heads: 4,
        kv_heads: 2,
        ffn: 512,
        vocabulary: VocabularyKind::Spm,
        tied,
        kind,
        ..RandomOptions::default()
    };
    random(path, &options);
    PlanRequest {
        context: 96,
        step_width: Some(32),
        slice_bytes: Some(64 * KIB),
        ..all_resident()
    }
}

fn check_small(kind: TensorType, tied: bool) {
    check_architecture(Architecture::Llama, kind, tied);
}

fn check_architecture(architecture: Architecture, kind: TensorType, tied: bool) {
    let Some(device) = device() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.gguf");
    let reference = small(architecture, kind, tied, &path);
    let prompt = prompt(37, 256);
    let expected = logits(&mut load(&path, &reference, settings()), &prompt, 32, false);
    for placement in placements(&path, &reference) {
        let mut loaded = open(&device, &path, &placement);
        for (chunk, company) in [(32, false), (9, true), (1, false)] {
            let ours = logits(&mut loaded, &prompt, chunk, company);
            let (name, kind) = (architecture.name(), kind.name());
            let what = format!(
                "{name}, {kind}, {}, chunks of {chunk}, company: {company}",
                placement.name
            );
            device.assert_nothing_reported(&what);
            assert_same(&expected, &ours, &what);
        }
        drop(loaded);
        device.assert_nothing_reported(placement.name);
    }
}

#[test]
fn floats() {
    for kind in [TensorType::F32, TensorType::F16, TensorType::BF16] {
        check_small(kind, false);
    }
}

#[test]
fn blocks_of_32() {
    use TensorType::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
    for kind in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0] {
        check_small(kind, false);
    }
}

#[test]
fn blocks_of_256() {
    use TensorType::{Q2K, Q3K, Q4K, Q5K, Q6K};
    for kind in [Q2K, Q3K, Q4K, Q5K, Q6K] {
        check_small(kind, false);
    }
}

#[test]
fn a_tied_head() {
    check_small(TensorType::Q8_0, true);
}

#[test]
fn other_architectures() {
    for architecture in Architecture::ALL {
        if architecture != Architecture::Llama {
            check_architecture(architecture, TensorType::Q8_0, false);
        }
    }
}

#[test]
fn a_long_context() {
    check_long_context(&root().join("tests/data/tiny/llama.gguf"));
}

#[test]
fn a_long_context_of_which_most_layers_see_a_window() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gemma3.gguf");
    let options = RandomOptions {
        architecture: Architecture::Gemma3,
        metadata: every_third_layer_sees_all(Architecture::Gemma3),
        layers: 3,
        ..RandomOptions::default()
    };
    random(&path, &options);
    check_long_context(&path);
}

fn check_long_context(path: &Path) {
    let Some(device) = device() else { return };
    let reference = PlanRequest {
        context: 1536,
        parallel: 1,
        step_width: Some(8),
        ..all_resident()
    };
    let placement = Placement {
        name: "all on the device",
        request: on_device(&reference, 1 << 28, 1 << 28),
        homes: &[Tier::Device],
    };
    // What nobody has written is zeros on both, so the tokens before need not be computed. Split, and not, by the widths
    // and by the positions.
    let steps = |loaded: &mut LoadedModel| -> Vec<Vec<u32>> {
        let cases = [(1500, 1), (1490, 4), (1023, 1), (1022, 1), (1200, 5)];
        let far = cases.iter().map(|&(before, tokens)| {
            let mut sequence = Sequence::new(0, 48);
            sequence.tokens = vec![0; before];
            let logits = sequence.step(loaded, &prompt(tokens, 256));
            logits.iter().map(|logit| logit.to_bits()).collect()
        });
        let mut all: Vec<Vec<u32>> = far.collect();
        // Layers with a window have two pages: a prompt writes over them.
        all.extend(logits(loaded, &prompt(90, 256), 8, false));
        all
    };
    let expected = steps(&mut load(path, &reference, settings()));
    let ours = steps(&mut open(&device, path, &placement));
    device.assert_nothing_reported("a long context");
    assert_same(&expected, &ours, "a long context");
}

#[test]
fn smollm2_for_a_few_tokens() {
    let Some(device) = device() else { return };
    let path = smollm2();
    let reference = PlanRequest {
        context: 64,
        parallel: 1,
        step_width: Some(8),
        ..all_resident()
    };
    let prompt = prompt(5, 49_152);
    let mut on_host = load(&path, &reference, settings());
    let expected = logits(&mut on_host, &prompt, 8, false);
    let placement = Placement {
        name: "three tiers",
        request: on_device(&reference, 48 * MIB, 32 * MIB),
        homes: &[Tier::Device, Tier::Host, Tier::Storage],
    };
    let mut loaded = open(&device, &path, &placement);
    let ours = logits(&mut loaded, &prompt, 8, false);
    device.assert_nothing_reported("SmolLM2");
    assert_same(&expected, &ours, "SmolLM2");
}

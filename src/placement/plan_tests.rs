//! Tests of whole plans: what holds for every plan, over models, budgets and executors.

use super::planner::{GROUPS_MAX, plan_tensors};
use super::shapes::{Shape, request};
use super::*;
use crate::gguf::card::ShapeCard;
use crate::gguf::{Gguf, Hyperparameters, TensorInfo, TensorType};
use std::path::Path;

pub(super) type Index = (Vec<TensorInfo>, Hyperparameters);

pub(super) fn card(name: &str) -> Index {
    let gguf = card_file(name);
    let hyperparameters = Hyperparameters::from_gguf(&gguf).unwrap();
    (gguf.tensors, hyperparameters)
}

/// A shape card as a file's index.
pub(super) fn card_file(name: &str) -> Gguf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("models")
        .join(name);
    ShapeCard::open(&path).unwrap().index()
}

/// One of the tiny reference files.
fn tiny_file(name: &str) -> Index {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/tiny")
        .join(name);
    let gguf = Gguf::open(&path).unwrap();
    let hyperparameters = Hyperparameters::from_gguf(&gguf).unwrap();
    (gguf.tensors, hyperparameters)
}

pub(super) fn planned(index: &Index, request: &PlanRequest) -> Plan {
    let plan = plan_tensors(&index.0, &index.1, request).unwrap_or_else(|e| panic!("{e}"));
    check(&plan, &index.1, request);
    plan
}

pub(super) fn refused(index: &Index, request: &PlanRequest) -> Refusal {
    match plan_tensors(&index.0, &index.1, request) {
        Err(PlanError::DoesNotFit(refusal)) => *refusal,
        Err(error) => panic!("{error}"),
        Ok(plan) => panic!("expected a refusal, got\n{}", plan.report()),
    }
}

/// Everything that holds for any plan.
pub(super) fn check(plan: &Plan, model: &Hyperparameters, request: &PlanRequest) {
    assert_eq!(plan.groups.len(), plan.residences.len());
    let executes = |executor| move |residence: &Residence| residence.executor == executor;
    let homes_on = |tier: Tier| -> u64 {
        plan.iter()
            .filter(|(_, group, residence)| {
                residence.home == tier && group.kind != GroupKind::Small
            })
            .map(|(_, group, _)| group.home_bytes())
            .sum()
    };
    let small: u64 = plan
        .iter()
        .filter(|(_, group, _)| group.kind == GroupKind::Small)
        .map(|(_, group, _)| group.home_bytes())
        .sum();
    let scratch_of = |tier: Tier| -> u64 {
        let of_tier = plan.scratch.iter().filter(|item| item.tier == tier);
        of_tier.map(|item| item.bytes).sum()
    };
    let kv = plan.kv;
    assert_eq!(kv.page_tokens, 32);
    assert_eq!(
        u64::from(kv.pages),
        u64::from(plan.context.div_ceil(32)) * u64::from(plan.parallel)
    );
    check_window_pages(plan, model);
    let splits = [
        (Tier::Device, plan.device_split, plan.device_ring),
        (Tier::Host, Some(plan.host_split), plan.host_ring),
    ];
    for (tier, split, ring) in splits {
        let Some(split) = split else {
            assert_eq!(homes_on(tier), 0);
            assert_eq!(ring.entries, 0);
            continue;
        };
        assert!(split.claimed() <= split.budget, "{tier}: {split:?}");
        assert_eq!(split.weights, homes_on(tier) + small, "{tier}");
        assert_eq!(split.ring, ring.bytes(), "{tier}");
        assert!(split.scratch >= scratch_of(tier) && split.scratch < scratch_of(tier) + 4096);
        let kv_bytes = kv.bytes();
        if kv.tier == tier {
            assert!(split.kv >= kv_bytes && split.kv < kv_bytes + 4096);
        } else {
            assert_eq!(split.kv, 0);
        }
        for bytes in [split.weights, split.ring, split.kv, split.scratch] {
            assert_eq!(bytes % ARENA_ALIGNMENT, 0);
        }
    }

    // A ring exists where something streams, and what streams fits its entries.
    let check_ring = |ring: Ring, streamed: Vec<GroupId>| {
        assert_eq!(ring.entries > 0, !streamed.is_empty());
        assert_ne!(ring.entries, 1);
        for id in streamed {
            assert!(plan.group(id).entry_bytes <= ring.entry_bytes);
        }
    };
    check_ring(plan.host_ring, plan.streamed_from_storage().collect());
    check_ring(plan.device_ring, plan.streamed_over_link().collect());

    for (id, group, residence) in plan.iter() {
        match residence.home {
            Tier::Device => assert_eq!(residence.executor, Executor::Device),
            Tier::Host | Tier::Storage => {}
        }
        match group.kind {
            GroupKind::Small => assert_ne!(residence.home, Tier::Storage),
            GroupKind::Embedding => assert_ne!(residence.home, Tier::Device),
            _ => {}
        }
        // Loading goes through the ring or the staging entry.
        if residence.home == Tier::Device && group.kind != GroupKind::Small {
            let through = plan.host_ring.entry_bytes.max(plan.staging_bytes);
            assert!(
                group.entry_bytes <= through,
                "{id:?} loads through {through}"
            );
        }
    }
    match (request.device, request.executor) {
        (DeviceKind::Cpu, _) => assert!(plan.residences.iter().all(executes(Executor::Host))),
        (DeviceKind::Emulated | DeviceKind::Cuda, ExecutorChoice::Host) => {
            assert_eq!(plan.device_ring, Ring::default());
        }
        (DeviceKind::Emulated | DeviceKind::Cuda, _) => {
            let device = plan.iter().filter(|(_, group, _)| group.is_streamable());
            let mut executors = device.map(|(_, _, residence)| residence.executor);
            assert!(executors.all(|executor| executor == Executor::Device));
        }
    }
    let kind = if plan.tied_head {
        GroupKind::Head
    } else {
        GroupKind::Embedding
    };
    let gathers = plan
        .iter()
        .any(|(_, group, residence)| group.kind == kind && residence.home == Tier::Storage);
    assert_eq!(plan.gather.rows, if gathers { plan.step_width } else { 0 });

    // What is left over is of no use to any group that streams.
    if plan.host_ring.entries > 0 && plan.gather.rows > 0 && request.device == DeviceKind::Cpu {
        let smallest = plan
            .streamed_from_storage()
            .map(|id| plan.group(id).home_bytes())
            .min();
        assert!(plan.host_split.free() < smallest.unwrap());
    }
    for prediction in &plan.predictions {
        assert!(prediction.step_seconds.is_finite() && prediction.step_seconds >= 0.0);
        assert!(prediction.tokens_per_second.is_finite());
        assert!(
            prediction.limit_seconds <= prediction.step_seconds * (1.0 + 1e-9),
            "below the limit: {prediction:?}"
        );
    }
    let _ = (plan.report(), plan.report_json());
}

/// Layers with a window have the pages that steps of the plan's width write and read at once, and at most one more.
fn check_window_pages(plan: &Plan, model: &Hyperparameters) {
    let pages = plan.kv.window;
    assert_eq!(pages.is_some(), model.window.is_some());
    let (Some(pages), Some(window)) = (pages, model.window) else {
        return;
    };
    // From the last position of a page on: what the step's first token sees, and the other tokens.
    let positions = u64::from(window.positions) + u64::from(plan.step_width) - 1;
    let touched = (31 + positions - 1) / 32 + 1;
    let of_context = u64::from(plan.context.div_ceil(32));
    let of_sequence = u64::from(pages.pages_of_sequence);
    let what = format!("{pages:?} in steps of {}", plan.step_width);
    assert!(of_sequence >= touched.min(of_context), "{what}");
    assert!(of_sequence <= (touched + 1).min(of_context), "{what}");
    assert_eq!(pages.sequences, plan.parallel);
    let elements = u64::from(model.key_length + model.value_length);
    let heads_with_window: u32 = (0..model.layers as usize)
        .filter(|&layer| window.of_layer(layer).is_some())
        .map(|layer| model.head_count_kv[layer])
        .sum();
    let bytes = u64::from(heads_with_window) * elements * plan.kv.kind.element_bytes() * 32;
    assert_eq!(pages.page_bytes, bytes);
}

#[test]
fn smollm2_under_small_budgets_rests_on_all_three_tiers() {
    let plan = planned(
        &Shape::smollm2().index(),
        &request(Some(48 * MIB), 24 * MIB),
    );
    let total: u64 = plan.groups.iter().map(|group| group.weight_bytes).sum();
    for tier in [Tier::Device, Tier::Host, Tier::Storage] {
        let share = plan.weight_home_bytes(tier) as f64 / total as f64;
        assert!(share >= 0.10, "{tier} holds {share:.3} of the weights");
    }
    assert!(plan.step_width >= 16);
    // Three entries of the device's ring take about a quarter of what KV and scratch leave.
    let split = plan.device_split.unwrap();
    assert!(
        split.ring <= (split.budget - split.kv - split.scratch) / 3,
        "{split:?}"
    );
}

#[test]
fn a_model_of_1b_weights_plans_in_64_and_128_mib() {
    let plan = planned(
        &card("tinyllama-1.1b.toml"),
        &request(Some(64 * MIB), 128 * MIB),
    );
    for tier in [Tier::Device, Tier::Host, Tier::Storage] {
        assert!(plan.weight_home_bytes(tier) > 0, "{tier}");
    }
    // The embedding gives way first: its rows cost a short read each.
    let mut embedding = plan
        .iter()
        .filter(|(_, group, _)| group.kind == GroupKind::Embedding);
    assert!(embedding.all(|(_, _, residence)| residence.home == Tier::Storage));
}

#[test]
fn the_tiny_files_plan_whole_and_under_pressure() {
    for (name, tied) in [
        ("llama.gguf", false),
        ("llama-tied.gguf", true),
        ("llama-rope-factors.gguf", false),
        ("llama-rope-linear.gguf", false),
    ] {
        let index = tiny_file(name);
        let all: u64 = index.0.iter().map(|tensor| tensor.bytes).sum();
        // Slices of a few KiB make many groups of even these.
        let mut request = PlanRequest {
            context: 256,
            step_width: Some(16),
            slice_bytes: Some(16 << 10),
            ..request(Some(320 << 10), 256 << 10)
        };
        let plan = planned(&index, &request);
        assert_eq!(plan.tied_head, tied, "{name}");
        assert!(plan.unused.is_empty(), "{name}: {:?}", plan.unused);
        assert!(
            plan.storage_bytes_per_step() > 0,
            "{name}\n{}",
            plan.report()
        );
        assert!(plan.link_bytes_per_step() > 0, "{name}");
        let placed: u64 = [Tier::Device, Tier::Host, Tier::Storage]
            .iter()
            .map(|&tier| plan.weight_home_bytes(tier))
            .sum();
        assert_eq!(placed, all, "{name}");

        request = super::shapes::request(None, GIB);
        request.map_file = true;
        assert!(planned(&index, &request).mapped, "{name}");
    }
}

#[test]
fn attention_rests_on_the_device_before_feed_forward() {
    let mut request = request(Some(24 * GIB), 64 * GIB);
    request.context = 8192;
    request.device = DeviceKind::Cuda;
    request.executor = ExecutorChoice::Device;
    let hardware = include_str!("../../config/hardware/rtx-4090-desktop.toml");
    request.rates = HardwareCard::parse(hardware).unwrap().rates;
    let plan = planned(&card("llama-3.3-70b.toml"), &request);
    for (id, group, residence) in plan.iter() {
        if group.kind == GroupKind::Attention {
            assert_eq!(residence.home, Tier::Device, "{id:?}");
        }
    }
    assert_eq!(plan.storage_bytes_per_step(), 0);
    assert_eq!(plan.predictions[0].bound, Bound::Link);
    // 25 GB/s for what is missing: about 1.2 tokens a second, as in any card of this size.
    let missing = plan.link_bytes_per_step() as f64;
    let ideal = 25.0e9 / missing;
    let reached = plan.predictions[0].tokens_per_second;
    assert!(
        reached > 0.9 * ideal && reached <= 1.01 * ideal,
        "{reached} of {ideal}"
    );
}

#[test]
fn streamed_bytes_keep_to_their_share_at_every_point_of_the_step() {
    let index = card("llama-3.1-8b.toml");
    for (device, host) in [(None, 3 * GIB), (Some(2 * GIB), GIB), (Some(GIB), 3 * GIB)] {
        let plan = planned(&index, &request(device, host));
        let streamable: Vec<_> = plan
            .iter()
            .filter(|(_, group, _)| group.is_streamable())
            .collect();
        let bytes = |group: &Group| group.home_bytes() as f64;
        let total: f64 = streamable.iter().map(|(_, group, _)| bytes(group)).sum();
        let from_storage = |residence: Residence| residence.home == Tier::Storage;
        let streamed: f64 = streamable
            .iter()
            .filter(|(_, _, residence)| from_storage(*residence))
            .map(|(_, group, _)| bytes(group))
            .sum();
        let layer = total / 32.0;
        let (mut passed, mut so_far) = (0.0, 0.0);
        for (_, group, residence) in &streamable {
            passed += bytes(group);
            if from_storage(*residence) {
                so_far += bytes(group);
            }
            let ahead: f64 = so_far - streamed * passed / total;
            // Within two layers of an even flow.
            assert!(
                ahead.abs() <= 2.0 * layer,
                "{ahead} bytes ahead where a layer is {layer}"
            );
        }
    }
}

#[test]
fn what_fits_whole_has_no_rings() {
    let index = Shape::smollm2().index();
    let on_host = planned(&index, &request(None, GIB));
    assert_eq!(
        (on_host.host_ring, on_host.device_ring),
        (Ring::default(), Ring::default())
    );
    assert!(!on_host.mapped);
    assert_eq!(on_host.step_width, 512);

    let on_device = planned(&index, &request(Some(GIB), GIB));
    assert_eq!(
        (on_device.host_ring, on_device.device_ring),
        (Ring::default(), Ring::default())
    );
    assert_eq!(on_device.weight_home_bytes(Tier::Host), 0);
    assert!(
        on_device.staging_bytes > 0,
        "loading needs somewhere to land"
    );
}

#[test]
fn a_gpu_holds_the_scratch_of_a_step_and_what_crosses_the_link_has_its_place() {
    let index = Shape::smollm2().index();
    for executor in [ExecutorChoice::Device, ExecutorChoice::Host] {
        for (device, host) in [(64 * MIB, 48 * MIB), (GIB, GIB)] {
            let like = |device_kind| PlanRequest {
                device: device_kind,
                executor,
                ..request(Some(device), host)
            };
            let gpu = planned(&index, &like(DeviceKind::Cuda));
            let split = gpu.device_split.unwrap();
            assert_eq!(gpu.arena_bytes(Tier::Device), split.claimed());
            assert!(gpu.arena_bytes(Tier::Host) <= gpu.host_split.claimed());
            // Logits come back, and the rows of the embedding go there.
            assert!(gpu.crossing_bytes > 4 * 49_152, "{}", gpu.crossing_bytes);

            let emulated = planned(&index, &like(DeviceKind::Emulated));
            assert_eq!(emulated.crossing_bytes, 0);
            let split = emulated.device_split.unwrap();
            let in_arena = split.claimed() - split.scratch;
            assert_eq!(emulated.arena_bytes(Tier::Device), in_arena);
        }
    }
}

#[test]
fn on_a_gpu_narrow_steps_are_the_hosts_up_to_the_width_at_which_copying_is_the_faster() {
    let index = Shape::smollm2().index();
    let like = |link_bytes_per_second, executor| PlanRequest {
        device: DeviceKind::Cuda,
        executor,
        rates: Rates {
            link_bytes_per_second,
            host_kernel_bytes_per_second: 20.0e9,
            host_flops_per_second: 2.0e11,
            ..Rates::with_gpu()
        },
        ..request(Some(64 * MIB), GIB)
    };
    // Q4_1 has 1.6 weights a byte: 2e11 / 10e9 operations a byte / 3.2 for a token.
    let plan = planned(&index, &like(10.0e9, ExecutorChoice::Auto));
    assert!(
        (5..=7).contains(&plan.host_width_max),
        "{}",
        plan.host_width_max
    );
    let of_host = |id: &GroupId| plan.residence(*id).narrow == Executor::Host;
    let streams = plan.streamed_over_link().find(of_host).unwrap();
    let executor = |width| plan.residence_at(streams, width).executor;
    assert_eq!(executor(plan.host_width_max), Executor::Host);
    assert_eq!(executor(plan.host_width_max + 1), Executor::Device);
    let predicted = |width| plan.predict(width, 0);
    let narrow = predicted(plan.host_width_max).link_seconds;
    assert!(narrow < predicted(plan.host_width_max + 1).link_seconds / 2.0);
    let streamed = planned(&index, &like(10.0e9, ExecutorChoice::Device));
    assert!(predicted(1).step_seconds < streamed.predict(1, 0).step_seconds);

    // A link that is faster than the host's kernels leaves them nothing.
    let plan = planned(&index, &like(25.0e9, ExecutorChoice::Auto));
    assert_eq!(plan.host_width_max, 0);
}

#[test]
fn a_file_is_mapped_only_on_cpu_and_only_where_all_of_it_fits() {
    let index = Shape::smollm2().index();
    let with_map = |device, host| PlanRequest {
        map_file: true,
        ..request(device, host)
    };
    let mapped = planned(&index, &with_map(None, GIB));
    assert!(mapped.mapped && mapped.residences.iter().all(|r| r.home == Tier::Host));
    assert!(!planned(&index, &with_map(None, 64 * MIB)).mapped);
    assert!(!planned(&index, &with_map(Some(GIB), GIB)).mapped);
}

#[test]
fn a_narrower_step_is_taken_where_it_saves_a_ring() {
    let index = Shape::smollm2().index();
    let mut budget = 130 * MIB;
    while planned(&index, &request(None, budget)).host_ring.entries == 0 {
        budget -= MIB;
    }
    let just_fits = planned(&index, &request(None, budget + MIB));
    assert!(just_fits.step_width >= 16);
    let wider = PlanRequest {
        step_width: Some(2 * just_fits.step_width),
        ..request(None, budget + MIB)
    };
    assert!(planned(&index, &wider).host_ring.entries > 0);
}

#[test]
fn everything_that_holds_for_plans_holds_over_budgets_executors_and_models() {
    let indexes = [
        Shape::tiny().index(),
        Shape {
            tied: true,
            ..Shape::tiny()
        }
        .index(),
        Shape::smollm2().index(),
        Shape::with_window(1).index(),
        Shape::with_window(100).index(),
        card("tinyllama-1.1b.toml"),
        card("smollm2-135m.toml"),
    ];
    let sizes = [0, 1, 3 * MIB, 20 * MIB, 60 * MIB, 300 * MIB, u64::MAX];
    let (mut plans, mut refusals) = (0, 0);
    for index in &indexes {
        for host in sizes {
            for device in [None].into_iter().chain(sizes.map(Some)) {
                for executor in [ExecutorChoice::Auto, ExecutorChoice::Host] {
                    let request = PlanRequest {
                        executor,
                        context: 300,
                        parallel: 2,
                        read_alignment: 512,
                        ..request(device, host)
                    };
                    match plan_tensors(&index.0, &index.1, &request) {
                        Ok(plan) => {
                            check(&plan, &index.1, &request);
                            plans += 1;
                        }
                        Err(PlanError::DoesNotFit(_)) => refusals += 1,
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        }
    }
    assert!(
        plans > 200 && refusals > 50,
        "{plans} plans, {refusals} refusals"
    );
}

#[test]
fn asked_for_slices_entries_and_widths_are_kept() {
    let request = PlanRequest {
        slice_bytes: Some(300_000),
        ring_entries: Some(7),
        step_width: Some(5),
        ..request(Some(48 * MIB), 24 * MIB)
    };
    let plan = planned(&Shape::smollm2().index(), &request);
    assert_eq!(plan.slice_bytes, 73 * 4096);
    assert_eq!((plan.host_ring.entries, plan.device_ring.entries), (7, 7));
    assert_eq!(plan.step_width, 5);
}

#[test]
fn a_plan_is_the_same_every_time() {
    let request = request(Some(48 * MIB), 24 * MIB);
    let index = Shape::smollm2().index();
    assert_eq!(planned(&index, &request), planned(&index, &request));
}

#[test]
fn pages_of_windows_are_as_many_as_the_chosen_width_needs() {
    let index = card("gemma-3-27b.toml");
    let mut request = PlanRequest {
        context: 2048,
        ..request(None, 800 * MIB)
    };
    // Steps of 512 tokens have 49 pages of each sequence, of 16 tokens 34: 195 MiB less.
    let in_narrow_steps = planned(&index, &request);
    assert!(in_narrow_steps.step_width < 512);
    request.host_budget = 32 * GIB;
    let in_wide_steps = planned(&index, &request);
    let pages = |plan: &Plan| plan.kv.window.unwrap().pages_of_sequence;
    assert_eq!((in_wide_steps.step_width, pages(&in_wide_steps)), (512, 49));
    assert!(pages(&in_narrow_steps) < 49, "{}", pages(&in_narrow_steps));
}

#[test]
fn a_file_without_tensors_plans_nothing() {
    let (_, hyperparameters) = Shape::tiny().index();
    let request = request(Some(MIB), MIB);
    let plan = planned(&(Vec::new(), hyperparameters), &request);
    assert!(plan.groups.is_empty());
    assert_eq!(plan.predictions[0].tokens_per_second, 0.0);
}

#[test]
fn the_report_shows_tiers_homes_and_predictions() {
    let plan = planned(
        &Shape::smollm2().index(),
        &request(Some(48 * MIB), 24 * MIB),
    );
    let text = plan.report();
    for line in [
        "device emulated, context 512 x 1 sequences",
        "device       48.0 MiB",
        "attention     device        30    15.8 MiB  0-29",
        "feed-forward  storage",
    ] {
        assert!(text.contains(line), "no `{line}` in\n{text}");
    }
    for width in [1, 8, 64, 512] {
        assert!(
            text.contains(&format!("\n{width} ")),
            "no width {width} in\n{text}"
        );
    }
    let value = plan.report_json();
    assert_eq!(value["groups"].as_array().unwrap().len(), plan.groups.len());
    assert_eq!(value["memory"]["device"]["budget_bytes"], 48 * MIB);
    assert_eq!(value["groups"][1]["kind"], "attention");
    assert_eq!(value["groups"][1]["layer"], 0);
}

/// A terabyte of q8_0.
fn huge() -> Index {
    let shape = Shape {
        layers: 40,
        embedding: 8192,
        feed_forward: 1 << 20,
        heads: 64,
        heads_kv: 8,
        matrices: TensorType::Q8_0,
        ..Shape::smollm2()
    };
    shape.index()
}

#[test]
fn slices_grow_where_the_usual_ones_would_be_too_many() {
    let mut request = request(None, 64 * MIB + GIB);
    request.map_file = true;
    let plan = planned(&huge(), &request);
    assert!(plan.groups.len() as u64 <= GROUPS_MAX + 1);
    assert!(plan.slice_bytes > 16 * MIB, "{}", plan.slice_bytes);
}

#[test]
fn weights_of_too_many_groups_are_refused_before_they_are_cut() {
    let mut index = huge();
    let mut request = request(None, GIB);
    request.map_file = true;
    request.slice_bytes = Some(64 << 10);
    let error = plan_tensors(&index.0, &index.1, &request).err().unwrap();
    assert!(error.to_string().starts_with("slice: "), "{error}");
    assert!(error.to_string().contains("--slice"), "{error}");

    request.slice_bytes = None;
    for tensor in &mut index.0 {
        if tensor.name.contains("ffn_gate") {
            tensor.bytes = tensor.row_bytes() << 40;
            tensor.dimensions[1] = 1 << 40;
        }
    }
    let error = plan_tensors(&index.0, &index.1, &request).err().unwrap();
    assert!(error.to_string().starts_with("weights: "), "{error}");
}

#[test]
fn scratch_counts_what_sampling_and_attention_hold() {
    let index = Shape::smollm2().index();
    let mut request = request(None, GIB);
    request.parallel = 2;
    let plan = planned(&index, &request);
    let bytes = |name: &str| {
        let item = plan.scratch.iter().find(|item| item.name == name);
        item.unwrap_or_else(|| panic!("no `{name}`")).bytes
    };
    // A candidate, a candidate at the border of top_p and a weight for each token: 8 bytes each.
    assert_eq!(bytes("sampler"), 49152 * 24);
    // Both rows, and the rows that the engine gets.
    assert_eq!(bytes("logits"), 2 * 2 * 49152 * 4);
    assert_eq!(bytes("rope angles"), 512 * 32 * 8);
    assert_eq!(bytes("pages as attention reads them"), (32 + 512) * 24);
    request.parallel = 1;
    let plan = planned(&index, &request);
    let logits = plan.scratch.iter().find(|item| item.name == "logits");
    assert_eq!(logits.unwrap().bytes, 49152 * 4);
}

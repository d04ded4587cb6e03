//! Tests of what plans do for speed, and of what they say of it.

use super::plan_tests::{card, card_file, planned};
use super::shapes::request;
use super::*;
use crate::gguf::Hyperparameters;
use std::collections::BTreeMap;

/// 70B on a card of 24 GiB with RAM for the rest: some of what the host would multiply by crosses the link meanwhile.
#[test]
fn a_narrow_step_on_a_gpu_uses_the_host_and_the_link_at_once() {
    let index = card("llama-3.3-70b.toml");
    let hardware = include_str!("../../config/hardware/rtx-4090-desktop.toml");
    let rates = HardwareCard::parse(hardware).unwrap().rates;
    let step = |executor| {
        let request = PlanRequest {
            device: DeviceKind::Cuda,
            executor,
            context: 8192,
            rates: rates.clone(),
            ..request(Some(24 * GIB - 512 * MIB), 56 * GIB)
        };
        planned(&index, &request)
    };
    let [both, host, device] = [
        ExecutorChoice::Auto,
        ExecutorChoice::Host,
        ExecutorChoice::Device,
    ]
    .map(step);
    let speed = |plan: &Plan| plan.predictions[0].tokens_per_second;
    assert!(speed(&host) > 2.0 * speed(&device));
    assert!(
        speed(&both) > 1.1 * speed(&host),
        "{} and {}",
        speed(&both),
        speed(&host)
    );
    let moved = |residence: &Residence| {
        residence.home == Tier::Host && residence.narrow == Executor::Device
    };
    assert!(both.residences.iter().any(moved));
    assert!(both.predictions[0].link_seconds > 0.0);
    // In wide steps all of it crosses.
    let executor = |id: GroupId| both.residence_at(id, 512).executor;
    let streamable = both.iter().filter(|(_, group, _)| group.is_streamable());
    assert!(
        streamable
            .into_iter()
            .all(|(id, _, _)| executor(id) == Executor::Device)
    );
}

#[test]
fn smaller_slices_and_narrower_steps_leave_more_room_for_weights() {
    let index = card("llama-3.1-8b.toml");
    for host in [2 * GIB, 3 * GIB, 4 * GIB] {
        let chosen = planned(&index, &request(None, host));
        let usual = planned(
            &index,
            &PlanRequest {
                slice_bytes: Some(128 * MIB),
                step_width: Some(512),
                ..request(None, host)
            },
        );
        let read = |plan: &Plan| plan.storage_bytes_per_step();
        assert!(
            read(&chosen) + 256 * MIB < read(&usual),
            "{} and {} of {host}",
            read(&chosen),
            read(&usual)
        );
        // What is ahead of the computation keeps the drive busy.
        let ahead = u64::from(chosen.host_ring.entries - 1) * chosen.host_ring.entry_bytes;
        assert!(ahead >= 16 * MIB, "{:?}", chosen.host_ring);
    }
}

/// A prompt in steps of 128 tokens reads what streams four times as often as in steps of 512.
#[test]
fn steps_are_narrower_only_where_that_gains_much() {
    let index = card("llama-3.1-8b.toml");
    // Products with 256 tokens and more are slower by this factor than with fewer.
    let width_chosen = |slower: f64| {
        let rate = |width: u32, bytes_per_second: f64| ProductRate {
            width,
            bytes_per_second,
        };
        let rates = vec![
            rate(1, 20e9),
            rate(8, 5e9),
            rate(128, 0.4e9),
            rate(256, 0.2e9 / slower),
            rate(512, 0.1e9 / slower),
        ];
        let products = ["Q4_K", "Q6_K"].map(|kind| (kind.to_owned(), rates.clone()));
        let request = PlanRequest {
            rates: Rates {
                host_products: BTreeMap::from(products),
                ..Rates::default()
            },
            ..request(None, 2 * GIB)
        };
        planned(&index, &request).step_width
    };
    assert_eq!(width_chosen(1.0), 512);
    assert_eq!(width_chosen(1.05), 512);
    assert!(width_chosen(1.5) <= 128);
}

#[test]
fn more_of_a_ring_is_ahead_where_there_is_more_memory() {
    let index = card("llama-3.1-8b.toml");
    let ahead = |host| {
        let ring = planned(&index, &request(None, host)).host_ring;
        u64::from(ring.entries - 1) * ring.entry_bytes
    };
    assert!(
        (16 * MIB..=56 * MIB).contains(&ahead(GIB)),
        "{}",
        ahead(GIB)
    );
    let much = ahead(3 * GIB);
    assert!((48 * MIB..=64 * MIB).contains(&much), "{much}");
}

#[test]
fn changes_that_are_told_have_been_planned() {
    let gguf = card_file("llama-3.1-8b.toml");
    let hyperparameters = Hyperparameters::from_gguf(&gguf).unwrap();
    let short = PlanRequest {
        context: 8192,
        parallel: 4,
        ..request(None, 6 * GIB)
    };
    let made = plan(&gguf, &hyperparameters, &short).unwrap();
    let gains = best_changes(&gguf, &hyperparameters, &short, &made);
    let now = made.predictions[0].tokens_per_second;
    assert!(!gains.is_empty());
    for pair in gains.windows(2) {
        assert!(pair[0].tokens_per_second >= pair[1].tokens_per_second);
    }
    let more_memory = gains.iter().find_map(|gain| match gain.change {
        Change::HostMemory(bytes) => Some((bytes, gain.tokens_per_second)),
        _ => None,
    });
    let (bytes, promised) = more_memory.expect("RAM is what lacks");
    let changed = PlanRequest {
        host_budget: short.host_budget + bytes,
        slice_bytes: Some(made.slice_bytes),
        step_width: Some(made.step_width),
        ..short.clone()
    };
    let changed = plan(&gguf, &hyperparameters, &changed).unwrap();
    assert_eq!(changed.predictions[0].tokens_per_second, promised);
    assert!(promised > now * 1.05);

    // Where all rests in memory nothing of that is told.
    let enough = request(None, 16 * GIB);
    let made = plan(&gguf, &hyperparameters, &enough).unwrap();
    assert_eq!(best_changes(&gguf, &hyperparameters, &enough, &made), []);
}

#[test]
fn a_long_prompt_takes_its_chunks_and_deeper_ones_take_longer() {
    let index = card("llama-3.1-8b.toml");
    let mut request = request(None, 16 * GIB);
    request.context = 8192;
    let plan = planned(&index, &request);
    let (seconds, limit) = plan.first_token_seconds(4096);
    assert!(limit > 0.0 && limit <= seconds);
    let chunk = |depth| plan.predict(plan.step_width, depth).step_seconds;
    let chunks = f64::from(4096 / plan.step_width);
    assert!(chunks * chunk(0) < seconds && seconds < chunks * chunk(4096));
}

/// `planned` holds every prediction against its limit.
#[test]
fn no_plan_is_faster_than_its_limit_where_products_were_measured() {
    let index = card("llama-3.1-8b.toml");
    let hardware = include_str!("../../config/hardware/two-core-vm.toml");
    let host = HardwareCard::parse(hardware).unwrap().rates;
    assert!(!host.host_products.is_empty());
    let gpu = Rates::with_gpu();
    for executor in [
        ExecutorChoice::Auto,
        ExecutorChoice::Host,
        ExecutorChoice::Device,
    ] {
        for (device_budget, host_budget) in [(2 * GIB, 3 * GIB), (3 * GIB, 16 * GIB)] {
            for device in [DeviceKind::Cuda, DeviceKind::Emulated] {
                let request = PlanRequest {
                    device,
                    executor,
                    context: 2048,
                    parallel: 4,
                    rates: Rates {
                        device_memory_bytes_per_second: gpu.device_memory_bytes_per_second,
                        device_flops_per_second: gpu.device_flops_per_second,
                        ..host.clone()
                    },
                    ..request(Some(device_budget), host_budget)
                };
                planned(&index, &request);
            }
        }
    }
}

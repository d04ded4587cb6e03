//! Tests of what does not fit: what the refusal says, and that its advice works.

use super::plan_tests::{card, check, planned, refused};
use super::planner::plan_tensors;
use super::shapes::{Shape, request};
use super::*;

#[test]
fn advice_that_is_given_works() {
    let indexes = [
        Shape::smollm2().index(),
        Shape::with_window(1000).index(),
        card("tinyllama-1.1b.toml"),
    ];
    let mut kinds = [0; 4];
    for index in &indexes {
        for (device, host, context, parallel) in [
            (None, 0, 512, 1),
            (None, 1, 1, 1),
            (None, 20 * MIB, 2048, 4),
            (None, 20 * MIB, 8192, 1),
            (None, 20 * MIB, 40, 400),
            (Some(0), 0, 512, 1),
            (Some(24 * MIB), 64 * MIB, 4096, 4),
            (Some(24 * MIB), 1, 64, 1),
            (Some(MIB), u64::MAX, 512, 1),
            (Some(u64::MAX), MIB, 512, 1_000_000),
        ] {
            let request = PlanRequest {
                context,
                parallel,
                ..request(device, host)
            };
            let refusal = refused(index, &request);
            assert!(!refusal.advice.is_empty(), "{refusal}");
            assert!(!refusal.shortages.is_empty(), "{refusal}");
            for advice in &refusal.advice {
                planned(index, &advice.apply(&request));
                kinds[0] += usize::from(advice.context.is_some());
                kinds[1] += usize::from(advice.parallel.is_some());
                kinds[2] += usize::from(advice.device_memory.is_some());
                kinds[3] += usize::from(advice.host_memory.is_some());
                assert!(refusal.to_string().contains(&advice.to_string()));
            }
            for shortage in &refusal.shortages {
                assert!(shortage.needed > shortage.budget, "{refusal}");
            }
        }
    }
    assert!(kinds.iter().all(|&given| given > 0), "{kinds:?}");
}

#[test]
fn what_is_refused_fits_in_no_narrower_step_either() {
    let indexes = [
        Shape::smollm2().index(),
        Shape::with_window(100).index(),
        Shape::with_window(1000).index(),
    ];
    for index in &indexes {
        let (mut plans, mut refusals) = (0, 0);
        for host in (8..136).step_by(8).map(|size| size * MIB) {
            let request = PlanRequest {
                context: 2048,
                parallel: 2,
                ..request(None, host)
            };
            let planned = |request: &PlanRequest| plan_tensors(&index.0, &index.1, request);
            if planned(&request).is_ok() {
                plans += 1;
                continue;
            }
            refusals += 1;
            for width in (0..10).map(|doubled| 1 << doubled) {
                let narrower = PlanRequest {
                    step_width: Some(width),
                    ..request.clone()
                };
                let refused = planned(&narrower).is_err();
                assert!(refused, "{host} bytes hold steps of {width} tokens");
            }
        }
        assert!(
            plans > 0 && refusals > 0,
            "{plans} plans, {refusals} refusals"
        );
    }
}

#[test]
fn a_refusal_says_what_is_short_by_how_much_and_what_to_change() {
    let mut request = request(None, 24 * MIB);
    request.context = 2048;
    let text = refused(&Shape::smollm2().index(), &request).to_string();
    assert!(text.starts_with("host memory is short by "), "{text}");
    assert!(text.contains("KV cache 45.0 MiB"), "{text}");
    assert!(
        text.contains("try --context 768, or --host-memory 48MiB"),
        "{text}"
    );
}

#[test]
fn absurd_requests_are_refused_and_never_overflow() {
    let index = Shape::smollm2().index();
    let u64_max = Some(u64::MAX);
    for (device, host, context, parallel) in [
        (None, u64::MAX, u32::MAX, u32::MAX),
        (u64_max, u64::MAX, u32::MAX, u32::MAX),
        (u64_max, u64::MAX, u32::MAX, 1),
        (None, u64::MAX, 1, u32::MAX),
        (u64_max, u64::MAX, 1, 1_000_000),
        (Some(1), 1, 1, 1_000_000),
        (None, 1, u32::MAX, 1),
    ] {
        let request = PlanRequest {
            context,
            parallel,
            ..request(device, host)
        };
        match plan_tensors(&index.0, &index.1, &request) {
            Ok(plan) => check(&plan, &index.1, &request),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    let mut wild = index.clone();
    wild.1.key_length = 1 << 31;
    wild.1.head_count = vec![1 << 31; 30];
    wild.1.head_count_kv = vec![1 << 31; 30];
    wild.1.vocabulary_size = u32::MAX;
    let refusal = refused(&wild, &request(None, u64::MAX));
    assert!(!refusal.to_string().is_empty());
}

#[test]
fn requests_that_make_no_sense_are_refused_by_name() {
    let good = request(Some(GIB), GIB);
    let cases = [
        (
            "context",
            PlanRequest {
                context: 0,
                ..good.clone()
            },
        ),
        (
            "parallel",
            PlanRequest {
                parallel: 0,
                ..good.clone()
            },
        ),
        (
            "read alignment",
            PlanRequest {
                read_alignment: 0,
                ..good.clone()
            },
        ),
        (
            "read alignment",
            PlanRequest {
                read_alignment: 3000,
                ..good.clone()
            },
        ),
        (
            "device memory",
            PlanRequest {
                device_budget: None,
                ..good.clone()
            },
        ),
        (
            "rates",
            PlanRequest {
                rates: Rates {
                    link_bytes_per_second: f64::NAN,
                    ..Rates::default()
                },
                ..good.clone()
            },
        ),
    ];
    let (tensors, hyperparameters) = Shape::tiny().index();
    for (what, request) in cases {
        let error = plan_tensors(&tensors, &hyperparameters, &request).unwrap_err();
        assert!(error.to_string().starts_with(what), "{error}");
    }
}

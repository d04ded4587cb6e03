//! The device gives the reference's log-probabilities.

use crate::device::device;
use crate::placements::{Placement, on_device, open};
use crate::run::{Sequence, all_resident, log_probabilities, root};
use serde_json::Value;
use strata::placement::{KvType, PlanRequest, Tier};

/// Of tests/data/tiny.
pub(crate) const TINY_MODELS: [&str; 6] = [
    "llama",
    "llama-tied",
    "llama-rope-factors",
    "llama-rope-linear",
    "qwen2",
    "qwen3",
];

fn numbers(value: &Value) -> Vec<f64> {
    let list = value.as_array().unwrap();
    list.iter().map(|number| number.as_f64().unwrap()).collect()
}

#[test]
fn tiny_models() {
    let Some(device) = device() else { return };
    let folder = root().join("tests/data/tiny");
    for name in TINY_MODELS {
        let golden = std::fs::read_to_string(folder.join(format!("{name}.json"))).unwrap();
        let golden: Value = serde_json::from_str(&golden).unwrap();
        let tolerance = golden["tolerance"].as_f64().unwrap();
        let reference = PlanRequest {
            context: 128,
            parallel: 1,
            step_width: Some(128),
            // As on the host: the reference does not round keys and values.
            kv_type: KvType::F32,
            ..all_resident()
        };
        let placement = Placement {
            name: "all on the device",
            request: on_device(&reference, 1 << 28, 1 << 28),
            homes: &[Tier::Device],
        };
        for prompt in golden["prompts"].as_array().unwrap() {
            let mut loaded = open(&device, &folder.join(format!("{name}.gguf")), &placement);
            let ids: Vec<u32> = numbers(&prompt["ids"])
                .iter()
                .map(|&id| id as u32)
                .collect();
            let logits = Sequence::new(0, 4).step(&mut loaded, &ids);
            let ours = log_probabilities(&logits);
            let last = &prompt["last"];
            for (id, expected) in numbers(&last["top"])
                .into_iter()
                .zip(numbers(&last["logprob"]))
            {
                let ours = ours[id as usize];
                assert!(
                    (ours - expected).abs() <= tolerance,
                    "{name}, {} tokens, id {id}: {ours} and not {expected}",
                    ids.len()
                );
            }
            device.assert_nothing_reported(name);
        }
    }
}

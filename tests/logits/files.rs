//! What files may say in more than one way: a value for all layers or one for each, more rows of the embedding than
//! tokens, a head of its own or the embedding, version 2 or 3.

use crate::models::{RandomOptions, pad, parts, random, write};
use crate::run::{Sequence, all_resident, load, log_probabilities, settings};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::collections::HashMap;
use std::path::Path;
use strata::gguf::{Gguf, Header, TensorShape, TensorType};
use strata::model::PlannedModel;
use strata::placement::{DeviceKind, ExecutorChoice, KvType, PlanRequest, Tier};

const PROMPT: [u32; 9] = [5, 70, 200, 260, 9, 131, 77, 5, 44];

/// Whether something is read from the file in every step.
fn streams(path: &Path, request: &PlanRequest) -> bool {
    let planned = PlannedModel::open(path, request).unwrap();
    planned.plan.weight_home_bytes(Tier::Storage) > 0
}

/// The bits of the logits after the prompt.
fn bits(path: &Path, request: &PlanRequest) -> Vec<u32> {
    let mut loaded = load(path, request, settings());
    let logits = Sequence::new(0, 1).step(&mut loaded, &PROMPT);
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Mapped, copied, streamed, and on an emulated device.
fn placements(host_budget: u64) -> [PlanRequest; 4] {
    let mapped = PlanRequest {
        context: 32,
        parallel: 1,
        step_width: Some(16),
        ..all_resident()
    };
    let copied = PlanRequest {
        map_file: false,
        ..mapped.clone()
    };
    let streamed = PlanRequest {
        host_budget,
        slice_bytes: Some(16 << 10),
        ..copied.clone()
    };
    let emulated = PlanRequest {
        device: DeviceKind::Emulated,
        device_budget: Some(4 << 20),
        executor: ExecutorChoice::Device,
        ..copied.clone()
    };
    [mapped, copied, streamed, emulated]
}

#[test]
fn a_file_of_version_2_is_the_same_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("version2.gguf");
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny/llama.gguf");
    let (metadata, shapes, bytes) = parts(&tiny);
    let header = Header::new(2, &metadata, &shapes).unwrap();
    let mut file = Vec::new();
    let written = header.write(&mut file, |_, tensor, output| {
        output.write_all(&bytes[&tensor.name])
    });
    written.unwrap();
    std::fs::write(&path, file).unwrap();
    assert_eq!(Gguf::open(&path).unwrap().version, 2);
    let [mapped, copied, ..] = placements(0);
    for request in [mapped, copied] {
        assert!(bits(&path, &request) == bits(&tiny, &request));
    }
}

/// Rows beyond the tokens are padding: they have logits, and change none of the others.
#[test]
fn an_embedding_may_have_more_rows_than_tokens() {
    const PADDING: usize = 37;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let padded_path = folder.path().join("padded.gguf");
    for tied in [false, true] {
        let options = RandomOptions {
            tied,
            layers: 3,
            ..RandomOptions::default()
        };
        let tokens = random(&path, &options).len();
        pad(&path, &padded_path, &[0.0; PADDING]);
        let [.., streamed, _] = placements(420 << 10);
        assert!(streams(&path, &streamed) && streams(&padded_path, &streamed));
        for request in placements(420 << 10) {
            let (whole, padded) = (bits(&path, &request), bits(&padded_path, &request));
            assert_eq!((whole.len(), padded.len()), (tokens, tokens + PADDING));
            assert!(whole == padded[..tokens], "tied: {tied}");
            assert!(
                padded[tokens..]
                    .iter()
                    .all(|&logit| f32::from_bits(logit) == 0.0)
            );
        }
    }
}

/// A llama whose layers differ, with keys and values that are not width / heads long.
struct Differing {
    width: usize,
    vocabulary: usize,
    head_length: usize,
    heads: [usize; 3],
    kv_heads: [usize; 3],
    feed_forward: [usize; 3],
}

const DIFFERING: Differing = Differing {
    width: 64,
    vocabulary: 300,
    head_length: 24,
    heads: [4, 2, 6],
    kv_heads: [2, 1, 6],
    feed_forward: [96, 64, 160],
};

impl Differing {
    /// Writes the file, and gives its weights by name.
    fn write(&self, path: &Path) -> HashMap<String, Vec<f32>> {
        let folder = tempfile::tempdir().unwrap();
        let plain = folder.path().join("plain.gguf");
        // For the vocabulary.
        let tokens = random(&plain, &RandomOptions::default()).len();
        assert!(tokens <= self.vocabulary);
        let (mut metadata, ..) = parts(&plain);
        let list = |values: [usize; 3]| values.map(|value| value as i32).to_vec();
        metadata.insert("llama.block_count", 3u32);
        metadata.insert("llama.attention.head_count", list(self.heads));
        metadata.insert("llama.attention.head_count_kv", list(self.kv_heads));
        metadata.insert("llama.feed_forward_length", list(self.feed_forward));
        metadata.insert("llama.attention.key_length", self.head_length as u32);
        metadata.insert("llama.attention.value_length", self.head_length as u32);
        metadata.insert("llama.rope.dimension_count", self.head_length as u32);

        let matrix = |name: String, columns: usize, rows: usize| {
            TensorShape::new(name, TensorType::F32, [columns as u64, rows as u64])
        };
        let norm = |name: String| TensorShape::new(name, TensorType::F32, [self.width as u64]);
        let mut shapes = vec![matrix(
            "token_embd.weight".into(),
            self.width,
            self.vocabulary,
        )];
        for layer in 0..3 {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            let queries = self.heads[layer] * self.head_length;
            let keys = self.kv_heads[layer] * self.head_length;
            let inner = self.feed_forward[layer];
            shapes.extend([
                norm(name("attn_norm")),
                matrix(name("attn_q"), self.width, queries),
                matrix(name("attn_k"), self.width, keys),
                matrix(name("attn_v"), self.width, keys),
                matrix(name("attn_output"), queries, self.width),
                norm(name("ffn_norm")),
                matrix(name("ffn_gate"), self.width, inner),
                matrix(name("ffn_up"), self.width, inner),
                matrix(name("ffn_down"), inner, self.width),
            ]);
        }
        shapes.push(norm("output_norm.weight".into()));
        shapes.push(matrix("output.weight".into(), self.width, self.vocabulary));

        let mut random = ChaCha8Rng::seed_from_u64(3);
        let mut weights = HashMap::new();
        write(path, &metadata, &shapes, |shape| {
            let count: u64 = shape.dimensions.iter().product();
            let scale = 2.0 / (shape.dimensions[0] as f32).sqrt();
            let values: Vec<f32> = (0..count)
                .map(|_| {
                    let uniform = random.next_u32() as f32 / u32::MAX as f32 - 0.5;
                    match shape.dimensions.len() {
                        1 => 1.0 + uniform / 4.0,
                        _ => uniform * 2.0 * scale,
                    }
                })
                .collect();
            let bytes = values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect();
            weights.insert(shape.name.clone(), values);
            bytes
        });
        weights
    }

    /// The logits after the last of `tokens`, in f64, as the paper of llama has it and with nothing shared with the program:
    /// each token is computed anew from the start.
    fn logits(&self, weights: &HashMap<String, Vec<f32>>, tokens: &[u32]) -> Vec<f32> {
        let product = |name: &str, input: &[f64]| -> Vec<f64> {
            let rows = weights[name].chunks(input.len());
            rows.map(|row| row.iter().zip(input).map(|(w, x)| f64::from(*w) * x).sum())
                .collect()
        };
        let normed = |name: &str, input: &[f64]| -> Vec<f64> {
            let mean = input.iter().map(|x| x * x).sum::<f64>() / input.len() as f64;
            let scale = 1.0 / (mean + 1e-5).sqrt();
            let weights = weights[name].iter();
            input
                .iter()
                .zip(weights)
                .map(|(x, w)| x * scale * f64::from(*w))
                .collect()
        };
        let rotated = |vector: Vec<f64>, position: usize| -> Vec<f64> {
            let mut out = vector;
            for head in out.chunks_mut(self.head_length) {
                for (pair, values) in head.chunks_mut(2).enumerate() {
                    let exponent = -2.0 * pair as f64 / self.head_length as f64;
                    let (sine, cosine) = (position as f64 * 10_000f64.powf(exponent)).sin_cos();
                    let (a, b) = (values[0], values[1]);
                    values[0] = a * cosine - b * sine;
                    values[1] = a * sine + b * cosine;
                }
            }
            out
        };
        let mut states: Vec<Vec<f64>> = tokens
            .iter()
            .map(|&token| {
                let start = token as usize * self.width;
                let row = &weights["token_embd.weight"][start..start + self.width];
                row.iter().map(|&value| f64::from(value)).collect()
            })
            .collect();
        for layer in 0..3 {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            let inputs: Vec<Vec<f64>> = states
                .iter()
                .map(|state| normed(&name("attn_norm"), state))
                .collect();
            let numbered = || inputs.iter().enumerate();
            let keys: Vec<Vec<f64>> = numbered()
                .map(|(position, input)| rotated(product(&name("attn_k"), input), position))
                .collect();
            let values: Vec<Vec<f64>> = inputs
                .iter()
                .map(|input| product(&name("attn_v"), input))
                .collect();
            let grouped = self.heads[layer] / self.kv_heads[layer];
            for (position, input) in numbered() {
                let queries = rotated(product(&name("attn_q"), input), position);
                let mut mixed = Vec::new();
                for (head, query) in queries.chunks(self.head_length).enumerate() {
                    let start = head / grouped * self.head_length;
                    let place = start..start + self.head_length;
                    let scores: Vec<f64> = keys[..=position]
                        .iter()
                        .map(|key| {
                            let key = &key[place.clone()];
                            let dot: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                            (dot / (self.head_length as f64).sqrt()).exp()
                        })
                        .collect();
                    let sum: f64 = scores.iter().sum();
                    for element in place {
                        let weighted = scores.iter().zip(&values);
                        mixed.push(weighted.map(|(s, v)| s * v[element]).sum::<f64>() / sum);
                    }
                }
                let added = product(&name("attn_output"), &mixed);
                let state = &mut states[position];
                state.iter_mut().zip(&added).for_each(|(x, y)| *x += y);
                let input = normed(&name("ffn_norm"), state);
                let gate = product(&name("ffn_gate"), &input);
                let up = product(&name("ffn_up"), &input);
                let gated: Vec<f64> = gate
                    .iter()
                    .zip(&up)
                    .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up)
                    .collect();
                let added = product(&name("ffn_down"), &gated);
                state.iter_mut().zip(&added).for_each(|(x, y)| *x += y);
            }
        }
        let last = normed("output_norm.weight", states.last().unwrap());
        let logits = product("output.weight", &last);
        logits.into_iter().map(|logit| logit as f32).collect()
    }
}

#[test]
fn layers_may_differ_in_heads_and_in_the_length_of_the_feed_forward() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("differing.gguf");
    let weights = DIFFERING.write(&path);
    let expected = log_probabilities(&DIFFERING.logits(&weights, &PROMPT));
    let spread = expected.iter().fold(0f64, |most, &value| most.max(-value));
    assert!(spread > 3.0, "all tokens are as likely: {spread}");
    let [.., streamed, _] = placements(300 << 10);
    assert!(streams(&path, &streamed));
    let mut first: Option<Vec<u32>> = None;
    for request in placements(300 << 10) {
        let request = PlanRequest {
            kv_type: KvType::F32,
            ..request
        };
        let ours = bits(&path, &request);
        let logits: Vec<f32> = ours.iter().map(|&logit| f32::from_bits(logit)).collect();
        for (id, (ours, expected)) in log_probabilities(&logits).iter().zip(&expected).enumerate() {
            assert!(
                (ours - expected).abs() < 1e-3,
                "token {id}: {ours} and not {expected}"
            );
        }
        match &first {
            None => first = Some(ours),
            Some(first) => assert!(*first == ours),
        }
    }
}

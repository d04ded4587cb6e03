//! Forward passes as the papers write them down: f64, position by position, with nothing paged, streamed or vectorised. What
//! golden files do not reach is held against it: windows, and scaled rotary positions.

use crate::models::{RandomOptions, random};
use crate::run::{Sequence, all_resident, load, log_probabilities, settings};
use std::f64::consts::PI;
use std::path::Path;
use strata::gguf::{Architecture, Gguf, Value};
use strata::placement::{KvType, PlanRequest};

/// The angle that each pair of a layer's heads turns by per position, and what the rotation is multiplied by.
type Turns<'a> = &'a dyn Fn(usize) -> (Vec<f64>, f64);

struct Reference {
    gguf: Gguf,
    file: Vec<u8>,
    architecture: &'static str,
    is_gemma: bool,
}

impl Reference {
    fn open(path: &Path, architecture: Architecture) -> Reference {
        Reference {
            gguf: Gguf::open(path).unwrap(),
            file: std::fs::read(path).unwrap(),
            architecture: architecture.name(),
            is_gemma: architecture == Architecture::Gemma3,
        }
    }

    fn number(&self, key: &str) -> Option<usize> {
        let key = format!("{}.{key}", self.architecture);
        let number = self.gguf.metadata.u32(&key).unwrap();
        number.map(|number| number as usize)
    }

    fn floats(&self, name: &str) -> Option<Vec<f64>> {
        let (_, tensor) = self.gguf.tensor(name)?;
        let bytes = &self.file[tensor.file_offset as usize..][..tensor.bytes as usize];
        let floats = bytes.as_chunks().0.iter();
        Some(
            floats
                .map(|&bytes| f64::from(f32::from_le_bytes(bytes)))
                .collect(),
        )
    }

    /// A matrix of the layer times x, with its bias.
    fn product(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = self.floats(&format!("{name}.weight")).unwrap();
        let rows = weight.chunks_exact(x.len());
        let mut y: Vec<f64> = rows
            .map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum())
            .collect();
        if let Some(bias) = self.floats(&format!("{name}.bias")) {
            y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
        }
        y
    }

    /// Rows of x, each normalised by a weight of the layer; x itself where the model has none.
    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let Some(weight) = self.floats(&format!("{name}.weight")) else {
            return x.to_vec();
        };
        let normalise = |row: &[f64]| {
            let squares: f64 = row.iter().map(|x| x * x).sum();
            let root = (squares / row.len() as f64 + 1e-5f32 as f64).sqrt();
            let normal = row.iter().zip(&weight).map(move |(x, w)| x / root * w);
            normal.collect::<Vec<f64>>()
        };
        x.chunks_exact(weight.len()).flat_map(normalise).collect()
    }

    fn rotate(&self, x: &mut [f64], length: usize, position: usize, turns: &(Vec<f64>, f64)) {
        let (frequencies, magnitude) = turns;
        for head in x.chunks_exact_mut(length) {
            for (pair, frequency) in frequencies.iter().enumerate() {
                let (i, j) = match self.architecture {
                    "llama" => (2 * pair, 2 * pair + 1),
                    _ => (pair, pair + frequencies.len()),
                };
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                let (a, b) = (head[i], head[j]);
                head[i] = magnitude * (a * cos - b * sin);
                head[j] = magnitude * (a * sin + b * cos);
            }
        }
    }

    /// The log-probabilities of what follows the tokens.
    fn log_probabilities(&self, tokens: &[u32], turns: Turns<'_>) -> Vec<f64> {
        let hidden = self.number("embedding_length").unwrap();
        let heads = self.number("attention.head_count").unwrap();
        let kv_heads = self.number("attention.head_count_kv").unwrap();
        let length = hidden / heads;
        let window = self.number("attention.sliding_window");
        let embedding = self.floats("token_embd.weight").unwrap();
        let scale = if self.is_gemma {
            (hidden as f64).sqrt()
        } else {
            1.0
        };
        let mut all: Vec<Vec<f64>> = tokens
            .iter()
            .map(|&token| {
                let row = &embedding[token as usize * hidden..][..hidden];
                row.iter().map(|x| x * scale).collect()
            })
            .collect();
        for layer in 0..self.number("block_count").unwrap() {
            let name = |name: &str| format!("blk.{layer}.{name}");
            let turns = turns(layer);
            let seen = match window {
                Some(window) if layer % 6 != 5 => window,
                _ => tokens.len(),
            };
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            for (position, x) in all.iter_mut().enumerate() {
                let h = self.norm(&name("attn_norm"), x);
                let query = self.product(&name("attn_q"), &h);
                let mut query = self.norm(&name("attn_q_norm"), &query);
                let key = self.product(&name("attn_k"), &h);
                let mut key = self.norm(&name("attn_k_norm"), &key);
                self.rotate(&mut query, length, position, &turns);
                self.rotate(&mut key, length, position, &turns);
                keys.push(key);
                values.push(self.product(&name("attn_v"), &h));
                let first = (position + 1).saturating_sub(seen);
                let mut attended = Vec::new();
                for (head, query) in query.chunks_exact(length).enumerate() {
                    let at = head / (heads / kv_heads) * length;
                    let of_position = |other: usize| {
                        let key = &keys[other][at..at + length];
                        let score: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                        (score / (length as f64).sqrt()).exp()
                    };
                    let weights: Vec<f64> = (first..=position).map(of_position).collect();
                    let total: f64 = weights.iter().sum();
                    attended.extend((at..at + length).map(|element| {
                        let weighted = weights.iter().zip(&values[first..]);
                        weighted.map(|(w, value)| w * value[element]).sum::<f64>() / total
                    }));
                }
                let projected = self.product(&name("attn_output"), &attended);
                let projected = self.norm(&name("post_attention_norm"), &projected);
                x.iter_mut()
                    .zip(projected)
                    .for_each(|(x, delta)| *x += delta);
                let h = self.norm(&name("ffn_norm"), x);
                let gate = self.product(&name("ffn_gate"), &h);
                let up = self.product(&name("ffn_up"), &h);
                let activation = if self.is_gemma { gelu } else { silu };
                let gated: Vec<f64> = gate
                    .iter()
                    .zip(up)
                    .map(|(g, u)| activation(*g) * u)
                    .collect();
                let projected = self.product(&name("ffn_down"), &gated);
                let projected = self.norm(&name("post_ffw_norm"), &projected);
                x.iter_mut()
                    .zip(projected)
                    .for_each(|(x, delta)| *x += delta);
            }
        }
        let h = self.norm("output_norm", all.last().unwrap());
        let logits = self.product("output", &h);
        let total = logits.iter().map(|logit| logit.exp()).sum::<f64>().ln();
        logits.iter().map(|logit| logit - total).collect()
    }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Hendrycks and Gimpel (2016), section 2.
fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
}

const DIMENSIONS: usize = 16;

/// base^(-2 i / dimensions).
fn plain(base: f64) -> Vec<f64> {
    (0..DIMENSIONS / 2)
        .map(|pair| base.powf(-2.0 * pair as f64 / DIMENSIONS as f64))
        .collect()
}

/// A model of eight layers with heads of 16 elements, over prompts of 3, 17 and 120 tokens, in contexts of `context`.
fn check_in(
    context: u32,
    architecture: Architecture,
    keys: &[(&str, Value)],
    vectors: &[(&str, &[f32])],
    turns: Turns<'_>,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let own = |&(key, ref value): &(&str, Value)| {
        (format!("{}.{key}", architecture.name()), value.clone())
    };
    let options = RandomOptions {
        architecture,
        layers: 8,
        metadata: keys.iter().map(own).collect(),
        vectors: vectors
            .iter()
            .map(|&(name, floats)| (name.to_owned(), floats.to_vec()))
            .collect(),
        ..RandomOptions::default()
    };
    random(&path, &options);
    let reference = Reference::open(&path, architecture);
    let request = PlanRequest {
        context,
        kv_type: KvType::F32,
        ..all_resident()
    };
    let prompts = [3, 17, 120]
        .map(|length| -> Vec<u32> { (0..length).map(|i| (i * 73 + 5) % 256).collect() });
    let expected = prompts
        .each_ref()
        .map(|tokens| reference.log_probabilities(tokens, turns));
    // Narrower steps make for fewer pages of layers with windows.
    for step_width in [128, 16, 1] {
        let request = PlanRequest {
            step_width: Some(step_width),
            ..request.clone()
        };
        let mut loaded = load(&path, &request, settings());
        for (tokens, expected) in prompts.iter().zip(&expected) {
            let mut sequence = Sequence::new(0, 4);
            let chunks = tokens.chunks(step_width as usize);
            let logits = chunks.map(|chunk| sequence.step(&mut loaded, chunk)).last();
            let ours = log_probabilities(&logits.unwrap());
            assert_eq!(ours.len(), expected.len());
            for (id, (ours, expected)) in ours.iter().zip(expected).enumerate() {
                assert!(
                    (ours - expected).abs() <= 0.002,
                    "{}, {keys:?}, {} tokens by {step_width}, id {id}: {ours} and not {expected}",
                    architecture.name(),
                    tokens.len()
                );
            }
        }
    }
}

fn check(architecture: Architecture, keys: &[(&str, Value)], turns: Turns<'_>) {
    check_in(256, architecture, keys, &[], turns);
}

#[test]
fn plain_models() {
    for architecture in [
        Architecture::Llama,
        Architecture::Qwen2,
        Architecture::Qwen3,
    ] {
        check(architecture, &[], &|_| (plain(10_000.0), 1.0));
    }
}

#[test]
fn gemma3_with_windows_of_any_length() {
    // Shorter than a page, a page, and across its ends. The layers that see everything have a base and a scaling of their own.
    for window in [1u32, 7, 32, 45, 1000] {
        let keys = [
            ("attention.sliding_window", window.into()),
            ("rope.freq_base", 1_000_000.0f32.into()),
            ("rope.scaling.type", "linear".into()),
            ("rope.scaling.factor", 8.0f32.into()),
        ];
        check(Architecture::Gemma3, &keys, &|layer| match layer % 6 {
            5 => (plain(1e6).iter().map(|turn| turn / 8.0).collect(), 1.0),
            _ => (plain(1e4), 1.0),
        });
    }
}

#[test]
fn yarn() {
    // The ramp as its paper has it: by how often a pair turns within the original context.
    let (factor, original) = (4.0, 512.0);
    let pair_of = |turns: f64| 16.0 * (original / (2.0 * PI * turns)).ln() / (2.0 * 1e4f64.ln());
    let (low, high) = (pair_of(32.0).floor(), pair_of(1.0).ceil());
    let turns: Vec<f64> = plain(1e4)
        .iter()
        .enumerate()
        .map(|(pair, turn)| {
            let slowed = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
            turn * (1.0 - slowed) + turn / factor * slowed
        })
        .collect();
    let magnitude = 1.0 + 0.1 * factor.ln();
    for architecture in [
        Architecture::Llama,
        Architecture::Qwen2,
        Architecture::Qwen3,
    ] {
        let keys = [
            ("rope.scaling.type", Value::from("yarn")),
            ("rope.scaling.factor", (factor as f32).into()),
            ("rope.scaling.original_context_length", 512u32.into()),
        ];
        check(architecture, &keys, &|_| (turns.clone(), magnitude));
    }
}

#[test]
fn longrope_takes_its_factors_by_the_context() {
    let short: Vec<f32> = (0..8).map(|pair| 1.0 + 0.125 * pair as f32).collect();
    let long: Vec<f32> = (0..8).map(|pair| 1.5 + 2.0 * pair as f32).collect();
    let keys = [
        ("rope.scaling.type", Value::from("longrope")),
        ("rope.scaling.attn_factor", 1.19f32.into()),
        ("rope.scaling.original_context_length", 192u32.into()),
    ];
    let vectors = [
        ("rope_factors_short.weight", &*short),
        ("rope_factors_long.weight", &*long),
    ];
    for (context, factors) in [(160, &short), (192, &short), (224, &long)] {
        let turns: Vec<f64> = plain(1e4)
            .iter()
            .zip(factors)
            .map(|(turn, factor)| turn / f64::from(*factor))
            .collect();
        check_in(context, Architecture::Llama, &keys, &vectors, &|_| {
            (turns.clone(), f64::from(1.19f32))
        });
    }
}

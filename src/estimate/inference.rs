//! What serving a model takes, were all of it in one memory. How it is spread over tiers is a plan's question.

use super::subject::Transformer;
use super::{EstimateError, Figure, Subject, SubjectKind, in_64_bits, total};
use crate::gguf::{Mixture, TensorType};
use crate::placement::{
    DeviceKind, ExecutorChoice, KvSplit, KvType, Plan, PlanRequest, Rates, Tier, WindowPages, plan,
};

/// Contexts for which the KV cache is listed, as far as the model was trained for them.
const CONTEXTS: [u32; 4] = [2048, 8192, 32_768, 131_072];
/// More than any model takes, and little enough that sums of it fit 64 bits.
const ENOUGH: u64 = 1 << 60;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InferenceRequest {
    /// Tokens of each sequence.
    pub context: u32,
    /// Sequences at once; of a perceptron, the samples.
    pub parallel: u32,
    pub kv_type: KvType,
    /// Tokens in the widest step; `None`: as a plan chooses it.
    pub step_width: Option<u32>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Inference {
    /// As the card or the file has them.
    pub weights: Figure,
    /// The same model under other names.
    pub quantised: Vec<QuantisedSize>,
    /// `None` for what keeps none.
    pub kv: Option<KvCache>,
    /// What a step needs beside them; empty where the shape is not known.
    pub activations: Vec<Figure>,
    pub total_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantisedSize {
    pub name: &'static str,
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvCache {
    /// For the request's context and sequences.
    pub figure: Figure,
    /// Of the layers that see all positions.
    pub token_bytes: u64,
    /// Of the layers that see a window, where there are such.
    pub window: Option<KvWindow>,
    /// Tokens of a sequence, and the bytes of one such sequence.
    pub of_context: Vec<(u32, u64)>,
}

/// The KV cache that does not grow with the context: positions that have left the window are written over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvWindow {
    pub layers: u64,
    /// Layers that see all positions.
    pub other_layers: u64,
    /// Tokens that are seen.
    pub positions: u32,
    /// Of one sequence of the context that the model was trained for.
    pub bytes: u64,
}

impl InferenceRequest {
    /// With room for all of it in one memory.
    pub(super) fn of_plan(&self) -> PlanRequest {
        PlanRequest {
            device: DeviceKind::Cpu,
            device_budget: None,
            host_budget: ENOUGH,
            context: self.context,
            parallel: self.parallel,
            kv_type: self.kv_type,
            step_width: self.step_width,
            read_alignment: 4096,
            slice_bytes: None,
            ring_entries: None,
            executor: ExecutorChoice::Auto,
            map_file: true,
            rates: Rates::default(),
            rates_card: None,
        }
    }
}

/// What serving takes.
///
/// # Errors
/// A request that no plan can be made for, or a sum beyond 64 bits.
pub fn inference(
    subject: &Subject,
    request: &InferenceRequest,
) -> Result<Inference, EstimateError> {
    let (weights, quantised, kv, activations) = match &subject.kind {
        SubjectKind::Transformer(transformer) => {
            return transformer.inference(request);
        }
        SubjectKind::Perceptron { widths } => {
            // A layer's input and output are there at once.
            let pairs = widths.windows(2).map(|pair| pair.iter().sum::<u64>());
            let widest = pairs.max().unwrap_or(0);
            let activations = Figure::new(
                "activations",
                format!(
                    "{} samples x {widest} (a layer's input and output) x 4",
                    request.parallel
                ),
                u128::from(request.parallel) * u128::from(widest) * 4,
            )?;
            (
                subject.flat_weights()?,
                subject.flat_sizes()?,
                None,
                vec![activations],
            )
        }
        SubjectKind::Parameters => (
            subject.flat_weights()?,
            subject.flat_sizes()?,
            None,
            Vec::new(),
        ),
    };
    finish(weights, quantised, kv, activations)
}

/// `planned` is what the plan of `request` has; the cache of other contexts is that of their plans.
fn kv_cache(
    model: &Transformer,
    request: &PlanRequest,
    planned: &Plan,
) -> Result<KvCache, EstimateError> {
    let shape = &model.shape;
    let of_one = |context| -> Result<KvSplit, EstimateError> {
        let request = PlanRequest {
            context,
            parallel: 1,
            step_width: Some(planned.step_width),
            ..request.clone()
        };
        Ok(plan(&model.gguf, shape, &request)?.kv)
    };
    let trained = shape.context_length;
    let mut contexts: Vec<u32> = CONTEXTS
        .into_iter()
        .filter(|&tokens| tokens < trained)
        .collect();
    contexts.push(trained);

    let planned = planned.kv;
    let token_bytes = planned.page_bytes / u64::from(planned.page_tokens);
    let (parallel, context) = (request.parallel, request.context);
    let grows = format!("{parallel} x {context} tokens x {token_bytes} bytes");
    let pages = format!("in pages of {} tokens", planned.page_tokens);
    let (formula, window) = match (planned.window, shape.window) {
        (Some(planned), Some(window)) => {
            let sees_window = |&layer: &usize| window.of_layer(layer).is_some();
            let all = shape.head_count_kv.len();
            let layers = (0..all).filter(sees_window).count();
            let WindowPages {
                pages_of_sequence,
                page_bytes,
                ..
            } = planned;
            let formula = format!(
                "{grows} ({} layers) + {parallel} x {pages_of_sequence} pages x {page_bytes} bytes \
                 ({layers} layers, a window of {} tokens and a step), {pages}",
                all - layers,
                window.positions
            );
            // The trained context may be longer than the request's.
            let most = of_one(trained)?.window.map_or(0, |of_trained| {
                page_bytes.saturating_mul(of_trained.pages_of_sequence.into())
            });
            let window = KvWindow {
                layers: layers as u64,
                other_layers: (all - layers) as u64,
                positions: window.positions,
                bytes: most,
            };
            (formula, Some(window))
        }
        _ => (format!("{grows}, {pages}"), None),
    };
    Ok(KvCache {
        figure: Figure::new("KV cache", formula, planned.bytes().into())?,
        token_bytes,
        window,
        of_context: contexts
            .into_iter()
            .map(|tokens| Ok((tokens, of_one(tokens)?.bytes())))
            .collect::<Result<_, EstimateError>>()?,
    })
}

fn finish(
    weights: Figure,
    quantised: Vec<QuantisedSize>,
    kv: Option<KvCache>,
    activations: Vec<Figure>,
) -> Result<Inference, EstimateError> {
    let mut all = activations.clone();
    all.push(weights.clone());
    all.extend(kv.iter().map(|kv| kv.figure.clone()));
    Ok(Inference {
        total_bytes: total(&all)?,
        weights,
        quantised,
        kv,
        activations,
    })
}

impl Subject {
    fn flat_weights(&self) -> Result<Figure, EstimateError> {
        Figure::new("weights", "4 P in f32", u128::from(self.parameters) * 4)
    }

    /// Without a shape, as if all rows were whole blocks.
    fn flat_sizes(&self) -> Result<Vec<QuantisedSize>, EstimateError> {
        [
            TensorType::F32,
            TensorType::F16,
            TensorType::Q8_0,
            TensorType::Q6K,
            TensorType::Q5K,
            TensorType::Q4K,
            TensorType::Q3K,
            TensorType::Q2K,
        ]
        .into_iter()
        .map(|kind| {
            let blocks = self.parameters.div_ceil(kind.block_elements() as u64);
            let bytes = u128::from(blocks) * kind.block_bytes() as u128;
            Ok(QuantisedSize {
                name: kind.name(),
                bytes: in_64_bits("the weights", bytes)?,
            })
        })
        .collect()
    }
}

impl Transformer {
    fn inference(&self, request: &InferenceRequest) -> Result<Inference, EstimateError> {
        let of_plan = request.of_plan();
        let plan = plan(&self.gguf, &self.shape, &of_plan)?;
        let weights = Figure::new(
            "weights",
            "each tensor: rows x blocks of a row x bytes of a block",
            plan.weight_home_bytes(Tier::Host).into(),
        )?;
        let activations = (plan.scratch.iter())
            .map(|item| {
                let formula = format!("for steps of up to {} tokens", plan.step_width);
                Figure::new(item.name, formula, item.bytes.into())
            })
            .collect::<Result<Vec<_>, _>>()?;
        let quantised = Mixture::ALL
            .into_iter()
            .map(|mixture| {
                Ok(QuantisedSize {
                    name: mixture.name(),
                    bytes: in_64_bits("the weights", self.bytes_as(mixture))?,
                })
            })
            .collect::<Result<_, EstimateError>>()?;
        let kv = kv_cache(self, &of_plan, &plan)?;
        finish(weights, quantised, Some(kv), activations)
    }

    /// Bytes of all tensors, were the model quantised as `mixture` says.
    fn bytes_as(&self, mixture: Mixture) -> u128 {
        let tensors = self.gguf.tensors.iter();
        let bytes = tensors.map(|tensor| {
            let choice = mixture.choose(&tensor.name, &tensor.dimensions, self.rules);
            let row = choice.and_then(|choice| choice.kind.row_bytes(tensor.columns()));
            match row {
                Some(bytes) => u128::from(bytes) * u128::from(tensor.rows()),
                None => u128::from(tensor.bytes),
            }
        });
        bytes.sum()
    }
}

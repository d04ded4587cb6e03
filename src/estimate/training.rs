//! What a training step takes on one device.
//!
//! With P parameters, b bytes of a number (4 in fp32, 2 in bf16):
//!
//! | part | bytes |
//! |---|---|
//! | parameters | b P |
//! | gradients | b P |
//! | master copy | 4 P in bf16: updates are too small for 8 bits of mantissa (Micikevicius et al. 2018); none in fp32 |
//! | moments | Adam 8 P: the averages of the gradient and of its square, in fp32 (Kingma & Ba 2015); SGD with momentum 4 P; SGD none |
//! | saved inputs | b for each number that the backward pass reads again: of a fully connected layer its input, batch x width x b |
//!
//! What a program holds beside that (buffers of its allocator, workspaces of its kernels) is not counted.

use super::subject::Layer;
use super::{EstimateError, Figure, Subject, in_64_bits, total};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Optimizer {
    Adam,
    Sgd,
    SgdMomentum,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    Fp32,
    /// Weights and gradients in bf16, a master copy and moments in fp32.
    Bf16,
}

/// How the work of a step is cut. All ones and `false`: one device, one pass, everything kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parallelism {
    /// Passes whose gradients are added up before an update.
    pub accumulate: u32,
    /// Keep the inputs of every so-many-th layer and compute the others again: Chen et al. 2016.
    pub checkpoint: bool,
    /// Devices that each hold the model and a share of the batch.
    pub data: u32,
    /// Devices that each hold some consecutive layers: Huang et al. 2019 (GPipe).
    pub pipeline: u32,
    /// Into which a pass is cut for the pipeline; of no use without one.
    pub micro_batches: u32,
    /// What the data-parallel devices share among them: 1 the optimiser's state, 2 gradients too, 3 parameters too:
    /// Rajbhandari et al. 2020 (ZeRO).
    pub zero: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainingRequest {
    pub optimizer: Optimizer,
    pub precision: Precision,
    /// Samples of an update, on all devices together.
    pub batch: u32,
    /// Positions of a sample: the tokens of a sequence, 1 for a perceptron.
    pub positions: u32,
    pub parallelism: Parallelism,
}

/// What the device that holds most holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Training {
    /// Parameters, gradients, master copy and moments, where there are any.
    pub state: Vec<Figure>,
    pub state_bytes: u64,
    /// `None`: the shape is not known.
    pub saved: Option<Figure>,
    pub total_bytes: u64,
    /// What each device sends in a step for data parallelism, and how that comes.
    pub traffic: Figure,
    /// The share of time in which a stage of the pipeline works.
    pub efficiency: f64,
    /// Forward passes for each backward one: 2 where layers are computed again.
    pub forward_passes: u32,
}

impl Parallelism {
    pub const NONE: Parallelism = Parallelism {
        accumulate: 1,
        checkpoint: false,
        data: 1,
        pipeline: 1,
        micro_batches: 1,
        zero: 0,
    };
}

impl Optimizer {
    pub const fn name(self) -> &'static str {
        match self {
            Optimizer::Adam => "adam",
            Optimizer::Sgd => "sgd",
            Optimizer::SgdMomentum => "sgd-momentum",
        }
    }

    /// Bytes for each parameter, in fp32 whatever the weights are in.
    const fn moment_bytes(self) -> u64 {
        match self {
            Optimizer::Adam => 8,
            Optimizer::Sgd => 0,
            Optimizer::SgdMomentum => 4,
        }
    }
}

impl Precision {
    pub const fn name(self) -> &'static str {
        match self {
            Precision::Fp32 => "fp32",
            Precision::Bf16 => "bf16",
        }
    }

    pub(super) const fn bytes(self) -> u64 {
        match self {
            Precision::Fp32 => 4,
            Precision::Bf16 => 2,
        }
    }

    const fn master_bytes(self) -> u64 {
        match self {
            Precision::Fp32 => 0,
            Precision::Bf16 => 4,
        }
    }
}

/// The share of time in which each of `stages` works, where a pass is cut into so many micro-batches: the first has
/// nothing from behind, the last nothing from before, for stages - 1 of them.
pub fn pipeline_efficiency(stages: u32, micro_batches: u32) -> f64 {
    let micro_batches = f64::from(micro_batches);
    micro_batches / (micro_batches + f64::from(stages) - 1.0)
}

/// What a training step takes on the device that takes most.
///
/// # Errors
/// A flag that this model or batch cannot have, or a sum beyond 64 bits.
pub fn training(subject: &Subject, request: &TrainingRequest) -> Result<Training, EstimateError> {
    check(subject, request)?;
    let cut = &request.parallelism;
    let mut largest: Option<Training> = None;
    for stage in Stage::all(subject, cut.pipeline) {
        let training = stage.training(request)?;
        let is_larger = |other: &Training| training.total_bytes > other.total_bytes;
        if largest.as_ref().is_none_or(is_larger) {
            largest = Some(training);
        }
    }
    largest.ok_or(EstimateError::Setting {
        flag: "pipeline",
        value: cut.pipeline.into(),
        why: "there is no stage".to_owned(),
    })
}

fn check(subject: &Subject, request: &TrainingRequest) -> Result<(), EstimateError> {
    let cut = &request.parallelism;
    let setting = |flag: &'static str, value: u32, why: String| {
        Err(EstimateError::Setting {
            flag,
            value: value.into(),
            why,
        })
    };
    for (flag, value) in [
        ("batch", request.batch),
        ("context", request.positions),
        ("accumulate", cut.accumulate),
        ("data-parallel", cut.data),
        ("pipeline", cut.pipeline),
        ("micro-batches", cut.micro_batches),
    ] {
        if value == 0 {
            return setting(flag, value, "at least 1 is needed".to_owned());
        }
    }
    if cut.zero > 3 {
        return setting("zero", cut.zero, "the stages are 0 to 3".to_owned());
    }
    let layers = subject.layers.len();
    if layers > 0 && cut.pipeline as usize > layers {
        let why = format!("the model has {layers} layers that could be stages");
        return setting("pipeline", cut.pipeline, why);
    }
    let passes = u64::from(cut.data) * u64::from(cut.accumulate);
    if passes > u64::from(request.batch) {
        let why = format!(
            "{} devices x {} passes need as many samples at least; give a larger --batch",
            cut.data, cut.accumulate
        );
        return setting("batch", request.batch, why);
    }
    let samples = u64::from(request.batch).div_ceil(passes);
    if cut.pipeline > 1 && u64::from(cut.micro_batches) > samples {
        let why = format!("a pass has {samples} samples to cut; give a larger --batch");
        return setting("micro-batches", cut.micro_batches, why);
    }
    Ok(())
}

/// Consecutive layers that one device holds.
struct Stage<'a> {
    parameters: u64,
    layers: &'a [Layer],
}

impl<'a> Stage<'a> {
    fn all(subject: &'a Subject, stages: u32) -> Vec<Stage<'a>> {
        if subject.layers.is_empty() {
            return vec![Stage {
                parameters: subject.parameters.div_ceil(u64::from(stages)),
                layers: &[],
            }];
        }
        // As even as whole layers allow.
        let (count, stages) = (subject.layers.len(), stages as usize);
        let bound = |stage: usize| stage * count / stages;
        (0..stages)
            .filter_map(|stage| subject.layers.get(bound(stage)..bound(stage + 1)))
            .map(|layers| Stage {
                // No more than the subject's, which fit.
                parameters: layers.iter().map(|layer| layer.parameters).sum(),
                layers,
            })
            .collect()
    }

    fn training(&self, request: &TrainingRequest) -> Result<Training, EstimateError> {
        let cut = &request.parallelism;
        let state = self.state(request)?;
        let saved = match self.layers {
            [] => None,
            layers => Some(saved(layers, request)?),
        };
        let state_bytes = total(&state)?;
        let saved_bytes = saved.as_ref().map_or(0, |figure| figure.bytes);
        let total_bytes = u128::from(state_bytes) + u128::from(saved_bytes);
        Ok(Training {
            state_bytes,
            state,
            saved,
            total_bytes: in_64_bits("all of it", total_bytes)?,
            traffic: self.traffic(request)?,
            efficiency: match cut.pipeline {
                1 => 1.0,
                stages => pipeline_efficiency(stages, cut.micro_batches),
            },
            forward_passes: if cut.checkpoint { 2 } else { 1 },
        })
    }

    fn state(&self, request: &TrainingRequest) -> Result<Vec<Figure>, EstimateError> {
        let cut = &request.parallelism;
        let of_a_number = request.precision.bytes();
        let parts = [
            ("parameters", of_a_number, 3, ""),
            ("gradients", of_a_number, 2, ""),
            (
                "master copy",
                request.precision.master_bytes(),
                1,
                " in fp32",
            ),
            (
                "moments",
                request.optimizer.moment_bytes(),
                1,
                match request.optimizer {
                    Optimizer::Adam => " (m and v, in fp32)",
                    Optimizer::Sgd | Optimizer::SgdMomentum => " in fp32",
                },
            ),
        ];
        let figure = |(name, bytes, sharded_from, note): (&'static str, u64, u32, &str)| {
            let is_sharded = cut.zero >= sharded_from && cut.data > 1;
            let of = if is_sharded { cut.data } else { 1 };
            let elements = self.parameters.div_ceil(u64::from(of));
            let by = match of {
                1 => String::new(),
                of => format!(" / {of}"),
            };
            let formula = format!("{bytes} P{by}{note}");
            Figure::new(name, formula, u128::from(bytes) * u128::from(elements))
        };
        parts
            .into_iter()
            .filter(|&(_, bytes, _, _)| bytes > 0)
            .map(figure)
            .collect()
    }

    /// Reducing what D devices have, and giving it to all, takes (D - 1) / D of it twice in a ring (Patarasuk & Yuan 2009).
    /// Sharded parameters are gathered once more, for the backward pass (Rajbhandari et al. 2020, section 7).
    fn traffic(&self, request: &TrainingRequest) -> Result<Figure, EstimateError> {
        let cut = &request.parallelism;
        let times = if cut.zero == 3 { 3 } else { 2 };
        let bytes = u128::from(self.parameters) * u128::from(request.precision.bytes());
        let devices = u128::from(cut.data);
        Figure::new(
            "sent by each device",
            format!(
                "{times} x {} P x ({devices} - 1) / {devices}",
                request.precision.bytes()
            ),
            times * bytes * (devices - 1) / devices,
        )
    }
}

/// The inputs that the backward pass reads. Those of `m` micro-batches are kept until it begins; with checkpoints they
/// are the inputs of the segments, and beside them all of the one segment that is computed again.
fn saved(layers: &[Layer], request: &TrainingRequest) -> Result<Figure, EstimateError> {
    let cut = &request.parallelism;
    let number = request.precision.bytes();
    let passes = u64::from(cut.data) * u64::from(cut.accumulate);
    let samples = u64::from(request.batch).div_ceil(passes);
    let micro_batches = match cut.pipeline {
        1 => 1,
        _ => u64::from(cut.micro_batches),
    };
    let in_micro_batch = samples.div_ceil(micro_batches);
    let positions = u64::from(request.positions);
    let count = format!("{samples} samples{}", of_positions(positions));
    // Of one position; bounded by 4096 layers of some 2^36 each.
    let sum = |of: fn(&Layer) -> u64, layers: &[Layer]| -> u128 {
        layers.iter().map(|layer| u128::from(of(layer))).sum()
    };
    if !cut.checkpoint {
        let elements = sum(|layer| layer.saved, layers);
        return Figure::new(
            "saved inputs",
            format!("{count} x {} x {number}", terms(layers, elements)),
            u128::from(in_micro_batch * micro_batches)
                * u128::from(positions)
                * elements
                * u128::from(number),
        );
    }
    let length = checkpoint_length(layers.len());
    let (mut kept, mut again) = (0u128, 0u128);
    for segment in layers.chunks(length) {
        let input = segment.first().map_or(0, |layer| u128::from(layer.input));
        kept += input;
        again = again.max(sum(|layer| layer.saved, segment).saturating_sub(input));
    }
    Figure::new(
        "saved inputs",
        format!(
            "({samples} x {kept} + {in_micro_batch} x {again}){} x {number}: the input of every {length} layers, and one such \
             run again",
            of_positions(positions)
        ),
        (u128::from(in_micro_batch * micro_batches) * kept + u128::from(in_micro_batch) * again)
            * u128::from(positions)
            * u128::from(number),
    )
}

/// Layers of a run that is computed again: the square root of all, so that inputs of runs and the inside of one are
/// equally many.
pub(super) fn checkpoint_length(layers: usize) -> usize {
    (layers as f64).sqrt().ceil().max(1.0) as usize
}

fn of_positions(positions: u64) -> String {
    match positions {
        1 => String::new(),
        tokens => format!(" x {tokens} tokens"),
    }
}

/// The sum over layers, written out where they are few.
fn terms(layers: &[Layer], sum: u128) -> String {
    const WRITTEN_OUT_MAX: usize = 6;
    if layers.len() > WRITTEN_OUT_MAX {
        return format!("{sum} numbers in {} layers", layers.len());
    }
    let each: Vec<String> = layers.iter().map(|layer| layer.saved.to_string()).collect();
    format!("({})", each.join(" + "))
}

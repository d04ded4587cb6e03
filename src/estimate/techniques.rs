//! What would make a training step take less, each by itself, and what each costs.

use super::training::checkpoint_length;
use super::{EstimateError, Parallelism, Subject, Training, TrainingRequest, training};

/// One change of a request that has none.
#[derive(Clone, Debug, PartialEq)]
pub struct Technique {
    pub name: String,
    pub training: Training,
    /// Where its bytes come from, and what it costs.
    pub why: String,
}

/// Devices and passes of the examples, where the request names none.
const DEVICES: u32 = 8;
const STAGES: u32 = 4;
const PASSES: u32 = 4;

/// Every change by itself, in the sizes that the request names or in those of an example; what this model or batch is too
/// small for is left out.
pub fn techniques(
    subject: &Subject,
    request: &TrainingRequest,
) -> Result<Vec<Technique>, EstimateError> {
    let given = request.parallelism;
    let or = |given: u32, example: u32| if given > 1 { given } else { example };
    let devices = or(given.data, DEVICES);
    let passes = or(given.accumulate, PASSES);
    let layers = u32::try_from(subject.layers.len()).unwrap_or(u32::MAX);
    let stages = match layers {
        0 => STAGES,
        layers => STAGES.min(layers),
    };
    let stages = or(given.pipeline, stages);
    // From four for each stage on the bubble is small: Huang et al. 2019, section 2.3.
    let micro_batches = or(given.micro_batches, stages.saturating_mul(4));
    let length = checkpoint_length(subject.layers.len());

    let none = Parallelism::NONE;
    let mut cuts = vec![(
        format!("gradient accumulation, {passes} passes"),
        Parallelism {
            accumulate: passes,
            ..none
        },
        format!(
            "saved inputs / {passes}; gradients stay for all passes; the update is the same, the matrices are narrower"
        ),
    )];
    if !subject.layers.is_empty() {
        cuts.push((
            "checkpoints".to_owned(),
            Parallelism {
                checkpoint: true,
                ..none
            },
            format!(
                "keeps the inputs of every {length} of {} layers (the square root of them); one forward pass more, about 4/3 of \
                 the arithmetic; Chen et al. 2016",
                subject.layers.len()
            ),
        ));
    }
    cuts.push((
        format!("data parallel, {devices} devices"),
        Parallelism {
            data: devices,
            ..none
        },
        format!("saved inputs / {devices}; parameters, gradients and moments on each"),
    ));
    if stages > 1 {
        cuts.push((
            format!("pipeline, {stages} stages, {micro_batches} micro-batches"),
            Parallelism {
                pipeline: stages,
                micro_batches,
                ..none
            },
            format!(
                "the largest run of layers; {micro_batches} / ({micro_batches} + {stages} - 1) of the time is used; Huang et al. 2019"
            ),
        ));
    }
    for (zero, what) in [
        (1, "moments and master copy"),
        (2, "moments, master copy and gradients"),
        (
            3,
            "moments, master copy, gradients and parameters (which are gathered layer by layer)",
        ),
    ] {
        cuts.push((
            format!("sharded (ZeRO {zero}), {devices} devices"),
            Parallelism {
                data: devices,
                zero,
                ..none
            },
            format!("saved inputs, {what} / {devices}; Rajbhandari et al. 2020"),
        ));
    }
    let mut found = Vec::new();
    for (name, parallelism, why) in cuts {
        let request = TrainingRequest {
            parallelism,
            ..*request
        };
        match training(subject, &request) {
            Ok(training) => found.push(Technique {
                name,
                training,
                why,
            }),
            // Too few layers or samples for it.
            Err(EstimateError::Setting { .. }) => {}
            Err(other) => return Err(other),
        }
    }
    Ok(found)
}

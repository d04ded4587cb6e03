//! `strata estimate`: what a model would take, before anything is allocated.

use super::Usage;
use super::files::{print, print_json};
use super::load::plan_of;
use anyhow::Context;
use std::path::Path;
use strata::cli::{EstimateArguments, OptimizerArgument, PrecisionArgument, TrainingArguments};
use strata::config::{Config, KvTypeSetting};
use strata::estimate::{
    EstimateError, InferenceRequest, Optimizer, Parallelism, Precision, Subject, SubjectKind,
    TrainingRequest, inference, inference_json, inference_report, techniques, training,
    training_json, training_report,
};
use strata::gguf::Gguf;
use strata::gguf::card::{is_card, read_card};
use strata::placement::KvType;

/// Settings that say where a model would be served, and so ask how it would be spread over tiers.
const OF_A_MACHINE: [&str; 4] = ["device", "device-memory", "host-memory", "hardware"];

pub(crate) fn estimate(config: &Config, arguments: &EstimateArguments) -> anyhow::Result<()> {
    let path = &arguments.target;
    let of_file = || path.display().to_string();
    let subject = read(path).with_context(of_file)?;
    let context = match &subject.kind {
        SubjectKind::Transformer(model) => config.context_for(model.context_length()),
        SubjectKind::Perceptron { .. } | SubjectKind::Parameters => 1,
    };
    if arguments.training {
        return estimate_training(&subject, context, arguments);
    }
    let request = InferenceRequest {
        context,
        parallel: config.parallel,
        kv_type: match config.kv_type {
            KvTypeSetting::F16 => KvType::F16,
            KvTypeSetting::F32 => KvType::F32,
        },
        step_width: config.step_width,
    };
    let needs = inference(&subject, &request).with_context(of_file)?;
    let of_machine = OF_A_MACHINE.into_iter();
    let plan = match &subject.kind {
        SubjectKind::Transformer(model)
            if of_machine
                .into_iter()
                .any(|key| arguments.settings.has_flag(key)) =>
        {
            let file = (!is_card(path)).then_some(path.as_path());
            Some(plan_of(config, path, model.index().clone(), file))
        }
        _ => None,
    };
    // What it takes is worth knowing where no plan fits, too.
    if arguments.json {
        let mut report = inference_json(&subject, &needs);
        if let Some(Ok((plan, _))) = &plan {
            report["plan"] = plan.report_json();
        }
        print_json(&report)?;
    } else {
        print(&inference_report(&subject, &needs))?;
        if let Some(Ok((plan, _))) = &plan {
            print(&format!(
                "\nspread over the tiers of this machine, or of the card's\n{}",
                plan.report()
            ))?;
        }
    }
    plan.transpose().map(drop)
}

fn read(path: &Path) -> Result<Subject, EstimateError> {
    if is_card(path) {
        return Subject::from_card(&read_card(path)?);
    }
    let gguf = Gguf::open(path)?;
    let name = gguf.metadata.string("general.name")?.map(str::to_owned);
    let name = name.unwrap_or_else(|| path.display().to_string());
    Subject::from_index(name, gguf)
}

fn estimate_training(
    subject: &Subject,
    positions: u32,
    arguments: &EstimateArguments,
) -> anyhow::Result<()> {
    let request = training_request(&arguments.step, positions);
    let usage = |error: EstimateError| match error {
        EstimateError::Setting { .. } => anyhow::Error::new(Usage(error.to_string())),
        error => error.into(),
    };
    let needs = training(subject, &request).map_err(usage)?;
    let changes = techniques(subject, &request).map_err(usage)?;
    match arguments.json {
        true => print_json(&training_json(subject, &request, &needs, &changes)),
        false => print(&training_report(subject, &request, &needs, &changes)),
    }
}

fn training_request(arguments: &TrainingArguments, positions: u32) -> TrainingRequest {
    // From four for each stage on the pipeline seldom waits; a pass of fewer samples is cut into single ones.
    let samples = arguments
        .batch
        .div_ceil(arguments.data_parallel.max(1))
        .div_ceil(arguments.accumulate.max(1));
    let micro_batches = match (arguments.micro_batches, arguments.pipeline) {
        (Some(number), _) => number,
        (None, 1) => 1,
        (None, stages) => stages.saturating_mul(4).min(samples.max(1)),
    };
    TrainingRequest {
        optimizer: match arguments.optimizer {
            OptimizerArgument::Adam => Optimizer::Adam,
            OptimizerArgument::Sgd => Optimizer::Sgd,
            OptimizerArgument::SgdMomentum => Optimizer::SgdMomentum,
        },
        precision: match arguments.precision {
            PrecisionArgument::Fp32 => Precision::Fp32,
            PrecisionArgument::Bf16 => Precision::Bf16,
        },
        batch: arguments.batch,
        positions,
        parallelism: Parallelism {
            accumulate: arguments.accumulate,
            checkpoint: arguments.checkpoint,
            data: arguments.data_parallel,
            pipeline: arguments.pipeline,
            micro_batches,
            zero: arguments.zero,
        },
    }
}

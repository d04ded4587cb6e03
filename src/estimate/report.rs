//! Estimates as people and programs read them.

use super::{Figure, Inference, Subject, Technique, Training, TrainingRequest, binary_size};
use crate::inspect::grouped;
use serde_json::{Value, json};
use std::fmt::Write;

const NAME_COLUMNS: usize = 38;

/// What serving takes, as a table.
pub fn inference_report(subject: &Subject, inference: &Inference) -> String {
    let mut text = heading(subject);
    // Writing to a string cannot fail.
    let _ = write_inference(&mut text, inference);
    text
}

/// What a training step takes, and what would change it.
pub fn training_report(
    subject: &Subject,
    request: &TrainingRequest,
    training: &Training,
    techniques: &[Technique],
) -> String {
    let mut text = heading(subject);
    let _ = write_training(&mut text, request, training, techniques);
    text
}

fn heading(subject: &Subject) -> String {
    format!(
        "{}: P = {} parameters (1 MiB = 2^20 bytes, 1 GiB = 2^30)\n",
        subject.name.escape_debug(),
        grouped(subject.parameters)
    )
}

fn write_line(text: &mut String, name: &str, bytes: u64, formula: &str) -> std::fmt::Result {
    let line = format!(
        "{name:<NAME_COLUMNS$}{:>12}{:>26}  {formula}",
        binary_size(bytes),
        grouped(bytes)
    );
    writeln!(text, "{}", line.trim_end())
}

fn write_figure(text: &mut String, figure: &Figure) -> std::fmt::Result {
    write_line(text, figure.name, figure.bytes, &figure.formula)
}

fn write_inference(text: &mut String, inference: &Inference) -> std::fmt::Result {
    writeln!(text, "\nto serve it, all in one memory")?;
    write_figure(text, &inference.weights)?;
    if let Some(kv) = &inference.kv {
        write_figure(text, &kv.figure)?;
    }
    for figure in &inference.activations {
        write_figure(text, figure)?;
    }
    write_line(text, "total", inference.total_bytes, "")?;
    writeln!(text, "\nweights by quantisation")?;
    for size in &inference.quantised {
        write_line(text, size.name, size.bytes, "")?;
    }
    if let Some(kv) = &inference.kv {
        write!(
            text,
            "\nKV cache of one sequence: layers x KV heads x (key + value elements) x bytes of one = {} bytes a token",
            grouped(kv.token_bytes)
        )?;
        match &kv.window {
            None => writeln!(text)?,
            Some(window) => writeln!(
                text,
                " in the {} layers that grow with the context; the other {} keep a window of {} tokens and a step, \
                 at most {} bytes",
                window.other_layers,
                window.layers,
                grouped(window.positions.into()),
                grouped(window.bytes)
            )?,
        }
        for (tokens, bytes) in &kv.of_context {
            write_line(text, &format!("{tokens} tokens"), *bytes, "")?;
        }
    }
    Ok(())
}

fn write_training(
    text: &mut String,
    request: &TrainingRequest,
    training: &Training,
    techniques: &[Technique],
) -> std::fmt::Result {
    let cut = &request.parallelism;
    write!(
        text,
        "\nto train it with {} in {}, a batch of {}",
        request.optimizer.name(),
        request.precision.name(),
        request.batch
    )?;
    if request.positions > 1 {
        write!(text, " x {} tokens", request.positions)?;
    }
    let devices = u64::from(cut.data) * u64::from(cut.pipeline);
    match devices {
        1 => writeln!(text, ", on one device")?,
        devices => writeln!(text, ", on the one of {devices} devices that holds most")?,
    }
    for figure in &training.state {
        write_figure(text, figure)?;
    }
    write_line(text, "these together", training.state_bytes, "")?;
    match &training.saved {
        Some(figure) => write_figure(text, figure)?,
        None => writeln!(text, "saved inputs: not known without the layers")?,
    }
    write_line(text, "total", training.total_bytes, "")?;
    if cut.data > 1 {
        write_line(
            text,
            "sent by each device in a step",
            training.traffic.bytes,
            &training.traffic.formula,
        )?;
    }
    if cut.pipeline > 1 {
        writeln!(
            text,
            "the pipeline works {:.1} % of the time: {m} / ({m} + {} - 1)",
            100.0 * training.efficiency,
            cut.pipeline,
            m = cut.micro_batches
        )?;
    }
    writeln!(text, "\nwhat would change it, each by itself")?;
    for technique in techniques {
        write_line(
            text,
            &technique.name,
            technique.training.total_bytes,
            &technique.why,
        )?;
    }
    Ok(())
}

fn figure_json(figure: &Figure) -> Value {
    json!({"name": figure.name, "bytes": figure.bytes, "formula": figure.formula})
}

fn figures_json(figures: &[Figure]) -> Vec<Value> {
    figures.iter().map(figure_json).collect()
}

/// What serving takes, for programs.
pub fn inference_json(subject: &Subject, inference: &Inference) -> Value {
    let quantised =
        (inference.quantised.iter()).map(|size| (size.name.to_owned(), json!(size.bytes)));
    json!({
        "name": subject.name,
        "parameters": subject.parameters,
        "inference": {
            "weights": figure_json(&inference.weights),
            "weights_by_quantisation": Value::Object(quantised.collect()),
            "kv": inference.kv.as_ref().map(|kv| json!({
                "bytes": kv.figure.bytes,
                "formula": kv.figure.formula,
                "token_bytes": kv.token_bytes,
                "window": kv.window.map(|window| json!({
                    "layers": window.layers,
                    "positions": window.positions,
                    "bytes": window.bytes,
                })),
                "by_context": kv.of_context.iter().map(|(tokens, bytes)| {
                    json!({"tokens": tokens, "bytes": bytes})
                }).collect::<Vec<_>>(),
            })),
            "activations": figures_json(&inference.activations),
            "total_bytes": inference.total_bytes,
        },
    })
}

/// What a training step takes, for programs.
pub fn training_json(
    subject: &Subject,
    request: &TrainingRequest,
    training: &Training,
    techniques: &[Technique],
) -> Value {
    let of = |training: &Training| {
        json!({
            "state": figures_json(&training.state),
            "state_bytes": training.state_bytes,
            "saved_inputs": training.saved.as_ref().map(figure_json),
            "total_bytes": training.total_bytes,
            "sent": figure_json(&training.traffic),
            "pipeline_efficiency": training.efficiency,
            "forward_passes": training.forward_passes,
        })
    };
    let mut report = of(training);
    let cut = &request.parallelism;
    report["optimizer"] = json!(request.optimizer.name());
    report["precision"] = json!(request.precision.name());
    report["batch"] = json!(request.batch);
    report["positions"] = json!(request.positions);
    report["parallelism"] = json!({
        "accumulate": cut.accumulate,
        "checkpoint": cut.checkpoint,
        "data": cut.data,
        "pipeline": cut.pipeline,
        "micro_batches": cut.micro_batches,
        "zero": cut.zero,
    });
    report["techniques"] = techniques
        .iter()
        .map(|technique| {
            let mut value = of(&technique.training);
            value["name"] = json!(technique.name);
            value["why"] = json!(technique.why);
            value
        })
        .collect();
    json!({
        "name": subject.name,
        "parameters": subject.parameters,
        "training": report,
    })
}

//! The commands that load no model: `plan`, `inspect`, `synth`.

use super::load::{plan_of, served};
use super::progress::Progress;
use super::{Usage, say};
use anyhow::Context;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use strata::api::{Stop, watch_signals};
use strata::cli::{InspectArguments, PlanArguments, SynthArguments};
use strata::config::Config;
use strata::gguf::card::{ShapeCard, is_card};
use strata::gguf::{Destination, Gguf, NewFile};
use strata::inspect::Lists;
use strata::placement::{report_gains, report_gains_json};
use strata::{inspect, synth};

/// `strata plan`: where every group would rest, and how fast that would be.
pub(crate) fn plan(config: &Config, arguments: &PlanArguments) -> anyhow::Result<()> {
    let path = &arguments.target;
    let is_card = is_card(path);
    let gguf = match is_card {
        true => open_card(path)?.index(),
        false => Gguf::open(path).with_context(|| path.display().to_string())?,
    };
    let model = (!is_card).then_some(path.as_path());
    let (plan, gains) = plan_of(config, path, gguf, model)?;
    match arguments.json {
        true => {
            let mut report = plan.report_json();
            report["changes"] = report_gains_json(&gains);
            print_json(&report)
        }
        false => print(&format!("{}{}", plan.report(), report_gains(&plan, &gains))),
    }
}

fn open_card(path: &Path) -> anyhow::Result<ShapeCard> {
    ShapeCard::open(path).with_context(|| path.display().to_string())
}

/// `strata inspect`: what is in a file.
pub(crate) fn inspect(arguments: &InspectArguments) -> anyhow::Result<()> {
    let path = &arguments.model;
    let gguf = Gguf::open_to_show(path).with_context(|| path.display().to_string())?;
    let served = served(&gguf);
    let lists = Lists {
        tensors: arguments.tensors,
        metadata: arguments.metadata,
    };
    match arguments.json {
        true => print_json(&inspect::report_json(&gguf, &served)),
        false => print(&inspect::report(&gguf, &served, lists)),
    }
}

/// `strata synth`: a file of a real shape with random weights.
pub(crate) fn synth(arguments: &SynthArguments) -> anyhow::Result<()> {
    let read = [
        ("the card", arguments.card.as_path()),
        ("the vocabulary file", arguments.vocabulary.as_path()),
    ];
    check_output(&arguments.output, &read, arguments.force)?;
    let card = open_card(&arguments.card)?;
    let vocabulary = Gguf::open(&arguments.vocabulary)
        .with_context(|| arguments.vocabulary.display().to_string())?;
    check_shards(&arguments.output, "the vocabulary file", &vocabulary)?;
    let stop = Stop::new();
    watch_signals(stop.clone()).context("watch signals")?;
    let mut progress = Progress::new("writing");
    let written = synth::synthesise(
        &card,
        &vocabulary,
        Destination {
            path: &arguments.output,
            replace: arguments.force,
        },
        arguments.seed,
        |done, total| {
            progress.show(done, total, |line| say(format_args!("{line}")));
            !stop.is_stopped()
        },
    )?;
    let seconds = progress.elapsed().as_secs_f64();
    drop(progress);
    say(format_args!(
        "strata: wrote {} ({:.1} MiB, {} tensors, {} filler tokens) in {seconds:.1} s",
        arguments.output.display(),
        written.index.file_bytes as f64 / MIB,
        written.index.tensors.len(),
        written.filler_tokens,
    ));
    Ok(())
}

const MIB: f64 = (1 << 20) as f64;

/// Refuses to write over what is read, and without `force` over what is there.
pub(super) fn check_output(
    output: &Path,
    read: &[(&str, &Path)],
    force: bool,
) -> anyhow::Result<()> {
    for (what, path) in read {
        refuse_same(output, what, path)?;
    }
    if output.is_file() && !force {
        anyhow::bail!(Usage(format!(
            "{} is there already; choose another name, or replace it with --force",
            output.display()
        )));
    }
    Ok(())
}

/// The same for all files of a model that is read, which are known once it is open.
pub(super) fn check_shards(output: &Path, what: &str, read: &Gguf) -> anyhow::Result<()> {
    let mut files = read.files.iter();
    files.try_for_each(|file| refuse_same(output, what, &file.path))
}

/// A file that is read may have another path, or the name under which the new one is written first.
fn refuse_same(output: &Path, what: &str, read: &Path) -> anyhow::Result<()> {
    let number = |path: &Path| {
        let file = std::fs::metadata(path).ok()?;
        Some((file.dev(), file.ino()))
    };
    let Some(number_read) = number(read) else {
        return Ok(());
    };
    if number(output) == Some(number_read) {
        anyhow::bail!(Usage(format!(
            "the output is {what} itself; choose another name"
        )));
    }
    let partial = NewFile::partial_path(output);
    if number(&partial) == Some(number_read) {
        anyhow::bail!(Usage(format!(
            "the output is written as {} first, which is {what}; choose another name",
            partial.display()
        )));
    }
    Ok(())
}

/// Names and texts of a file may hold characters that steer a terminal. JSON escapes those of ASCII, but for the last;
/// the others mean the same when they are escaped too.
pub(super) fn print_json(report: &serde_json::Value) -> anyhow::Result<()> {
    print(&format!("{}\n", escaped(&format!("{report:#}"))))
}

/// Such characters stand in strings only.
fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for character in json.chars() {
        match character {
            '\n' => text.push(character),
            // None of them is beyond 16 bits.
            _ if character.is_control() => text.push_str(&format!("\\u{:04x}", character as u32)),
            _ => text.push(character),
        }
    }
    text
}

/// A closed pipe (`| head`) is not a failure.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(error).context("write to stdout")
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steers_a_terminal_is_escaped_and_means_the_same() {
        let name = "\u{9b}2J\u{1b}[2J\u{7f}\n\t\"é";
        let report = serde_json::json!({ name: [name] });
        let text = escaped(&format!("{report:#}"));
        assert!(
            text.chars().all(|c| c == '\n' || !c.is_control()),
            "{text:?}"
        );
        assert!(text.contains("\\u009b2J") && text.contains('é'), "{text}");
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&text).unwrap(),
            report
        );
    }
}

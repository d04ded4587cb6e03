//! The commands that load no model: `plan`, `inspect`, `synth`.

use super::load::plan_of;
use super::{Stderr, Usage, say};
use anyhow::Context;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};
use strata::cli::{InspectArguments, PlanArguments, SynthArguments};
use strata::config::Config;
use strata::gguf::Gguf;
use strata::gguf::card::ShapeCard;
use strata::placement::{report_gains, report_gains_json};
use strata::{inspect, synth};

/// `strata plan`: where every group would rest, and how fast that would be.
pub(crate) fn plan(config: &Config, arguments: &PlanArguments) -> anyhow::Result<()> {
    let path = &arguments.target;
    let is_card = path
        .extension()
        .is_some_and(|extension| extension == "toml");
    let gguf = match is_card {
        true => ShapeCard::open(path)?.index(),
        false => Gguf::open(path).with_context(|| path.display().to_string())?,
    };
    let model = (!is_card).then_some(path.as_path());
    let (plan, gains) = plan_of(config, path, gguf, model)?;
    match arguments.json {
        true => {
            let mut report = plan.report_json();
            report["changes"] = report_gains_json(&gains);
            print(&format!("{report:#}\n"))
        }
        false => print(&format!("{}{}", plan.report(), report_gains(&plan, &gains))),
    }
}

/// `strata inspect`: what is in a file.
pub(crate) fn inspect(arguments: &InspectArguments) -> anyhow::Result<()> {
    let path = &arguments.model;
    let gguf = Gguf::open(path).with_context(|| path.display().to_string())?;
    match arguments.json {
        true => print(&format!("{:#}\n", inspect::report_json(&gguf))),
        false => print(&inspect::report(&gguf)),
    }
}

/// `strata synth`: a file of a real shape with random weights.
pub(crate) fn synth(arguments: &SynthArguments) -> anyhow::Result<()> {
    let same = |path: &Path| path.canonicalize().ok();
    if same(&arguments.output).is_some_and(|output| Some(output) == same(&arguments.vocabulary)) {
        anyhow::bail!(Usage(
            "the output is the vocabulary file itself; choose another name".to_owned()
        ));
    }
    if arguments.output.is_file() && !arguments.force {
        anyhow::bail!(Usage(format!(
            "{} is there already; choose another name, or replace it with --force",
            arguments.output.display()
        )));
    }
    let card = ShapeCard::open(&arguments.card)?;
    let vocabulary = Gguf::open(&arguments.vocabulary)
        .with_context(|| arguments.vocabulary.display().to_string())?;
    let mut progress = Progress::new();
    let written = synth::synthesise(
        &card,
        &vocabulary,
        &arguments.output,
        arguments.seed,
        |done, total| progress.show(done, total),
    )?;
    say(format_args!(
        "strata: wrote {} ({:.1} MiB, {} tensors, {} filler tokens) in {:.1} s",
        arguments.output.display(),
        written.index.file_bytes as f64 / MIB,
        written.index.tensors.len(),
        written.filler_tokens,
        progress.began.elapsed().as_secs_f64(),
    ));
    Ok(())
}

const MIB: f64 = (1 << 20) as f64;

/// A closed pipe (`| head`) is not a failure.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(error).context("write to stdout")
        }
        _ => Ok(()),
    }
}

/// A line on stderr: rewritten in place on a terminal, one every few seconds elsewhere.
struct Progress {
    began: Instant,
    shown: Option<Instant>,
}

impl Progress {
    fn new() -> Progress {
        Progress {
            began: Instant::now(),
            shown: None,
        }
    }

    fn show(&mut self, done: u64, total: u64) {
        let terminal = std::io::stderr().is_terminal();
        let pause = Duration::from_millis(if terminal { 100 } else { 5000 });
        let last = done >= total;
        let due = self.shown.is_none_or(|shown| shown.elapsed() >= pause);
        if !(due || last && terminal) {
            return;
        }
        self.shown = Some(Instant::now());
        let (start, end) = match (terminal, last) {
            (true, false) => ("\r", ""),
            (true, true) => ("\r", "\n"),
            (false, _) => ("", "\n"),
        };
        let line = format!(
            "{start}{:.0} of {:.0} MiB ({:.0} %){end}",
            done as f64 / MIB,
            total as f64 / MIB,
            100.0 * done as f64 / total.max(1) as f64
        );
        drop(Stderr.write_all(line.as_bytes()));
    }
}

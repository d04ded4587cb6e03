//! `strata quantise`: a model's file with fewer bits for each weight.

use super::files::{check_output, check_shards};
use super::progress::Progress;
use super::{Usage, say};
use anyhow::Context;
use std::num::NonZeroUsize;
use strata::api::{Stop, watch_signals};
use strata::cli::QuantiseArguments;
use strata::config::format_bytes;
use strata::gguf::{Destination, Gguf, Mixture};
use strata::quantise::Conversion;

pub(crate) fn quantise(arguments: &QuantiseArguments) -> anyhow::Result<()> {
    let mixture = mixture(&arguments.mixture)?;
    let (input, output) = (&arguments.input, &arguments.output);
    check_output(output, &[("the input", input)], arguments.force)?;
    let of_file = || input.display().to_string();
    let gguf = Gguf::open(input).with_context(of_file)?;
    check_shards(output, "the input", &gguf)?;
    let conversion = Conversion::new(gguf, mixture).with_context(of_file)?;
    for remark in conversion.remarks() {
        say(format_args!("strata: {remark}"));
    }
    let threads = match arguments.threads {
        Some(threads) => NonZeroUsize::new(threads as usize),
        None => std::thread::available_parallelism().ok(),
    };
    // From here on a signal ends the work, and what there is of the file with it.
    let stop = Stop::new();
    watch_signals(stop.clone()).context("watch signals")?;
    let mut progress = Progress::new("quantising");
    strata::quantise::quantise(
        &conversion,
        Destination {
            path: output,
            replace: arguments.force,
        },
        threads.unwrap_or(NonZeroUsize::MIN),
        |done, total| {
            progress.show(done, total, |line| say(format_args!("{line}")));
            !stop.is_stopped()
        },
    )?;
    let seconds = progress.elapsed().as_secs_f64();
    drop(progress);
    let after = conversion.header().index();
    let kinds: Vec<String> = (conversion.kinds().iter())
        .map(|(kind, count)| format!("{count} x {}", kind.name()))
        .collect();
    say(format_args!(
        "strata: wrote {} ({}, from {}; {}) in {seconds:.1} s, {:.0} MB/s of weights as f32",
        output.display(),
        format_bytes(after.file_bytes),
        format_bytes(conversion.input().file_bytes),
        kinds.join(", "),
        conversion.float_bytes() as f64 / 1e6 / seconds.max(1e-9),
    ));
    Ok(())
}

/// llama-quantize has short names for three of them.
fn mixture(name: &str) -> anyhow::Result<Mixture> {
    let full = match name.to_ascii_lowercase().as_str() {
        "q3_k" => "q3_k_m".to_owned(),
        "q4_k" => "q4_k_m".to_owned(),
        "q5_k" => "q5_k_m".to_owned(),
        other => other.to_owned(),
    };
    Mixture::from_name(&full).ok_or_else(|| {
        let names: Vec<&str> = Mixture::ALL.into_iter().map(Mixture::name).collect();
        Usage(format!(
            "--type `{}` is not known; one of {} is expected",
            name.escape_debug(),
            names.join(", ")
        ))
        .into()
    })
}

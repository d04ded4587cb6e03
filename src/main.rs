//! The program: parse, build, run, exit code. 0: done; 1: it failed; 2: the command line or the configuration is
//! wrong; 74: the mapped model file shrank; 130 and 143: a second signal, or the first one of `pull`.

mod commands;

use clap::Parser;
use std::io::IsTerminal;
use std::process::ExitCode;
use strata::cli::{Cli, Command};
use strata::config::{Config, ConfigError, LogLevel};
use strata::memory::CountingHeap;

#[global_allocator]
static HEAP: CountingHeap = CountingHeap;

fn main() -> ExitCode {
    commands::let_writes_fail();
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            commands::say(format_args!("strata: {}", commands::one_line(&error)));
            let of_usage = error.is::<ConfigError>() || error.is::<commands::Usage>();
            ExitCode::from(if of_usage { 2 } else { 1 })
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    match cli.command {
        Command::Serve(arguments) => {
            let config = arguments.settings.config(arguments.model)?;
            start_log(&config, config.log);
            commands::serve(&config)
        }
        Command::Generate(arguments) => {
            let config = arguments.settings.config(arguments.model.clone())?;
            start_log(&config, of_trouble(config.log));
            commands::generate(&config, &arguments)
        }
        Command::Bench(arguments) => {
            let config = commands::bench_config(&arguments)?;
            start_log(&config, of_trouble(config.log));
            commands::bench(&config, &arguments)
        }
        Command::Plan(arguments) => {
            let config = arguments.settings.config(None)?;
            start_log(&config, config.log);
            commands::plan(&config, &arguments)
        }
        Command::Estimate(arguments) => {
            let config = arguments.settings.config(None)?;
            start_log(&config, of_trouble(config.log));
            commands::estimate(&config, &arguments)
        }
        Command::Inspect(arguments) => commands::inspect(&arguments),
        Command::Synth(arguments) => commands::synth(&arguments),
        Command::Pull(arguments) => commands::pull(&arguments),
        Command::Quantise(arguments) => commands::quantise(&arguments),
    }
}

/// Where text or figures are what is wanted, the log tells of trouble only, unless more is asked for.
fn of_trouble(level: LogLevel) -> LogLevel {
    match level {
        LogLevel::Info => LogLevel::Warn,
        level => level,
    }
}

fn start_log(config: &Config, level: LogLevel) {
    let filter = match level {
        LogLevel::Off => "off".to_owned(),
        level => format!("warn,strata={}", level.name()),
    };
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(filter))
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(|| commands::Stderr)
        .init();
    for warning in config.warnings() {
        tracing::warn!("{warning}");
    }
}

//! The program: parse, build, run, exit code. 0: done; 1: it failed; 2: the command line or the configuration is
//! wrong; 74: the mapped model file shrank; 130 and 143: a second signal, or the first one of `pull`.

use super::hand_over::hand_over;
use super::{
    Stderr, Usage, bench, bench_config, estimate, generate, inspect, let_writes_fail, one_line,
    plan, pull, quantise, say, serve, synth,
};
use clap::Parser;
use std::io::IsTerminal;
use std::process::ExitCode;
use strata::cli::{Cli, Command};
use strata::config::{Config, ConfigError, LogLevel};

pub(crate) fn main() -> ExitCode {
    let_writes_fail();
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(format_args!("strata: {}", one_line(&error)));
            let of_usage = error.is::<ConfigError>() || error.is::<Usage>();
            ExitCode::from(if of_usage { 2 } else { 1 })
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    match cli.command {
        Command::Serve(arguments) => {
            let config = arguments.settings.config(arguments.model)?;
            begin(&config, config.log);
            serve(&config)
        }
        Command::Generate(arguments) => {
            let config = arguments.settings.config(arguments.model.clone())?;
            begin(&config, of_trouble(config.log));
            generate(&config, &arguments)
        }
        Command::Bench(arguments) => {
            let config = bench_config(&arguments)?;
            begin(&config, of_trouble(config.log));
            bench(&config, &arguments)
        }
        Command::Plan(arguments) => {
            let config = arguments.settings.config(None)?;
            begin(&config, config.log);
            plan(&config, &arguments)
        }
        Command::Estimate(arguments) => {
            let config = arguments.settings.config(None)?;
            begin(&config, of_trouble(config.log));
            estimate(&config, &arguments)
        }
        Command::Inspect(arguments) => inspect(&arguments),
        Command::Synth(arguments) => synth(&arguments),
        Command::Pull(arguments) => pull(&arguments),
        Command::Quantise(arguments) => quantise(&arguments),
    }
}

/// Where text or figures are what is wanted, the log tells of trouble only, unless more is asked for.
fn of_trouble(level: LogLevel) -> LogLevel {
    match level {
        LogLevel::Info => LogLevel::Warn,
        level => level,
    }
}

/// What every command with settings begins with: it is done by the program that suits them, which starts its log.
fn begin(config: &Config, level: LogLevel) {
    hand_over(config);
    let filter = match level {
        LogLevel::Off => "off".to_owned(),
        // `strata_cuda` begins with it.
        level => format!("warn,strata={}", level.name()),
    };
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(filter))
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(|| Stderr)
        .init();
    for warning in config.warnings() {
        tracing::warn!("{warning}");
    }
}

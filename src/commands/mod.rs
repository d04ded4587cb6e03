//! The commands. `load` puts the parts of the library together for those that need a loaded model.

mod bench;
mod bench_rates;
mod bench_rates_profile;
mod bench_rates_report;
mod contention;
mod device;
mod estimate;
mod file_limit;
mod files;
mod generate;
mod hand_over;
mod load;
mod memory_report;
mod memory_watch;
mod process_memory;
mod program;
mod progress;
mod pull;
mod quantise;
mod rates;
mod serve;
mod stderr;
mod trace;

pub(crate) use hand_over::OpenGpu;
pub(crate) use program::main;

use bench::{bench, bench_config};
use estimate::estimate;
use file_limit::let_writes_fail;
use files::{inspect, plan, synth};
use generate::generate;
use pull::pull;
use quantise::quantise;
use serve::serve;
use stderr::{Stderr, one_line, say};

use std::fmt;

/// The command line asks for what cannot be: exit code 2.
#[derive(Debug)]
pub(crate) struct Usage(String);

impl fmt::Display for Usage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

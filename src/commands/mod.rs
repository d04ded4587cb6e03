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
mod load;
mod memory_report;
mod memory_watch;
mod process_memory;
mod progress;
mod pull;
mod quantise;
mod rates;
mod serve;
mod stderr;
mod trace;

pub(crate) use bench::{bench, bench_config};
pub(crate) use estimate::estimate;
pub(crate) use file_limit::let_writes_fail;
pub(crate) use files::{inspect, plan, synth};
pub(crate) use generate::generate;
pub(crate) use pull::pull;
pub(crate) use quantise::quantise;
pub(crate) use serve::serve;
pub(crate) use stderr::{Stderr, one_line, say};

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

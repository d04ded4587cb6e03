//! The file of `--trace`.

use super::Usage;
use strata::config::Config;
use strata::trace::{TraceError, TraceFile};

/// Begins the file, if one is asked for. It is completed when it is dropped: after the engine.
pub(super) fn begin_trace(config: &Config) -> anyhow::Result<TraceFile> {
    let Some(path) = &config.trace else {
        return Ok(TraceFile::none());
    };
    TraceFile::create(path).map_err(|error| match error {
        TraceError::NotATrace { .. } => Usage(error.to_string()).into(),
        TraceError::Write { .. } => error.into(),
    })
}

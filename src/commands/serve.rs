//! `strata serve`.

use super::load::load;
use anyhow::Context;
use std::time::Duration;
use strata::api::{self, HttpThreads, Served, Stop};
use strata::config::Config;
use strata::engine::EngineStatus;

/// Serves until a signal. While the model loads, `/health` says how far it is; a model that does not load ends the
/// server.
pub(crate) fn serve(config: &Config) -> anyhow::Result<()> {
    let stop = Stop::new();
    // Before anything slow: a file is parsed and planned before there is a server to stop.
    api::watch_signals(stop.clone()).context("watch signals")?;
    let threads = HttpThreads::start().context("start the threads that serve HTTP")?;
    let listener = api::listen(&config.listen)?;
    let loading = load(config)?;
    tracing::info!(
        model = loading.model_name,
        context = loading.context,
        "listening on http://{}",
        listener.local_addr().context("find the port")?
    );
    let engine = loading.engine;
    let watcher = std::thread::Builder::new()
        .name("watcher".to_owned())
        .spawn({
            let (engine, stop) = (engine.clone(), stop.clone());
            move || {
                let failed = match engine.wait_until_loaded() {
                    EngineStatus::Failed(cause) => format!("load the model: {cause}"),
                    // A server that can compute nothing any more is better started again.
                    _ => match engine.wait_until_ended() {
                        EngineStatus::Failed(cause) => cause,
                        _ => return None,
                    },
                };
                stop.stop();
                Some(failed)
            }
        })
        .context("start the watcher: the system gives no thread; raise the limit (the control group's, `ulimit -u`)")?;
    let served = Served {
        engine: engine.clone(),
        tokenizer: loading.tokenizer,
        template: loading.template,
        metrics: loading.metrics,
        memory: loading.memory,
        model_name: loading.model_name,
        context: loading.context,
        model_context: loading.model_context,
    };
    threads
        .serve(listener, served, config, &stop)
        .context("serve HTTP")?;
    engine.shutdown(Duration::ZERO);
    engine.join();
    drop(loading.trace);
    match watcher.join() {
        Ok(Some(cause)) => anyhow::bail!("{cause}"),
        _ => Ok(()),
    }
}

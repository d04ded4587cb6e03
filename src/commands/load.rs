//! From a configuration to an engine that loads its model, and what else serving needs.

use super::Usage;
use anyhow::Context;
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use strata::api::MemoryReport;
use strata::config::Config;
use strata::engine::{Engine, EngineHandle, EngineSettings, Progress};
use strata::gguf::{Gguf, Hyperparameters};
use strata::metrics::Metrics;
use strata::model::Model;
use strata::tokenizer::{ChatTemplate, Tokenizer};

/// A model that is loading.
pub(crate) struct Loading {
    pub(crate) engine: EngineHandle,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) template: ChatTemplate,
    pub(crate) metrics: Metrics,
    pub(crate) memory: MemoryReport,
    pub(crate) model_name: String,
    /// Tokens of a sequence.
    pub(crate) context: usize,
    /// What the model was trained on.
    pub(crate) model_context: usize,
}

/// Reads everything but weights, and starts the engine, which reads those on its thread.
pub(crate) fn load(config: &Config) -> anyhow::Result<Loading> {
    let path = model_path(config)?;
    let metrics = Metrics::new();
    let gguf = Gguf::open(path).with_context(|| format!("open {}", path.display()))?;
    let of_file = || path.display().to_string();
    let hyperparameters = Hyperparameters::from_gguf(&gguf).with_context(of_file)?;
    let tokenizer = Arc::new(Tokenizer::from_gguf(&gguf.metadata).with_context(of_file)?);
    let template = ChatTemplate::from_gguf(&gguf.metadata, &tokenizer).with_context(of_file)?;
    let context = config.context_for(hyperparameters.context_length);
    let parallel = config.parallel as usize;
    let end_of_generation: HashSet<u32> = tokenizer.end_of_generation().iter().copied().collect();
    let settings = EngineSettings {
        context,
        parallel,
        step_width: config.step_width.unwrap_or(64) as usize,
        queue_max: config.queue,
        page_tokens: 32,
        kv_pages: context.div_ceil(32) * config.parallel,
        kv_tier: "host",
        stalled_client_timeout: config.stall_timeout,
        end_of_generation: Arc::new(end_of_generation),
    };
    let engine = Engine::start(make_model, settings, &metrics).context("start the engine")?;
    Ok(Loading {
        engine,
        tokenizer,
        template,
        metrics,
        memory: Arc::new(|| serde_json::json!({})),
        model_name: config.served_name(path),
        context: context as usize,
        model_context: hyperparameters.context_length as usize,
    })
}

/// Runs on the engine thread.
fn make_model(_progress: &Progress) -> anyhow::Result<Box<dyn Model>> {
    anyhow::bail!("this build has no model family")
}

fn model_path(config: &Config) -> anyhow::Result<&Path> {
    config.model.as_deref().ok_or_else(|| {
        Usage("no model is given; name a GGUF file: `strata serve MODEL.gguf`".to_owned()).into()
    })
}

//! A server on a port of its own, ended when dropped.

use super::client::{Response, call};
use super::model::{FIRST_PIECE, Script, ScriptedModel, metadata};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use strata::api::{self, Served, Stop};
use strata::config::Config;
use strata::engine::{Engine, EngineHandle, EngineSettings, EngineStatus};
use strata::metrics::Metrics;
use strata::tokenizer::{ChatTemplate, Tokenizer};

pub(super) const CONTEXT: usize = 64;

pub(super) struct Setup {
    pub(super) pieces: Vec<&'static str>,
    pub(super) script: Script,
    pub(super) config: Config,
    pub(super) context: usize,
    /// The model is not loaded before this is sent to (or dropped).
    pub(super) loading: Option<std::sync::mpsc::Receiver<()>>,
    pub(super) load_fails: bool,
    pub(super) memory_panics: bool,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            pieces: Vec::new(),
            script: Script::default(),
            config: Config {
                listen: "127.0.0.1:0".to_owned(),
                grace: Duration::ZERO,
                ..Config::default()
            },
            context: CONTEXT,
            loading: None,
            load_fails: false,
            memory_panics: false,
        }
    }
}

impl Setup {
    /// A model that says these pieces and ends.
    pub(super) fn saying(pieces: &[&'static str]) -> Setup {
        let ids = FIRST_PIECE..FIRST_PIECE + pieces.len() as u32;
        Setup {
            pieces: pieces.to_vec(),
            script: Script {
                tokens: ids.collect(),
                ..Script::default()
            },
            ..Setup::default()
        }
    }

    /// A model that says these tokens and ends.
    pub(super) fn emitting(tokens: &[u32]) -> Setup {
        Setup {
            script: Script {
                tokens: tokens.to_vec(),
                ..Script::default()
            },
            ..Setup::default()
        }
    }

    pub(super) fn start(self) -> Server {
        let metadata = metadata(&self.pieces);
        let tokenizer = Arc::new(Tokenizer::from_gguf(&metadata).unwrap());
        let template = ChatTemplate::from_gguf(&metadata, &tokenizer).unwrap();
        let metrics = Metrics::new();
        let memory_panics = self.memory_panics;
        let ends: HashSet<u32> = tokenizer.end_of_generation().iter().copied().collect();
        let vocabulary = tokenizer.vocabulary_size();
        let pages_each = (self.context as u32).div_ceil(16);
        let settings = EngineSettings {
            context: self.context as u32,
            parallel: self.config.parallel as usize,
            step_width: 32,
            queue_max: self.config.queue,
            page_tokens: 16,
            kv_pages: pages_each * self.config.parallel,
            kv_tier: "host",
            stalled_client_timeout: self.config.stall_timeout,
            tokens: vocabulary,
            end_of_generation: Arc::new(ends),
        };
        let (script, loading, load_fails) = (self.script, self.loading, self.load_fails);
        let engine = Engine::start(
            move |progress| {
                progress.set(0.5);
                if let Some(loading) = loading {
                    // An error means that nobody waits any more.
                    let _ = loading.recv();
                }
                if load_fails {
                    return Err("/secret/model.gguf is broken");
                }
                Ok(Box::new(ScriptedModel::new(vocabulary, script)))
            },
            settings,
            &metrics,
        )
        .unwrap();
        let served = Served {
            engine: engine.clone(),
            tokenizer,
            template,
            metrics: metrics.clone(),
            memory: Arc::new(move || {
                assert!(!memory_panics, "secret");
                json!({"tiers": []})
            }),
            model_name: "scripted".to_owned(),
            context: self.context,
            model_context: 128,
        };
        let listener = api::listen(&self.config.listen).unwrap();
        let address = listener.local_addr().unwrap();
        let stop = Stop::new();
        let (config, stopping) = (self.config, stop.clone());
        let thread = std::thread::spawn(move || {
            tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .unwrap()
                .block_on(async {
                    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                    api::run(listener, served, &config, &stopping).await;
                });
        });
        Server {
            address,
            engine,
            metrics,
            stop,
            thread: Some(thread),
        }
    }
}

pub(super) struct Server {
    pub(super) address: SocketAddr,
    pub(super) engine: EngineHandle,
    pub(super) metrics: Metrics,
    pub(super) stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Waits for the model first.
    pub(super) fn ready(self) -> Server {
        assert_eq!(self.engine.wait_until_loaded(), EngineStatus::Ready);
        self
    }

    pub(super) fn get(&self, path: &str) -> Response {
        call(self.address, "GET", path, &[], b"")
    }

    pub(super) fn post(&self, path: &str, body: &Value) -> Response {
        let headers = [("content-type", "application/json")];
        call(
            self.address,
            "POST",
            path,
            &headers,
            body.to_string().as_bytes(),
        )
    }

    /// One user message, with `fields` beside it.
    pub(super) fn chat(&self, fields: Value) -> Response {
        self.post(
            "/v1/chat/completions",
            &with(
                json!({"messages": [{"role": "user", "content": "hi"}]}),
                fields,
            ),
        )
    }

    pub(super) fn complete(&self, fields: Value) -> Response {
        self.post("/v1/completions", &with(json!({"prompt": "hi"}), fields))
    }

    /// The outcome's count of an endpoint.
    pub(super) fn counted(&self, endpoint: &str, outcome: &str) -> u64 {
        self.metrics
            .requests_total
            .with_label_values(&[endpoint, outcome])
            .get()
    }

    /// Waits until `condition` holds; fails after a time that no healthy machine needs.
    pub(super) fn eventually(&self, what: &str, condition: impl Fn(&Server) -> bool) {
        for _ in 0..6000 {
            if condition(self) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("not within 30 s: {what}");
    }

    pub(super) fn join(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(
                std::thread::panicking() || ended.is_ok(),
                "the server panicked"
            );
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

pub(super) fn with(mut body: Value, fields: Value) -> Value {
    let body_fields = body.as_object_mut().unwrap();
    for (name, value) in fields.as_object().unwrap() {
        body_fields.insert(name.clone(), value.clone());
    }
    body
}

//! Every metric name, label and bucket, in one place. The names are an interface (README.md lists them).
//!
//! One `Metrics` is made by `main` and shared by reference; the handles are atomics, so any thread may count.
//! `strata_requests_total` counts HTTP requests when they end, those that were refused included;
//! `strata_requests_active` counts sequences, which only the engine has: a request with `n` = 2 is two of them, and one
//! whose body is still being read is none.

use prometheus::{Counter, CounterVec, HistogramVec};
use prometheus::{
    Encoder, Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGaugeVec, Opts,
    Registry, TextEncoder, core::Collector,
};

/// All metrics of one process (or of one test: nothing here is global).
#[derive(Clone)]
pub struct Metrics {
    registry: Registry,
    /// `{tier}`: what the user allowed, bytes.
    pub memory_budget_bytes: IntGaugeVec,
    /// `{tier, kind=weights|ring|kv|scratch}`.
    pub memory_used_bytes: IntGaugeVec,
    /// `{tier}`: the largest piece that could still be allocated.
    pub memory_largest_free_bytes: IntGaugeVec,
    /// `{tier}`: weight bytes that rest there between uses.
    pub weight_home_bytes: IntGaugeVec,
    /// `{from, to}`: bytes moved between tiers, alignment included.
    pub transfer_bytes_total: IntCounterVec,
    /// `{from, to}`: seconds during which at least one such transfer was under way.
    pub transfer_seconds_total: CounterVec,
    /// `{reason=error|short|checksum}`: reads of the model file that were tried again.
    pub read_retries_total: IntCounterVec,
    /// Bytes of weights that were found to be those of the first read.
    pub reads_verified_bytes_total: IntCounter,
    /// The share of reads that is verified now, 0 to 1.
    pub verify_share: Gauge,
    /// Processor time of verifying groups.
    pub verify_seconds_total: Counter,
    /// `{from}`: seconds that computation waited for weights of that home.
    pub weight_stall_seconds_total: CounterVec,
    /// `{outcome=ready|waited}`.
    pub leases_total: IntCounterVec,
    pub step_seconds: Histogram,
    pub step_width: Histogram,
    pub step_predicted_seconds: Gauge,
    /// Of all steps that were computed, each at its width and depth: beside the sum of `step_seconds`, whether the plan
    /// can be believed.
    pub steps_predicted_seconds_total: Counter,
    /// `{tier, state=used|free}`.
    pub kv_pages: IntGaugeVec,
    /// `{endpoint, outcome}`; outcomes: `stop`, `length`, `cancelled`, `rejected`, `error`.
    pub requests_total: IntCounterVec,
    /// `{state=running|waiting}`.
    pub requests_active: IntGaugeVec,
    pub prompt_tokens_total: IntCounter,
    pub generated_tokens_total: IntCounter,
    pub time_to_first_token_seconds: Histogram,
    pub time_per_output_token_seconds: Histogram,
    pub queue_seconds: Histogram,
    /// `{endpoint}`.
    pub request_seconds: HistogramVec,
    pub load_progress_ratio: Gauge,
    /// `{version, device, reader}`: always 1.
    pub build_info: IntGaugeVec,
}

/// From a millisecond (a small model's token) to ten minutes (a long prompt from a slow disk).
const SECONDS_BUCKETS: [f64; 18] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0,
    120.0, 300.0, 600.0,
];
const WIDTH_BUCKETS: [f64; 11] = [
    1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0,
];

#[expect(
    clippy::expect_used,
    clippy::missing_panics_doc,
    reason = "names, labels and buckets are constants of this file: a bad one is our bug and shows in every test"
)]
impl Metrics {
    pub fn new() -> Metrics {
        let registry = Registry::new();
        fn add<C: Collector + Clone + 'static>(registry: &Registry, collector: C) -> C {
            registry
                .register(Box::new(collector.clone()))
                .expect("metric names are unique");
            collector
        }
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            let made = IntGaugeVec::new(Opts::new(name, help), labels);
            add(&registry, made.expect("valid metric"))
        };
        let counters = |name: &str, help: &str, labels: &[&str]| {
            let made = IntCounterVec::new(Opts::new(name, help), labels);
            add(&registry, made.expect("valid metric"))
        };
        let seconds = |name: &str, help: &str, labels: &[&str]| {
            let made = CounterVec::new(Opts::new(name, help), labels);
            add(&registry, made.expect("valid metric"))
        };
        let counter = |name: &str, help: &str| {
            add(
                &registry,
                IntCounter::new(name, help).expect("valid metric"),
            )
        };
        let gauge =
            |name: &str, help: &str| add(&registry, Gauge::new(name, help).expect("valid metric"));
        let histogram = |name: &str, help: &str, buckets: &[f64]| {
            let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
            let made = Histogram::with_opts(options);
            add(&registry, made.expect("valid metric"))
        };
        let metrics = Metrics {
            memory_budget_bytes: gauges(
                "strata_memory_budget_bytes",
                "Budget of each tier.",
                &["tier"],
            ),
            memory_used_bytes: gauges(
                "strata_memory_used_bytes",
                "Bytes in use on each tier, by kind.",
                &["tier", "kind"],
            ),
            memory_largest_free_bytes: gauges(
                "strata_memory_largest_free_bytes",
                "Largest allocation that each tier could still take.",
                &["tier"],
            ),
            weight_home_bytes: gauges(
                "strata_weight_home_bytes",
                "Weight bytes that rest on each tier between uses.",
                &["tier"],
            ),
            transfer_bytes_total: counters(
                "strata_transfer_bytes_total",
                "Bytes moved between tiers, alignment included.",
                &["from", "to"],
            ),
            transfer_seconds_total: seconds(
                "strata_transfer_seconds_total",
                "Seconds during which a transfer between the tiers was under way.",
                &["from", "to"],
            ),
            read_retries_total: counters(
                "strata_read_retries_total",
                "Reads of the model file that were tried again, by reason.",
                &["reason"],
            ),
            reads_verified_bytes_total: counter(
                "strata_reads_verified_bytes_total",
                "Bytes of weights whose checksum was that of their first read.",
            ),
            verify_share: gauge(
                "strata_verify_share",
                "Share of reads of weights that is verified now.",
            ),
            verify_seconds_total: {
                let made = Counter::new(
                    "strata_verify_seconds_total",
                    "Processor time of verifying what was read.",
                );
                add(&registry, made.expect("valid metric"))
            },
            weight_stall_seconds_total: seconds(
                "strata_weight_stall_seconds_total",
                "Seconds that computation waited for weights, by their home; a GPU's by its own clock.",
                &["from"],
            ),
            leases_total: counters(
                "strata_leases_total",
                "Weight groups lent to computation, ready at once or waited for.",
                &["outcome"],
            ),
            step_seconds: histogram("strata_step_seconds", "Time of a step.", &SECONDS_BUCKETS),
            step_width: histogram("strata_step_width", "Tokens in a step.", &WIDTH_BUCKETS),
            step_predicted_seconds: gauge(
                "strata_step_predicted_seconds",
                "The plan's prediction for a step of one token.",
            ),
            steps_predicted_seconds_total: {
                let made = Counter::new(
                    "strata_steps_predicted_seconds_total",
                    "The plan's predictions for the steps that were computed, added up.",
                );
                add(&registry, made.expect("valid metric"))
            },
            kv_pages: gauges(
                "strata_kv_pages",
                "Pages of the KV cache.",
                &["tier", "state"],
            ),
            requests_total: counters(
                "strata_requests_total",
                "HTTP requests that have ended, by outcome.",
                &["endpoint", "outcome"],
            ),
            requests_active: gauges(
                "strata_requests_active",
                "Sequences that run or wait in the engine; a request may have several.",
                &["state"],
            ),
            prompt_tokens_total: counter("strata_prompt_tokens_total", "Prompt tokens computed."),
            generated_tokens_total: counter("strata_generated_tokens_total", "Tokens generated."),
            time_to_first_token_seconds: histogram(
                "strata_time_to_first_token_seconds",
                "From arrival to the first token.",
                &SECONDS_BUCKETS,
            ),
            time_per_output_token_seconds: histogram(
                "strata_time_per_output_token_seconds",
                "Between one token and the next of a request.",
                &SECONDS_BUCKETS,
            ),
            queue_seconds: histogram(
                "strata_queue_seconds",
                "From arrival to the first step.",
                &SECONDS_BUCKETS,
            ),
            request_seconds: {
                let options = HistogramOpts::new(
                    "strata_request_seconds",
                    "Time of an HTTP request, from its headers to the end of its answer.",
                )
                .buckets(SECONDS_BUCKETS.to_vec());
                let made = HistogramVec::new(options, &["endpoint"]);
                add(&registry, made.expect("valid metric"))
            },
            load_progress_ratio: gauge(
                "strata_load_progress_ratio",
                "Share of the resident weights that is loaded.",
            ),
            build_info: gauges(
                "strata_build_info",
                "Version, device and reader rung of this process.",
                &["version", "device", "reader"],
            ),
            registry: registry.clone(),
        };
        #[cfg(target_os = "linux")]
        add_process_metrics(&registry);
        metrics
    }

    /// Prometheus' text exposition format, version 0.0.4.
    pub fn render(&self) -> String {
        let mut text = Vec::new();
        TextEncoder::new()
            .encode(&self.registry.gather(), &mut text)
            .expect("metrics encode as text");
        String::from_utf8(text).expect("exposition text is UTF-8")
    }
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics::new()
    }
}

#[cfg(target_os = "linux")]
#[expect(clippy::expect_used, reason = "registered once, at start")]
fn add_process_metrics(registry: &Registry) {
    let process = prometheus::process_collector::ProcessCollector::for_self();
    registry
        .register(Box::new(process))
        .expect("process metrics register once");
}

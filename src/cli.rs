//! The command line, as given. Settings become a `Config` in `config`; nothing is checked here but form.
//!
//! The flags of settings are made from `config::KEYS`, so that a key has one name and one help everywhere.

use crate::config::{Config, ConfigError, KEYS, Key, Sources};
use clap::{Arg, ArgMatches, Args, FromArgMatches, Parser, Subcommand};
use std::path::PathBuf;
use std::time::Duration;

/// Serves language models that are larger than the GPU.
#[derive(Debug, Parser)]
#[command(name = "strata", version, max_term_width = 120)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model over HTTP, as OpenAI's API
    Serve(ServeArguments),
    /// Generate text to stdout; figures go to stderr
    Generate(GenerateArguments),
    /// Say where every group of weights would rest, and how fast that would be
    Plan(PlanArguments),
    /// Say what a model would take, to serve it or to train it, before anything is allocated
    Estimate(EstimateArguments),
    /// Measure the engine's step without a server, or the machine
    Bench(BenchArguments),
    /// Say what is in a GGUF file
    Inspect(InspectArguments),
    /// Write a model of random weights with the shape of a card
    Synth(SynthArguments),
    /// Fetch a model's GGUF file from the Hugging Face hub, or from a URL
    Pull(PullArguments),
    /// Write a model's file with fewer bits for each weight
    #[command(visible_alias = "quantize")]
    Quantise(QuantiseArguments),
}

#[derive(Debug, Args)]
pub struct ServeArguments {
    /// The GGUF file; of a model in several, any of them
    #[arg(value_name = "MODEL")]
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub settings: Settings<true>,
}

#[derive(Debug, Args)]
pub struct GenerateArguments {
    /// The GGUF file; of a model in several, any of them
    #[arg(value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// The prompt
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: String,
    /// The prompt is a user's message, and the model's chat template is applied
    #[arg(long)]
    pub chat: bool,
    /// The most tokens to generate; by default as many as the context has room for
    #[arg(short = 'n', long, value_name = "N", allow_negative_numbers = true)]
    pub max_tokens: Option<usize>,
    #[command(flatten)]
    pub sampling: SamplingArguments,
    #[command(flatten)]
    pub settings: Settings<false>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArguments {
    /// 0 takes the most probable token, always
    #[arg(
        long,
        value_name = "T",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub temperature: f32,
    /// Keep the most probable tokens that have this much probability together; 1 keeps all
    #[arg(
        long,
        value_name = "P",
        default_value_t = 1.0,
        allow_negative_numbers = true
    )]
    pub top_p: f32,
    /// Keep this many of the most probable tokens; 0 keeps all
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub top_k: usize,
    /// Keep tokens that are at least this times as probable as the most probable one; 0 keeps all
    #[arg(
        long,
        value_name = "P",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub min_p: f32,
    /// The same seed gives the same text
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        allow_negative_numbers = true
    )]
    pub seed: u64,
    /// End before this text; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
}

#[derive(Debug, Args)]
pub struct PlanArguments {
    /// A GGUF file, or a card of a model's shape
    #[arg(value_name = "MODEL.gguf|CARD.toml")]
    pub target: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub settings: Settings<false>,
}

#[derive(Debug, Args)]
pub struct EstimateArguments {
    /// A GGUF file, or a card: of a model's shape, of a perceptron, or of a number of parameters
    #[arg(value_name = "MODEL.gguf|CARD.toml")]
    pub target: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// What a training step takes, in place of what serving does
    #[arg(long)]
    pub training: bool,
    #[command(flatten)]
    pub step: TrainingArguments,
    #[command(flatten)]
    pub settings: Settings<false>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Training")]
pub struct TrainingArguments {
    /// What turns gradients into updates
    #[arg(
        long,
        visible_alias = "optimiser",
        value_enum,
        value_name = "NAME",
        default_value = "adam",
        requires = "training"
    )]
    pub optimizer: OptimizerArgument,
    /// Of weights and gradients; with bf16 a master copy in fp32 is kept beside them
    #[arg(
        long,
        value_enum,
        value_name = "NAME",
        default_value = "fp32",
        requires = "training"
    )]
    pub precision: PrecisionArgument,
    /// Samples of an update, on all devices together; of a transformer each has --context tokens
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        allow_negative_numbers = true,
        requires = "training"
    )]
    pub batch: u32,
    /// Passes whose gradients are added up before an update
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        allow_negative_numbers = true,
        requires = "training"
    )]
    pub accumulate: u32,
    /// Keep the inputs of some layers and compute the others again
    #[arg(long, requires = "training")]
    pub checkpoint: bool,
    /// Devices that each take a share of the batch
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        allow_negative_numbers = true,
        requires = "training"
    )]
    pub data_parallel: u32,
    /// What these devices share: 1 the optimiser's state, 2 gradients too, 3 parameters too
    #[arg(
        long,
        value_name = "0|1|2|3",
        default_value_t = 0,
        allow_negative_numbers = true,
        requires = "training"
    )]
    pub zero: u32,
    /// Devices that each hold some consecutive layers
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        allow_negative_numbers = true,
        requires = "training"
    )]
    pub pipeline: u32,
    /// Into how many a pass is cut for the pipeline; by default four for each stage, as far as there are samples
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        requires = "training"
    )]
    pub micro_batches: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum OptimizerArgument {
    Adam,
    Sgd,
    SgdMomentum,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PrecisionArgument {
    Fp32,
    Bf16,
}

#[derive(Debug, Args)]
pub struct BenchArguments {
    #[command(subcommand)]
    pub kind: BenchKind,
}

#[derive(Debug, Subcommand)]
pub enum BenchKind {
    /// Steps of one token for each sequence: what answers are made of
    Decode(BenchDecodeArguments),
    /// Steps as wide as the plan allows: how fast a prompt is computed
    Prompt(BenchPromptArguments),
    /// What storage, memory, link and kernels of this machine reach; stored, so that plans can be predicted from it
    Rates(BenchRatesArguments),
}

/// The most tokens of a bench, and the most positions that it begins with.
const BENCH_TOKENS_MAX: i64 = 1 << 20;

#[derive(Debug, Args)]
pub struct BenchDecodeArguments {
    /// The GGUF file; of a model in several, any of them
    #[arg(value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// Sequences in every step
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub sequences: u32,
    /// Steps of a round: tokens of each sequence
    #[arg(long, value_name = "N", default_value_t = 64, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=BENCH_TOKENS_MAX))]
    pub tokens: u32,
    /// Positions of each sequence that are in the cache when a round begins
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(0..=BENCH_TOKENS_MAX))]
    pub depth: u32,
    #[command(flatten)]
    pub report: BenchReportArguments,
    #[command(flatten)]
    pub settings: Settings<false>,
}

#[derive(Debug, Args)]
pub struct BenchPromptArguments {
    /// The GGUF file; of a model in several, any of them
    #[arg(value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 128, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=BENCH_TOKENS_MAX))]
    pub tokens: u32,
    #[command(flatten)]
    pub report: BenchReportArguments,
    #[command(flatten)]
    pub settings: Settings<false>,
}

#[derive(Debug, Args)]
pub struct BenchRatesArguments {
    /// The GGUF file to read from storage; without one, storage is not measured
    #[arg(value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// Where to write the profile; `-` is stdout. By default where `--rates auto` looks for it
    #[arg(long, value_name = "FILE|-")]
    pub out: Option<PathBuf>,
    /// How long it may take, about
    #[arg(long, value_name = "N", default_value_t = 45, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Measure one part; the others stay as they are in the profile
    #[arg(long, value_enum, value_name = "PART")]
    pub only: Option<RatesPart>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub settings: Settings<false>,
}

/// A part of a machine that is measured by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RatesPart {
    /// Reads of the model file
    Storage,
    /// Reads of RAM
    Memory,
    /// Copies to the device, and on a GPU its memory and kernels
    Link,
    /// The host's products and attention
    Kernels,
}

#[derive(Clone, Copy, Debug, Args)]
pub struct BenchReportArguments {
    /// Rounds that are measured, after one that is not
    #[arg(long, value_name = "N", default_value_t = 5, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct InspectArguments {
    /// The GGUF file; of a model in several, any of them
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,
    /// List the tensors too: type, shape, size and place
    #[arg(long)]
    pub tensors: bool,
    /// List all keys too
    #[arg(long)]
    pub metadata: bool,
    /// Print JSON, with everything
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct SynthArguments {
    /// The model's shape
    #[arg(value_name = "CARD.toml")]
    pub card: PathBuf,
    /// The file to write
    #[arg(value_name = "OUT.gguf")]
    pub output: PathBuf,
    /// Take the tokenizer of this file
    #[arg(long, value_name = "OTHER.gguf")]
    pub vocabulary: PathBuf,
    /// The same seed gives the same file
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        allow_negative_numbers = true
    )]
    pub seed: u64,
    /// Replace OUT.gguf if it is there
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Args)]
pub struct PullArguments {
    /// owner/repo, owner/repo:Q4_K_M or owner/repo/FILE.gguf of the hub, or an http(s) URL
    #[arg(value_name = "NAME|URL")]
    pub name: String,
    /// The folder to put it into; or, for one file, the file to write
    #[arg(short, long, value_name = "DIR/|FILE", default_value = "models/")]
    pub output: PathBuf,
    /// What the file must be; the hub's own sums are checked without it
    #[arg(long, value_name = "HEX")]
    pub sha256: Option<String>,
    /// Replace a file that is there and differs
    #[arg(long)]
    pub force: bool,
    /// Give up after so many tries that brought nothing
    #[arg(long, value_name = "N", default_value_t = 8, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub tries: u32,
    /// Connect anew after so long without a byte
    #[arg(long, value_name = "SECONDS", default_value = "30", allow_negative_numbers = true, value_parser = seconds)]
    pub stall_timeout: Duration,
    /// Wait so long before the second try, twice as long before each next one
    #[arg(long, value_name = "SECONDS", default_value = "1", allow_negative_numbers = true, value_parser = seconds)]
    pub retry_pause: Duration,
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.01..=3600.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("it is no number of seconds from 0.01 to 3600".to_owned()),
    }
}

#[derive(Debug, Args)]
pub struct QuantiseArguments {
    /// The GGUF file to read; of a model in several, any of them
    #[arg(value_name = "IN.gguf")]
    pub input: PathBuf,
    /// The file to write
    #[arg(value_name = "OUT.gguf")]
    pub output: PathBuf,
    /// f32, f16, bf16, q8_0, q6_k, q5_k_m, q5_k_s, q5_1, q5_0, q4_k_m, q4_k_s, q4_1, q4_0, q3_k_l, q3_k_m, q3_k_s or q2_k
    #[arg(long = "type", value_name = "NAME")]
    pub mixture: String,
    /// Threads that convert; by default one for each processor
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Replace OUT.gguf if it is there
    #[arg(long)]
    pub force: bool,
}

/// `--config` and a flag for each key; those of the server only where `SERVER`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings<const SERVER: bool> {
    file: Option<PathBuf>,
    flags: Vec<(String, String)>,
}

impl<const SERVER: bool> Settings<SERVER> {
    /// Resolved with this process's environment. A `model` that is given as an argument wins over all.
    pub fn config(&self, model: Option<PathBuf>) -> Result<Config, ConfigError> {
        let environment = std::env::vars_os()
            .map(|(name, value)| {
                let text = |os: std::ffi::OsString| os.to_string_lossy().into_owned();
                (text(name), text(value))
            })
            .collect();
        let mut config = Config::resolve(&Sources {
            file: self.file.clone(),
            environment,
            flags: self.flags.clone(),
        })?;
        config.model = model.or(config.model);
        Ok(config)
    }

    /// Whether the flag of a key was given.
    pub fn has_flag(&self, key: &str) -> bool {
        self.flags.iter().any(|(name, _)| name == key)
    }

    fn keys() -> impl Iterator<Item = &'static Key> {
        // The model is an argument.
        KEYS.iter()
            .filter(|key| key.name != "model" && (SERVER || !key.server_only))
    }
}

impl<const SERVER: bool> Args for Settings<SERVER> {
    fn augment_args(command: clap::Command) -> clap::Command {
        let file = Arg::new("config")
            .long("config")
            .value_name("FILE")
            .help("Settings in TOML; flags and STRATA_* variables win over it")
            .value_parser(clap::value_parser!(PathBuf));
        let flags = Self::keys().map(|key| {
            let help = match key.default {
                Some(default) => format!("{} [default: {default}]", key.help),
                None => key.help.to_owned(),
            };
            let flag = Arg::new(key.name)
                .long(key.name)
                .value_name(key.value)
                .help(help)
                .allow_negative_numbers(true);
            if key.value == "true|false" {
                flag.num_args(0..=1)
                    .require_equals(true)
                    .default_missing_value("true")
            } else {
                flag
            }
        });
        command
            .next_help_heading(if SERVER {
                "Settings"
            } else {
                "Settings of the model"
            })
            .arg(file)
            .args(flags)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl<const SERVER: bool> FromArgMatches for Settings<SERVER> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut settings = Settings::default();
        settings.update_from_arg_matches(matches)?;
        Ok(settings)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.file = matches.get_one::<PathBuf>("config").cloned();
        self.flags = Self::keys()
            .filter_map(|key| {
                let value = matches.get_one::<String>(key.name)?;
                Some((key.name.to_owned(), value.clone()))
            })
            .collect();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Command, clap::Error> {
        Cli::try_parse_from(line.split(' ')).map(|cli| cli.command)
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_of_settings_are_the_keys() {
        let line = "strata serve m.gguf --config c.toml --device-memory 24GiB --context -1 --copy --queue 3";
        let Command::Serve(arguments) = parse(line).unwrap() else {
            panic!("another command");
        };
        assert_eq!(arguments.model, Some(PathBuf::from("m.gguf")));
        assert_eq!(arguments.settings.file, Some(PathBuf::from("c.toml")));
        let flags: Vec<(&str, &str)> = arguments
            .settings
            .flags
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        assert_eq!(
            flags,
            [
                ("device-memory", "24GiB"),
                ("context", "-1"),
                ("copy", "true"),
                ("queue", "3"),
            ]
        );
        let Command::Serve(arguments) = parse("strata serve --copy=false m.gguf").unwrap() else {
            panic!("another command");
        };
        assert_eq!(
            arguments.settings.flags,
            [("copy".to_owned(), "false".to_owned())]
        );
    }

    #[test]
    fn commands_take_what_concerns_them() {
        for line in [
            "strata generate m.gguf -p -hi --chat -n 5 --temperature 0.5 --seed 7 --stop a --stop b --threads 2",
            "strata plan models/card.toml --json --device emulated --device-memory 1GiB",
            "strata inspect m.gguf --json",
            "strata estimate card.toml --json --context 2048 --host-memory 8GiB --hardware h.toml",
            "strata estimate card.toml --training --optimizer sgd-momentum --precision bf16 --batch 64 --checkpoint",
            "strata estimate card.toml --training --optimiser adam --data-parallel 8 --zero 3 --pipeline 2 --micro-batches 8",
            "strata bench decode m.gguf",
            "strata bench decode m.gguf --threads 2 --sequences 8 --tokens 5 --depth 0 --rounds 1 --json",
            "strata bench prompt m.gguf --tokens 5 --rounds 1 --json --device emulated --device-memory 1GiB",
            "strata bench rates",
            "strata bench rates m.gguf --out - --json --seconds 5 --only storage --reader pread --threads 2",
            "strata synth card.toml out.gguf --vocabulary v.gguf",
            "strata quantise in.gguf out.gguf --type q4_k_m --threads 2 --force",
            "strata quantize in.gguf out.gguf --type Q8_0",
            "strata serve",
            "strata pull o/r:Q4_K_M",
            "strata pull http://a/b.gguf -o x.gguf --sha256 0 --force --tries 2 --stall-timeout 0.5 --retry-pause 0.1",
        ] {
            assert!(parse(line).is_ok(), "{line}");
        }
        for line in [
            "strata",
            "strata generate m.gguf",
            "strata generate m.gguf -p x --queue 5",
            "strata plan m.gguf --listen 1.2.3.4:5",
            "strata inspect",
            "strata estimate",
            "strata estimate card.toml --batch 64",
            "strata estimate card.toml --training --optimizer lion",
            "strata estimate card.toml --training --batch -1",
            "strata bench",
            "strata bench m.gguf",
            "strata bench decode m.gguf --sequences 0",
            "strata bench decode m.gguf --tokens 0",
            "strata bench decode m.gguf --rounds 0",
            "strata bench decode m.gguf --depth -1",
            "strata bench decode m.gguf --tokens 9999999",
            "strata bench prompt m.gguf --tokens 0",
            "strata bench prompt m.gguf --depth 5",
            "strata bench rates --seconds 0",
            "strata bench rates --only disk",
            "strata bench rates a.gguf b.gguf",
            "strata pull",
            "strata pull a b",
            "strata pull a --tries 0",
            "strata pull a --stall-timeout 0",
            "strata pull a --stall-timeout nan",
            "strata pull a --retry-pause 1e9",
            "strata quantise in.gguf out.gguf",
            "strata quantise in.gguf --type q8_0",
            "strata quantise in.gguf out.gguf --type q8_0 --threads 0",
            "strata serve --contxt 5",
            "strata serve --context",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}

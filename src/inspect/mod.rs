//! `strata inspect`: what a model's files hold, for a person and as JSON. Reads the index only, never the weights, and shows
//! what it can of a model that strata cannot load.

mod text;

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use crate::gguf::{Gguf, Hyperparameters, Metadata, RopeScaling, Value};

pub use text::{grouped, report};

/// Whether strata can serve a model: found out by those who would load it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Served {
    /// On a CPU; on a GPU too, or why not, as the rest of a sentence about the model.
    Yes { gpu: Result<(), String> },
    /// The error that loading would end with.
    No(String),
}

/// What is too long to be shown unasked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lists {
    pub tensors: bool,
    pub metadata: bool,
}

/// Keys of the ids of special tokens, without their prefix, and the name each is shown under.
const SPECIAL_IDS: [(&str, &str); 9] = [
    ("bos_token_id", "bos"),
    ("eos_token_id", "eos"),
    ("eot_token_id", "eot"),
    ("eom_token_id", "eom"),
    ("unknown_token_id", "unknown"),
    ("seperator_token_id", "separator"),
    ("padding_token_id", "padding"),
    ("cls_token_id", "cls"),
    ("mask_token_id", "mask"),
];

/// The same facts as JSON, lists included, with nothing shortened but arrays and no rounding.
pub fn report_json(gguf: &Gguf, served: &Served) -> Json {
    let totals = Totals::of(gguf);
    let tokenizer = Tokenizer::of(&gguf.metadata);
    let (shape, problem) = match Hyperparameters::from_gguf(gguf) {
        Ok(parameters) => (shape_json(&parameters), Json::Null),
        Err(error) => (Json::Null, Json::from(error.to_string())),
    };
    let kinds: Map<String, Json> = totals
        .kinds
        .iter()
        .map(|(name, kind)| {
            let value = json!({
                "tensors": kind.tensors,
                "parameters": kind.parameters,
                "bytes": kind.bytes,
                "bits_per_weight": kind.bits_per_weight(),
                "supported": kind.is_supported,
            });
            (name.clone(), value)
        })
        .collect();
    let metadata: Map<String, Json> = gguf
        .metadata
        .iter()
        .map(|(key, value)| (key.to_owned(), value_json(value)))
        .collect();
    let special: Map<String, Json> = tokenizer
        .special
        .iter()
        .map(|(name, id, token)| ((*name).to_owned(), json!({ "id": id, "token": token })))
        .collect();
    let flags: Map<String, Json> = tokenizer
        .flags
        .iter()
        .map(|&(name, value)| (name.to_owned(), value.into()))
        .collect();
    let text = |key: &str| gguf.metadata.string(key).ok().flatten();
    let files = gguf.files.iter().map(|file| {
        json!({
            "path": file.path.to_string_lossy(),
            "bytes": file.bytes,
            "base": file.base,
        })
    });
    let tensors = gguf.tensors.iter().map(|tensor| {
        json!({
            "name": tensor.name,
            "type": tensor.kind.name(),
            "dimensions": tensor.dimensions,
            "file_offset": tensor.file_offset,
            "bytes": tensor.bytes,
        })
    });
    let foreign = gguf.foreign.iter().map(|tensor| {
        json!({
            "name": tensor.name,
            "type": tensor.kind,
            "dimensions": tensor.dimensions,
            "file_offset": tensor.file_offset,
            "bytes": tensor.bytes,
        })
    });
    let tensors: Vec<Json> = tensors.chain(foreign).collect();
    json!({
        "served": served_json(served),
        "version": gguf.version,
        "alignment": gguf.alignment,
        "file_bytes": gguf.file_bytes,
        "files": files.collect::<Vec<Json>>(),
        "name": text("general.name"),
        "architecture": gguf.architecture().ok(),
        "licence": text("general.license"),
        "parameters": totals.parameters,
        "weight_bytes": totals.bytes,
        "bits_per_weight": totals.bits_per_weight(),
        "shape": shape,
        "problem": problem,
        "tokenizer": {
            "model": tokenizer.model,
            "pre": tokenizer.pre,
            "tokens": tokenizer.tokens,
            "merges": tokenizer.merges,
            "special": special,
            "flags": flags,
            "chat_template": tokenizer.template,
        },
        "types": kinds,
        "layer_bytes": totals.layers,
        "outside_layers_bytes": totals.outside_layers,
        "metadata": metadata,
        "tensors": tensors,
    })
}

fn served_json(served: &Served) -> Json {
    let (on_cpu, on_gpu, problem) = match served {
        Served::Yes { gpu: Ok(()) } => (true, true, None),
        Served::Yes { gpu: Err(why) } => (true, false, Some(why)),
        Served::No(why) => (false, false, Some(why)),
    };
    json!({ "cpu": on_cpu, "gpu": on_gpu, "problem": problem })
}

fn shape_json(parameters: &Hyperparameters) -> Json {
    let scaling = match parameters.rope_scaling {
        RopeScaling::None => json!({ "type": "none" }),
        RopeScaling::Linear { factor } => json!({ "type": "linear", "factor": factor }),
        RopeScaling::Yarn(yarn) => json!({
            "type": "yarn",
            "factor": yarn.factor,
            "original_context_length": yarn.original_context_length,
            "extrapolation": yarn.extrapolation,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
        }),
        RopeScaling::LongRope {
            factor,
            original_context_length,
        } => json!({
            "type": "longrope",
            "factor": factor,
            "original_context_length": original_context_length,
        }),
    };
    let window = parameters.window.map(|window| {
        json!({
            "positions": window.positions,
            "period": window.period,
            "rope_base": window.rope_base,
        })
    });
    json!({
        "layers": parameters.layers,
        "context_length": parameters.context_length,
        "embedding_length": parameters.embedding_length,
        "feed_forward_length": parameters.feed_forward_length,
        "head_count": parameters.head_count,
        "head_count_kv": parameters.head_count_kv,
        "key_length": parameters.key_length,
        "value_length": parameters.value_length,
        "rms_epsilon": parameters.rms_epsilon,
        "rope_dimensions": parameters.rope_dimensions,
        "rope_base": parameters.rope_base,
        "rope_scaling": scaling,
        "rope_magnitude": parameters.rope_magnitude,
        "sliding_window": window,
        "vocabulary_size": parameters.vocabulary_size,
        "tied_head": parameters.tied_head,
        "kv_elements_per_token": parameters.kv_elements(false),
        "window_kv_elements_per_token": parameters.kv_elements(true),
    })
}

/// Numbers and text as they are; an array by its type and length.
fn value_json(value: &Value) -> Json {
    match value {
        Value::U8(value) => (*value).into(),
        Value::I8(value) => (*value).into(),
        Value::U16(value) => (*value).into(),
        Value::I16(value) => (*value).into(),
        Value::U32(value) => (*value).into(),
        Value::I32(value) => (*value).into(),
        Value::U64(value) => (*value).into(),
        Value::I64(value) => (*value).into(),
        // JSON has no infinities; those become null.
        Value::F32(value) => (*value).into(),
        Value::F64(value) => (*value).into(),
        Value::Bool(value) => (*value).into(),
        Value::String(text) => text.as_str().into(),
        Value::Array(array) => json!({ "type": array.type_name(), "length": array.len() }),
    }
}

/// Sums over the tensors.
struct Totals {
    parameters: u64,
    bytes: u64,
    kinds: BTreeMap<String, Kind>,
    /// Bytes of each layer, by number.
    layers: Vec<u64>,
    outside_layers: u64,
}

/// The tensors of one type.
struct Kind {
    tensors: usize,
    parameters: u64,
    bytes: u64,
    is_supported: bool,
}

impl Kind {
    fn bits_per_weight(&self) -> f64 {
        bits_per_weight(self.bytes, self.parameters)
    }
}

fn bits_per_weight(bytes: u64, parameters: u64) -> f64 {
    bytes as f64 * 8.0 / parameters.max(1) as f64
}

impl Totals {
    fn of(gguf: &Gguf) -> Totals {
        let mut totals = Totals {
            parameters: 0,
            bytes: 0,
            kinds: BTreeMap::new(),
            layers: Vec::new(),
            outside_layers: 0,
        };
        for tensor in &gguf.tensors {
            let kind = tensor.kind.name();
            totals.add(&tensor.name, kind, &tensor.dimensions, tensor.bytes, true);
        }
        for tensor in &gguf.foreign {
            totals.add(
                &tensor.name,
                &tensor.kind,
                &tensor.dimensions,
                tensor.bytes,
                false,
            );
        }
        totals
    }

    fn add(&mut self, name: &str, kind: &str, dimensions: &[u64], bytes: u64, is_supported: bool) {
        // A product of this size was checked when the file was read; sums of such may be anything in a hostile file.
        let parameters: u64 = dimensions.iter().product();
        self.parameters = self.parameters.saturating_add(parameters);
        self.bytes = self.bytes.saturating_add(bytes);
        let of_kind = self.kinds.entry(kind.to_owned()).or_insert(Kind {
            tensors: 0,
            parameters: 0,
            bytes: 0,
            is_supported,
        });
        of_kind.tensors += 1;
        of_kind.parameters = of_kind.parameters.saturating_add(parameters);
        of_kind.bytes = of_kind.bytes.saturating_add(bytes);
        match layer_of(name) {
            Some(layer) => {
                self.layers.resize(self.layers.len().max(layer + 1), 0);
                if let Some(of_layer) = self.layers.get_mut(layer) {
                    *of_layer = of_layer.saturating_add(bytes);
                }
            }
            None => self.outside_layers = self.outside_layers.saturating_add(bytes),
        }
    }

    fn bits_per_weight(&self) -> f64 {
        bits_per_weight(self.bytes, self.parameters)
    }
}

/// The number in `blk.N.`; a number that no model has is no layer.
fn layer_of(tensor: &str) -> Option<usize> {
    const LAYERS_MAX: usize = 4096;
    let (number, _) = tensor.strip_prefix("blk.")?.split_once('.')?;
    number.parse().ok().filter(|&layer| layer < LAYERS_MAX)
}

/// What the keys `tokenizer.*` say, where they are of the right type.
struct Tokenizer {
    model: Option<String>,
    pre: Option<String>,
    tokens: usize,
    merges: usize,
    /// Name, id, and the token's text where the id is in range.
    special: Vec<(&'static str, u64, Option<String>)>,
    flags: Vec<(&'static str, bool)>,
    template: Option<String>,
}

impl Tokenizer {
    fn of(metadata: &Metadata) -> Tokenizer {
        let text = |key: &str| metadata.string(key).ok().flatten().map(str::to_owned);
        let strings = |key: &str| metadata.strings(key).ok().flatten().unwrap_or_default();
        let tokens = strings("tokenizer.ggml.tokens");
        let special = SPECIAL_IDS
            .into_iter()
            .filter_map(|(key, name)| {
                let id = metadata.u64(&format!("tokenizer.ggml.{key}")).ok()??;
                let token = usize::try_from(id).ok().and_then(|id| tokens.get(id));
                Some((name, id, token.cloned()))
            })
            .collect();
        let flags = ["add_bos_token", "add_eos_token", "add_space_prefix"]
            .into_iter()
            .filter_map(|name| {
                let value = metadata.bool(&format!("tokenizer.ggml.{name}")).ok()??;
                Some((name, value))
            })
            .collect();
        Tokenizer {
            model: text("tokenizer.ggml.model"),
            pre: text("tokenizer.ggml.pre"),
            tokens: tokens.len(),
            merges: strings("tokenizer.ggml.merges").len(),
            special,
            flags,
            template: text("tokenizer.chat_template"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::card::ShapeCard;
    use crate::gguf::{Header, TensorShape, TensorType};
    use std::path::Path;

    const SERVED: Served = Served::Yes { gpu: Ok(()) };

    fn card() -> ShapeCard {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models");
        ShapeCard::open(&folder.join("llama-3.1-8b.toml")).unwrap()
    }

    #[track_caller]
    fn check_holds(text: &str, wanted: &[&str]) {
        for line in wanted {
            assert!(text.contains(line), "{line:?} is missing in:\n{text}");
        }
    }

    #[test]
    fn the_report_answers_what_people_ask_of_a_model() {
        let mut metadata = card().metadata();
        metadata.insert("tokenizer.ggml.model", "gpt2");
        metadata.insert(
            "tokenizer.ggml.tokens",
            vec!["a".to_owned(), "<|end|>".to_owned()],
        );
        metadata.insert("tokenizer.ggml.eos_token_id", 1u32);
        metadata.insert("tokenizer.ggml.bos_token_id", 9u32);
        metadata.insert("tokenizer.ggml.add_bos_token", true);
        metadata.insert("tokenizer.chat_template", "first\n\u{1b}[2Jsecond");
        let gguf = Header::new(3, &metadata, &card().tensors())
            .unwrap()
            .index()
            .clone();
        let all = Lists {
            tensors: true,
            metadata: true,
        };
        let gpu = Err("its heads are odd".to_owned());
        let text = report(&gguf, &Served::Yes { gpu }, all);
        check_holds(
            &text,
            &[
                "served            yes, on a CPU; not on a GPU: its heads are odd",
                "GGUF version 3, 4.58 GiB",
                "Llama 3.1 8B\n",
                "8,030,261,312 parameters in 292 tensors, 4.58 GiB, 4.89 bits per weight",
                "32 layers, width 4096, feed-forward 14336, vocabulary 128256 (2 tokens and padding), output head of its own",
                "KV cache          128.00 KiB per token in f16; 16.00 GiB for the context that the model was trained for",
                "32 heads, 8 KV heads, 128 elements per key",
                "base 500000, 128 elements of a head, not scaled, frequencies divided by `rope_freqs.weight`; trained for 131072 tokens",
                "gpt2, pre-tokenizer not given, 2 tokens, 0 merges",
                "bos 9 (out of range), eos 1 `<|end|>`",
                "add_bos_token     true",
                "Q4_K                193 tensors      3.40 GiB   4.50 bits per weight",
                "layers 0-3        ",
                "tokenizer.ggml.tokens = 2 [\"a\", \"<|end|>\"]",
                "  | first\n  | \\u{1b}[2Jsecond\n",
                "blk.31.ffn_down.weight       Q6_K  [14336, 4096]",
            ],
        );
    }

    #[test]
    fn what_layers_with_a_window_keep_is_told_apart() {
        let card = ShapeCard::parse(include_str!("../../models/gemma-3-27b.toml")).unwrap();
        let lists = Lists {
            tensors: false,
            metadata: false,
        };
        // Ten layers see everything, and 52 a window: 16 heads of 256 elements in two bytes each.
        check_holds(
            &report(&card.index(), &SERVED, lists),
            &[
                "KV cache          80.00 KiB per token in f16, and 416.00 KiB for each position in the window; \
                 10.41 GiB for the context that the model was trained for",
                "window            the last 1024 positions, with rope base 10000; ",
            ],
        );
        let shape = &report_json(&card.index(), &SERVED)["shape"];
        assert_eq!(shape["window_kv_elements_per_token"], 52 * 16 * 256);
    }

    #[test]
    fn long_lists_are_shown_when_they_are_asked_for() {
        let gguf = card().index();
        let show = |tensors, metadata| report(&gguf, &SERVED, Lists { tensors, metadata });
        for (tensors, metadata) in [(false, false), (true, false), (false, true), (true, true)] {
            let text = show(tensors, metadata);
            assert_eq!(text.contains("blk.31.ffn_down.weight"), tensors);
            assert_eq!(text.contains("llama.block_count = 32"), metadata);
            assert_eq!(text.contains("--tensors lists"), !tensors, "{text}");
            assert_eq!(text.contains("--metadata lists"), !metadata, "{text}");
        }
    }

    #[test]
    fn the_json_report_holds_the_same_facts_unrounded() {
        let report = report_json(&card().index(), &SERVED);
        assert_eq!(report["served"]["gpu"], true);
        assert_eq!(report["shape"]["kv_elements_per_token"], 32 * 8 * 256);
        assert_eq!(report["parameters"], 8_030_261_312u64);
        assert_eq!(report["shape"]["head_count_kv"][31], 8);
        assert_eq!(report["types"]["Q6_K"]["tensors"], 33);
        assert_eq!(report["tensors"][1]["name"], "token_embd.weight");
        assert_eq!(report["problem"], Json::Null);
        let layers: u64 = report["layer_bytes"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(Json::as_u64)
            .sum();
        let outside = report["outside_layers_bytes"].as_u64().unwrap();
        assert_eq!(report["weight_bytes"], layers + outside);
        assert_eq!(report["metadata"]["llama.block_count"], 32);
    }

    #[test]
    fn a_file_that_is_no_loadable_model_is_still_shown() {
        let mut metadata = Metadata::new();
        metadata.insert("general.name", "odd\nname");
        metadata.insert("tokenizer.ggml.tokens", 3u32);
        let shape = TensorShape::new("blk.99999.x", TensorType::F32, [8]);
        let gguf = Header::new(2, &metadata, &[shape]).unwrap().index().clone();
        let no = Served::No("it is odd\nindeed".to_owned());
        check_holds(
            &report(&gguf, &no, Lists::default()),
            &[
                "served            no: it is odd\\nindeed\n",
                "GGUF version 2, ",
                "odd\\nname",
                "shape             not known: missing key `general.architecture`",
                "none in this file",
                "outside layers    32 bytes",
            ],
        );
        let json = report_json(&gguf, &no);
        assert_eq!(json["problem"], "missing key `general.architecture`");
        assert_eq!(json["served"]["cpu"], false);
        let empty = Gguf::parse(&empty()).unwrap();
        assert!(report(&empty, &no, Lists::default()).contains("0 parameters in 0 tensors"));
    }

    /// A file with nothing in it.
    fn empty() -> Vec<u8> {
        let mut file = Vec::new();
        let header = Header::new(3, &Metadata::new(), &[]).unwrap();
        header.write(&mut file, |_, _, _| Ok(())).unwrap();
        file
    }
}

//! The report as a person reads it.

use std::fmt::Write;

use super::{Lists, Served, Tokenizer, Totals};
use crate::gguf::{Array, Gguf, Hyperparameters, Metadata, RopeScaling, Value};

const TEMPLATE_LINES: usize = 8;
const LINE_CHARACTERS: usize = 110;
/// Elements of an array that are shown.
const ARRAY_ELEMENTS: usize = 4;

/// The report as a person reads it.
pub fn report(gguf: &Gguf, served: &Served, lists: Lists) -> String {
    let mut lines = Lines::default();
    let totals = Totals::of(gguf);
    let text = |key: &str| gguf.metadata.string(key).ok().flatten().map(one_line);
    lines.row(
        "served",
        match served {
            Served::Yes { gpu: Ok(()) } => "yes, on a CPU or a GPU".to_owned(),
            Served::Yes { gpu: Err(why) } => {
                format!("yes, on a CPU; not on a GPU: {}", escaped(why.chars()))
            }
            Served::No(why) => format!("no: {}", escaped(why.chars())),
        },
    );
    lines.row(
        "format",
        format!(
            "GGUF version {}, {} ({} bytes), tensor data aligned to {}",
            gguf.version,
            size(gguf.file_bytes),
            gguf.file_bytes,
            gguf.alignment
        ),
    );
    if gguf.files.len() > 1 {
        lines.row("files", gguf.files.len().to_string());
        for file in &gguf.files {
            let name = file.path.file_name().unwrap_or_default();
            let name = one_line(&name.to_string_lossy());
            lines.line(&format!("  {name}  {}", size(file.bytes)));
        }
    }
    for (title, key) in [
        ("name", "general.name"),
        ("architecture", "general.architecture"),
        ("licence", "general.license"),
    ] {
        if let Some(value) = text(key) {
            lines.row(title, value);
        }
    }
    lines.row(
        "weights",
        format!(
            "{} parameters in {} tensors, {}, {:.2} bits per weight",
            grouped(totals.parameters),
            gguf.tensors.len() + gguf.foreign.len(),
            size(totals.bytes),
            totals.bits_per_weight()
        ),
    );
    match Hyperparameters::from_gguf(gguf) {
        Ok(parameters) => shape_rows(&mut lines, gguf, &parameters),
        Err(error) => lines.row("shape", format!("not known: {error}")),
    }
    tokenizer_rows(&mut lines, &gguf.metadata);

    lines.title("types");
    for (name, kind) in &totals.kinds {
        let supported = match kind.is_supported {
            true => "",
            false => "  (not supported)",
        };
        lines.row(
            name,
            format!(
                "{:>5} tensors  {:>12}  {:>5.2} bits per weight{supported}",
                kind.tensors,
                size(kind.bytes),
                kind.bits_per_weight()
            ),
        );
    }
    lines.title("bytes per layer");
    for run in runs(&totals.layers) {
        let name = match (run.first, run.last) {
            (first, last) if first == last => format!("layer {first}"),
            (first, last) => format!("layers {first}-{last}"),
        };
        let each = if run.first == run.last { "" } else { " each" };
        lines.row(&name, format!("{}{each}", size(run.bytes)));
    }
    lines.row("outside layers", size(totals.outside_layers));
    if lists.metadata {
        key_lines(&mut lines, gguf);
    }
    if lists.tensors {
        tensor_lines(&mut lines, gguf);
    }
    if !lists.metadata {
        let keys = gguf.metadata.len();
        lines.title(&format!("{keys} keys: --metadata lists them"));
    }
    if !lists.tensors {
        let tensors = gguf.tensors.len() + gguf.foreign.len();
        lines.title(&format!("{tensors} tensors: --tensors lists them"));
    }
    lines.text
}

fn key_lines(lines: &mut Lines, gguf: &Gguf) {
    lines.title("keys");
    for (key, value) in gguf.metadata.iter() {
        // Titles are as wide as most keys would be; these have a line of their own anyway.
        lines.line(&format!("  {} = {}", one_line(key), brief(value)));
    }
}

fn tensor_lines(lines: &mut Lines, gguf: &Gguf) {
    let known = gguf.tensors.iter().map(|tensor| {
        let kind = tensor.kind.name();
        (
            &tensor.name,
            kind,
            &tensor.dimensions,
            tensor.bytes,
            tensor.file_offset,
        )
    });
    let foreign = gguf.foreign.iter().map(|tensor| {
        let kind = tensor.kind.as_str();
        (
            &tensor.name,
            kind,
            &tensor.dimensions,
            tensor.bytes,
            tensor.file_offset,
        )
    });
    lines.title("tensors");
    for (name, kind, dimensions, bytes, file_offset) in known.chain(foreign) {
        let files = gguf.files.iter().enumerate();
        let holder = files.rev().find(|(_, file)| file.base <= file_offset);
        let place = match holder {
            Some((index, file)) if gguf.files.len() > 1 => {
                format!("at byte {} of file {}", file_offset - file.base, index + 1)
            }
            _ => format!("at byte {file_offset}"),
        };
        lines.line(&format!(
            "  {:<28} {kind:<5} {:<18} {:>12}  {place}",
            one_line(name),
            format!("{dimensions:?}"),
            size(bytes),
        ));
    }
}

fn shape_rows(lines: &mut Lines, gguf: &Gguf, parameters: &Hyperparameters) {
    let tokens = Tokenizer::of(&gguf.metadata).tokens;
    let padding = match tokens {
        0 => String::new(),
        tokens if tokens < parameters.vocabulary_size as usize => {
            format!(" ({tokens} tokens and padding)")
        }
        _ => String::new(),
    };
    lines.row(
        "shape",
        format!(
            "{} layers, width {}, feed-forward {}, vocabulary {}{padding}, output head {}",
            parameters.layers,
            parameters.embedding_length,
            range(&parameters.feed_forward_length),
            parameters.vocabulary_size,
            if parameters.tied_head {
                "tied to the embedding"
            } else {
                "of its own"
            }
        ),
    );
    lines.row(
        "attention",
        format!(
            "{} heads, {} KV heads, {} elements per key, {} per value, RMS epsilon {:e}",
            range(&parameters.head_count),
            range(&parameters.head_count_kv),
            parameters.key_length,
            parameters.value_length,
            parameters.rms_epsilon
        ),
    );
    // Two bytes for each element.
    let bytes_of = |with_window| parameters.kv_elements(with_window).saturating_mul(2);
    let context = parameters.context_length;
    let in_window = parameters
        .window
        .map_or(0, |window| window.positions.min(context));
    let of_context = (bytes_of(false).saturating_mul(context.into()))
        .saturating_add(bytes_of(true).saturating_mul(in_window.into()));
    let of_window = match parameters.window {
        Some(_) => format!(
            ", and {} for each position in the window",
            size(bytes_of(true))
        ),
        None => String::new(),
    };
    lines.row(
        "KV cache",
        format!(
            "{} per token in f16{of_window}; {} for the context that the model was trained for",
            size(bytes_of(false)),
            size(of_context)
        ),
    );
    if let Some(window) = parameters.window {
        lines.row(
            "window",
            format!(
                "the last {} positions, with rope base {}; every layer whose number is a multiple of {} sees all",
                window.positions, window.rope_base, window.period
            ),
        );
    }
    let scaling = match parameters.rope_scaling {
        RopeScaling::None => "not scaled".to_owned(),
        RopeScaling::Linear { factor } => format!("positions divided by {factor}"),
        RopeScaling::Yarn(yarn) => format!(
            "YaRN by {} from {} tokens",
            yarn.factor, yarn.original_context_length
        ),
        RopeScaling::LongRope {
            original_context_length,
            ..
        } => format!(
            "LongRoPE: frequencies divided by `rope_factors_long.weight` in contexts above {original_context_length} tokens, \
             below by `rope_factors_short.weight`"
        ),
    };
    let magnitude = match parameters.rope_magnitude {
        1.0 => String::new(),
        magnitude => format!(", magnitude {magnitude}"),
    };
    let factors = match gguf.tensor("rope_freqs.weight") {
        Some(_) => ", frequencies divided by `rope_freqs.weight`",
        None => "",
    };
    lines.row(
        "rope",
        format!(
            "base {}, {} elements of a head, {scaling}{factors}{magnitude}; trained for {} tokens",
            parameters.rope_base, parameters.rope_dimensions, parameters.context_length
        ),
    );
}

fn tokenizer_rows(lines: &mut Lines, metadata: &Metadata) {
    let tokenizer = Tokenizer::of(metadata);
    let Some(model) = &tokenizer.model else {
        lines.row("tokenizer", "none in this file".to_owned());
        return;
    };
    let pre = tokenizer.pre.as_deref().unwrap_or("not given");
    lines.row(
        "tokenizer",
        format!(
            "{}, pre-tokenizer {}, {} tokens, {} merges",
            one_line(model),
            one_line(pre),
            tokenizer.tokens,
            tokenizer.merges
        ),
    );
    let special: Vec<String> = tokenizer
        .special
        .iter()
        .map(|(name, id, token)| match token {
            Some(token) => format!("{name} {id} `{}`", one_line(token)),
            None => format!("{name} {id} (out of range)"),
        })
        .collect();
    if !special.is_empty() {
        lines.row("special tokens", special.join(", "));
    }
    for (title, value) in &tokenizer.flags {
        lines.row(title, value.to_string());
    }
    if let Some(template) = &tokenizer.template {
        lines.row(
            "chat template",
            format!(
                "{} bytes, {} lines",
                template.len(),
                template.lines().count()
            ),
        );
        for line in template.lines().take(TEMPLATE_LINES) {
            lines.line(&format!("  | {}", one_line(line)));
        }
        if template.lines().count() > TEMPLATE_LINES {
            lines.line("  | …");
        }
    }
}

/// Neighbouring layers of one size.
struct Run {
    first: usize,
    last: usize,
    bytes: u64,
}

fn runs(layers: &[u64]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (layer, &bytes) in layers.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if run.bytes == bytes => run.last = layer,
            _ => runs.push(Run {
                first: layer,
                last: layer,
                bytes,
            }),
        }
    }
    runs
}

#[derive(Default)]
struct Lines {
    text: String,
}

impl Lines {
    fn line(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn row(&mut self, title: &str, value: String) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "{title:<17} {value}");
    }

    fn title(&mut self, title: &str) {
        let _ = writeln!(self.text, "\n{title}");
    }
}

/// Text from the file, escaped so that it cannot steer a terminal, and cut where it is long.
fn one_line(text: &str) -> String {
    let mut line = escaped(text.chars().take(LINE_CHARACTERS));
    if text.chars().nth(LINE_CHARACTERS).is_some() {
        line.push('…');
    }
    line
}

/// Without a character that would end the line or steer a terminal.
fn escaped(characters: impl Iterator<Item = char>) -> String {
    let mut line = String::new();
    for character in characters {
        match character {
            '\'' | '"' | '\\' => line.push(character),
            _ => line.extend(character.escape_debug()),
        }
    }
    line
}

/// A value on one line.
fn brief(value: &Value) -> String {
    match value {
        Value::U8(value) => value.to_string(),
        Value::I8(value) => value.to_string(),
        Value::U16(value) => value.to_string(),
        Value::I16(value) => value.to_string(),
        Value::U32(value) => value.to_string(),
        Value::I32(value) => value.to_string(),
        Value::U64(value) => value.to_string(),
        Value::I64(value) => value.to_string(),
        Value::F32(value) => value.to_string(),
        Value::F64(value) => value.to_string(),
        Value::Bool(value) => value.to_string(),
        Value::String(text) => one_line(text),
        Value::Array(array) => brief_array(array),
    }
}

fn brief_array(array: &Array) -> String {
    fn first<T: std::fmt::Debug>(items: &[T]) -> String {
        let shown: Vec<String> = items
            .iter()
            .take(ARRAY_ELEMENTS)
            .map(|item| format!("{item:?}"))
            .collect();
        let more = if items.len() > ARRAY_ELEMENTS {
            ", …"
        } else {
            ""
        };
        format!("[{}{more}]", shown.join(", "))
    }
    let shown = match array {
        Array::U8(items) => first(items),
        Array::I8(items) => first(items),
        Array::U16(items) => first(items),
        Array::I16(items) => first(items),
        Array::U32(items) => first(items),
        Array::I32(items) => first(items),
        Array::U64(items) => first(items),
        Array::I64(items) => first(items),
        Array::F32(items) => first(items),
        Array::F64(items) => first(items),
        Array::Bool(items) => first(items),
        Array::String(items) => first(items),
    };
    format!("{} {}", array.len(), one_line(&shown))
}

/// One value where all layers agree, else the least and the most.
fn range(values: &[u32]) -> String {
    match (values.iter().min(), values.iter().max()) {
        (Some(least), Some(most)) if least != most => format!("{least} to {most}"),
        (Some(value), _) => value.to_string(),
        (None, _) => "none".to_owned(),
    }
}

fn size(bytes: u64) -> String {
    const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.into_iter().find(|&(_, unit)| bytes >= unit) {
        Some((name, unit)) => format!("{:.2} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} bytes"),
    }
}

/// 1100048384 as 1,100,048,384.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

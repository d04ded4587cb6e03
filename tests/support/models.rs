//! Small models written on the spot: CHAIN, whose greedy output is scripted, and RANDOM, a seeded tiny llama.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test crate uses a part of this module, and a test fails by panicking"
)]

use std::collections::HashMap;
use std::path::Path;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use strata::gguf::{
    Architecture, Gguf, Header, LayerSizes, Metadata, TensorShape, TensorType, Value,
};
use strata::synth::{fill_floats, fill_random};

/// The chat template of ChatML models, with the control tokens below.
pub const CHATML: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + \
     '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
pub const TURN_START: &str = "<|im_start|>";
pub const TURN_END: &str = "<|im_end|>";

/// Values of `enum llama_token_type`.
const UNKNOWN: i32 = 2;
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const BYTE: i32 = 6;

/// The tokens of a model that was written, to look up ids.
#[derive(Clone, Debug, Default)]
pub struct Tokens {
    pub texts: Vec<String>,
    types: Vec<i32>,
    ids: HashMap<String, u32>,
}

impl Tokens {
    /// The id of a token by its text in the vocabulary (`▁` for a space in SPM, `Ġ` in BPE).
    #[track_caller]
    pub fn id(&self, text: &str) -> u32 {
        match self.ids.get(text) {
            Some(&id) => id,
            None => panic!("the vocabulary has no token {text:?}"),
        }
    }

    pub fn len(&self) -> usize {
        self.texts.len()
    }

    /// Adds a token that is not there yet.
    fn add(&mut self, text: &str, kind: i32) -> u32 {
        if let Some(&id) = self.ids.get(text) {
            return id;
        }
        let id = self.texts.len() as u32;
        self.texts.push(text.to_owned());
        self.types.push(kind);
        self.ids.insert(text.to_owned(), id);
        id
    }

    /// `<unk>`, `<s>`, `</s>` and the 256 byte pieces, as in every SentencePiece vocabulary.
    fn sentencepiece() -> Tokens {
        let mut tokens = Tokens::default();
        tokens.add("<unk>", UNKNOWN);
        tokens.add("<s>", CONTROL);
        tokens.add("</s>", CONTROL);
        for byte in 0..=255u8 {
            tokens.add(&format!("<0x{byte:02X}>"), BYTE);
        }
        tokens
    }

    /// The 256 bytes in the alphabet of GPT-2's vocabulary, then what `merges` make.
    fn byte_pair(merges: &[&str]) -> Tokens {
        let mut tokens = Tokens::default();
        let mut unprintable = 0;
        for byte in 0..=255u8 {
            let character = match byte {
                b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
                _ => {
                    unprintable += 1;
                    char::from_u32(255 + unprintable).unwrap()
                }
            };
            tokens.add(&character.to_string(), NORMAL);
        }
        for merge in merges {
            tokens.add(&merge.replace(' ', ""), NORMAL);
        }
        tokens
    }

    fn put(&self, metadata: &mut Metadata) {
        metadata.insert("tokenizer.ggml.tokens", self.texts.clone());
        metadata.insert("tokenizer.ggml.token_type", self.types.clone());
    }

    fn put_scores(&self, metadata: &mut Metadata) {
        let score = |(id, &kind): (usize, &i32)| if kind == NORMAL { -(id as f32) } else { 0.0 };
        let scores: Vec<f32> = self.types.iter().enumerate().map(score).collect();
        metadata.insert("tokenizer.ggml.scores", scores);
    }
}

/// One token of CHAIN's output.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// A normal token. A space may be written as a space.
    Text(String),
    /// A byte piece.
    Byte(u8),
    /// A control token by its text; it is added to the vocabulary.
    Control(String),
    /// `</s>`.
    End,
}

/// Pieces from text.
pub fn texts(pieces: &[&str]) -> Vec<Piece> {
    pieces
        .iter()
        .map(|&piece| Piece::Text(piece.to_owned()))
        .collect()
}

/// One piece per byte.
pub fn bytes(bytes: &[u8]) -> Vec<Piece> {
    bytes.iter().map(|&byte| Piece::Byte(byte)).collect()
}

#[derive(Clone, Debug)]
pub struct ChainOptions {
    pub template: Option<String>,
    /// A control token that is the model's `eot`.
    pub end_of_turn: Option<String>,
    /// More control tokens.
    pub control: Vec<String>,
    /// More normal tokens.
    pub vocabulary: Vec<String>,
    /// `None` leaves the key out.
    pub add_bos: Option<bool>,
    pub add_space_prefix: bool,
    /// Whether `</s>` is named as the end of the sequence.
    pub end_id: bool,
    pub context: u32,
    /// After the last piece comes the first again, for ever; otherwise `</s>`.
    pub endless: bool,
    /// The most probable token after every token; the scripted one is the second.
    pub always: Option<Piece>,
    /// Keys that are added or replaced.
    pub metadata: Vec<(String, Value)>,
}

impl Default for ChainOptions {
    fn default() -> ChainOptions {
        ChainOptions {
            template: None,
            end_of_turn: None,
            control: Vec::new(),
            vocabulary: Vec::new(),
            add_bos: Some(false),
            add_space_prefix: false,
            end_id: true,
            context: 4096,
            endless: false,
            always: None,
            metadata: Vec::new(),
        }
    }
}

/// Writes CHAIN: a llama of one layer with zero weights, so that each token alone decides the next. The prompt `S` is
/// answered with `pieces`. A token may stand in them once. Every token that is not in the chain leads to nothing (all
/// logits 0), but for the end of a chat prompt: with a template, the last token of the prompt should be `S`.
pub fn chain(path: &Path, pieces: &[Piece], options: &ChainOptions) -> Tokens {
    const END: u32 = 2;
    let mut tokens = Tokens::sentencepiece();
    tokens.add("▁", NORMAL);
    let start = tokens.add("S", NORMAL);
    let id_of = |tokens: &mut Tokens, piece: &Piece| match piece {
        Piece::Text(text) => tokens.add(&text.replace(' ', "▁"), NORMAL),
        Piece::Byte(byte) => 3 + u32::from(*byte),
        Piece::Control(text) => tokens.add(text, CONTROL),
        Piece::End => END,
    };
    let sequence: Vec<u32> = pieces
        .iter()
        .map(|piece| id_of(&mut tokens, piece))
        .collect();
    let always = options
        .always
        .as_ref()
        .map(|piece| id_of(&mut tokens, piece));
    let end_of_turn = options
        .end_of_turn
        .as_ref()
        .map(|text| tokens.add(text, CONTROL));
    for text in &options.control {
        tokens.add(text, CONTROL);
    }
    for text in &options.vocabulary {
        tokens.add(&text.replace(' ', "▁"), NORMAL);
    }

    let mut next = vec![None; tokens.len()];
    let mut current = start;
    for &token in &sequence {
        let slot = &mut next[current as usize];
        assert_eq!(*slot, None, "token {current} stands twice in the chain");
        *slot = Some(token);
        current = token;
    }
    let last = if options.endless {
        sequence.first().copied()
    } else {
        Some(END)
    };
    let slot = &mut next[current as usize];
    assert_eq!(*slot, None, "token {current} stands twice in the chain");
    *slot = last;

    // One dimension per token; heads of 64.
    let width = tokens.len().max(320).next_multiple_of(64);
    let mut embedding = vec![0.0f32; tokens.len() * width];
    let mut output = embedding.clone();
    for token in 0..tokens.len() {
        embedding[token * width + token] = 1.0;
        if let Some(successor) = next[token] {
            output[successor as usize * width + token] = if always.is_some() { 5.0 } else { 10.0 };
        }
        if let Some(always) = always {
            output[always as usize * width + token] = 10.0;
        }
    }

    let mut metadata = Metadata::new();
    let shape = Shape {
        architecture: Architecture::Llama,
        layers: 1,
        width,
        heads: width / 64,
        kv_heads: width / 64,
        feed_forward: 64,
        context: options.context,
    };
    shape.put(&mut metadata, "chain");
    for (key, value) in [
        ("model", Value::from("llama")),
        ("pre", "default".into()),
        ("bos_token_id", 1u32.into()),
        ("unknown_token_id", 0u32.into()),
        ("add_space_prefix", options.add_space_prefix.into()),
    ] {
        metadata.insert(format!("tokenizer.ggml.{key}"), value);
    }
    if let Some(add) = options.add_bos {
        metadata.insert("tokenizer.ggml.add_bos_token", add);
    }
    if options.end_id {
        metadata.insert("tokenizer.ggml.eos_token_id", END);
    }
    if let Some(id) = end_of_turn {
        metadata.insert("tokenizer.ggml.eot_token_id", id);
    }
    if let Some(template) = &options.template {
        metadata.insert("tokenizer.chat_template", template.as_str());
    }
    tokens.put(&mut metadata);
    tokens.put_scores(&mut metadata);
    for (key, value) in &options.metadata {
        metadata.insert(key.clone(), value.clone());
    }

    let tensors = shape.tensors(tokens.len(), TensorType::F32, false);
    write(path, &metadata, &tensors, |shape| {
        let floats: &[f32] = match shape.name.as_str() {
            "token_embd.weight" => &embedding,
            "output.weight" => &output,
            name if name.ends_with("norm.weight") => &vec![1.0; width],
            _ => &vec![0.0; shape.dimensions.iter().product::<u64>() as usize],
        };
        floats
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect()
    });
    tokens
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VocabularyKind {
    /// SentencePiece with byte pieces and a few words.
    Spm,
    /// Byte-level BPE in the manner of GPT-2, pre-tokenizer `smollm`.
    Bpe,
}

#[derive(Clone, Debug)]
pub struct RandomOptions {
    pub architecture: Architecture,
    pub layers: u32,
    pub width: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub ffn: usize,
    pub vocabulary: VocabularyKind,
    pub tied: bool,
    /// Type of all matrices; rows must be whole blocks (K types: `width` and `ffn` multiples of 256).
    pub kind: TensorType,
    pub seed: u64,
    pub context: u32,
    pub add_bos: bool,
    /// `None`: no template.
    pub template: Option<String>,
    /// Keys that are added or replaced.
    pub metadata: Vec<(String, Value)>,
    /// F32 vectors that are added, by name.
    pub vectors: Vec<(String, Vec<f32>)>,
}

impl Default for RandomOptions {
    fn default() -> RandomOptions {
        RandomOptions {
            architecture: Architecture::Llama,
            layers: 2,
            width: 64,
            heads: 4,
            kv_heads: 2,
            ffn: 96,
            vocabulary: VocabularyKind::Spm,
            tied: false,
            kind: TensorType::F32,
            seed: 1,
            context: 512,
            add_bos: false,
            template: Some(CHATML.to_owned()),
            metadata: Vec::new(),
            vectors: Vec::new(),
        }
    }
}

/// Pairs that the BPE vocabulary joins, first ones first. Written with `Ġ` for a space.
const MERGES: [&str; 12] = [
    "h e", "Ġ t", "i n", "e r", "Ġ a", "o n", "l l", "Ġt he", "o r", "he ll", "r e", "hell o",
];
const WORDS: [&str; 12] = [
    "▁", "e", "t", "a", "o", "n", "h", "th", "he", "▁t", "▁the", "▁a",
];

/// Writes a tiny model with random weights. Equal options give equal files; every logit depends on the whole context.
pub fn random(path: &Path, options: &RandomOptions) -> Tokens {
    let mut tokens = match options.vocabulary {
        VocabularyKind::Spm => Tokens::sentencepiece(),
        VocabularyKind::Bpe => Tokens::byte_pair(&MERGES),
    };
    let mut metadata = Metadata::new();
    let shape = Shape {
        architecture: options.architecture,
        layers: options.layers,
        width: options.width,
        heads: options.heads,
        kv_heads: options.kv_heads,
        feed_forward: options.ffn,
        context: options.context,
    };
    shape.put(&mut metadata, "random");
    let mut insert = |key: &str, value: Value| {
        metadata.insert(format!("tokenizer.ggml.{key}"), value);
    };
    match options.vocabulary {
        VocabularyKind::Spm => {
            for word in WORDS {
                tokens.add(word, NORMAL);
            }
            tokens.add(TURN_START, CONTROL);
            let turn_end = tokens.add(TURN_END, CONTROL);
            insert("model", "llama".into());
            insert("pre", "default".into());
            insert("bos_token_id", 1u32.into());
            insert("eos_token_id", 2u32.into());
            insert("eot_token_id", turn_end.into());
            insert("unknown_token_id", 0u32.into());
            insert("add_space_prefix", false.into());
        }
        VocabularyKind::Bpe => {
            let end_of_text = tokens.add("<|endoftext|>", CONTROL);
            tokens.add(TURN_START, CONTROL);
            let turn_end = tokens.add(TURN_END, CONTROL);
            insert("model", "gpt2".into());
            insert("pre", "smollm".into());
            insert("merges", MERGES.map(str::to_owned).to_vec().into());
            insert("bos_token_id", end_of_text.into());
            insert("eos_token_id", turn_end.into());
        }
    }
    insert("add_bos_token", options.add_bos.into());
    tokens.put(&mut metadata);
    if options.vocabulary == VocabularyKind::Spm {
        tokens.put_scores(&mut metadata);
    }
    if let Some(template) = &options.template {
        metadata.insert("tokenizer.chat_template", template.as_str());
    }
    for (key, value) in &options.metadata {
        metadata.insert(key.clone(), value.clone());
    }

    let mut random = ChaCha8Rng::seed_from_u64(options.seed);
    let mut tensors = shape.tensors(tokens.len(), options.kind, options.tied);
    tensors.extend(options.vectors.iter().map(|(name, floats)| {
        TensorShape::new(name.as_str(), TensorType::F32, [floats.len() as u64])
    }));
    write(path, &metadata, &tensors, |tensor| {
        let mut added = options.vectors.iter();
        if let Some((_, floats)) = added.find(|(name, _)| *name == tensor.name) {
            return floats
                .iter()
                .flat_map(|float| float.to_le_bytes())
                .collect();
        }
        let columns = tensor.dimensions[0];
        let rows: u64 = tensor.dimensions.iter().skip(1).product();
        let mut bytes = vec![0; (tensor.kind.row_bytes(columns).unwrap() * rows) as usize];
        // Logits with a standard deviation of about 2.4, so that the best token stands out.
        let per_row = 1.0 / (columns as f32).sqrt();
        match tensor.name.as_str() {
            name if name.ends_with("norm.weight") => {
                fill_floats(tensor.kind, 1.0, 0.2, &mut random, &mut bytes);
            }
            name if name.ends_with(".bias") => {
                fill_floats(tensor.kind, 0.0, 0.3, &mut random, &mut bytes);
            }
            "token_embd.weight" if !options.tied => {
                fill_random(tensor.kind, 1.0, &mut random, &mut bytes);
            }
            "token_embd.weight" | "output.weight" => {
                fill_random(tensor.kind, 2.4 * per_row, &mut random, &mut bytes);
            }
            _ => fill_random(tensor.kind, 1.5 * per_row, &mut random, &mut bytes),
        }
        bytes
    });
    tokens
}

struct Shape {
    architecture: Architecture,
    layers: u32,
    width: usize,
    heads: usize,
    kv_heads: usize,
    feed_forward: usize,
    context: u32,
}

impl Shape {
    fn put(&self, metadata: &mut Metadata, name: &str) {
        let architecture = self.architecture.name();
        metadata.insert("general.architecture", architecture);
        metadata.insert("general.name", name);
        for (key, value) in [
            ("context_length", self.context),
            ("embedding_length", self.width as u32),
            ("block_count", self.layers),
            ("feed_forward_length", self.feed_forward as u32),
            ("attention.head_count", self.heads as u32),
            ("attention.head_count_kv", self.kv_heads as u32),
            ("rope.dimension_count", (self.width / self.heads) as u32),
        ] {
            metadata.insert(format!("{architecture}.{key}"), value);
        }
        if self.architecture == Architecture::Gemma3 {
            metadata.insert("gemma3.attention.sliding_window", 24u32);
        }
        let epsilon = format!("{architecture}.attention.layer_norm_rms_epsilon");
        metadata.insert(epsilon, 1e-5f32);
    }

    fn tensors(&self, vocabulary: usize, kind: TensorType, tied: bool) -> Vec<TensorShape> {
        let matrix = |name: &str, columns: usize, rows: usize| {
            TensorShape::new(name, kind, [columns as u64, rows as u64])
        };
        let norm = |name: &str| TensorShape::new(name, TensorType::F32, [self.width as u64]);
        let kv_rows = self.width / self.heads * self.kv_heads;
        let head_length = (self.width / self.heads) as u32;
        let sizes = LayerSizes {
            embedding_length: self.width as u32,
            head_count: self.heads as u32,
            head_count_kv: self.kv_heads as u32,
            key_length: head_length,
            value_length: head_length,
        };
        let mut tensors = vec![matrix("token_embd.weight", self.width, vocabulary)];
        for layer in 0..self.layers {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            tensors.extend([
                norm(&name("attn_norm")),
                matrix(&name("attn_q"), self.width, self.width),
                matrix(&name("attn_k"), self.width, kv_rows),
                matrix(&name("attn_v"), self.width, kv_rows),
                matrix(&name("attn_output"), self.width, self.width),
                norm(&name("ffn_norm")),
                matrix(&name("ffn_gate"), self.width, self.feed_forward),
                matrix(&name("ffn_up"), self.width, self.feed_forward),
                matrix(&name("ffn_down"), self.feed_forward, self.width),
            ]);
            for vector in self.architecture.added_vectors() {
                let length = vector.elements(&sizes);
                let name = format!("blk.{layer}.{}", vector.name);
                tensors.push(TensorShape::new(name, TensorType::F32, [length]));
            }
        }
        tensors.push(norm("output_norm.weight"));
        if !tied {
            tensors.push(matrix("output.weight", self.width, vocabulary));
        }
        tensors
    }
}

/// The metadata and the tensors of a file.
pub fn parts(path: &Path) -> (Metadata, Vec<TensorShape>, HashMap<String, Vec<u8>>) {
    let gguf = Gguf::open(path).unwrap();
    let content = std::fs::read(path).unwrap();
    let shapes = gguf
        .tensors
        .iter()
        .map(|tensor| TensorShape::new(&tensor.name, tensor.kind, tensor.dimensions.clone()));
    let bytes = gguf.tensors.iter().map(|tensor| {
        let start = tensor.file_offset as usize;
        let bytes = content[start..start + tensor.bytes as usize].to_vec();
        (tensor.name.clone(), bytes)
    });
    (gguf.metadata.clone(), shapes.collect(), bytes.collect())
}

/// Writes the model of F32 matrices at `path` to `output`, with more rows of the embedding and of the head than tokens: one
/// for each of `padding`, which all its elements are.
pub fn pad(path: &Path, output: &Path, padding: &[f32]) {
    let (metadata, mut shapes, mut bytes) = parts(path);
    for shape in &mut shapes {
        if ["token_embd.weight", "output.weight"].contains(&shape.name.as_str()) {
            assert_eq!(shape.kind, TensorType::F32, "{}", shape.name);
            let columns = shape.dimensions[0] as usize;
            shape.dimensions[1] += padding.len() as u64;
            let rows = bytes.get_mut(&shape.name).unwrap();
            for element in padding {
                rows.extend(element.to_le_bytes().repeat(columns));
            }
        }
    }
    write(output, &metadata, &shapes, |shape| {
        bytes[&shape.name].clone()
    });
}

/// Writes a file whose tensors hold what `data` returns.
pub fn write(
    path: &Path,
    metadata: &Metadata,
    tensors: &[TensorShape],
    mut data: impl FnMut(&TensorShape) -> Vec<u8>,
) {
    let header = Header::new(3, metadata, tensors).unwrap();
    let mut file = std::io::BufWriter::new(std::fs::File::create(path).unwrap());
    header
        .write(&mut file, |index, _, output| {
            output.write_all(&data(&tensors[index]))
        })
        .unwrap();
    std::io::Write::flush(&mut file).unwrap();
}

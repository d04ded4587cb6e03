//! How fast does text become tokens, on one thread?
//!
//! `cargo bench --bench tokenizer` encodes English, code, and what is hard for a tokenizer (runs of one letter, of spaces, of
//! one emoji, in which nothing says where a word ends) with the vocabularies of SmolLM2 (byte pairs) and Gemma 3
//! (SentencePiece), as far as they are in `models/`, and prints MB/s as a table in Markdown, which `TOKENIZER.md` keeps.
//! Under `cargo test` the texts are tiny.

use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use strata::gguf::Gguf;
use strata::tokenizer::{Special, Tokenizer};

const MODELS: [&str; 2] = [
    "models/SmolLM2-135M-Instruct.Q4_1.gguf",
    "models/gemma3-270m-q4_k_m.gguf",
];

fn main() {
    let is_bench = std::env::args().any(|argument| argument == "--bench");
    let bytes: usize = if is_bench { 3 << 20 } else { 4 << 10 };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let written = |names: &[&str]| {
        let read = |name: &&str| std::fs::read_to_string(root.join(name)).expect("read a text");
        names.iter().map(read).collect::<String>()
    };
    let texts = [
        ("English", written(&["ARCHITECTURE.md", "README.md"])),
        (
            "code",
            written(&["src/tokenizer/mod.rs", "src/gguf/mod.rs"]),
        ),
        (
            "scripts",
            "Größe 深度学习模型 Привет, мир! हिन्दी 한국어 العربية 日本語です。🙂 ".to_string(),
        ),
        ("one letter", "a".to_string()),
        ("spaces", " ".to_string()),
        ("one emoji", "🦙".to_string()),
    ];
    for model in MODELS {
        let path = root.join(model);
        if !path.is_file() {
            println!("{model} is not there: skipped");
            continue;
        }
        let gguf = Gguf::open(&path).expect("open the model");
        let tokenizer = Tokenizer::from_gguf(&gguf.metadata).expect("load the tokenizer");
        let heads = [
            ("text", "---"),
            ("MB/s", "--:"),
            ("bytes to a token", "--:"),
        ];
        println!("\n## {model}\n");
        println!("| {} |", heads.map(|head| head.0).join(" | "));
        println!("| {} |", heads.map(|head| head.1).join(" | "));
        for (name, text) in &texts {
            let mut text = text.repeat(bytes.div_ceil(text.len()));
            let end = (0..=bytes).rfind(|&end| text.is_char_boundary(end));
            text.truncate(end.unwrap_or_default());
            // The best of several rounds: what other programs take away is no property of the tokenizer.
            let mut seconds = f64::INFINITY;
            let mut tokens = 0;
            for _ in 0..if is_bench { 5 } else { 1 } {
                let began = Instant::now();
                tokens = black_box(tokenizer.encode(black_box(&text), Special::Text)).len();
                seconds = seconds.min(began.elapsed().as_secs_f64());
            }
            assert!(tokens > 0);
            println!(
                "| {name} | {:.1} | {:.2} |",
                text.len() as f64 / seconds / 1e6,
                text.len() as f64 / tokens as f64
            );
        }
    }
}

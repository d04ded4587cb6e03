//! What each name in `tokenizer.ggml.pre` stands for: the stages that cut the text, and what else goes with the name.
//!
//! The patterns are those that the models were trained with; where llama.cpp approximates one (Unicode categories in
//! `tekken`, `gpt-4o`, `youtu`, `tiny_aya` and `kimi-k2`; the text before a number in `afmoe` and `tiny_aya`; white space
//! outside of ASCII in `deepseek-llm` and `deepseek-coder`), the original stands here. tests/pre_tokenizers.rs has each
//! such case.

use super::vocabulary::Spelling;
use Cut::{At, PowersOfTwo, Threes};

/// What a name stands for.
#[derive(Clone, Copy)]
pub(super) struct Known {
    pub(super) stages: &'static [Cut],
    pub(super) whole_words: WholeWords,
    pub(super) bos: Bos,
    pub(super) spelling: Spelling,
}

/// One stage.
#[derive(Clone, Copy)]
pub(super) enum Cut {
    /// Around each match of a pattern.
    At(&'static str),
    /// Around each match of a pattern, and each match into groups of three characters counted from its end.
    Threes(&'static str),
    /// Around each match of a pattern, and white space that is matched by `\s+` at its end into powers of two characters,
    /// at most 512, the longest first.
    PowersOfTwo(&'static str),
}

/// Words that become a piece as they stand, whatever the merges say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WholeWords {
    None,
    /// Those of line breaks alone.
    LineBreaks,
    All,
}

/// Whether prompts begin with the beginning-of-sequence token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bos {
    /// Where the file says so.
    IfTold,
    /// Unless the file says no.
    UnlessTold,
    /// Whatever the file says: converted files of these models are known to be wrong.
    Always,
}

impl Known {
    const fn cut(stages: &'static [Cut]) -> Known {
        Known {
            stages,
            whole_words: WholeWords::None,
            bos: Bos::IfTold,
            spelling: Spelling::ByteLevel,
        }
    }

    const fn whole_words(mut self, which: WholeWords) -> Known {
        self.whole_words = which;
        self
    }

    const fn bos(mut self, bos: Bos) -> Known {
        self.bos = bos;
        self
    }

    /// Pieces are written as SentencePiece writes them, and characters are merged, not bytes.
    const fn of_characters(mut self) -> Known {
        self.spelling = Spelling::SentencePiece;
        self
    }
}

/// `tokenizer.ggml.pre` of files that name none, or one that is not known here.
pub(super) const FALLBACK: &str = "default";

/// What that name stands for; `None` where it is not known.
pub(super) fn known(name: &str) -> Option<Known> {
    let row = NAMES.iter().find(|(names, _)| names.contains(&name));
    row.map(|(_, known)| *known)
}

/// The names of llama.cpp, but for `whitespace`, whose models embed text and do not generate it.
pub(super) const NAMES: &[(&[&str], Known)] = &[
    (
        &["default"],
        Known::cut(&[
            At(r"[\p{P}\$\+<=>\^~\|]+"),
            At(GPT2),
            At(r"\p{N}+"),
            At(r"[0-9][0-9][0-9]"),
        ]),
    ),
    (
        &[
            "gpt-2",
            "gpt2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "exaone4",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "granite-docling",
        ],
        Known::cut(&[At(GPT2)]),
    ),
    (
        &[
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        Known::cut(&[At(r"\p{N}"), At(GPT2)]),
    ),
    (
        &[
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        Known::cut(&[At(LLAMA3)])
            .whole_words(WholeWords::All)
            .bos(Bos::UnlessTold),
    ),
    (
        &["dbrx", "smaug-bpe", "chatglm-bpe"],
        Known::cut(&[At(LLAMA3)]),
    ),
    (
        &["glm4", "glm5"],
        Known::cut(&[At(LLAMA3)]).whole_words(WholeWords::All),
    ),
    (
        &["minicpm5"],
        Known::cut(&[At(r"\p{N}{1,3}"), At(LLAMA3)]).whole_words(WholeWords::All),
    ),
    (&["jais-2"], Known::cut(&[PowersOfTwo(JAIS2)])),
    (
        &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        Known::cut(&[At(QWEN2)]),
    ),
    (&["laguna"], Known::cut(&[At(LINES), At(QWEN2)])),
    (&["ufakzeka"], Known::cut(&[At(UFAKZEKA)])),
    (&["qwen35"], Known::cut(&[At(QWEN35)])),
    (
        &["tekken"],
        Known::cut(&[At(TEKKEN)])
            .whole_words(WholeWords::All)
            .bos(Bos::UnlessTold),
    ),
    (
        &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"],
        Known::cut(&[At(GPT4O)]),
    ),
    (
        &["granite-embed-multi-97m"],
        Known::cut(&[At(GPT4O)]).whole_words(WholeWords::All),
    ),
    (
        &["tiny_aya", "cohere2moe"],
        Known::cut(&[Threes(r"\p{N}+"), At(GPT4O)]),
    ),
    (
        &["youtu"],
        Known::cut(&[At(YOUTU_SCRIPTS), At(YOUTU)]).whole_words(WholeWords::All),
    ),
    (&["kimi-k2"], Known::cut(&[At(KIMI)])),
    (
        &["bailingmoe", "bailingmoe2", "llada-moe"],
        Known::cut(&[At(BAILING)]),
    ),
    (&["seed-coder"], Known::cut(&[At(SEED_CODER)])),
    (&["exaone-moe"], Known::cut(&[At(EXAONE_MOE)])),
    (
        &["chameleon"],
        Known::cut(&[
            At(r"<sentinel:[0-9]+>"),
            At(r"IMGIMG[A-I]{1,4}Z"),
            At(r"[\t\n]|    |  "),
            At(r"\p{N}"),
            At(r"[\p{P}!-/:-@\[-`{-~]"),
            At(GPT2),
        ])
        .bos(Bos::UnlessTold),
    ),
    (
        &["falcon"],
        Known::cut(&[
            At(r"[\p{P}\$\+<=>\^~\|`]+"),
            At(GPT2),
            At(r"[0-9][0-9][0-9]"),
        ]),
    ),
    (
        &["deepseek-llm"],
        Known::cut(&[
            At(r"[\r\n]"),
            At(DEEPSEEK_LETTERS),
            At(DEEPSEEK_PUNCTUATION),
            At(r"\s+$"),
            At(DEEPSEEK_CJK),
            At(r"\p{N}+"),
        ]),
    ),
    (
        &["deepseek-coder"],
        Known::cut(&[
            At(r"[\r\n]"),
            At(r"\s?\p{L}+"),
            At(r"\s?\p{P}+"),
            At(DEEPSEEK_CJK),
            At(r"\p{N}"),
        ]),
    ),
    (
        &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        Known::cut(&[At(r"\p{N}{1,3}"), At(DEEPSEEK3_CJK), At(DEEPSEEK3)]),
    ),
    (
        &["spark2_5"],
        Known::cut(&[
            At(r"\p{N}{1,3}"),
            At(DEEPSEEK3_CJK),
            At(SPARK),
            At(r"\p{N}"),
        ]),
    ),
    (
        &["afmoe"],
        Known::cut(&[Threes(r"\p{N}+"), At(AFMOE_SCRIPTS), At(DEEPSEEK3)]),
    ),
    (
        &["superbpe"],
        Known::cut(&[At(r"\p{N}+"), Threes(r"[0-9]+")]),
    ),
    (
        &["poro-chat", "bloom", "gpt3-finnish"],
        Known::cut(&[At(BLOOM)]),
    ),
    (&["viking"], Known::cut(&[At(BLOOM), At(r"\p{N}")])),
    (
        &["gemma4", "granite-embed-multi-311m"],
        Known::cut(&[At(LINES)])
            .whole_words(WholeWords::LineBreaks)
            .bos(Bos::Always)
            .of_characters(),
    ),
    (&["sarvam-moe"], Known::cut(&[At(LINES)]).of_characters()),
];

/// Letters of an English contraction.
macro_rules! contraction {
    () => {
        r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
    };
}

/// Words in which capital letters come first, for letters with and without case.
macro_rules! cased_words {
    ($upper:literal, $lower:literal, $after:expr) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?",
            $upper,
            "*",
            $lower,
            "+",
            $after,
            r"|[^\r\n\p{L}\p{N}]?",
            $upper,
            "+",
            $lower,
            "*",
            $after
        )
    };
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
/// Runs of line breaks, and what stands between them.
const LINES: &str = r"[^\n]+|\n+";
const LLAMA3: &str = concat!(
    contraction!(),
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
);
/// For `\s{512}(?!\S)|\s{256}(?!\S)|...|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}` at the end.
const JAIS2: &str = concat!(
    contraction!(),
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
);
const QWEN2: &str = concat!(
    contraction!(),
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
);
/// Without contractions, for which Turkish suffixes would be taken.
const UFAKZEKA: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const QWEN35: &str = concat!(
    contraction!(),
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
);
const TEKKEN: &str = concat!(
    cased_words!(
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
        ""
    ),
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+"
);
const GPT4O: &str = concat!(
    cased_words!(
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
        concat!("(?:", contraction!(), ")?")
    ),
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+"
);
/// Hangul, full-width punctuation, Bopomofo, and Han with Kana.
const YOUTU_SCRIPTS: &str = r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
const YOUTU: &str = concat!(
    cased_words!(
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
        concat!("(?:", contraction!(), ")?")
    ),
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+"
);
const KIMI: &str = concat!(
    r"\p{Han}+|",
    cased_words!(
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
        concat!("(?:", contraction!(), ")?")
    ),
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
);
const BAILING: &str = concat!(
    contraction!(),
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+"
);
const SEED_CODER: &str = concat!(
    contraction!(),
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+"
);
/// Words go on over single spaces.
const EXAONE_MOE: &str = concat!(
    contraction!(),
    r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+"
);
const DEEPSEEK3_CJK: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"##;
const SPARK: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+"##;
/// Han, Kana, radicals, Thai, Lao, Khmer, Burmese and Hangul. In llama.cpp's list the first compatibility ideograph has
/// become the character that it stands for, and the range begins there.
const AFMOE_SCRIPTS: &str = r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{0E40}-\x{0E7F}\x{0E80}-\x{0EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+";
/// Letters with case, as the tokenizer of DeepSeek LLM lists them.
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+";
const DEEPSEEK_PUNCTUATION: &str =
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+";
const DEEPSEEK_CJK: &str = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

//! The opcodes that the kernels are made of, as a list that is kept: a compiler or a kernel that brings another one shows
//! here, by name, before the software GPU is asked for it.

use std::collections::BTreeSet;
use std::path::Path;

/// One opcode with its modifiers a line, sorted: those of our kernels, and those of candle's that `make gpu-check` races with.
const OURS: &str = "tests/cuda/opcodes.txt";
const CANDLES: &str = "tests/cuda/opcodes-candle.txt";
/// Names candle's kernels: a file of `scripts/candle_kernels.py`.
const CANDLES_PTX: &str = "STRATA_CANDLE_PTX";
/// Set to write the list anew.
const WRITE: &str = "STRATA_WRITE_OPCODES";

/// The opcodes of a PTX text: the first word of each statement in a body, after a predicate if there is one.
fn opcodes(text: &str) -> BTreeSet<&str> {
    let statements = text.lines().map(|line| {
        let line = line.split("//").next().unwrap_or_default().trim();
        match line.strip_prefix('@') {
            Some(predicated) => predicated
                .split_once(char::is_whitespace)
                .map_or("", |(_, rest)| rest.trim()),
            None => line,
        }
    });
    let is_opcode = |word: &&str| {
        word.starts_with(|first: char| first.is_ascii_lowercase()) && !word.ends_with(':')
    };
    statements
        .filter(|statement| statement.ends_with(';'))
        .filter_map(|statement| statement.trim_end_matches(';').split_whitespace().next())
        .filter(is_opcode)
        .collect()
}

#[test]
fn the_opcodes_of_the_kernels_are_those_of_the_list() {
    let mut found = BTreeSet::new();
    let mut texts = 0;
    for entry in std::fs::read_dir(env!("OUT_DIR")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "ptx") {
            let text = std::fs::read_to_string(&path).unwrap();
            found.extend(opcodes(&text).into_iter().map(str::to_owned));
            texts += 1;
        }
    }
    assert!(texts > 0, "no PTX in {}", env!("OUT_DIR"));
    assert_are_listed(&found, OURS);
}

#[test]
fn the_opcodes_of_candles_kernels_are_those_of_their_list() {
    let Some(path) = std::env::var_os(CANDLES_PTX) else {
        println!("skipped: {CANDLES_PTX} names no file");
        return;
    };
    let text = std::fs::read_to_string(path).unwrap();
    let found: BTreeSet<String> = opcodes(&text).into_iter().map(str::to_owned).collect();
    assert!(!found.is_empty());
    assert_are_listed(&found, CANDLES);
}

fn assert_are_listed(found: &BTreeSet<String>, list: &str) {
    let list = Path::new(env!("CARGO_MANIFEST_DIR")).join(list);
    if std::env::var_os(WRITE).is_some() {
        let lines: String = found.iter().map(|opcode| format!("{opcode}\n")).collect();
        std::fs::write(&list, lines).unwrap();
    }
    let listed = std::fs::read_to_string(&list).unwrap();
    let listed: BTreeSet<String> = listed.lines().map(str::to_owned).collect();
    let new: Vec<&String> = found.difference(&listed).collect();
    let gone: Vec<&String> = listed.difference(found).collect();
    assert!(
        new.is_empty() && gone.is_empty(),
        "new: {new:?}, gone: {gone:?}; where that is meant, and the software GPU knows the new ones, run this test once with \
         {WRITE}=1"
    );
}

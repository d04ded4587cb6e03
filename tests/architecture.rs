//! The import table of ARCHITECTURE.md holds: no module of `src/` imports what its row does not allow, every module
//! has a row, and there are no cycles. The table is read from the page itself, so that page and code cannot drift.
//!
//! What counts as an import is any path that starts at the crate's root: `crate::gguf`, `use crate::{gguf, memory}`,
//! or enough `super`s to climb there. Test code is held to the same table as the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// What each module may import; `None` is anything.
type Table = BTreeMap<String, Option<BTreeSet<String>>>;

/// A graph of modules: who imports whom.
type Imports = BTreeMap<String, BTreeSet<String>>;

struct Source {
    /// Relative to `src/`.
    path: PathBuf,
    text: String,
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Word(String),
    /// `::`
    Separator,
    Mark(char),
}

/// The words and marks of a source file with their lines; comments, strings and character literals are left out.
fn tokens(text: &str) -> Vec<(usize, Token)> {
    let characters: Vec<char> = text.chars().collect();
    let at = |index: usize| characters.get(index).copied().unwrap_or('\0');
    let is_word = |character: char| character.is_alphanumeric() || character == '_';
    let mut found = Vec::new();
    let mut line = 1;
    let mut index = 0;
    while index < characters.len() {
        let start = index;
        match at(index) {
            '/' if at(index + 1) == '/' => {
                while index < characters.len() && at(index) != '\n' {
                    index += 1;
                }
            }
            '/' if at(index + 1) == '*' => {
                let mut depth = 0;
                while index < characters.len() {
                    match (at(index), at(index + 1)) {
                        ('/', '*') => (depth, index) = (depth + 1, index + 2),
                        ('*', '/') => (depth, index) = (depth - 1, index + 2),
                        _ => index += 1,
                    }
                    if depth == 0 {
                        break;
                    }
                }
            }
            '"' => {
                index += 1;
                while index < characters.len() && at(index) != '"' {
                    index += if at(index) == '\\' { 2 } else { 1 };
                }
                index += 1;
            }
            // A character literal, or a lifetime (then only the apostrophe is skipped).
            '\'' if at(index + 1) == '\\' => {
                index += 3;
                while index < characters.len() && at(index) != '\'' {
                    index += 1;
                }
                index += 1;
            }
            '\'' => index += if at(index + 2) == '\'' { 3 } else { 1 },
            character if is_word(character) => {
                while is_word(at(index)) {
                    index += 1;
                }
                let word: String = characters[start..index].iter().collect();
                let hashes = (index..).take_while(|&next| at(next) == '#').count();
                if matches!(word.as_str(), "r" | "br" | "cr") && at(index + hashes) == '"' {
                    let end: String = std::iter::once('"')
                        .chain(std::iter::repeat_n('#', hashes))
                        .collect();
                    index += hashes + 1;
                    while index < characters.len()
                        && !(0..=hashes)
                            .all(|k| at(index + k) == end.chars().nth(k).unwrap_or('\0'))
                    {
                        index += 1;
                    }
                    index += hashes + 1;
                } else if word == "r" && hashes == 1 {
                    // A raw identifier: the name follows.
                    index += 1;
                } else {
                    found.push((line, Token::Word(word)));
                }
            }
            ':' if at(index + 1) == ':' => {
                found.push((line, Token::Separator));
                index += 2;
            }
            character => {
                if !character.is_whitespace() {
                    found.push((line, Token::Mark(character)));
                }
                index += 1;
            }
        }
        index = index.min(characters.len());
        line += characters[start..index]
            .iter()
            .filter(|&&c| c == '\n')
            .count();
    }
    found
}

/// The module that a file of `src/` is, from the crate's root: `weights/ring.rs` is `[weights, ring]`.
fn module_path(path: &Path) -> Vec<String> {
    let path = path.with_extension("");
    let mut names: Vec<String> = path
        .components()
        .map(|part| part.as_os_str().to_string_lossy().into_owned())
        .collect();
    if names.last().is_some_and(|name| name == "mod") {
        names.pop();
    }
    names
}

/// The names that a file takes from the crate's root, with the line of each. `*` stands for all of the root.
fn root_names(file_depth: usize, tokens: &[(usize, Token)]) -> Vec<(usize, String)> {
    let token = |index: usize| tokens.get(index).map(|(_, token)| token);
    let word = |index: usize| match token(index) {
        Some(Token::Word(word)) => word.as_str(),
        _ => "",
    };
    let is = |index: usize, mark: char| token(index) == Some(&Token::Mark(mark));
    let mut found = Vec::new();
    // For each open brace, whether it is the body of an inline module: one `super` more to climb.
    let mut braces: Vec<bool> = Vec::new();
    let mut in_use = false;
    for index in 0..tokens.len() {
        let line = tokens[index].0;
        if is(index, '{') {
            braces.push(index >= 2 && word(index - 2) == "mod");
        } else if is(index, '}') {
            braces.pop();
        } else if is(index, ';') {
            in_use = false;
        }
        in_use |= word(index) == "use";
        let starts_path = index == 0 || token(index - 1) != Some(&Token::Separator);
        if !starts_path || !matches!(word(index), "crate" | "super" | "self") {
            continue;
        }
        let depth = file_depth + braces.iter().filter(|&&is_module| is_module).count();
        let mut level = match word(index) {
            "crate" => 0,
            "self" => depth,
            _ => depth.saturating_sub(1),
        };
        // `use crate as name` and `use super::{super::name}` would hide where a path leads.
        let hidden = in_use
            && (word(index) == "crate" && word(index + 1) == "as"
                || word(index) == "super" && (is(index - 1, '{') || is(index - 1, ',')));
        if hidden {
            found.push((line, "*".to_owned()));
        }
        let mut next = index + 1;
        while token(next) == Some(&Token::Separator) && word(next + 1) == "super" {
            level = level.saturating_sub(1);
            next += 2;
        }
        if level > 0 || token(next) != Some(&Token::Separator) {
            continue;
        }
        next += 1;
        if !is(next, '{') {
            let name = if is(next, '*') { "*" } else { word(next) };
            found.push((line, name.to_owned()));
            continue;
        }
        // A list: the names that stand directly in it.
        let mut depth = 0;
        loop {
            if is(next, '{') {
                depth += 1;
            } else if is(next, '}') {
                depth -= 1;
            }
            let starts_item = is(next, ',') || is(next, '{');
            if depth == 1 && starts_item && !is(next + 1, '}') {
                let name = match word(next + 1) {
                    "" | "self" => "*",
                    name => name,
                };
                found.push((tokens[next + 1].0, name.to_owned()));
            }
            next += 1;
            if depth == 0 || next >= tokens.len() {
                break;
            }
        }
    }
    found
}

/// The table of a page: the rows under `| module | owns | may import |`.
fn parse_table(page: &str) -> Result<Table, String> {
    let cells = |line: &str| -> Vec<String> {
        line.trim()
            .trim_matches('|')
            .split('|')
            .map(|cell| cell.replace('`', "").trim().to_owned())
            .collect()
    };
    let mut lines = page
        .lines()
        .skip_while(|line| cells(line) != ["module", "owns", "may import"]);
    if lines.next().is_none() {
        return Err("no table `| module | owns | may import |`".to_owned());
    }
    let mut table = Table::new();
    for line in lines.skip(1).take_while(|line| line.starts_with('|')) {
        let row = cells(line);
        let [module, _, may_import] = row.as_slice() else {
            return Err(format!("a row without three cells: {line}"));
        };
        let allowed = match may_import.as_str() {
            "anything" => None,
            "nothing" => Some(BTreeSet::new()),
            names => Some(
                names
                    .split(',')
                    .map(|name| name.trim().to_owned())
                    .collect(),
            ),
        };
        if table.insert(module.clone(), allowed).is_some() {
            return Err(format!("two rows for `{module}`"));
        }
    }
    for (module, allowed) in &table {
        for name in allowed.iter().flatten() {
            if !table.contains_key(name) {
                return Err(format!(
                    "the row of `{module}` names `{name}`, which has no row"
                ));
            }
        }
    }
    Ok(table)
}

/// A path through the graph that ends where it starts.
fn cycle(graph: &Imports) -> Option<Vec<String>> {
    fn visit(graph: &Imports, path: &mut Vec<String>, done: &mut BTreeSet<String>) -> bool {
        let module = path.last().cloned().unwrap_or_default();
        for name in graph.get(&module).into_iter().flatten() {
            if let Some(start) = path.iter().position(|seen| seen == name) {
                path.drain(..start);
                path.push(name.clone());
                return true;
            }
            if !done.contains(name) {
                path.push(name.clone());
                if visit(graph, path, done) {
                    return true;
                }
                path.pop();
            }
        }
        done.insert(module);
        false
    }
    let mut done = BTreeSet::new();
    graph.keys().find_map(|module| {
        let mut path = vec![module.clone()];
        (!done.contains(module) && visit(graph, &mut path, &mut done)).then_some(path)
    })
}

/// What the two programs are made of: no modules of the library.
fn is_program(module: &str) -> bool {
    matches!(module, "main" | "main_cuda" | "commands")
}

/// Everything that is wrong, one sentence each.
fn problems(page: &str, sources: &[Source]) -> Vec<String> {
    let table = match parse_table(page) {
        Ok(table) => table,
        Err(error) => return vec![format!("ARCHITECTURE.md: {error}")],
    };
    let mut problems = Vec::new();
    let mut modules = BTreeSet::new();
    for source in sources
        .iter()
        .filter(|source| source.path == Path::new("lib.rs"))
    {
        let tokens = tokens(&source.text);
        for pair in tokens.windows(2) {
            if let [(_, Token::Word(word)), (_, Token::Word(name))] = pair
                && word == "mod"
            {
                modules.insert(name.clone());
            }
        }
    }
    for module in &modules {
        if !table.contains_key(module) {
            problems.push(format!("`{module}` has no row in the table"));
        }
    }
    for module in table.keys().filter(|module| !is_program(module)) {
        if !modules.contains(module) {
            problems.push(format!(
                "the table has a row for `{module}`, which lib.rs does not declare"
            ));
        }
    }

    let mut imports = Imports::new();
    for source in sources {
        let path = module_path(&source.path);
        let Some(module) = path
            .first()
            .filter(|name| name.as_str() != "lib" && !is_program(name))
        else {
            continue;
        };
        for (line, name) in root_names(path.len(), &tokens(&source.text)) {
            if name == *module {
                continue;
            }
            let place = format!("src/{}:{line}", source.path.display());
            if !modules.contains(&name) {
                problems.push(format!("{place}: `crate::{name}` is not a module"));
                continue;
            }
            let allowed = table
                .get(module)
                .is_some_and(|row| row.as_ref().is_none_or(|names| names.contains(&name)));
            if !allowed {
                problems.push(format!("{place}: `{module}` may not import `{name}`"));
            }
            imports.entry(module.clone()).or_default().insert(name);
        }
    }
    let allowed: Imports = table
        .into_iter()
        .filter_map(|(module, row)| Some((module, row?)))
        .collect();
    for (what, graph) in [("the table", &allowed), ("the code", &imports)] {
        if let Some(path) = cycle(graph) {
            problems.push(format!("{what} has a cycle: {}", path.join(" -> ")));
        }
    }
    problems
}

fn read_sources(root: &Path, folder: &Path, sources: &mut Vec<Source>) {
    for entry in fs::read_dir(folder).expect("list src") {
        let path = entry.expect("list src").path();
        if path.is_dir() {
            read_sources(root, &path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push(Source {
                path: path.strip_prefix(root).expect("under src").to_owned(),
                text: without_tests(&fs::read_to_string(&path).expect("read source")).to_owned(),
            });
        }
    }
}

/// A file up to its unit tests: those may build what they need from anything.
fn without_tests(text: &str) -> &str {
    text.split("\n#[cfg(test)]\nmod tests {")
        .next()
        .unwrap_or(text)
}

#[test]
fn no_module_imports_what_the_table_does_not_allow() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    let mut sources = Vec::new();
    read_sources(&root.join("src"), &root.join("src"), &mut sources);
    assert!(sources.len() > 10, "found {} files only", sources.len());
    let problems = problems(&page, &sources);
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

mod the_check_itself {
    use super::*;

    const PAGE: &str = "Words.\n\n| module | owns | may import |\n|---|---|---|\n| `low` | a | nothing |\n\
        | `middle` | b | low |\n| `high` | c | low, middle |\n| main | d | anything |\n\nMore | words |\n";
    const LIB: &str = "pub mod low;\npub mod middle;\npub mod high;";

    fn check(page: &str, files: &[(&str, &str)]) -> Vec<String> {
        let sources: Vec<Source> = files
            .iter()
            .map(|(path, text)| Source {
                path: PathBuf::from(path),
                text: (*text).to_owned(),
            })
            .collect();
        problems(page, &sources)
    }

    #[test]
    fn what_the_table_allows_passes() {
        let files = [
            ("lib.rs", LIB),
            ("main.rs", "use strata::high;"),
            (
                "low.rs",
                "pub(crate) struct Low; pub(in crate::low) mod inner { use super::Low; }",
            ),
            ("middle/mod.rs", "use crate::low::Low; mod part;"),
            (
                "middle/part.rs",
                "use super::Thing; use super::super::low; use crate::middle::Thing;",
            ),
            (
                "high.rs",
                "use crate::{low::{self, middle_name}, middle::{a, b::{c}},};",
            ),
        ];
        assert_eq!(check(PAGE, &files), Vec::<String>::new());
    }

    #[test]
    fn a_forbidden_import_is_found_in_every_form() {
        let forms = [
            "use crate::high;",
            "\n// a comment\nuse crate::high::Thing;",
            "use crate::{low, high::{a, b}};",
            "use crate::{low::{a}, high as other};",
            "fn f() { crate::high::g() }",
            "use super::high;",
            "mod tests { use super::super::high; }",
            "mod tests { use super::*; fn f() -> super::super::high::T { g('{', \"}\") } }",
            "fn f<'a>(x: &'a str) -> char { '\\'' } use crate::high;",
            "const A: &str = r#\"a \" b\"#; use crate::high;",
            "use self::super::high;",
            "pub use crate :: high :: { Thing };",
        ];
        for form in forms {
            let found = check(PAGE, &[("lib.rs", LIB), ("middle.rs", form)]);
            assert_eq!(found.len(), 1, "{form}: {found:?}");
            assert!(
                found[0].contains("`middle` may not import `high`"),
                "{found:?}"
            );
        }
        let nested = check(
            PAGE,
            &[
                ("lib.rs", LIB),
                ("middle/a/b.rs", "\nuse super::super::super::high;"),
            ],
        );
        assert_eq!(
            nested,
            ["src/middle/a/b.rs:2: `middle` may not import `high`"]
        );
    }

    #[test]
    fn names_in_comments_and_strings_are_not_imports() {
        let text = "//! [`crate::high`]\n/* use crate::high; /* nested */ */\nconst A: &str = \"crate::high\\\"\";\n\
            const B: &str = r##\"\"# crate::high\"##; const C: char = '\"'; fn f() -> &'static str { A }";
        assert_eq!(
            check(PAGE, &[("lib.rs", LIB), ("middle.rs", text)]),
            Vec::<String>::new()
        );
    }

    #[test]
    fn a_path_that_hides_where_it_leads_is_refused() {
        for text in [
            "use crate::*;",
            "use crate as root;",
            "use crate::{self as root};",
            "use super::{super::high};",
        ] {
            let found = check(PAGE, &[("lib.rs", LIB), ("middle/part.rs", text)]);
            assert!(
                found.iter().any(|problem| problem.contains("`crate::*`")),
                "{text}: {found:?}"
            );
        }
    }

    #[test]
    fn a_cycle_is_found_in_the_table_and_in_the_code() {
        let page = PAGE.replace("| `low` | a | nothing |", "| `low` | a | high |");
        let table_only = check(&page, &[("lib.rs", LIB)]);
        assert_eq!(table_only, ["the table has a cycle: high -> low -> high"]);
        let files = [
            ("lib.rs", LIB),
            ("low.rs", "use crate::high;"),
            ("high.rs", "use crate::middle;"),
            ("middle.rs", "use crate::low;"),
        ];
        let found = check(PAGE, &files);
        assert!(
            found.contains(&"the code has a cycle: high -> middle -> low -> high".to_owned()),
            "{found:?}"
        );
    }

    #[test]
    fn a_module_without_a_row_and_a_row_without_a_module_are_found() {
        let found = check(
            PAGE,
            &[("lib.rs", "pub mod low; mod middle; pub mod other;")],
        );
        assert_eq!(
            found,
            [
                "`other` has no row in the table",
                "the table has a row for `high`, which lib.rs does not declare"
            ]
        );
        assert!(check("no table", &[])[0].contains("no table"));
        let unknown = PAGE.replace("low, middle", "low, nowhere");
        assert!(check(&unknown, &[])[0].contains("`nowhere`, which has no row"));
    }
}

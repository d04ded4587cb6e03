//! The Hugging Face hub: which files a repository has, and where they are.
//!
//! Two of its routes are used: `GET /api/models/OWNER/REPO/revision/REVISION?blobs=true`, which lists the files with their
//! sizes and checksums, and `GET /OWNER/REPO/resolve/COMMIT/PATH`, which leads to a file
//! (<https://huggingface.co/docs/hub/api>).

use super::address::{Address, encoded};
use super::client::{Client, Token, Trouble};
use super::sha256::Sha256;
use super::source::{Choice, Repository, check_path};
use super::{PullError, Remote};
use crate::gguf::ShardName;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Which hub, and as whom. It cannot be printed, because of the token.
#[derive(Clone)]
pub struct HubSettings {
    pub endpoint: Address,
    /// Sent to the endpoint only.
    pub token: Option<String>,
}

const ENDPOINT: &str = "https://huggingface.co";
const TOKEN_BYTES_MAX: usize = 4 << 10;

impl HubSettings {
    /// From the variables that the hub's own tools read: `HF_ENDPOINT`; `HF_TOKEN`, or else the file that `hf auth login`
    /// writes (`HF_TOKEN_PATH`, `$HF_HOME/token`, `~/.cache/huggingface/token`).
    pub fn resolve(variable: impl Fn(&str) -> Option<String>) -> Result<HubSettings, PullError> {
        let variable = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        let endpoint = endpoint.trim().trim_end_matches('/');
        let endpoint = Address::parse(endpoint)
            .map_err(|what| PullError::Usage(format!("HF_ENDPOINT={endpoint}: {what}")))?;
        let from_file = || {
            let home = || variable("HOME").map(|home| format!("{home}/.cache"));
            let hub_home = variable("HF_HOME").or_else(|| {
                let cache = variable("XDG_CACHE_HOME").or_else(home)?;
                Some(format!("{cache}/huggingface"))
            });
            let path =
                variable("HF_TOKEN_PATH").or_else(|| Some(format!("{}/token", hub_home?)))?;
            // Who has none has no file either.
            std::fs::read_to_string(Path::new(&path)).ok()
        };
        let token = variable("HF_TOKEN").or_else(from_file);
        let token = token.map(|token| token.trim().to_owned());
        let token = token.filter(|token| !token.is_empty());
        let fits = |token: &String| {
            token.len() <= TOKEN_BYTES_MAX && token.bytes().all(|byte| byte.is_ascii_graphic())
        };
        if !token.as_ref().is_none_or(fits) {
            return Err(PullError::Usage(
                "the hub's token (HF_TOKEN) has characters that no token has: copy it again"
                    .to_owned(),
            ));
        }
        Ok(HubSettings { endpoint, token })
    }

    pub(super) fn token(&self) -> Option<Token> {
        Some(Token {
            secret: self.token.clone()?,
            home: self.endpoint.clone(),
        })
    }

    fn address(&self, path: &str) -> Result<Address, PullError> {
        let endpoint = self.endpoint.to_string();
        Address::parse(&format!("{}/{path}", endpoint.trim_end_matches('/')))
            .map_err(|what| PullError::Refused(format!("{path}: {what}")))
    }
}

/// A file of a repository, as the hub lists it. The path is hostile until it was checked.
#[derive(Clone, Debug, Deserialize)]
struct Sibling {
    #[serde(rename = "rfilename")]
    path: String,
    size: Option<u64>,
    /// Of those that are large.
    lfs: Option<LargeFile>,
}

#[derive(Clone, Debug, Deserialize)]
struct LargeFile {
    sha256: Option<String>,
    size: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct Listing {
    /// The commit that the revision is now.
    sha: Option<String>,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

const LISTING_BYTES_MAX: usize = 16 << 20;

/// Asks the hub for the files of a model, in order.
pub(super) fn files(
    client: &Client,
    settings: &HubSettings,
    repository: &Repository,
    choice: &Choice,
) -> Result<Vec<Remote>, Trouble> {
    let Repository { name, revision } = repository;
    let path = format!(
        "api/models/{name}/revision/{}",
        encoded(revision).replace('/', "%2F")
    );
    let listing = settings.address(&format!("{path}?blobs=true"))?;
    let deadline = Some(client.limits.stall.saturating_mul(4));
    let answer = client.get(&listing, None, deadline)?;
    if answer.status != 200 {
        return Err(answer.refusal(name));
    }
    let host = answer.address.authority().to_owned();
    let body = answer.into_reader().read_to_end(LISTING_BYTES_MAX)?;
    let listing: Listing = serde_json::from_slice(&body).map_err(|error| {
        Trouble::refused(format!(
            "{name}: {host} does not answer like the hub: {error}; check HF_ENDPOINT"
        ))
    })?;
    // All parts of a model are of one commit, whatever is pushed meanwhile.
    let is_commit =
        |sha: &String| sha.len() == 40 && sha.bytes().all(|byte| byte.is_ascii_hexdigit());
    let commit = listing.sha.filter(is_commit);
    let commit = commit.unwrap_or_else(|| revision.clone());
    let chosen = choose(name, listing.siblings, choice)
        .map_err(|what| Trouble::refused(format!("{name}: {what}")))?;
    let remote = |file: Sibling| {
        let resolve = format!(
            "{name}/resolve/{}/{}",
            encoded(&commit),
            encoded(&file.path)
        );
        let LargeFile { sha256, size } = file.lfs.unwrap_or(LargeFile {
            sha256: None,
            size: None,
        });
        Ok(Remote {
            address: settings.address(&resolve)?,
            name: file.path.rsplit('/').next().unwrap_or_default().to_owned(),
            bytes: size.or(file.size),
            sha256: sha256.and_then(|sum| Sha256::from_hex(&sum)),
        })
    };
    chosen.into_iter().map(remote).collect()
}

/// A model's parts: `model-00001-of-00003.gguf`, in order, under what they are called without their numbers.
#[derive(Debug)]
struct Model {
    parts: BTreeMap<u32, Sibling>,
    count: u32,
}

/// The models among the files, by the name that stands for all parts.
fn models(files: Vec<Sibling>) -> BTreeMap<String, Model> {
    let mut models: BTreeMap<String, Model> = BTreeMap::new();
    for file in files {
        // A repository or a model may be called after how it was quantised.
        let name = file.path.rsplit('/').next().unwrap_or_default();
        let name = name.to_ascii_lowercase();
        let of_another_kind = name.contains("mmproj") || name.starts_with("imatrix");
        if of_another_kind || check_path(&file.path).is_err() {
            continue;
        }
        let (name, number, count) = match ShardName::of(&file.path) {
            Some(ShardName {
                stem,
                number,
                count,
            }) => (format!("{stem}-of-{count:05}.gguf"), number, count),
            None => (file.path.clone(), 1, 1),
        };
        let model = models.entry(name).or_insert_with(|| Model {
            parts: BTreeMap::new(),
            count,
        });
        model.parts.insert(number, file);
    }
    models
}

/// The quantisation that most people take; the hub's other clients take it too.
const CUSTOMARY: &str = "Q4_K_M";

fn choose(repository: &str, files: Vec<Sibling>, choice: &Choice) -> Result<Vec<Sibling>, String> {
    if let Choice::File(path) = choice
        && ShardName::of(path).is_none()
    {
        let mut found = files.into_iter().filter(|file| file.path == *path);
        return match found.next() {
            Some(file) => Ok(vec![file]),
            None => Err(format!(
                "it has no file {path}; check the name, or give {repository} alone to see what it has"
            )),
        };
    }
    let models = models(files);
    if models.is_empty() {
        return Err(
            "it has no GGUF file; look for a repository whose name ends in -GGUF".to_owned(),
        );
    }
    let list = || {
        let names: Vec<&str> = models.keys().map(String::as_str).take(30).collect();
        let more = models.len() - names.len();
        let more = if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        };
        format!("{}{more}", names.join(", "))
    };
    let tagged = |tag: &str| -> Vec<&Model> {
        let has_tag = models.iter().filter(|(name, _)| has_tag(name, tag));
        has_tag.map(|(_, model)| model).collect()
    };
    let found = match choice {
        Choice::Customary if models.len() == 1 => models.values().collect(),
        Choice::Customary => match tagged(CUSTOMARY) {
            found if found.is_empty() => {
                return Err(format!(
                    "it has several models: {}; add the one to fetch, as in {repository}:Q8_0 or {repository}/FILE.gguf",
                    list()
                ));
            }
            found => found,
        },
        Choice::Tag(tag) => tagged(tag),
        Choice::File(path) => {
            let holds = |model: &&Model| model.parts.values().any(|file| file.path == *path);
            models.values().filter(holds).collect()
        }
    };
    match found.as_slice() {
        [] => Err(format!("it has no such model, but {}", list())),
        [model] if model.parts.len() as u64 == u64::from(model.count) => {
            Ok(model.parts.values().cloned().collect())
        }
        [model] => {
            let missing = (1..=model.count).find(|number| !model.parts.contains_key(number));
            Err(format!(
                "part {} of {} is missing there: its owner has not uploaded all of it",
                missing.unwrap_or_default(),
                model.count
            ))
        }
        _ => Err(format!(
            "several models are called so; give the name of one: {}",
            list()
        )),
    }
}

/// Whether a quantisation stands in a name as a word of its own: `Q4_K` is not in `model-Q4_K_M.gguf`.
fn has_tag(name: &str, tag: &str) -> bool {
    let (name, tag) = (name.to_ascii_lowercase(), tag.to_ascii_lowercase());
    let of_word = |c: char| c.is_alphanumeric() || c == '_';
    name.match_indices(&tag).any(|(at, _)| {
        let (before, after) = (&name[..at], &name[at + tag.len()..]);
        !before.ends_with(of_word) && !after.starts_with(of_word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn siblings(paths: &[&str]) -> Vec<Sibling> {
        let sibling = |path: &&str| Sibling {
            path: (*path).to_owned(),
            size: None,
            lfs: None,
        };
        paths.iter().map(sibling).collect()
    }

    const FILES: [&str; 9] = [
        "README.md",
        "m-IQ4_XS.gguf",
        "m-Q4_K_M.gguf",
        "m-Q4_K_S.gguf",
        "m.UD-Q2_K.gguf",
        "mmproj-F16.gguf",
        "Q8_0/m-Q8_0-00002-of-00002.gguf",
        "Q8_0/m-Q8_0-00001-of-00002.gguf",
        "BF16/m-00001-of-00002.gguf",
    ];

    #[test]
    fn a_choice_finds_its_files() {
        let check = |choice: Choice, expected: Result<&[&str], &str>| {
            let chosen = choose("o/r", siblings(&FILES), &choice);
            match (chosen, expected) {
                (Ok(files), Ok(paths)) => {
                    let found: Vec<&str> = files.iter().map(|file| file.path.as_str()).collect();
                    assert_eq!(found, paths, "{choice:?}");
                }
                (Err(error), Err(part)) => assert!(error.contains(part), "{choice:?}: {error}"),
                other => panic!("{choice:?}: {other:?}"),
            }
        };
        let tag = |tag: &str| Choice::Tag(tag.to_owned());
        let file = |path: &str| Choice::File(path.to_owned());
        let q8: [&str; 2] = [
            "Q8_0/m-Q8_0-00001-of-00002.gguf",
            "Q8_0/m-Q8_0-00002-of-00002.gguf",
        ];
        check(Choice::Customary, Ok(&["m-Q4_K_M.gguf"]));
        check(tag("q4_k_s"), Ok(&["m-Q4_K_S.gguf"]));
        check(tag("UD-Q2_K"), Ok(&["m.UD-Q2_K.gguf"]));
        check(tag("Q2_K"), Ok(&["m.UD-Q2_K.gguf"]));
        check(tag("Q8_0"), Ok(&q8));
        check(file(q8[1]), Ok(&q8));
        check(file("m-IQ4_XS.gguf"), Ok(&["m-IQ4_XS.gguf"]));
        check(file("mmproj-F16.gguf"), Ok(&["mmproj-F16.gguf"]));
        check(
            tag("Q4_K"),
            Err("no such model, but BF16/m-of-00002.gguf, Q8_0"),
        );
        check(tag("Q4_XS"), Err("no such model"));
        check(tag("m"), Err("several models are called so"));
        check(tag("BF16"), Err("part 2 of 2 is missing"));
        check(file("x.gguf"), Err("no file x.gguf"));
        check(file("x-00001-of-00002.gguf"), Err("no such model"));
    }

    #[test]
    fn without_a_tag_the_only_model_or_the_customary_one() {
        let choose = |paths: &[&str]| choose("o/r", siblings(paths), &Choice::Customary);
        assert_eq!(choose(&["a.gguf", "b.bin"]).unwrap().len(), 1);
        let error = choose(&["a-Q8_0.gguf", "a-F16.gguf"]).unwrap_err();
        assert!(
            error.contains("a-F16.gguf, a-Q8_0.gguf") && error.contains("o/r:Q8_0"),
            "{error}"
        );
        let error = choose(&["model.safetensors"]).unwrap_err();
        assert!(error.contains("-GGUF"), "{error}");
        // Some are made with the matrix, and some are it.
        let found = choose(&["imatrix/m-imatrix.gguf", "imatrix_m.gguf"]).unwrap();
        assert_eq!(found[0].path, "imatrix/m-imatrix.gguf");
        // Names that would leave the folder are not there.
        let error = choose(&["../../a.gguf", "b\n.gguf", "x/../a.gguf"]).unwrap_err();
        assert!(error.contains("no GGUF"), "{error}");
    }

    #[test]
    fn settings_are_those_of_the_hubs_tools() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join(".cache/huggingface");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("token"), "of_file\n").unwrap();
        let resolve = |variables: &[(&str, &str)]| {
            let home = home.path().to_str().unwrap().to_owned();
            HubSettings::resolve(
                |name| match variables.iter().find(|(key, _)| *key == name) {
                    Some((_, value)) => Some((*value).to_owned()),
                    None => (name == "HOME").then(|| home.clone()),
                },
            )
        };
        let settings = resolve(&[]).unwrap();
        assert_eq!(settings.endpoint.to_string(), "https://huggingface.co/");
        assert_eq!(settings.token.as_deref(), Some("of_file"));
        let settings = resolve(&[("HF_TOKEN", " t "), ("HF_ENDPOINT", "http://a:1/b/")]).unwrap();
        assert_eq!(settings.token.as_deref(), Some("t"));
        assert_eq!(settings.address("c").unwrap().to_string(), "http://a:1/b/c");
        assert_eq!(resolve(&[("HF_HOME", "/nowhere")]).unwrap().token, None);
        assert!(resolve(&[("HF_TOKEN", "a\r\nb: c")]).is_err());
        assert!(resolve(&[("HF_ENDPOINT", "ftp://a")]).is_err());
    }
}

//! What is asked for: a model of the hub, by its name or by the address of its page, or any URL.

use super::PullError;
use super::address::{Address, check_file_name, decoded, hides};

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Hub {
        repository: Repository,
        choice: Choice,
    },
    Url(Address),
}

/// A model's repository on the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Repository {
    /// `owner/name`
    pub(super) name: String,
    /// A branch, a tag or a commit.
    pub(super) revision: String,
}

/// Which of a repository's models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// The only one, or that of the customary quantisation.
    Customary,
    /// A quantisation, as in `Q4_K_M`.
    Tag(String),
    /// A path in the repository.
    File(String),
}

const REVISION: &str = "main";
/// Hosts of the hub, whose pages people copy the address of.
const HUB_HOSTS: [&str; 2] = ["huggingface.co", "hf.co"];
/// First pieces of paths there that are no owners.
const NO_OWNERS: [&str; 3] = ["datasets", "spaces", "api"];

impl Source {
    /// `endpoint` is the hub's own address.
    pub(super) fn parse(text: &str, endpoint: &Address) -> Result<Source, PullError> {
        let wrong = |what: &str| {
            PullError::Usage(format!(
                "{text}: {what}; give owner/repo, owner/repo:Q4_K_M or owner/repo/FILE.gguf of the hub, or an http(s) URL"
            ))
        };
        if text.contains("://") {
            let address = Address::parse(text).map_err(wrong)?;
            let of_hub = address.same_origin(endpoint)
                || address.is_secure() && HUB_HOSTS.contains(&address.authority());
            let on_hub = if of_hub { of_page(&address) } else { None };
            return match on_hub {
                Some((repository, choice)) => {
                    check(&repository, &choice).map_err(wrong)?;
                    Ok(Source::Hub { repository, choice })
                }
                None => Ok(Source::Url(address)),
            };
        }
        let mut name = text;
        for host in HUB_HOSTS {
            if let Some(rest) = name
                .strip_prefix(host)
                .and_then(|rest| rest.strip_prefix('/'))
            {
                name = rest;
            }
        }
        let (name, tag) = match name.split_once(':') {
            Some((name, tag)) => (name, Some(tag)),
            None => (name, None),
        };
        let mut pieces = name.splitn(3, '/');
        let (Some(owner), Some(repository), file) = (pieces.next(), pieces.next(), pieces.next())
        else {
            return Err(wrong("it is no name of the hub"));
        };
        let choice = match (file, tag) {
            (None, None) => Choice::Customary,
            // What others call the customary one.
            (None, Some(tag)) if tag.eq_ignore_ascii_case("latest") => Choice::Customary,
            (None, Some(tag)) => Choice::Tag(tag.to_owned()),
            (Some(file), None) => Choice::File(file.to_owned()),
            (Some(_), Some(_)) => return Err(wrong("it has both a file and a tag")),
        };
        let repository = Repository {
            name: format!("{owner}/{repository}"),
            revision: REVISION.to_owned(),
        };
        check(&repository, &choice).map_err(wrong)?;
        Ok(Source::Hub { repository, choice })
    }
}

/// The model whose page or file is at an address of the hub: `/owner/repo`, with `/blob/REVISION/PATH` or the like behind.
fn of_page(address: &Address) -> Option<(Repository, Choice)> {
    let pieces: Vec<String> = address.path().split('/').skip(1).map(decoded).collect();
    let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
    let (owner, repository, rest) = match pieces.as_slice() {
        [owner, repository, rest @ ..] if !repository.is_empty() => (owner, repository, rest),
        _ => return None,
    };
    if NO_OWNERS.contains(owner) {
        return None;
    }
    let (revision, choice) = match rest {
        [] | [""] => (REVISION, Choice::Customary),
        ["tree", revision] => (*revision, Choice::Customary),
        ["blob" | "resolve" | "raw", revision, path @ ..] if !path.is_empty() => {
            (*revision, Choice::File(path.join("/")))
        }
        _ => return None,
    };
    let repository = Repository {
        name: format!("{owner}/{repository}"),
        revision: revision.to_owned(),
    };
    Some((repository, choice))
}

/// That nothing in it leads elsewhere when it becomes a part of a URL.
fn check(repository: &Repository, choice: &Choice) -> Result<(), &'static str> {
    let is_word = |text: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        !text.is_empty()
            && text.len() <= 128
            && text != ".."
            && text != "."
            && text.chars().all(allowed)
    };
    if !repository.name.split('/').all(is_word) {
        return Err("owner and repo are letters, digits, '-', '_' and '.'");
    }
    // A reference may have slashes: refs/pr/1.
    if !repository.revision.split('/').all(is_word) {
        return Err("the revision is no branch, tag or commit");
    }
    match choice {
        Choice::Tag(tag) if !is_word(tag) => Err("the tag is no quantisation, as in Q4_K_M"),
        Choice::File(path) => check_path(path),
        _ => Ok(()),
    }
}

/// A path in a repository, the hub's or the user's: its last piece becomes the name of a file.
pub(super) fn check_path(path: &str) -> Result<(), &'static str> {
    let mut pieces = path.rsplit('/');
    check_file_name(pieces.next().unwrap_or_default())?;
    let leads_elsewhere =
        |piece: &str| matches!(piece, "" | "." | "..") || piece.contains('\\') || hides(piece);
    match pieces.any(leads_elsewhere) {
        true => Err("it leads to another folder"),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Source, String> {
        let endpoint = Address::parse("https://huggingface.co").unwrap();
        Source::parse(text, &endpoint).map_err(|error| error.to_string())
    }

    #[test]
    fn names_of_the_hub() {
        let check = |text: &str, revision: &str, choice: Choice| {
            let repository = Repository {
                name: "o-1/r.2".to_owned(),
                revision: revision.to_owned(),
            };
            assert_eq!(
                parse(text),
                Ok(Source::Hub { repository, choice }),
                "{text}"
            );
        };
        let tag = |tag: &str| Choice::Tag(tag.to_owned());
        let file = |path: &str| Choice::File(path.to_owned());
        check("o-1/r.2", "main", Choice::Customary);
        check("hf.co/o-1/r.2", "main", Choice::Customary);
        check("o-1/r.2:latest", "main", Choice::Customary);
        check("o-1/r.2:q4_k_m", "main", tag("q4_k_m"));
        check("huggingface.co/o-1/r.2:IQ2_XS", "main", tag("IQ2_XS"));
        check("o-1/r.2/a.gguf", "main", file("a.gguf"));
        check("o-1/r.2/b/a b.gguf", "main", file("b/a b.gguf"));
        check("https://huggingface.co/o-1/r.2", "main", Choice::Customary);
        check("https://hf.co/o-1/r.2/tree/v1", "v1", Choice::Customary);
        let page = "https://huggingface.co/o-1/r.2/blob/main/b/a%20b.gguf?download=true";
        check(page, "main", file("b/a b.gguf"));
        check(
            "https://huggingface.co/o-1/r.2/resolve/v1/a.gguf",
            "v1",
            file("a.gguf"),
        );
    }

    #[test]
    fn other_addresses_are_urls() {
        for text in [
            "http://huggingface.co.evil/o/r/blob/main/a.gguf",
            "http://huggingface.co/o/r",
            "https://huggingface.co/datasets/o/r/resolve/main/a.gguf",
            "https://example.org/o/r/blob/main/a.gguf",
        ] {
            assert!(matches!(parse(text), Ok(Source::Url(_))), "{text}");
        }
    }

    #[test]
    fn what_is_neither_is_refused() {
        for (text, part) in [
            ("", "no name of the hub"),
            ("llama", "no name of the hub"),
            ("models/", "letters"),
            ("/etc/passwd.gguf", "letters"),
            ("../r", "letters"),
            ("o/..", "letters"),
            ("o/r?x", "letters"),
            ("o/r\u{1b}[m", "letters"),
            ("o/r:", "quantisation"),
            ("o/r:a/b", "quantisation"),
            ("o/r/a.gguf:Q4_0", "both"),
            ("o/r/a.bin", ".gguf"),
            ("o/r/../a.gguf", "another folder"),
            ("o/r//a.gguf", "another folder"),
            ("o/r/x\u{202e}/a.gguf", "another folder"),
            ("ftp://a/b.gguf", "http"),
            (
                "https://huggingface.co/o/r/resolve/main/..%2fa.gguf",
                "another folder",
            ),
            ("https://huggingface.co/o/r/resolve/%3fa/a.gguf", "revision"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(
                error.contains(part) && error.contains("owner/repo"),
                "{text:?}: {error}"
            );
        }
    }
}

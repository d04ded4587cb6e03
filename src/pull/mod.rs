//! `strata pull`: a model file from the Hugging Face hub or from any URL. Everything that comes from outside is hostile
//! here: names, headers, lengths, bytes.
//!
//! `source` reads what is asked for, `hub` finds the files of a model, `client` makes one request, `tries` says whether to
//! make another, `part` is the file that grows, and `download` puts them together: a file has its final name only when it
//! is whole, has the right checksum where one is known, and opens as GGUF. Runs on the caller's thread.

mod address;
mod client;
mod download;
mod hub;
mod part;
mod sha256;
mod source;
mod tries;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use address::Address;
pub use hub::HubSettings;
pub use sha256::Sha256;

use address::check_file_name;
use client::Client;
use source::Source;
use tries::Tries;

#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The command line or a variable asks for what cannot be.
    #[error("{0}")]
    Usage(String),

    /// The server or the file is not what was asked for; trying again does not help.
    #[error("{0}")]
    Refused(String),

    #[error(
        "{reason}; gave up after {tries} tries that brought nothing{}",
        kept(part.as_deref())
    )]
    GaveUp {
        reason: String,
        tries: u32,
        /// What holds the bytes that have come, where there are any.
        part: Option<PathBuf>,
    },

    #[error(
        "{} is being fetched by another process: wait for it, or choose another name with --output",
        path.display()
    )]
    Busy { path: PathBuf },

    #[error(
        "not enough space for {}: {needed} bytes ({:.1} GiB) are to come and {free} bytes ({:.1} GiB) are free; make room and run the same command again, or choose another folder with --output",
        path.display(),
        *needed as f64 / GIB,
        *free as f64 / GIB
    )]
    NoSpace {
        path: PathBuf,
        needed: u64,
        free: u64,
    },

    #[error("cannot {verb} {}: {error}{}", path.display(), hint(error))]
    File {
        verb: &'static str,
        path: PathBuf,
        error: io::Error,
    },
}

const GIB: f64 = (1u64 << 30) as f64;

fn kept(part: Option<&Path>) -> String {
    match part {
        Some(part) => format!(
            "; what has come is kept in {}: run the same command again to go on",
            part.display()
        ),
        None => ": run the same command again later".to_owned(),
    }
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; what has come is kept: make room and run the same command again to go on"
        }
        io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => {
            "; choose another place with --output"
        }
        _ => "",
    }
}

impl PullError {
    fn write(path: &Path, error: io::Error) -> PullError {
        PullError::File {
            verb: "write",
            path: path.to_owned(),
            error,
        }
    }

    fn read(path: &Path, error: io::Error) -> PullError {
        PullError::File {
            verb: "read",
            path: path.to_owned(),
            error,
        }
    }
}

/// How patient it is.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Without a byte for so long, a connection counts as cut.
    pub stall: Duration,
    /// Tries in a row that bring nothing new.
    pub tries: u32,
    /// Before the second try; it doubles from there on.
    pub pause: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            stall: Duration::from_secs(30),
            tries: 8,
            pause: Duration::from_secs(1),
        }
    }
}

/// What to fetch, and where to.
pub struct Order<'a> {
    /// `owner/repo`, `owner/repo:TAG`, `owner/repo/PATH` or a URL.
    pub name: &'a str,
    /// A folder, where it is one or ends in a slash; else the file.
    pub output: &'a Path,
    /// What the file must be; only for one file.
    pub sha256: Option<Sha256>,
    /// Replace a file that is there and differs.
    pub force: bool,
    pub limits: Limits,
    pub hub: HubSettings,
    /// A PEM file of authorities to trust in place of those that are built in.
    pub certificates: Option<String>,
}

/// What happens meanwhile.
#[derive(Debug)]
pub enum Event<'a> {
    /// A line for the user.
    Said(&'a str),
    /// Bytes go to this file from here on.
    Part(&'a Path),
    /// Bytes that are here are read again.
    Checking { done: u64, bytes: u64 },
    /// Bytes that have come, and of the whole file where that is known.
    Receiving { done: u64, bytes: Option<u64> },
}

/// A file that is there now.
#[derive(Clone, Debug)]
pub struct Pulled {
    pub path: PathBuf,
    pub bytes: u64,
    pub sha256: Sha256,
    /// Nothing had to be fetched.
    pub was_there: bool,
}

/// A file that can be fetched.
#[derive(Clone, Debug)]
struct Remote {
    address: Address,
    /// What it is called; checked.
    name: String,
    /// As the hub lists it.
    bytes: Option<u64>,
    sha256: Option<Sha256>,
}

/// Fetches a model: one file, or all its parts.
///
/// # Errors
///
/// Whatever the network, the server, the file or the disk did, and what to do about it. No file has its final name then
/// but those parts of a model that are whole.
pub fn pull(order: &Order<'_>, tell: &mut dyn FnMut(Event<'_>)) -> Result<Vec<Pulled>, PullError> {
    let source = Source::parse(order.name, &order.hub.endpoint)?;
    let certificates = order.certificates.as_deref();
    let client = Client::new(order.limits, order.hub.token(), certificates)?;
    let mut remotes = match source {
        Source::Url(address) => vec![Remote {
            name: address.file_name(),
            address,
            bytes: None,
            sha256: None,
        }],
        Source::Hub { repository, choice } => {
            let mut tries = Tries::new(order.limits);
            loop {
                match hub::files(&client, &order.hub, &repository, &choice) {
                    Ok(remotes) => break remotes,
                    Err(trouble) => {
                        let line = tries.next(trouble, false, None)?;
                        tell(Event::Said(&format!("{}: {}", repository.name, line.text)));
                        std::thread::sleep(line.pause);
                    }
                }
            }
        }
    };
    let outputs = outputs(&remotes, order.output)?;
    if let Some(sha256) = order.sha256 {
        match remotes.as_mut_slice() {
            [remote] => remote.sha256 = Some(sha256),
            _ => {
                return Err(PullError::Usage(format!(
                    "--sha256 is for one file, and {} has {} parts; the hub's own sums are checked",
                    order.name,
                    remotes.len()
                )));
            }
        }
    }
    let missing = |(remote, output): (&Remote, &PathBuf)| match output.exists() {
        true => 0,
        false => remote.bytes.unwrap_or(0),
    };
    let to_come: u64 = remotes
        .iter()
        .zip(&outputs)
        .map(missing)
        .fold(0, u64::saturating_add);
    if let [_, .., last] = outputs.as_slice() {
        // Parts of earlier runs are not counted here, and each file is looked at by itself once more.
        let begun: u64 = outputs.iter().filter_map(|output| part_bytes(output)).sum();
        check_space(last, to_come.saturating_sub(begun))?;
    }
    remotes
        .iter()
        .zip(&outputs)
        .map(|(remote, output)| download::download(&client, remote, output, order.force, tell))
        .collect()
}

fn part_bytes(output: &Path) -> Option<u64> {
    let mut name = output.as_os_str().to_owned();
    name.push(".part");
    Some(std::fs::symlink_metadata(Path::new(&name)).ok()?.len())
}

/// Where each file goes.
fn outputs(remotes: &[Remote], output: &Path) -> Result<Vec<PathBuf>, PullError> {
    let is_folder = output.is_dir() || output.as_os_str().as_encoded_bytes().ends_with(b"/");
    if !is_folder {
        return match remotes {
            [_] if output.file_name().is_some() => Ok(vec![output.to_owned()]),
            _ => Err(PullError::Usage(format!(
                "--output {} is no folder, and the model has {} parts: name a folder that is there, or end it with a slash",
                output.display(),
                remotes.len()
            ))),
        };
    }
    let in_folder = |remote: &Remote| match check_file_name(&remote.name) {
        Ok(()) => Ok(output.join(&remote.name)),
        Err(what) => Err(PullError::Usage(format!(
            "{}: its name {:?} cannot be used, because {what}: name the file with --output FILE.gguf",
            remote.address, remote.name
        ))),
    };
    let outputs = remotes.iter().map(in_folder).collect::<Result<_, _>>()?;
    std::fs::create_dir_all(output).map_err(|error| PullError::write(output, error))?;
    Ok(outputs)
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// That the file system of `path` has room for so many bytes more.
fn check_space(path: &Path, needed: u64) -> Result<(), PullError> {
    let status = rustix::fs::statvfs(folder_of(path))
        .map_err(|error| PullError::write(path, error.into()))?;
    let free = status.f_bavail.saturating_mul(status.f_frsize);
    match needed > free {
        true => Err(PullError::NoSpace {
            path: path.to_owned(),
            needed,
            free,
        }),
        false => Ok(()),
    }
}

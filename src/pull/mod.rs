//! `strata pull`: a model file from the Hugging Face hub or from any URL. Everything that comes from outside is hostile
//! here: names, headers, lengths, bytes.
//!
//! `source` reads what is asked for, `hub` finds the files of a model, `client` makes one request, by way of whom `proxies` says, `tries` says whether to
//! make another, `part` is the file that grows, and `download` puts them together: a file has its final name only when it
//! is whole, has the right checksum where one is known, and its header reads as GGUF. Runs on the caller's thread.

mod address;
mod client;
mod download;
mod hub;
mod part;
mod proxies;
mod sha256;
mod source;
mod tries;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use address::Address;
pub use hub::HubSettings;
pub use part::has_bytes;
pub use proxies::Proxies;
pub use sha256::Sha256;

use crate::gguf::{Gguf, NewFileError, check_space};
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

    /// There is no room for it, another process is fetching it, or it is there by now.
    #[error(transparent)]
    Output(#[from] NewFileError),

    #[error("cannot {verb} {}: {error}{}", path.display(), hint(error))]
    File {
        verb: &'static str,
        path: PathBuf,
        error: io::Error,
    },
}

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
            "; make room and run the same command again: it goes on with what has come"
        }
        io::ErrorKind::FileTooLarge => {
            "; raise the limit on the size of files (`ulimit -f`) and run the same command again, which goes on with what has \
             come, or choose a file system that takes larger ones with --output"
        }
        io::ErrorKind::NotFound
        | io::ErrorKind::NotADirectory
        | io::ErrorKind::PermissionDenied
        | io::ErrorKind::ReadOnlyFilesystem => "; choose another place with --output",
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
    pub proxies: Proxies,
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
    let proxies = order.proxies.clone();
    let client = Client::new(order.limits, order.hub.token(), certificates, proxies)?;
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
    let pulled = remotes
        .iter()
        .zip(&outputs)
        .map(|(remote, output)| download::download(&client, remote, output, order.force, tell))
        .collect::<Result<Vec<_>, _>>()?;
    check_model(&outputs, tell)?;
    Ok(pulled)
}

/// That all files together are a model, which can only be told once the last of them is there.
fn check_model(outputs: &[PathBuf], tell: &mut dyn FnMut(Event<'_>)) -> Result<(), PullError> {
    let Some(first) = outputs.first() else {
        return Ok(());
    };
    let name = first.file_name().unwrap_or_default().to_string_lossy();
    // The bytes are those that were asked for, so the file stays whether or not it can be loaded.
    match Gguf::open_to_show(first).map(|model| model.refuse_foreign()) {
        Ok(Ok(())) => {}
        Ok(Err(foreign)) => tell(Event::Said(&format!(
            "{name}: it is whole and kept, but strata cannot load it: {foreign}"
        ))),
        Err(error) if outputs.len() == 1 => tell(Event::Said(&format!(
            "{name}: it is whole and kept, but strata cannot load it by itself: {error}"
        ))),
        Err(error) => {
            return Err(PullError::Refused(format!(
                "{}: each file is whole and kept, but together they are no model: {error}",
                first.display()
            )));
        }
    }
    Ok(())
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

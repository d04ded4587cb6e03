//! One file, from the first try to its final name.
//!
//! The rule: under the final name there is a file whose every byte was checked, or nothing. What has come so far stays in
//! the part for the next try or the next run, and goes on only with bytes of the same version.
//!
//! Checked is: by a SHA-256 where the hub or the user gives one; else bytes that came in this process are what the server
//! sent, and those of an earlier one are what the file system gives back, so that a machine that lost its power meanwhile
//! may have lost some of them unnoticed.

use super::client::{Answer, Client, Resume, Trouble};
use super::part::{Note, Part, forget_note, version_of};
use super::sha256::{Hasher, Sha256, hash_file};
use super::tries::Tries;
use super::{Event, PullError, Pulled, Remote};
use crate::gguf::{Gguf, check_space};
use std::fs::File;
use std::path::Path;

/// Fetches `remote` to `output`, unless it is there.
pub(super) fn download(
    client: &Client,
    remote: &Remote,
    output: &Path,
    force: bool,
    tell: &mut dyn FnMut(Event<'_>),
) -> Result<Pulled, PullError> {
    let mut download = Download {
        client,
        remote,
        output,
        expected: remote.sha256,
        tell,
    };
    if let Some(there) = download.there(force)? {
        forget_note(output);
        return Ok(there);
    }
    let existed = output.exists();
    let mut part = Part::open(output)?;
    // Another process may have been done with it just before.
    if !existed
        && output.exists()
        && let Some(there) = download.there(force)?
    {
        return Ok(there);
    }
    (download.tell)(Event::Part(part.path()));
    download.inherit(&mut part)?;
    loop {
        let inherited = part.inherited();
        download.receive(&mut part)?;
        let sum = part.sha256();
        match download.expected {
            // Bytes of an earlier run may have been lost with the machine's power; those of this one were not.
            Some(expected) if expected != sum && inherited => {
                download.say("what an earlier run left has another SHA-256 than the file should have: starting over");
                part.empty()?;
            }
            Some(expected) if expected != sum => {
                part.remove();
                return Err(PullError::Refused(format!(
                    "{}: its SHA-256 is {sum} and should be {expected}: it was changed or damaged on the way, and is removed; check the address and the sum, then run the same command again",
                    output.display()
                )));
            }
            _ => break,
        }
    }
    // A shard by itself is no model, and types that strata does not compute with are no damage: `pull` looks at those.
    if let Err(error) = Gguf::open_file(part.path()) {
        part.remove();
        return Err(PullError::Refused(format!(
            "{}: what {} sent is no whole GGUF file, and is removed: {error}",
            output.display(),
            remote.address
        )));
    }
    let pulled = Pulled {
        path: output.to_owned(),
        bytes: part.done(),
        sha256: part.sha256(),
        was_there: false,
    };
    part.finish(force)?;
    Ok(pulled)
}

struct Download<'a> {
    client: &'a Client,
    remote: &'a Remote,
    output: &'a Path,
    /// Known beforehand, or told by the hub with its redirect.
    expected: Option<Sha256>,
    tell: &'a mut dyn FnMut(Event<'_>),
}

const CHUNK_BYTES: usize = 256 << 10;
const MAGIC: [u8; 4] = *b"GGUF";
/// So much room is looked for at once where the length of a body is not known.
const ROOM_BYTES: u64 = 1 << 30;

impl Download<'_> {
    fn say(&mut self, text: &str) {
        let name = self.output.file_name().unwrap_or_default();
        let line = format!("{}: {text}", name.to_string_lossy());
        (self.tell)(Event::Said(&line));
    }

    /// The file where it is there already and is the one that is asked for; an error where it is another, unless that is to
    /// be replaced.
    fn there(&mut self, force: bool) -> Result<Option<Pulled>, PullError> {
        let metadata = match std::fs::metadata(self.output) {
            Ok(metadata) => metadata,
            Err(_) if self.output.is_symlink() && !force => {
                return Err(PullError::Usage(format!(
                    "{} is a link that leads nowhere: remove it, or choose another name with --output",
                    self.output.display()
                )));
            }
            Err(_) => return Ok(None),
        };
        if !metadata.is_file() {
            return Err(PullError::Usage(format!(
                "{} is no file: choose another name with --output",
                self.output.display()
            )));
        }
        let bytes = metadata.len();
        let (mut server_bytes, mut version) = (self.remote.bytes, None);
        if self.expected.is_none() {
            let answer = self.ask()?;
            (server_bytes, version) = (answer.length(), answer.version());
            self.expect_linked(&answer);
        }
        let differs = |what: String| match force {
            true => Ok(None),
            false => Err(PullError::Refused(format!(
                "{} is there already, and {what}: replace it with --force, or choose another name with --output",
                self.output.display()
            ))),
        };
        if server_bytes.is_some_and(|server_bytes| server_bytes != bytes) {
            let server_bytes = server_bytes.unwrap_or_default();
            return differs(format!("has {bytes} bytes, not {server_bytes}"));
        }
        let sum = self.sum(bytes)?;
        let known = version_of(self.output).zip(version);
        match (self.expected, known) {
            (Some(expected), _) if expected != sum => {
                differs(format!("its SHA-256 is {sum}, not {expected}"))
            }
            (None, Some((ours, theirs))) if ours != theirs => {
                differs("the server has another version of it".to_owned())
            }
            (None, None) if server_bytes.is_none() => {
                differs("the server says neither its size nor its version".to_owned())
            }
            (expected, known) => {
                if expected.is_none() && known.is_none() {
                    self.say("only its size could be compared");
                }
                Ok(Some(Pulled {
                    path: self.output.to_owned(),
                    bytes,
                    sha256: sum,
                    was_there: true,
                }))
            }
        }
    }

    /// The headers of the whole file.
    fn ask(&mut self) -> Result<Answer, PullError> {
        let mut tries = Tries::new(self.client.limits);
        loop {
            let trouble = match self.client.get(&self.remote.address, None, None) {
                Ok(answer) if answer.status == 200 => return Ok(answer),
                Ok(answer) => answer.refusal(&self.remote.address.to_string()),
                Err(trouble) => trouble,
            };
            let line = tries.next(trouble, false, None)?;
            self.say(&line.text);
            std::thread::sleep(line.pause);
        }
    }

    fn sum(&mut self, bytes: u64) -> Result<Sha256, PullError> {
        let error = |error| PullError::read(self.output, error);
        let mut file = File::open(self.output).map_err(error)?;
        let mut hasher = Hasher::new();
        let tell = &mut *self.tell;
        let progress = |done| tell(Event::Checking { done, bytes });
        hash_file(&mut hasher, &mut file, bytes, progress).map_err(error)?;
        Ok(hasher.finish())
    }

    /// What an earlier run left is kept where it is of the same file.
    fn inherit(&mut self, part: &mut Part) -> Result<(), PullError> {
        let bytes = part.done();
        if bytes == 0 {
            return Ok(());
        }
        let sum = self.expected.map(|sum| sum.to_string());
        let note = part.note();
        // By its sum it is the same file wherever it comes from.
        let same = match (&sum, &note.sha256) {
            (Some(sum), Some(noted)) => sum == noted,
            _ => note.from == self.remote.address.text(),
        };
        if !same {
            self.say("what an earlier run left is of another file: starting over");
            return part.empty();
        }
        self.say(&format!("going on after {bytes} bytes of an earlier run"));
        let tell = &mut *self.tell;
        part.hash_inherited(|done| tell(Event::Checking { done, bytes }))
    }

    /// Tries until all bytes are there.
    fn receive(&mut self, part: &mut Part) -> Result<(), PullError> {
        let mut tries = Tries::new(self.client.limits);
        let (mut most, mut reached) = (part.done(), false);
        loop {
            if part.note().bytes.is_some_and(|bytes| bytes == part.done()) && part.done() > 0 {
                return Ok(());
            }
            let before = part.done();
            let Err(trouble) = self.attempt(part) else {
                return Ok(());
            };
            // Only more than ever before is progress: a server that starts over each time makes none.
            reached |= part.done() != before;
            if part.done() > most {
                (most, tries) = (part.done(), Tries::new(self.client.limits));
            }
            let line = tries.next(trouble, reached, Some(part.path()))?;
            self.say(&line.text);
            std::thread::sleep(line.pause);
        }
    }

    /// One request, and what comes of it.
    fn attempt(&mut self, part: &mut Part) -> Result<(), Trouble> {
        let resume = self.resume(part)?;
        let answer = self
            .client
            .get(&self.remote.address, resume.as_ref(), None)?;
        self.expect_linked(&answer);
        if let Some(coding) = answer
            .header("content-encoding")
            .filter(|coding| !coding.eq_ignore_ascii_case("identity"))
        {
            return Err(Trouble::refused(format!(
                "{} sends the file packed ({coding}), which was not asked for",
                self.remote.address
            )));
        }
        match (answer.status, &resume) {
            (200, _) => {
                if let Some(resume) = &resume {
                    let changed = resume.if_range.is_some() && resume.if_range != answer.version();
                    self.say(match changed {
                        true => "the file was changed on the server: starting over",
                        false => "the server cannot go on in the middle: starting over",
                    });
                }
                let bytes = answer.length();
                self.check_size(bytes)?;
                part.begin(Note {
                    from: self.remote.address.text(),
                    version: answer.version(),
                    bytes: bytes.or(self.remote.bytes),
                    sha256: self.expected.map(|sum| sum.to_string()),
                })?;
            }
            (206, Some(resume)) => self.check_rest(part, &answer, resume)?,
            (416, Some(_)) => {
                let (_, total) = content_range(&answer.header("content-range").unwrap_or_default());
                let whole = part.note().bytes.is_none() && total == Some(part.done());
                if whole {
                    return Ok(());
                }
                return Err(self.changed(part, "the server has fewer bytes than it said")?);
            }
            _ => return Err(answer.refusal(&self.remote.address.to_string())),
        }
        if let Some(bytes) = part.note().bytes {
            check_space(self.output, bytes.saturating_sub(part.done())).map_err(PullError::from)?;
        }
        self.read_body(part, answer)
    }

    /// From where on to ask, where that can be.
    fn resume(&mut self, part: &mut Part) -> Result<Option<Resume>, PullError> {
        if part.done() == 0 {
            return Ok(None);
        }
        let note = part.note();
        let why = if note.bytes.is_some_and(|bytes| bytes < part.done()) {
            Some("what an earlier run left is longer than the file: starting over")
        } else if note.version.is_none() && note.sha256.is_none() {
            // Bytes of two versions could be put together, and nothing would show it.
            Some("the server does not tell versions of the file apart: starting over")
        } else {
            None
        };
        if let Some(why) = why {
            self.say(why);
            part.empty()?;
            return Ok(None);
        }
        Ok(Some(Resume {
            from: part.done(),
            if_range: note.version.clone(),
        }))
    }

    /// That a partial answer is the rest of what is here.
    fn check_rest(
        &mut self,
        part: &mut Part,
        answer: &Answer,
        resume: &Resume,
    ) -> Result<(), Trouble> {
        let range = answer.header("content-range").unwrap_or_default();
        let (from, total) = content_range(&range);
        let version = answer.version();
        let other_version =
            resume.if_range.is_some() && version.is_some() && version != resume.if_range;
        let other_size = part
            .note()
            .bytes
            .zip(total)
            .is_some_and(|(ours, theirs)| ours != theirs);
        if other_version || other_size {
            return Err(self.changed(part, "the file was changed on the server")?);
        }
        if from != Some(resume.from) {
            return Err(self.changed(part, "the server sends another piece than was asked for")?);
        }
        self.check_size(total)?;
        if part.note().bytes.is_none() && total.is_some() {
            let note = part.note().clone();
            part.set_note(Note {
                bytes: total,
                ..note
            })?;
        }
        Ok(())
    }

    fn changed(&mut self, part: &mut Part, what: &str) -> Result<Trouble, PullError> {
        part.empty()?;
        Ok(Trouble::passing(format!("{what}, so it starts over")))
    }

    /// The hub's list and the server of the file must agree.
    fn check_size(&self, bytes: Option<u64>) -> Result<(), Trouble> {
        match self.remote.bytes.zip(bytes) {
            Some((listed, sent)) if listed != sent => Err(Trouble::refused(format!(
                "{} has {sent} bytes, and the hub lists it with {listed}: try again later, or check HF_ENDPOINT",
                self.remote.address
            ))),
            _ => Ok(()),
        }
    }

    fn expect_linked(&mut self, answer: &Answer) {
        let linked = answer.linked_etag.as_deref();
        let linked = linked.and_then(|tag| Sha256::from_hex(tag.trim_matches('"')));
        self.expected = self.expected.or(linked);
    }

    fn read_body(&mut self, part: &mut Part, answer: Answer) -> Result<(), Trouble> {
        let media = answer.header("content-type").unwrap_or_default();
        let host = answer.address.authority().to_owned();
        let total = part.note().bytes;
        let mut is_checked = false;
        let mut room_until = part.done().saturating_add(ROOM_BYTES);
        let mut body = answer.into_reader();
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let read = body.read(&mut chunk)?;
            if read == 0 {
                break;
            }
            if total.is_some_and(|total| part.done() + read as u64 > total) {
                return Err(self.changed(part, "the server sent more than it said")?);
            }
            // The room for a body of a known length was looked for before; others end by themselves, or not at all.
            if total.is_none() && part.done() + read as u64 > room_until {
                check_space(self.output, ROOM_BYTES).map_err(PullError::from)?;
                room_until = part.done().saturating_add(ROOM_BYTES);
            }
            part.append(&chunk[..read])?;
            if !is_checked && part.done() >= MAGIC.len() as u64 {
                is_checked = true;
                let head = part.head();
                if head != MAGIC {
                    part.empty()?;
                    return Err(Trouble::refused(format!(
                        "{} is no GGUF file: it begins with {:?}, and {host} calls it {media:?}; a page of the hub is no file, its name there is owner/repo/FILE.gguf",
                        self.remote.address,
                        String::from_utf8_lossy(&head),
                    )));
                }
            }
            (self.tell)(Event::Receiving {
                done: part.done(),
                bytes: total,
            });
        }
        match total {
            Some(total) if part.done() < total => {
                Err(Trouble::passing(format!("{host} sent less than it said")))
            }
            _ => Ok(()),
        }
    }
}

/// First byte and length of all in a `Content-Range` (RFC 9110, section 14.4): `bytes 5-9/10`, `bytes */10`.
fn content_range(text: &str) -> (Option<u64>, Option<u64>) {
    let Some((range, total)) = text
        .trim()
        .strip_prefix("bytes ")
        .and_then(|rest| rest.split_once('/'))
    else {
        return (None, None);
    };
    let from = range
        .split_once('-')
        .and_then(|(from, _)| from.trim().parse().ok());
    (from, total.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_content() {
        for (text, expected) in [
            ("bytes 5-9/10", (Some(5), Some(10))),
            ("bytes 5-9/*", (Some(5), None)),
            ("bytes */10", (None, Some(10))),
            ("lines 5-9/10", (None, None)),
            ("bytes -5-9/x", (None, None)),
            ("bytes 99999999999999999999-9/10", (None, Some(10))),
            ("", (None, None)),
        ] {
            assert_eq!(content_range(text), expected, "{text:?}");
        }
    }
}

//! Split models: one model in several files, as llama.cpp's `llama-gguf-split` writes them.
//!
//! A shard is a GGUF file of its own, with some of the tensors. Three keys say which one: `split.no` (from 0),
//! `split.count` and `split.tensors.count`, the number of tensors in all shards; its name ends in
//! `-00001-of-00003.gguf`. All other keys stand in the first shard. Any of them opens the whole model. What the shards
//! say is held against each other, because nothing else keeps a shard of one model out of another.
//!
//! The files become one space of offsets: each begins at a base of its own, with a gap before it that no read is rounded
//! across, so that everything above the storage reader treats a split model as one file with holes.
//!
//! Keys and names: <https://github.com/ggml-org/llama.cpp/tree/master/tools/gguf-split>.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::error::GgufError;
use super::metadata::Metadata;
use super::reader::{ALIGNMENT_KEY, ALIGNMENT_MAX, TENSORS_MAX};
use super::shard_name::{SHARDS_MAX, shard_suffix};
use super::{Gguf, IndexedFile};

pub(super) const NUMBER_KEY: &str = "split.no";
pub(super) const COUNT_KEY: &str = "split.count";
const TENSORS_KEY: &str = "split.tensors.count";
/// Bases are multiples of this, and at least as much lies between a file and the next. No tensor is aligned to more, and
/// no drive has larger blocks.
const FILE_GAP: u64 = ALIGNMENT_MAX;

/// What a shard says of its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    /// From 0; below `count`.
    number: u32,
    /// At least 2.
    count: u32,
    /// In all shards.
    tensors: u64,
}

impl Place {
    /// `None`: the file is a whole model.
    fn of(metadata: &Metadata) -> Result<Option<Place>, GgufError> {
        let count = match metadata.u32(COUNT_KEY)? {
            None | Some(0 | 1) => return Ok(None),
            Some(count) => count,
        };
        if count > SHARDS_MAX {
            return Err(GgufError::key(
                COUNT_KEY,
                format_args!("is {count}; a model of at most {SHARDS_MAX} files is read"),
            ));
        }
        let number = metadata.require_u32(NUMBER_KEY)?;
        if number >= count {
            return Err(GgufError::key(
                NUMBER_KEY,
                format_args!("is {number}, of a model of {count} files; they count from 0"),
            ));
        }
        let tensors = metadata.u64(TENSORS_KEY)?;
        let tensors = tensors.ok_or_else(|| GgufError::MissingKey {
            key: TENSORS_KEY.to_owned(),
        })?;
        if tensors > TENSORS_MAX {
            return Err(GgufError::key(
                TENSORS_KEY,
                format_args!("is {tensors}; at most {TENSORS_MAX} are read"),
            ));
        }
        Ok(Some(Place {
            number,
            count,
            tensors,
        }))
    }

    /// How the name of this shard ends.
    fn suffix(self) -> String {
        shard_suffix(self.number + 1, self.count)
    }
}

/// The whole model that `given`, the file at `path`, is a shard of; itself where it is none. `read` reads other shards.
pub(super) fn with_its_shards(
    path: &Path,
    given: Gguf,
    read: impl Fn(&Path) -> Result<Gguf, GgufError>,
) -> Result<Gguf, GgufError> {
    let Some(place) = Place::of(&given.metadata)? else {
        return Ok(given);
    };
    let name = path.file_name().unwrap_or_default().as_bytes();
    let Some(stem) = name.strip_suffix(place.suffix().as_bytes()) else {
        return Err(GgufError::key(
            NUMBER_KEY,
            format_args!(
                "is {}, of {} files, and the name of the file does not end in `{}`: the others are found by that name; \
                 give all shards the names that they had",
                place.number,
                place.count,
                place.suffix()
            ),
        ));
    };
    let mut given = Some(given);
    let shards = (0..place.count).map(|number| {
        let suffix = Place { number, ..place }.suffix();
        let path = path.with_file_name(OsStr::from_bytes(&[stem, suffix.as_bytes()].concat()));
        if number == place.number
            && let Some(given) = given.take()
        {
            return Ok((path, given));
        }
        match read(&path) {
            Ok(shard) => Ok((path, shard)),
            Err(GgufError::Open { error, .. }) if error.kind() == ErrorKind::NotFound => {
                Err(GgufError::MissingShard {
                    number: number + 1,
                    count: place.count,
                    path,
                })
            }
            // These name the file.
            Err(error @ (GgufError::Open { .. } | GgufError::NotAFile { .. })) => Err(error),
            Err(error) => Err(in_shard(&path, error)),
        }
    });
    join(place, shards)
}

fn in_shard(path: &Path, error: GgufError) -> GgufError {
    GgufError::InShard {
        path: path.to_owned(),
        error: Box::new(error),
    }
}

/// Joins the shards, in order, to the model that one of them says it is of.
fn join(
    place: Place,
    shards: impl Iterator<Item = Result<(PathBuf, Gguf), GgufError>>,
) -> Result<Gguf, GgufError> {
    let mut model: Option<Gguf> = None;
    // The number of the shard that each tensor was found in.
    let mut found: HashMap<String, u32> = HashMap::new();
    for (number, shard) in (0..).zip(shards) {
        let (path, shard) = shard?;
        let of_shard = |error| in_shard(&path, error);
        check_place(Place { number, ..place }, &shard.metadata).map_err(of_shard)?;
        if let Some(model) = &model {
            check_keys(&model.metadata, &shard.metadata).map_err(of_shard)?;
        }
        let names = shard.tensors.iter().map(|tensor| &tensor.name);
        for name in names.chain(shard.foreign.iter().map(|tensor| &tensor.name)) {
            if let Some(other) = found.insert(name.clone(), number) {
                let problem = format_args!(
                    "stands in shard {} too: these are not the shards of one model",
                    other + 1
                );
                return Err(of_shard(GgufError::tensor(name, problem)));
            }
        }
        if found.len() as u64 > place.tensors {
            break;
        }
        model = Some(match model {
            None => shard,
            Some(model) => extended(model, path, shard)?,
        });
    }
    match model {
        Some(model) if found.len() as u64 == place.tensors => {
            let Gguf {
                version,
                alignment,
                metadata,
                tensors,
                foreign,
                files,
                ..
            } = model;
            Ok(Gguf::new(
                version, alignment, metadata, tensors, foreign, files,
            ))
        }
        _ => Err(GgufError::key(
            TENSORS_KEY,
            format_args!(
                "is {}, and the shards hold {}{}: they are not those of one model",
                place.tensors,
                found.len(),
                match found.len() as u64 > place.tensors {
                    true => " and more",
                    false => "",
                }
            ),
        )),
    }
}

/// A shard has to be where its name says, and of as many as the others.
fn check_place(expected: Place, metadata: &Metadata) -> Result<(), GgufError> {
    let Some(place) = Place::of(metadata)? else {
        return Err(GgufError::key(
            COUNT_KEY,
            format_args!(
                "is missing or says that this is a whole model; by its name it is one of {} shards",
                expected.count
            ),
        ));
    };
    for (key, found, wanted) in [
        (COUNT_KEY, place.count.into(), expected.count.into()),
        (NUMBER_KEY, place.number.into(), expected.number.into()),
        (TENSORS_KEY, place.tensors, expected.tensors),
    ] {
        if found != wanted {
            return Err(GgufError::key(
                key,
                format_args!("is {found} and should be {wanted}: this is a shard of another model"),
            ));
        }
    }
    Ok(())
}

/// Where a shard repeats a key of the first one, it means the same model.
fn check_keys(first: &Metadata, other: &Metadata) -> Result<(), GgufError> {
    for (key, value) in other.iter() {
        let differs = first.get(key).is_some_and(|known| known != value);
        if differs && ![NUMBER_KEY, ALIGNMENT_KEY].contains(&key) {
            return Err(GgufError::key(
                key,
                "is another than in the first shard: this is a shard of another model",
            ));
        }
    }
    Ok(())
}

/// Adds the tensors of the next shard, at the next base. Its metadata are the first one's.
fn extended(mut model: Gguf, path: PathBuf, shard: Gguf) -> Result<Gguf, GgufError> {
    let end = model.files.last().map_or(0, IndexedFile::end);
    let base = end
        .checked_next_multiple_of(FILE_GAP)
        .and_then(|end| end.checked_add(FILE_GAP))
        .filter(|base| base.checked_add(shard.file_bytes).is_some());
    let Some(base) = base else {
        let error = GgufError::Header("the shards are larger than any file system".to_owned());
        return Err(in_shard(&path, error));
    };
    model.files.push(IndexedFile {
        path,
        bytes: shard.file_bytes,
        base,
    });
    let placed = shard.tensors.into_iter().map(|mut tensor| {
        // Lies inside the shard, whose end was added to the base above.
        tensor.file_offset += base;
        tensor
    });
    model.tensors.extend(placed);
    model
        .foreign
        .extend(shard.foreign.into_iter().map(|mut tensor| {
            tensor.file_offset += base;
            tensor
        }));
    Ok(model)
}

/// One shard has only some of a model's tensors. `Gguf::open` finds the others; an index that was read from bytes has none.
pub(crate) fn refuse_alone(gguf: &Gguf) -> Result<(), GgufError> {
    match Place::of(&gguf.metadata)? {
        Some(place) if gguf.files.len() == 1 => Err(GgufError::key(
            COUNT_KEY,
            format_args!(
                "is {}: this is shard {} of a split model, without the others",
                place.count,
                place.number + 1
            ),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;

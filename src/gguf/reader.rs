//! Reads the header of a GGUF file: metadata, then the tensor table, each checked as it is read.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{BufReader, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::cursor::{Cursor, HEADER_BYTES_MAX};
use super::error::{GgufError, quote};
use super::metadata::Metadata;
use super::{ForeignTensor, Gguf, IndexedFile, TensorInfo, TensorType};

pub(super) const MAGIC: [u8; 4] = *b"GGUF";
/// The key of the alignment of tensor data, and its value where the key is absent.
pub(super) const ALIGNMENT_KEY: &str = "general.alignment";
const ALIGNMENT_DEFAULT: u64 = 32;
pub(super) const ALIGNMENT_MAX: u64 = 16 << 20;
/// The format allows keys of 2^16 - 1 bytes and tensor names of 64.
const KEY_BYTES_MAX: u64 = 65_535;
const TENSOR_NAME_BYTES_MAX: u64 = 64;
const DIMENSIONS_MAX: u32 = 4;
/// The least that a key-value pair and a row of the tensor table take: lengths, type, one byte of value; length,
/// number of dimensions, one dimension, type, offset.
const PAIR_BYTES_MIN: u64 = 8 + 4 + 1;
const TENSOR_BYTES_MIN: u64 = 8 + 4 + 8 + 4 + 8;
/// The most tensors that the longest header can hold; the shards of a model hold no more together.
pub(super) const TENSORS_MAX: u64 = HEADER_BYTES_MAX / TENSOR_BYTES_MIN;

impl Gguf {
    /// Reads the index of a model: of the file at `path`, or, where that is a shard, of all shards beside it. The weights
    /// are not touched. A directory, a pipe or a device is refused without being read, and so is a model with a tensor of
    /// a type that strata does not compute with.
    pub fn open(path: &Path) -> Result<Gguf, GgufError> {
        let gguf = Gguf::open_to_show(path)?;
        gguf.refuse_foreign()?;
        Ok(gguf)
    }

    /// The same, with tensors of any type: for what looks at a model and does not load it.
    pub fn open_to_show(path: &Path) -> Result<Gguf, GgufError> {
        let given = Gguf::open_file(path)?;
        super::shards::with_its_shards(path, given, Gguf::open_file)
    }

    /// Reads the index of one file, whatever the types of its tensors and whether or not it is a shard: for who takes files
    /// one at a time.
    pub fn open_file(path: &Path) -> Result<Gguf, GgufError> {
        let open_error = |error| GgufError::Open {
            path: path.to_owned(),
            error,
        };
        let file = open_without_waiting(path).map_err(open_error)?;
        let file_bytes = regular_file_bytes(path, &file, open_error)?;
        let mut gguf = Gguf::read_any(BufReader::with_capacity(1 << 20, file), file_bytes)?;
        for file in &mut gguf.files {
            path.clone_into(&mut file.path);
        }
        Ok(gguf)
    }

    /// Reads the index from the bytes of a whole file.
    pub fn parse(bytes: &[u8]) -> Result<Gguf, GgufError> {
        Gguf::read(bytes, bytes.len() as u64)
    }

    pub(super) fn read(input: impl Read, file_bytes: u64) -> Result<Gguf, GgufError> {
        let gguf = Gguf::read_any(input, file_bytes)?;
        gguf.refuse_foreign()?;
        Ok(gguf)
    }

    /// With tensors of any type.
    fn read_any(input: impl Read, file_bytes: u64) -> Result<Gguf, GgufError> {
        let mut cursor = Cursor::new(input, file_bytes);
        let version = read_version(&mut cursor)?;
        let header = || "the header".to_owned();
        let tensor_count = cursor.u64(&header)?;
        let pair_count = cursor.u64(&header)?;
        check_count(&cursor, "key-value pairs", pair_count, PAIR_BYTES_MIN)?;
        check_count(&cursor, "tensors", tensor_count, TENSOR_BYTES_MIN)?;

        let metadata = read_metadata(&mut cursor, pair_count)?;
        let alignment = alignment(&metadata)?;
        let Table {
            mut tensors,
            mut foreign,
        } = read_tensor_table(&mut cursor, tensor_count, alignment)?;
        // Both are bounded (128 MiB, 16 MiB), so this cannot overflow.
        let data_start = cursor.position().next_multiple_of(alignment);
        place_tensors(&mut tensors, data_start, file_bytes)?;
        place_foreign(&mut foreign, &tensors, data_start, file_bytes)?;
        let file = IndexedFile {
            path: PathBuf::new(),
            bytes: file_bytes,
            base: 0,
        };
        let files = vec![file];
        Ok(Gguf::new(
            version, alignment, metadata, tensors, foreign, files,
        ))
    }
}

/// Opens for reading. A pipe without a writer would block an ordinary open.
pub(super) fn open_without_waiting(path: &Path) -> std::io::Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(path)
}

fn regular_file_bytes(
    path: &Path,
    file: &File,
    open_error: impl Fn(std::io::Error) -> GgufError,
) -> Result<u64, GgufError> {
    let attributes = file.metadata().map_err(open_error)?;
    let kind = attributes.file_type();
    let what = if kind.is_file() {
        return Ok(attributes.len());
    } else if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    };
    Err(GgufError::NotAFile {
        path: path.to_owned(),
        what,
    })
}

/// Checks the magic and the version.
fn read_version(cursor: &mut Cursor<impl Read>) -> Result<u32, GgufError> {
    if cursor.left() == 0 {
        return Err(GgufError::NotGguf {
            found: "the file is empty; the download may have failed".to_owned(),
        });
    }
    let start = || "the magic number".to_owned();
    let magic: [u8; 4] = cursor.take(&start)?;
    if magic != MAGIC {
        return Err(GgufError::NotGguf {
            found: describe_magic(magic),
        });
    }
    let field = cursor.u32(&|| "the version".to_owned())?;
    // Little-endian versions are small; the same number written big-endian has its low half empty.
    if field != 0 && field & 0xffff == 0 {
        return Err(GgufError::BigEndian { field });
    }
    if field != 2 && field != 3 {
        return Err(GgufError::Version(field));
    }
    Ok(field)
}

/// What the first four bytes say the file is instead.
fn describe_magic(magic: [u8; 4]) -> String {
    let known = match &magic {
        b"<!DO" | b"<!do" | b"<htm" | b"<HTM" => {
            "this is an HTML page; the download saved a web page in place of the model"
        }
        b"vers" => "this is probably a Git LFS pointer; fetch the file itself with `git lfs pull`",
        b"PK\x03\x04" => {
            "this is a zip archive, perhaps a PyTorch checkpoint; convert it with llama.cpp's convert_hf_to_gguf.py"
        }
        b"lmgg" | b"tjgg" | b"fmgg" | b"algg" => {
            "this is a GGML file of the time before GGUF; get the model as GGUF"
        }
        b"FUGG" => "the magic number is reversed; the file may have been converted wrongly",
        _ => {
            return format!(
                "it starts with `{}`; a GGUF file starts with `GGUF`",
                magic.escape_ascii()
            );
        }
    };
    known.to_owned()
}

/// A count that needs more bytes than the file has is refused before anything is allocated for it.
fn check_count(
    cursor: &Cursor<impl Read>,
    what: &str,
    count: u64,
    bytes_each: u64,
) -> Result<(), GgufError> {
    if count > cursor.left() / bytes_each {
        return Err(GgufError::Header(format!(
            "the header counts {count} {what}, more than the {} bytes after it can hold; the file is damaged or incomplete",
            cursor.left()
        )));
    }
    Ok(())
}

fn read_metadata(cursor: &mut Cursor<impl Read>, count: u64) -> Result<Metadata, GgufError> {
    let mut metadata = Metadata::new();
    for index in 0..count {
        let place = || format!("key {index} of {count}");
        let key = cursor.string_bytes(KEY_BYTES_MAX, &place)?;
        let key = utf8(key, &place)?;
        let code = cursor.u32(&|| format!("the type of key {}", quote(&key)))?;
        let value = cursor.value(&key, code)?;
        if metadata.contains(&key) {
            return Err(GgufError::key(&key, "stands twice in the file"));
        }
        metadata.insert(key, value);
    }
    Ok(metadata)
}

/// The alignment of tensor data.
pub(super) fn alignment(metadata: &Metadata) -> Result<u64, GgufError> {
    let alignment = metadata.u64(ALIGNMENT_KEY)?.unwrap_or(ALIGNMENT_DEFAULT);
    if !alignment.is_power_of_two() || alignment > ALIGNMENT_MAX {
        return Err(GgufError::key(
            ALIGNMENT_KEY,
            format_args!("is {alignment}; a power of two of at most {ALIGNMENT_MAX} is expected"),
        ));
    }
    Ok(alignment)
}

/// The rows of the table. `file_offset` is still the offset within the data section.
#[derive(Default)]
struct Table {
    tensors: Vec<TensorInfo>,
    /// `bytes` is not known yet.
    foreign: Vec<ForeignTensor>,
}

fn read_tensor_table(
    cursor: &mut Cursor<impl Read>,
    count: u64,
    alignment: u64,
) -> Result<Table, GgufError> {
    // `count` is small here: the bytes after the header could hold it.
    let mut table = Table::default();
    let mut names = HashSet::new();
    for index in 0..count {
        let Entry {
            name,
            dimensions,
            code,
            offset,
        } = read_entry(cursor, index, count)?;
        if !offset.is_multiple_of(alignment) {
            return Err(GgufError::tensor(
                &name,
                format_args!(
                    "starts at offset {offset}, which is not a multiple of the alignment {alignment}"
                ),
            ));
        }
        if !names.insert(name.clone()) {
            return Err(GgufError::tensor(&name, "stands twice in the file"));
        }
        // A type of blocks of one byte asks the same of a shape as any, but for whole blocks.
        let known = TensorType::from_code(code);
        let bytes = match known {
            Some(kind) => tensor_bytes(kind, &dimensions),
            None => product(1, &dimensions),
        };
        let bytes = bytes.map_err(|problem| GgufError::tensor(&name, problem))?;
        match known {
            Some(kind) => table.tensors.push(TensorInfo {
                name,
                kind,
                dimensions,
                file_offset: offset,
                bytes,
            }),
            None => table.foreign.push(ForeignTensor {
                name,
                kind: unsupported_type_name(code),
                dimensions,
                file_offset: offset,
                bytes: 0,
            }),
        }
    }
    Ok(table)
}

/// A row of the table as it stands in the file.
struct Entry {
    name: String,
    dimensions: Vec<u64>,
    /// Of the type.
    code: u32,
    /// Within the data section.
    offset: u64,
}

fn read_entry(cursor: &mut Cursor<impl Read>, index: u64, count: u64) -> Result<Entry, GgufError> {
    let place = || format!("tensor {index} of {count}");
    let name = cursor.string_bytes(TENSOR_NAME_BYTES_MAX, &place)?;
    let name = utf8(name, &place)?;
    let place = || format!("the entry of tensor {}", quote(&name));
    let dimension_count = cursor.u32(&place)?;
    if !(1..=DIMENSIONS_MAX).contains(&dimension_count) {
        return Err(GgufError::tensor(
            &name,
            format_args!("has {dimension_count} dimensions; 1 to {DIMENSIONS_MAX} are expected"),
        ));
    }
    let mut dimensions = Vec::with_capacity(dimension_count as usize);
    for _ in 0..dimension_count {
        dimensions.push(cursor.u64(&place)?);
    }
    let code = cursor.u32(&place)?;
    let offset = cursor.u64(&place)?;
    Ok(Entry {
        name,
        dimensions,
        code,
        offset,
    })
}

/// Bytes of a tensor of this shape, or what is wrong with the shape.
pub(super) fn tensor_bytes(kind: TensorType, dimensions: &[u64]) -> Result<u64, String> {
    let Some((&columns, rest)) = dimensions.split_first() else {
        return Err("has no dimensions".to_owned());
    };
    if dimensions.contains(&0) {
        return Err(format!("has a dimension of zero: {dimensions:?}"));
    }
    if !columns.is_multiple_of(kind.block_elements() as u64) {
        return Err(format!(
            "has rows of {columns} elements, which is not a multiple of the {} of a {} block",
            kind.block_elements(),
            kind.name()
        ));
    }
    kind.row_bytes(columns)
        .and_then(|bytes| product(bytes, rest).ok())
        .ok_or_else(|| too_large(dimensions))
}

/// `bytes` times all dimensions, none of which is zero. Signed sizes are what every other reader of the format holds.
fn product(bytes: u64, dimensions: &[u64]) -> Result<u64, String> {
    if dimensions.contains(&0) {
        return Err(format!("has a dimension of zero: {dimensions:?}"));
    }
    dimensions
        .iter()
        .try_fold(bytes, |bytes, &dimension| bytes.checked_mul(dimension))
        .filter(|&bytes| i64::try_from(bytes).is_ok())
        .ok_or_else(|| too_large(dimensions))
}

fn too_large(dimensions: &[u64]) -> String {
    format!("is larger than any file: {dimensions:?}")
}

/// Turns offsets within the data section into offsets within the file. Data must lie inside the file and must not
/// overlap; no padding after the last tensor is demanded, and bytes after it are tolerated.
fn place_tensors(
    tensors: &mut [TensorInfo],
    data_start: u64,
    file_bytes: u64,
) -> Result<(), GgufError> {
    for tensor in tensors.iter_mut() {
        let end = data_start
            .checked_add(tensor.file_offset)
            .and_then(|start| start.checked_add(tensor.bytes));
        match end {
            Some(end) if end <= file_bytes => tensor.file_offset += data_start,
            _ => {
                return Err(GgufError::tensor(
                    &tensor.name,
                    format_args!(
                        "its {} bytes at offset {} of the data section (which starts at byte {data_start}) end past the end of \
                         the file ({file_bytes} bytes); the download may be incomplete",
                        tensor.bytes, tensor.file_offset
                    ),
                ));
            }
        }
    }
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|tensor| tensor.file_offset);
    for pair in order.windows(2) {
        if let [first, second] = pair
            && first.file_offset + first.bytes > second.file_offset
        {
            return Err(GgufError::tensor(
                &second.name,
                format_args!("its data overlap those of {}", quote(&first.name)),
            ));
        }
    }
    Ok(())
}

/// The same for tensors whose size is not known: each has what there is up to the next one.
fn place_foreign(
    foreign: &mut [ForeignTensor],
    tensors: &[TensorInfo],
    data_start: u64,
    file_bytes: u64,
) -> Result<(), GgufError> {
    for tensor in foreign.iter_mut() {
        let start = data_start.checked_add(tensor.file_offset);
        match start.filter(|&start| start < file_bytes) {
            Some(start) => tensor.file_offset = start,
            None => {
                return Err(GgufError::tensor(
                    &tensor.name,
                    format_args!(
                        "its data at offset {} of the data section (which starts at byte {data_start}) begin past the end \
                         of the file ({file_bytes} bytes); the download may be incomplete",
                        tensor.file_offset
                    ),
                ));
            }
        }
    }
    let own = foreign.iter().map(|tensor| tensor.file_offset);
    let mut starts: Vec<u64> = own
        .chain(tensors.iter().map(|tensor| tensor.file_offset))
        .chain([file_bytes])
        .collect();
    starts.sort_unstable();
    for tensor in foreign {
        let next = starts.partition_point(|&start| start <= tensor.file_offset);
        let end = starts.get(next).copied().unwrap_or(file_bytes);
        tensor.bytes = end.saturating_sub(tensor.file_offset);
    }
    Ok(())
}

fn utf8(bytes: Vec<u8>, place: &dyn Fn() -> String) -> Result<String, GgufError> {
    String::from_utf8(bytes).map_err(|error| {
        GgufError::Header(format!(
            "the name of {} is not UTF-8: {}",
            place(),
            error.utf8_error()
        ))
    })
}

/// ggml's names of the types that strata does not compute with.
fn unsupported_type_name(code: u32) -> String {
    let name = match code {
        4 => "Q4_2",
        5 => "Q4_3",
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        31 => "Q4_0_4_4",
        32 => "Q4_0_4_8",
        33 => "Q4_0_8_8",
        34 => "TQ1_0",
        35 => "TQ2_0",
        36 => "IQ4_NL_4_4",
        37 => "IQ4_NL_4_8",
        38 => "IQ4_NL_8_8",
        39 => "MXFP4",
        40 => "NVFP4",
        41 => "Q1_0",
        _ => return format!("with the unknown code {code}"),
    };
    name.to_owned()
}

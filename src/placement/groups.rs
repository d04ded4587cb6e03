//! Tensor index -> groups, in the order in which a step uses them.
//!
//! A catalogue sorts tensors by role once; cutting and packing depends on the slice size, which the planner may try
//! several of. Nothing here decides where a group rests.

use super::{Extent, Group, GroupKind, Part, round_up};
use crate::gguf::TensorInfo;
use std::ops::Range;

/// Rows are cut in multiples of this, so that a slice is a whole number of kernel tiles.
pub(super) const ROWS_MULTIPLE: u64 = 32;

/// The matrices of each half of a layer, in the order of use.
const ATTENTION: [&str; 5] = [
    "attn_qkv.weight",
    "attn_q.weight",
    "attn_k.weight",
    "attn_v.weight",
    "attn_output.weight",
];
const FEED_FORWARD: [&str; 3] = ["ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"];

/// How tensors are cut and read.
#[derive(Clone, Copy, Debug)]
pub(super) struct SliceRule {
    /// No group's entry is larger, except one of a single slice of 32 rows.
    pub(super) slice_bytes: u64,
    /// Reads start and end at multiples of this; a power of two.
    pub(super) read_alignment: u64,
}

/// The tensors of a file by role: indices into its tensor table.
#[derive(Debug, Default)]
pub(super) struct Catalogue {
    small: Vec<usize>,
    /// Only where it is untied: a tied one is the head.
    embedding: Option<usize>,
    layers: Vec<Layer>,
    head: Option<usize>,
    /// Names of tensors that no group holds.
    pub(super) unused: Vec<String>,
}

#[derive(Clone, Debug, Default)]
struct Layer {
    attention: [Option<usize>; ATTENTION.len()],
    feed_forward: [Option<usize>; FEED_FORWARD.len()],
}

enum Role {
    Small,
    Embedding,
    Head,
    Attention(usize, usize),
    FeedForward(usize, usize),
    Unknown,
}

fn role(tensor: &TensorInfo, layers: u32) -> Role {
    if tensor.bytes == 0 || tensor.rows() == 0 || tensor.row_bytes() == 0 {
        return Role::Unknown;
    }
    let is_vector = tensor.dimensions.len() <= 1;
    let Some(of_layer) = tensor.name.strip_prefix("blk.") else {
        return match tensor.name.as_str() {
            _ if is_vector => Role::Small,
            "token_embd.weight" => Role::Embedding,
            "output.weight" => Role::Head,
            _ => Role::Unknown,
        };
    };
    let Some((number, name)) = of_layer.split_once('.') else {
        return Role::Unknown;
    };
    let layer = match number.parse::<u32>() {
        // "+1" and "01" parse too; a model file never asks for them.
        Ok(layer) if layer < layers && layer.to_string() == number => layer as usize,
        _ => return Role::Unknown,
    };
    if is_vector {
        return Role::Small;
    }
    let place = |names: &[&str]| names.iter().position(|&known| known == name);
    if let Some(slot) = place(&ATTENTION) {
        return Role::Attention(layer, slot);
    }
    if let Some(slot) = place(&FEED_FORWARD) {
        return Role::FeedForward(layer, slot);
    }
    Role::Unknown
}

impl Catalogue {
    /// Sorts `tensors` by role. With `tied_head`, the head is the token embedding.
    pub(super) fn new(tensors: &[TensorInfo], layers: u32, tied_head: bool) -> Catalogue {
        let mut catalogue = Catalogue {
            layers: vec![Layer::default(); layers as usize],
            ..Catalogue::default()
        };
        for (index, tensor) in tensors.iter().enumerate() {
            let slot = match role(tensor, layers) {
                Role::Small => {
                    catalogue.small.push(index);
                    continue;
                }
                Role::Embedding if tied_head => &mut catalogue.head,
                Role::Embedding => &mut catalogue.embedding,
                Role::Head if !tied_head => &mut catalogue.head,
                Role::Attention(layer, slot) => &mut catalogue.layers[layer].attention[slot],
                Role::FeedForward(layer, slot) => &mut catalogue.layers[layer].feed_forward[slot],
                Role::Head | Role::Unknown => {
                    catalogue.unused.push(tensor.name.clone());
                    continue;
                }
            };
            match slot {
                None => *slot = Some(index),
                Some(_) => catalogue.unused.push(tensor.name.clone()),
            }
        }
        catalogue
    }

    /// The tensor whose rows are gathered as embeddings.
    pub(super) fn embedding_rows(&self) -> Option<usize> {
        self.embedding.or(self.head)
    }

    /// The small group alone; it does not depend on the slice size.
    pub(super) fn small_group(&self, tensors: &[TensorInfo], alignment: u64) -> Option<Group> {
        let whole = |&index: &usize| Piece::whole(index, tensors);
        let pieces: Vec<Piece> = self.small.iter().map(whole).collect();
        (!pieces.is_empty()).then(|| group(GroupKind::Small, None, &pieces, tensors, alignment))
    }

    /// All groups, in the order in which a step uses them.
    pub(super) fn groups(&self, tensors: &[TensorInfo], rule: SliceRule) -> Vec<Group> {
        let mut groups = Vec::new();
        groups.extend(self.small_group(tensors, rule.read_alignment));
        let mut pack = |kind, layer, matrices: &[Option<usize>]| {
            let matrices = matrices.iter().flatten().copied();
            pack_into(&mut groups, kind, layer, matrices, tensors, rule);
        };
        pack(GroupKind::Embedding, None, &[self.embedding]);
        for (number, layer) in self.layers.iter().enumerate() {
            let number = Some(number as u32);
            pack(GroupKind::Attention, number, &layer.attention);
            pack(GroupKind::FeedForward, number, &layer.feed_forward);
        }
        pack(GroupKind::Head, None, &[self.head]);
        groups
    }
}

/// Rows of one tensor that stay together.
#[derive(Clone, Debug)]
struct Piece {
    tensor: usize,
    rows: Range<u64>,
}

impl Piece {
    fn whole(tensor: usize, tensors: &[TensorInfo]) -> Piece {
        Piece {
            tensor,
            rows: 0..tensors[tensor].rows(),
        }
    }

    /// The part of the file that these rows take.
    fn file_range(&self, tensors: &[TensorInfo]) -> Range<u64> {
        let tensor = &tensors[self.tensor];
        let at = |row: u64| {
            let into = row.saturating_mul(tensor.row_bytes());
            tensor.file_offset.saturating_add(into)
        };
        at(self.rows.start)..at(self.rows.end)
    }
}

/// Cuts a matrix into even slices where it does not fit one entry.
fn cut(index: usize, tensors: &[TensorInfo], rule: SliceRule) -> Vec<Piece> {
    let whole = Piece::whole(index, tensors);
    if entry_bytes(std::slice::from_ref(&whole), tensors, rule.read_alignment) <= rule.slice_bytes {
        return vec![whole];
    }
    let tensor = &tensors[index];
    let rows = tensor.rows();
    let units = rows.div_ceil(ROWS_MULTIPLE);
    // Rounding outward adds less than one block at each end.
    let usable = rule
        .slice_bytes
        .saturating_sub(2 * (rule.read_alignment - 1));
    let unit_bytes = tensor.row_bytes().saturating_mul(ROWS_MULTIPLE);
    let slices = units.div_ceil((usable / unit_bytes).max(1));
    let start_of = |slice: u64| {
        let unit = u128::from(slice) * u128::from(units) / u128::from(slices);
        // A share of `units` fits what `units` fits.
        (unit as u64).saturating_mul(ROWS_MULTIPLE).min(rows)
    };
    (0..slices)
        .map(|slice| Piece {
            tensor: index,
            rows: start_of(slice)..start_of(slice + 1),
        })
        .collect()
}

/// Packs the pieces of `matrices` greedily, in order, into groups that fit an entry.
fn pack_into(
    groups: &mut Vec<Group>,
    kind: GroupKind,
    layer: Option<u32>,
    matrices: impl Iterator<Item = usize>,
    tensors: &[TensorInfo],
    rule: SliceRule,
) {
    let mut open: Vec<Piece> = Vec::new();
    for piece in matrices.flat_map(|index| cut(index, tensors, rule)) {
        let mut extended = open.clone();
        match extended.last_mut() {
            Some(last) if last.tensor == piece.tensor && last.rows.end == piece.rows.start => {
                last.rows.end = piece.rows.end;
            }
            _ => extended.push(piece.clone()),
        }
        if open.is_empty()
            || entry_bytes(&extended, tensors, rule.read_alignment) <= rule.slice_bytes
        {
            open = extended;
        } else {
            groups.push(group(kind, layer, &open, tensors, rule.read_alignment));
            open = vec![piece];
        }
    }
    if !open.is_empty() {
        groups.push(group(kind, layer, &open, tensors, rule.read_alignment));
    }
}

/// The aligned ranges of the file that cover `pieces`, in file order; those that touch, overlap or leave a gap of at
/// most one block are one read.
fn cover(pieces: &[Piece], tensors: &[TensorInfo], alignment: u64) -> Vec<Extent> {
    let aligned = |piece: &Piece| {
        let range = piece.file_range(tensors);
        range.start / alignment * alignment..round_up(range.end, alignment)
    };
    let mut ranges: Vec<Range<u64>> = pieces.iter().map(aligned).collect();
    ranges.sort_by_key(|range| (range.start, range.end));
    let mut extents: Vec<Extent> = Vec::new();
    for range in ranges {
        if let Some(last) = extents.last_mut() {
            let end = last.file_offset + last.bytes;
            if range.start <= end.saturating_add(alignment) {
                last.bytes = end.max(range.end) - last.file_offset;
                continue;
            }
        }
        extents.push(Extent {
            file_offset: range.start,
            bytes: range.end - range.start,
            entry_offset: 0,
        });
    }
    let mut entry_offset = 0u64;
    for extent in &mut extents {
        extent.entry_offset = entry_offset;
        entry_offset = entry_offset.saturating_add(extent.bytes);
    }
    extents
}

fn entry_bytes(pieces: &[Piece], tensors: &[TensorInfo], alignment: u64) -> u64 {
    let extents = cover(pieces, tensors, alignment);
    extents
        .last()
        .map_or(0, |last| last.entry_offset.saturating_add(last.bytes))
}

fn group(
    kind: GroupKind,
    layer: Option<u32>,
    pieces: &[Piece],
    tensors: &[TensorInfo],
    alignment: u64,
) -> Group {
    let extents = cover(pieces, tensors, alignment);
    let part = |piece: &Piece| {
        let range = piece.file_range(tensors);
        // Extents are sorted and cover every piece: the last one that starts at or before it holds it.
        let holder = extents.partition_point(|extent| extent.file_offset <= range.start) - 1;
        let extent = &extents[holder];
        Part {
            tensor: piece.tensor,
            rows: piece.rows.clone(),
            file_offset: range.start,
            bytes: range.end - range.start,
            entry_offset: extent.entry_offset + (range.start - extent.file_offset),
        }
    };
    let parts: Vec<Part> = pieces.iter().map(part).collect();
    Group {
        kind,
        layer,
        weight_bytes: parts.iter().map(|part| part.bytes).sum(),
        entry_bytes: extents
            .last()
            .map_or(0, |last| last.entry_offset.saturating_add(last.bytes)),
        parts,
        extents,
    }
}

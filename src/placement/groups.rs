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

    fn matrices(&self) -> impl Iterator<Item = usize> {
        let of_layer = |layer: &'_ Layer| {
            let Layer {
                attention,
                feed_forward,
            } = layer.clone();
            attention.into_iter().chain(feed_forward)
        };
        std::iter::once(self.embedding)
            .chain(self.layers.iter().flat_map(of_layer))
            .chain(std::iter::once(self.head))
            .flatten()
    }

    /// How many pieces `groups` would cut matrices into: it makes no more groups than these and the small one.
    pub(super) fn pieces(&self, tensors: &[TensorInfo], rule: SliceRule) -> u64 {
        self.matrices().fold(0u64, |sum, index| {
            sum.saturating_add(slices_of(index, tensors, rule))
        })
    }

    /// Bytes of all tensors that groups hold.
    pub(super) fn weight_bytes(&self, tensors: &[TensorInfo]) -> u64 {
        let all = self.matrices().chain(self.small.iter().copied());
        all.fold(0u64, |sum, index| sum.saturating_add(tensors[index].bytes))
    }

    /// All groups, in the order in which a step uses them. The caller has bounded `pieces`.
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

/// How many slices a matrix is cut into.
fn slices_of(index: usize, tensors: &[TensorInfo], rule: SliceRule) -> u64 {
    let whole = Piece::whole(index, tensors);
    if entry_bytes(std::slice::from_ref(&whole), tensors, rule.read_alignment) <= rule.slice_bytes {
        return 1;
    }
    let tensor = &tensors[index];
    // Rounding outward adds less than one block at each end.
    let usable = rule
        .slice_bytes
        .saturating_sub(2 * (rule.read_alignment - 1));
    let unit_bytes = tensor.row_bytes().saturating_mul(ROWS_MULTIPLE);
    let units = tensor.rows().div_ceil(ROWS_MULTIPLE);
    units.div_ceil((usable / unit_bytes).max(1))
}

/// Cuts a matrix into even slices where it does not fit one entry.
fn cut(index: usize, tensors: &[TensorInfo], rule: SliceRule) -> Vec<Piece> {
    let slices = slices_of(index, tensors, rule);
    let rows = tensors[index].rows();
    let units = rows.div_ceil(ROWS_MULTIPLE);
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

#[cfg(test)]
mod tests {
    use super::super::shapes::{Shape, TensorTable};
    use super::*;
    use crate::gguf::TensorType;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    const RULE: SliceRule = SliceRule {
        slice_bytes: 1 << 20,
        read_alignment: 4096,
    };

    /// Layers of random matrices in a random order in the file.
    fn random_table(random: &mut ChaCha8Rng) -> (Vec<TensorInfo>, u32, bool) {
        let layers = random.random_range(0..4u32);
        let tied = random.random_bool(0.5);
        let mut names = vec![
            "token_embd.weight".to_owned(),
            "output_norm.weight".to_owned(),
            "rope_freqs.weight".to_owned(),
            "position_embd.weight".to_owned(),
        ];
        if !tied {
            names.push("output.weight".to_owned());
        }
        for layer in 0..layers {
            for name in ATTENTION.iter().chain(&FEED_FORWARD) {
                if random.random_bool(0.8) {
                    names.push(format!("blk.{layer}.{name}"));
                }
            }
            names.push(format!("blk.{layer}.attn_norm.weight"));
            names.push(format!("blk.{layer}.attn_q.bias"));
        }
        for index in (1..names.len()).rev() {
            names.swap(index, random.random_range(0..=index));
        }
        let mut table = TensorTable::default();
        for name in &names {
            let kind = TensorType::ALL[random.random_range(0..TensorType::ALL.len())];
            let columns = 256 * random.random_range(1..5u64);
            let is_vector = ["norm", "bias", "rope"]
                .iter()
                .any(|part| name.contains(part));
            let dimensions = if is_vector {
                vec![columns]
            } else {
                vec![columns, random.random_range(1..1500u64)]
            };
            table.add(name, kind, &dimensions);
        }
        (table.tensors, layers, tied)
    }

    /// Everything that holds for the groups of any table.
    fn check(tensors: &[TensorInfo], groups: &[Group], unused: &[String], rule: SliceRule) {
        let mut next_row = vec![0u64; tensors.len()];
        let mut order = Vec::new();
        for group in groups {
            let kind = GroupKind::ALL
                .iter()
                .position(|&kind| kind == group.kind)
                .unwrap();
            // The layers stand together, between the embedding and the head.
            let class = if group.layer.is_some() { 2 } else { kind };
            order.push((class, group.layer, kind));
            let mut end = 0;
            let mut file_end = 0;
            for extent in &group.extents {
                assert_eq!(extent.entry_offset, end, "extents lie side by side");
                assert_eq!(extent.file_offset % rule.read_alignment, 0);
                assert_eq!(extent.bytes % rule.read_alignment, 0);
                assert!(extent.bytes > 0);
                assert!(
                    file_end == 0 || extent.file_offset > file_end + rule.read_alignment,
                    "extents {} apart are two",
                    extent.file_offset - file_end
                );
                end += extent.bytes;
                file_end = extent.file_offset + extent.bytes;
            }
            assert_eq!(group.entry_bytes, end);
            let bytes: u64 = group.parts.iter().map(|part| part.bytes).sum();
            assert_eq!(group.weight_bytes, bytes);
            for part in &group.parts {
                let tensor = &tensors[part.tensor];
                assert_eq!(part.rows.start, next_row[part.tensor], "rows come in order");
                assert!(part.rows.end > part.rows.start);
                next_row[part.tensor] = part.rows.end;
                assert!(part.rows.end == tensor.rows() || part.rows.end % ROWS_MULTIPLE == 0);
                assert_eq!(
                    part.file_offset,
                    tensor.file_offset + part.rows.start * tensor.row_bytes()
                );
                assert_eq!(
                    part.bytes,
                    (part.rows.end - part.rows.start) * tensor.row_bytes()
                );
                let inside = group.extents.iter().any(|extent| {
                    part.file_offset >= extent.file_offset
                        && part.file_offset + part.bytes <= extent.file_offset + extent.bytes
                        && part.entry_offset - extent.entry_offset
                            == part.file_offset - extent.file_offset
                });
                assert!(inside, "{part:?} outside {:?}", group.extents);
            }
            let is_one_unit = group.parts.len() == 1
                && group.parts[0].rows.end - group.parts[0].rows.start <= ROWS_MULTIPLE;
            assert!(
                group.entry_bytes <= rule.slice_bytes
                    || is_one_unit
                    || group.kind == GroupKind::Small,
                "{} bytes in a slice of {}",
                group.entry_bytes,
                rule.slice_bytes
            );
        }
        let mut sorted = order.clone();
        sorted.sort();
        assert_eq!(order, sorted, "groups stand in the order of use");
        for (tensor, next_row) in tensors.iter().zip(next_row) {
            let rows = if unused.contains(&tensor.name) {
                0
            } else {
                tensor.rows()
            };
            assert_eq!(next_row, rows, "every row of {} in one group", tensor.name);
        }
    }

    #[test]
    fn every_row_of_random_tables_is_in_exactly_one_group() {
        let mut random = ChaCha8Rng::seed_from_u64(1);
        for _ in 0..300 {
            let (tensors, layers, tied) = random_table(&mut random);
            let catalogue = Catalogue::new(&tensors, layers, tied);
            assert_eq!(catalogue.unused, ["position_embd.weight"]);
            let rule = SliceRule {
                slice_bytes: 4096 * random.random_range(1..600u64),
                read_alignment: 1 << random.random_range(0..13),
            };
            let groups = catalogue.groups(&tensors, rule);
            check(&tensors, &groups, &catalogue.unused, rule);
            let small = groups.iter().filter(|group| group.kind == GroupKind::Small);
            let cut = groups.len() - small.count();
            assert!(cut as u64 <= catalogue.pieces(&tensors, rule));
            let bytes: u64 = groups.iter().map(|group| group.weight_bytes).sum();
            assert_eq!(bytes, catalogue.weight_bytes(&tensors));
        }
    }

    #[test]
    fn parts_stand_in_the_order_of_use_whatever_their_order_in_the_file() {
        let (tensors, hyperparameters) = Shape::smollm2().index();
        let catalogue = Catalogue::new(&tensors, hyperparameters.layers, true);
        let rule = SliceRule {
            slice_bytes: 128 << 20,
            ..RULE
        };
        let groups = catalogue.groups(&tensors, rule);
        let names: Vec<&str> = groups[1..3]
            .iter()
            .flat_map(|group| &group.parts)
            .map(|part| tensors[part.tensor].name.as_str())
            .collect();
        assert_eq!(
            names,
            [
                "blk.0.attn_q.weight",
                "blk.0.attn_k.weight",
                "blk.0.attn_v.weight",
                "blk.0.attn_output.weight",
                "blk.0.ffn_gate.weight",
                "blk.0.ffn_up.weight",
                "blk.0.ffn_down.weight",
            ]
        );
        // The four lie side by side in the file: one read.
        assert_eq!(groups[1].extents.len(), 1);
    }

    #[test]
    fn a_matrix_that_does_not_fit_is_cut_evenly() {
        let (tensors, hyperparameters) = Shape::smollm2().index();
        let catalogue = Catalogue::new(&tensors, hyperparameters.layers, true);
        let groups = catalogue.groups(&tensors, RULE);
        let head: Vec<u64> = groups
            .iter()
            .filter(|group| group.kind == GroupKind::Head)
            .map(|group| group.parts[0].rows.end - group.parts[0].rows.start)
            .collect();
        assert!(head.len() > 20, "{head:?}");
        let spread = head.iter().max().unwrap() - head.iter().min().unwrap();
        assert!(spread <= ROWS_MULTIPLE, "{head:?}");
    }

    #[test]
    fn odd_names_and_shapes_are_unused_not_errors() {
        let mut table = TensorTable::default();
        for name in [
            "blk.+0.attn_q.weight",
            "blk.00.attn_q.weight",
            "blk.1.attn_q.weight",
            "blk.99999999999.attn_q.weight",
            "blk.0",
            "blk.0.ffn_gate_exps.weight",
            "output.weight",
            "v.blk.0.attn_q.weight",
        ] {
            table.add(name, TensorType::F32, &[32, 32]);
        }
        table.add("blk.0.attn_q.weight", TensorType::F32, &[32, 32]);
        let catalogue = Catalogue::new(&table.tensors, 1, true);
        assert_eq!(catalogue.unused.len(), table.tensors.len() - 1);
        assert_eq!(catalogue.groups(&table.tensors, RULE).len(), 1);
    }
}

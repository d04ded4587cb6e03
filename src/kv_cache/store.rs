//! The bytes of the pages: keys and values of every layer, in f16 or f32. A page holds `PAGE_TOKENS` positions of all layers
//! that see everything; inside it each layer has one run of elements in the layout that `kernels::attention` reads. Layers
//! that see a window have pages of their own behind those, a few for each sequence, which its positions use in turn.

use super::PageId;
use crate::kernels::{AttentionShape, PageView, PageViewMut};
use crate::memory::Region;
use crate::placement::{KvSplit, KvType, WindowPages};

// The plan counts pages of as many tokens as the kernels lay out.
const _: () = assert!(crate::placement::PAGE_TOKENS as usize == crate::kernels::PAGE_TOKENS);

/// All pages of one model. Lives on the engine thread.
pub struct KvStore {
    region: Region,
    kind: KvType,
    layers: Vec<AttentionShape>,
    /// Where each layer starts in page 0, in elements from the start of the region.
    starts: Vec<usize>,
    /// Elements of a page of layers that see everything, and of one of those with a window.
    page_elements: [usize; 2],
    window: Option<WindowPages>,
}

/// The pages of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct SequencePages<'a> {
    /// Of the layers that see everything, in order.
    pub pages: &'a [PageId],
    /// Which of the sequences it is that have pages for layers with a window.
    pub slot: u32,
}

impl KvStore {
    /// # Panics
    /// When the region does not hold the pages of this shape: the plan that sized it is another model's.
    pub fn new(region: Region, split: &KvSplit, layers: Vec<AttentionShape>) -> KvStore {
        let pages = split.pages as usize;
        let element_bytes = split.kind.element_bytes() as usize;
        let mut page_elements = [0; 2];
        let in_page: Vec<usize> = layers
            .iter()
            .map(|layer| {
                let elements = &mut page_elements[usize::from(layer.window.is_some())];
                let start = *elements;
                *elements += layer.page_elements();
                start
            })
            .collect();
        let before_windows = pages * page_elements[0];
        let starts = layers.iter().zip(in_page).map(|(layer, start)| {
            let before = if layer.window.is_some() {
                before_windows
            } else {
                0
            };
            before + start
        });
        let starts = starts.collect();
        let of_windows = split.window.map_or(0, |window| {
            window.sequences as usize * window.pages_of_sequence as usize * page_elements[1]
        });
        assert!(
            region.bytes_total() >= (before_windows + of_windows) * element_bytes,
            "{split:?}: pages of {page_elements:?} elements in {} bytes",
            region.bytes_total()
        );
        assert!(
            split.window.is_some() || page_elements[1] == 0,
            "{split:?} has no pages for windows"
        );
        KvStore {
            region,
            kind: split.kind,
            layers,
            starts,
            page_elements,
            window: split.window,
        }
    }

    /// Where the pages are, on a device too.
    pub fn region(&self) -> &Region {
        &self.region
    }

    pub fn kind(&self) -> KvType {
        self.kind
    }

    /// The most query heads of any layer.
    pub fn heads_max(&self) -> usize {
        self.layers
            .iter()
            .map(|layer| layer.heads)
            .max()
            .unwrap_or(0)
    }

    /// Elements from one page of a layer to the next.
    pub fn page_elements(&self, layer: usize) -> usize {
        self.page_elements[usize::from(self.layers[layer].window.is_some())]
    }

    /// Where a layer starts in page 0, in elements from the start of the region.
    pub fn layer_start(&self, layer: usize) -> usize {
        self.starts[layer]
    }

    /// The page of a layer that holds the sequence's positions from `index * PAGE_TOKENS` on.
    pub fn page_of(&self, layer: usize, sequence: SequencePages<'_>, index: usize) -> PageId {
        match (self.layers[layer].window, self.window) {
            (Some(_), Some(window)) => {
                assert!(sequence.slot < window.sequences, "{sequence:?}, {window:?}");
                PageId(window.page(sequence.slot, index))
            }
            _ => sequence.pages[index],
        }
    }

    pub fn shape(&self, layer: usize) -> &AttentionShape {
        &self.layers[layer]
    }

    /// One layer's part of one page.
    ///
    /// # Panics
    /// When the pages are on a device.
    pub fn page(&self, layer: usize, page: PageId) -> PageView<'_> {
        let (start, end) = self.range(layer, page);
        match self.kind {
            KvType::F16 => PageView::F16(&self.region.u16s()[start..end]),
            KvType::F32 => PageView::F32(&self.region.f32s()[start..end]),
        }
    }

    pub fn page_mut(&mut self, layer: usize, page: PageId) -> PageViewMut<'_> {
        let (start, end) = self.range(layer, page);
        match self.kind {
            KvType::F16 => PageViewMut::F16(&mut self.region.u16s_mut()[start..end]),
            KvType::F32 => PageViewMut::F32(&mut self.region.f32s_mut()[start..end]),
        }
    }

    fn range(&self, layer: usize, page: PageId) -> (usize, usize) {
        let start = page.0 as usize * self.page_elements(layer) + self.starts[layer];
        (start, start + self.layers[layer].page_elements())
    }
}

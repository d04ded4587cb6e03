//! The bytes of the pages: keys and values of every layer, in f16 or f32. A page holds `PAGE_TOKENS` positions of all layers;
//! inside it each layer has one run of elements in the layout that `kernels::attention` reads.

use super::PageId;
use crate::kernels::{AttentionShape, PageView, PageViewMut};
use crate::memory::Region;
use crate::placement::KvType;

// The plan counts pages of as many tokens as the kernels lay out.
const _: () = assert!(crate::placement::PAGE_TOKENS as usize == crate::kernels::PAGE_TOKENS);

/// All pages of one model. Lives on the engine thread.
pub struct KvStore {
    region: Region,
    kind: KvType,
    layers: Vec<AttentionShape>,
    /// Where each layer starts in a page, in elements.
    starts: Vec<usize>,
    page_elements: usize,
}

impl KvStore {
    /// # Panics
    /// When the region does not hold `pages` pages of this shape: the plan that sized it is another model's.
    pub fn new(region: Region, kind: KvType, layers: Vec<AttentionShape>, pages: usize) -> KvStore {
        let mut page_elements = 0;
        let starts = layers
            .iter()
            .map(|layer| {
                let start = page_elements;
                page_elements += layer.page_elements();
                start
            })
            .collect();
        let element_bytes = match kind {
            KvType::F16 => 2,
            KvType::F32 => 4,
        };
        assert!(
            region.bytes_total() >= pages * page_elements * element_bytes,
            "{pages} pages of {page_elements} elements in {} bytes",
            region.bytes_total()
        );
        KvStore {
            region,
            kind,
            layers,
            starts,
            page_elements,
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

    /// Elements of a page, all layers.
    pub fn page_elements(&self) -> usize {
        self.page_elements
    }

    /// Where a layer starts in a page, in elements.
    pub fn layer_start(&self, layer: usize) -> usize {
        self.starts[layer]
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
        let start = page.0 as usize * self.page_elements + self.starts[layer];
        (start, start + self.layers[layer].page_elements())
    }
}

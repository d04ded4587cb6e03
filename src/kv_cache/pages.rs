//! Page bookkeeping: a pool with reference counts, and one table of pages per sequence. Pure: no bytes here.

/// One page of the KV cache: room for the keys and values of `page_tokens` tokens, in all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

/// Not enough free pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the KV cache has {free} free pages of {pages}, and {wanted} are wanted")]
pub struct OutOfPages {
    pub wanted: u32,
    pub free: u32,
    pub pages: u32,
}

/// All pages of one tier. A page is free or is held by as many owners as its count says.
#[derive(Debug)]
pub struct PagePool {
    page_tokens: u32,
    /// Owners of each page; 0 means free.
    counts: Vec<u32>,
    /// Free pages. The page freed last is taken first: its bytes are the likeliest to be in a cache.
    free: Vec<PageId>,
}

impl PagePool {
    /// `pages` pages of `page_tokens` tokens each, all free.
    pub fn new(pages: u32, page_tokens: u32) -> PagePool {
        assert!(page_tokens > 0, "a page of {page_tokens} tokens");
        PagePool {
            page_tokens,
            counts: vec![0; pages as usize],
            free: (0..pages).rev().map(PageId).collect(),
        }
    }

    pub fn page_tokens(&self) -> u32 {
        self.page_tokens
    }

    /// Pages that `tokens` tokens fill, the last one perhaps in part.
    pub fn pages_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.page_tokens)
    }

    pub fn pages(&self) -> u32 {
        self.counts.len() as u32
    }

    pub fn free_pages(&self) -> u32 {
        self.free.len() as u32
    }

    pub fn used_pages(&self) -> u32 {
        self.pages() - self.free_pages()
    }

    /// Takes a free page with one owner.
    pub fn allocate(&mut self) -> Option<PageId> {
        let page = self.free.pop()?;
        let count = &mut self.counts[page.0 as usize];
        assert_eq!(*count, 0, "{page:?} is in the free list and in use");
        *count = 1;
        Some(page)
    }

    /// Adds an owner to a page in use. A page with several owners must be full, and is never written again.
    pub fn share(&mut self, page: PageId) {
        let count = &mut self.counts[page.0 as usize];
        assert!(*count > 0, "{page:?} is shared, and it is free");
        *count += 1;
    }

    /// Takes one owner away. True when that was the last one and the page is free now.
    pub fn release(&mut self, page: PageId) -> bool {
        let count = &mut self.counts[page.0 as usize];
        assert!(*count > 0, "{page:?} is released, and it is free");
        *count -= 1;
        if *count > 0 {
            return false;
        }
        self.free.push(page);
        true
    }

    /// How many own the page.
    pub fn owners(&self, page: PageId) -> u32 {
        self.counts[page.0 as usize]
    }
}

/// The pages of one sequence, in order of position. They go back to the pool by [`BlockTable::release`] only: a table
/// cannot reach its pool when it is dropped, so dropping one that holds pages is a bug.
#[derive(Debug, Default)]
pub struct BlockTable {
    pages: Vec<PageId>,
}

impl BlockTable {
    pub fn new() -> BlockTable {
        BlockTable::default()
    }

    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// Makes room for `tokens` tokens in all. Takes every page that is missing, or none.
    ///
    /// # Errors
    ///
    /// The pool has not enough free pages.
    pub fn grow(&mut self, tokens: u32, pool: &mut PagePool) -> Result<(), OutOfPages> {
        let missing = pool
            .pages_for(tokens)
            .saturating_sub(self.pages.len() as u32);
        if missing > pool.free_pages() {
            return Err(OutOfPages {
                wanted: missing,
                free: pool.free_pages(),
                pages: pool.pages(),
            });
        }
        self.pages
            .extend((0..missing).filter_map(|_| pool.allocate()));
        Ok(())
    }

    /// Starts the table with full pages that another owner holds too: the common front of two sequences.
    pub fn share_front(&mut self, pages: &[PageId], pool: &mut PagePool) {
        assert!(
            self.pages.is_empty(),
            "a table that holds {} pages gets a shared front",
            self.pages.len()
        );
        for page in pages {
            pool.share(*page);
        }
        self.pages.extend_from_slice(pages);
    }

    /// Gives every page back.
    pub fn release(&mut self, pool: &mut PagePool) {
        for page in self.pages.drain(..) {
            pool.release(page);
        }
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        debug_assert!(
            self.pages.is_empty() || std::thread::panicking(),
            "a table is dropped with {} pages",
            self.pages.len()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_is_given_once_and_comes_back() {
        let mut pool = PagePool::new(4, 32);
        let mut pages: Vec<PageId> = std::iter::from_fn(|| pool.allocate()).collect();
        assert_eq!((pool.used_pages(), pool.free_pages()), (4, 0));
        pages.sort();
        assert_eq!(pages, [PageId(0), PageId(1), PageId(2), PageId(3)]);
        for page in pages {
            assert!(pool.release(page));
        }
        assert_eq!((pool.used_pages(), pool.free_pages()), (0, 4));
    }

    #[test]
    fn a_shared_page_is_free_only_after_its_last_owner() {
        let mut pool = PagePool::new(1, 32);
        let page = pool.allocate().unwrap();
        pool.share(page);
        assert_eq!(pool.owners(page), 2);
        assert!(!pool.release(page));
        assert_eq!(pool.allocate(), None);
        assert!(pool.release(page));
        assert_eq!(pool.allocate(), Some(page));
    }

    #[test]
    #[should_panic(expected = "PageId(0) is released, and it is free")]
    fn releasing_a_free_page_is_a_bug() {
        let mut pool = PagePool::new(1, 32);
        let page = pool.allocate().unwrap();
        pool.release(page);
        pool.release(page);
    }

    #[test]
    #[should_panic(expected = "PageId(1) is shared, and it is free")]
    fn sharing_a_free_page_is_a_bug() {
        PagePool::new(2, 32).share(PageId(1));
    }

    #[test]
    fn a_table_grows_by_whole_pages() {
        let mut pool = PagePool::new(8, 32);
        let mut table = BlockTable::new();
        for (tokens, pages) in [(1, 1), (31, 1), (32, 1), (33, 2), (20, 2), (96, 3), (97, 4)] {
            table.grow(tokens, &mut pool).unwrap();
            assert_eq!(table.pages().len(), pages, "at {tokens} tokens");
            assert_eq!(pool.used_pages() as usize, pages);
        }
        table.release(&mut pool);
        assert_eq!(pool.used_pages(), 0);
    }

    #[test]
    fn a_table_that_cannot_grow_takes_nothing() {
        let mut pool = PagePool::new(3, 32);
        let mut first = BlockTable::new();
        first.grow(64, &mut pool).unwrap();
        let mut second = BlockTable::new();
        let refused = second.grow(33, &mut pool).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "the KV cache has 1 free pages of 3, and 2 are wanted"
        );
        assert_eq!(pool.free_pages(), 1);
        first.release(&mut pool);
        second.grow(33, &mut pool).unwrap();
        second.release(&mut pool);
    }

    #[test]
    fn tables_with_a_common_front_share_its_pages() {
        let mut pool = PagePool::new(8, 32);
        let mut first = BlockTable::new();
        first.grow(100, &mut pool).unwrap();
        let front: Vec<PageId> = first.pages()[..3].to_vec();
        let mut second = BlockTable::new();
        second.share_front(&front, &mut pool);
        second.grow(100, &mut pool).unwrap();
        assert_eq!(pool.used_pages(), 5);
        assert_ne!(first.pages()[3], second.pages()[3]);
        first.release(&mut pool);
        assert_eq!(pool.used_pages(), 4);
        assert_eq!(second.pages()[..3], front);
        second.release(&mut pool);
        assert_eq!(pool.used_pages(), 0);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "a table is dropped with 1 pages")]
    fn dropping_pages_without_the_pool_is_a_bug() {
        let mut pool = PagePool::new(1, 32);
        let mut table = BlockTable::new();
        table.grow(1, &mut pool).unwrap();
        drop(table);
    }
}

//! Page bookkeeping: a pool, and one table of pages per sequence. Pure: no bytes here.

/// One page of the KV cache: room for the keys and values of `page_tokens` tokens, in all layers that see everything.
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

/// All pages of one tier. A page is free or has one owner.
#[derive(Debug)]
pub struct PagePool {
    page_tokens: u32,
    /// Whether each page has an owner.
    in_use: Vec<bool>,
    /// Free pages. The page freed last is taken first: its bytes are the likeliest to be in a cache.
    free: Vec<PageId>,
}

impl PagePool {
    /// `pages` pages of `page_tokens` tokens each, all free.
    pub fn new(pages: u32, page_tokens: u32) -> PagePool {
        assert!(page_tokens > 0, "a page of {page_tokens} tokens");
        PagePool {
            page_tokens,
            in_use: vec![false; pages as usize],
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
        self.in_use.len() as u32
    }

    pub fn free_pages(&self) -> u32 {
        self.free.len() as u32
    }

    pub fn used_pages(&self) -> u32 {
        self.pages() - self.free_pages()
    }

    /// Takes a free page.
    pub fn allocate(&mut self) -> Option<PageId> {
        let page = self.free.pop()?;
        let in_use = &mut self.in_use[page.0 as usize];
        assert!(!*in_use, "{page:?} is in the free list and in use");
        *in_use = true;
        Some(page)
    }

    /// Gives a page back.
    pub fn release(&mut self, page: PageId) {
        let in_use = &mut self.in_use[page.0 as usize];
        assert!(*in_use, "{page:?} is released, and it is free");
        *in_use = false;
        self.free.push(page);
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
            pool.release(page);
        }
        assert_eq!((pool.used_pages(), pool.free_pages()), (0, 4));
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
    #[cfg(debug_assertions)]
    #[should_panic(expected = "a table is dropped with 1 pages")]
    fn dropping_pages_without_the_pool_is_a_bug() {
        let mut pool = PagePool::new(1, 32);
        let mut table = BlockTable::new();
        table.grow(1, &mut pool).unwrap();
        drop(table);
    }
}

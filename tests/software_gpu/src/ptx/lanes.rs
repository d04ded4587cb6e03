//! The register file of a warp.
//!
//! A register is a row of 32 lanes of 32 bits, or two adjacent rows as 32 lanes of 64 bits; types of 8 and 16 bits take
//! the low bits of 32, the rest is zeros or does not count. A predicate is one bit a lane.

pub(super) const LANES: usize = 32;
pub(super) const FULL: u32 = u32::MAX;

/// Index of a register's first row; before allocation, of a virtual register.
pub(super) type Register = u32;
/// Index of a predicate.
pub(super) type Predicate = u32;
/// No register or no predicate.
pub(super) const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
#[repr(C, align(128))]
pub(super) struct Row(pub(super) [u32; LANES]);

impl Row {
    pub(super) const POISON: Row = Row([u32::MAX; LANES]);
}

/// The registers of one warp.
#[derive(Debug)]
pub(super) struct Lanes {
    pub(super) rows: Box<[Row]>,
    pub(super) predicates: Box<[u32]>,
}

impl Lanes {
    pub(super) fn new(rows: usize, predicates: usize) -> Lanes {
        Lanes {
            rows: vec![Row::POISON; rows].into(),
            predicates: vec![u32::MAX; predicates].into(),
        }
    }

    #[inline(always)]
    pub(super) fn narrow(&self, register: Register) -> &[u32; LANES] {
        &self.rows[register as usize].0
    }

    #[inline(always)]
    pub(super) fn narrow_mut(&mut self, register: Register) -> &mut [u32; LANES] {
        &mut self.rows[register as usize].0
    }

    #[inline(always)]
    #[expect(unsafe_code, reason = "two rows are read as one of 64-bit lanes")]
    pub(super) fn wide(&self, register: Register) -> &[u64; LANES] {
        let rows = &self.rows[register as usize..register as usize + 2];
        // SAFETY: two adjacent rows are 256 initialised bytes, aligned to 128, borrowed as long as `self`.
        unsafe { &*rows.as_ptr().cast() }
    }

    #[inline(always)]
    #[expect(unsafe_code, reason = "two rows are written as one of 64-bit lanes")]
    pub(super) fn wide_mut(&mut self, register: Register) -> &mut [u64; LANES] {
        let rows = &mut self.rows[register as usize..register as usize + 2];
        // SAFETY: as in `wide`; the borrow is exclusive.
        unsafe { &mut *rows.as_mut_ptr().cast() }
    }

    /// A predicate's bits; all ones for none.
    #[inline(always)]
    pub(super) fn predicate(&self, predicate: Predicate, negated: bool) -> u32 {
        self.predicates[predicate as usize] ^ if negated { FULL } else { 0 }
    }

    #[inline(always)]
    pub(super) fn set_predicate(&mut self, predicate: Predicate, mask: u32, bits: u32) {
        if predicate != NONE {
            let slot = &mut self.predicates[predicate as usize];
            *slot = *slot & !mask | bits & mask;
        }
    }
}

/// The two widths of lanes.
pub(super) trait Bits: Copy + Default + 'static {
    fn row(lanes: &Lanes, register: Register) -> &[Self; LANES];
    fn row_mut(lanes: &mut Lanes, register: Register) -> &mut [Self; LANES];
}

impl Bits for u32 {
    #[inline(always)]
    fn row(lanes: &Lanes, register: Register) -> &[u32; LANES] {
        lanes.narrow(register)
    }
    #[inline(always)]
    fn row_mut(lanes: &mut Lanes, register: Register) -> &mut [u32; LANES] {
        lanes.narrow_mut(register)
    }
}

impl Bits for u64 {
    #[inline(always)]
    fn row(lanes: &Lanes, register: Register) -> &[u64; LANES] {
        lanes.wide(register)
    }
    #[inline(always)]
    fn row_mut(lanes: &mut Lanes, register: Register) -> &mut [u64; LANES] {
        lanes.wide_mut(register)
    }
}

/// What one lane of a register is taken for.
pub(super) trait Lane: Copy + 'static {
    type Bits: Bits;
    fn from_bits(bits: Self::Bits) -> Self;
    fn to_bits(self) -> Self::Bits;
}

macro_rules! integer_lanes {
    ($($type:ty, $unsigned:ty, $bits:ty;)*) => {$(
        impl Lane for $type {
            type Bits = $bits;
            #[inline(always)]
            fn from_bits(bits: $bits) -> $type {
                bits as $type
            }
            #[inline(always)]
            fn to_bits(self) -> $bits {
                self as $unsigned as $bits
            }
        }
    )*};
}

integer_lanes! {
    u8, u8, u32;
    u16, u16, u32;
    u32, u32, u32;
    u64, u64, u64;
    i8, u8, u32;
    i16, u16, u32;
    i32, u32, u32;
    i64, u64, u64;
}

impl Lane for f32 {
    type Bits = u32;
    #[inline(always)]
    fn from_bits(bits: u32) -> f32 {
        f32::from_bits(bits)
    }
    #[inline(always)]
    fn to_bits(self) -> u32 {
        f32::to_bits(self)
    }
}

impl Lane for f64 {
    type Bits = u64;
    #[inline(always)]
    fn from_bits(bits: u64) -> f64 {
        f64::from_bits(bits)
    }
    #[inline(always)]
    fn to_bits(self) -> u64 {
        f64::to_bits(self)
    }
}

/// Stores the mask's lanes.
#[inline(always)]
pub(super) fn store<B: Bits>(
    lanes: &mut Lanes,
    register: Register,
    mask: u32,
    values: &[B; LANES],
) {
    let row = B::row_mut(lanes, register);
    if mask == FULL {
        *row = *values;
    } else {
        for lane in 0..LANES {
            row[lane] = if mask >> lane & 1 != 0 {
                values[lane]
            } else {
                row[lane]
            };
        }
    }
}

/// The lanes of a mask in ascending order.
pub(super) fn lanes_of(mask: u32) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        let lane = rest.trailing_zeros() as usize;
        if lane == LANES {
            return None;
        }
        rest &= rest - 1;
        Some(lane)
    })
}

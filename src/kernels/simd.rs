//! Sixteen f32 side by side, on each instruction set, and the macro that compiles a function for each of them.
//!
//! A function written over `Lanes` gives the same bits on every set: each operation is one IEEE operation for each
//! lane (a fused multiply-add is rounded once everywhere), and the reductions have one fixed order.
//!
//! `vectorised!` is the only place that names the processor's lane types, each inside a function compiled for its
//! instruction set and entered only where the set was found available (`ComputePool::with_instruction_set` checks).
//! That is what makes the intrinsics below sound.

use super::half_floats::{bf16_to_f32, f16_to_f32};

/// Sixteen f32.
pub(super) trait Lanes: Copy {
    /// How many of these the processor holds at once.
    const REGISTERS: usize;

    fn splat(value: f32) -> Self;
    fn load(from: &[f32; 16]) -> Self;
    /// Little-endian f32, at any address.
    fn load_bytes(from: &[u8; 64]) -> Self;
    fn load_f16(from: &[u16; 16]) -> Self;
    fn load_f16_bytes(from: &[u8; 32]) -> Self;
    fn load_bf16_bytes(from: &[u8; 32]) -> Self;
    fn store(self, to: &mut [f32; 16]);
    /// self * b + c, rounded once.
    fn mul_add(self, b: Self, c: Self) -> Self;
    fn add(self, b: Self) -> Self;
    fn sub(self, b: Self) -> Self;
    fn mul(self, b: Self) -> Self;
    fn div(self, b: Self) -> Self;
    /// The larger; `b` where either is a NaN.
    fn max(self, b: Self) -> Self;
    /// `self` where `value >= limit`, elsewhere 0.
    fn keep_where_at_least(self, value: Self, limit: Self) -> Self;
    /// 2^n, for integral n from -126 to 127.
    fn power_of_two(self) -> Self;

    /// Halves added until one lane is left: lane i and i + 8, then i + 4, i + 2, i + 1.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut lanes = [0.0; 16];
        self.store(&mut lanes);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
        }
        lanes[0]
    }

    /// The largest lane (no NaN among them).
    #[inline(always)]
    fn largest(self) -> f32 {
        let mut lanes = [0.0; 16];
        self.store(&mut lanes);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] = if lanes[i] > lanes[i + half] {
                    lanes[i]
                } else {
                    lanes[i + half]
                };
            }
        }
        lanes[0]
    }
}

/// e^x for each lane: relative error at most 2e-7 for -87.3 <= x <= 88, exactly 0 below (and for a NaN), e^88 above.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by the polynomial of Cephes (`expf`).
#[inline(always)]
pub(super) fn exp<L: Lanes>(x: L) -> L {
    // Both bounds keep 2^n a normal number.
    let lowest = L::splat(-87.3);
    let highest = L::splat(-88.0);
    let zero = L::splat(0.0);
    // The smaller of x and 88, written as a maximum of negatives.
    let clamped = zero.sub(zero.sub(x).max(highest)).max(lowest);
    // Adding and subtracting 1.5 * 2^23 rounds to an integer, ties to even.
    let magic = L::splat(12_582_912.0);
    let n = clamped
        .mul(L::splat(std::f32::consts::LOG2_E))
        .add(magic)
        .sub(magic);
    let r = n.mul_add(L::splat(-0.693_359_4), clamped);
    let r = n.mul_add(L::splat(2.121_944_4e-4), r);
    let mut p = L::splat(1.987_569_1e-4);
    for coefficient in [
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        1.666_666_5e-1,
        0.5,
    ] {
        p = p.mul_add(r, L::splat(coefficient));
    }
    let fraction = p.mul_add(r.mul(r), r.add(L::splat(1.0)));
    fraction
        .mul(n.power_of_two())
        .keep_where_at_least(x, lowest)
}

/// The reference: arrays.
#[derive(Clone, Copy)]
pub(super) struct PlainLanes([f32; 16]);

impl PlainLanes {
    #[inline(always)]
    fn with(self, b: PlainLanes, f: impl Fn(f32, f32) -> f32) -> PlainLanes {
        PlainLanes(std::array::from_fn(|i| f(self.0[i], b.0[i])))
    }
}

impl Lanes for PlainLanes {
    // The compiler chooses; the smallest machines have four.
    const REGISTERS: usize = 4;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        PlainLanes([value; 16])
    }
    #[inline(always)]
    fn load(from: &[f32; 16]) -> Self {
        PlainLanes(*from)
    }
    #[inline(always)]
    fn load_bytes(from: &[u8; 64]) -> Self {
        let words = from.as_chunks::<4>().0;
        PlainLanes(std::array::from_fn(|i| f32::from_le_bytes(words[i])))
    }
    #[inline(always)]
    fn load_f16(from: &[u16; 16]) -> Self {
        PlainLanes(from.map(f16_to_f32))
    }
    #[inline(always)]
    fn load_f16_bytes(from: &[u8; 32]) -> Self {
        let halves = from.as_chunks::<2>().0;
        PlainLanes(std::array::from_fn(|i| {
            f16_to_f32(u16::from_le_bytes(halves[i]))
        }))
    }
    #[inline(always)]
    fn load_bf16_bytes(from: &[u8; 32]) -> Self {
        let halves = from.as_chunks::<2>().0;
        PlainLanes(std::array::from_fn(|i| {
            bf16_to_f32(u16::from_le_bytes(halves[i]))
        }))
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; 16]) {
        *to = self.0;
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        PlainLanes(std::array::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        self.with(b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        self.with(b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        self.with(b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        self.with(b, |a, b| a / b)
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        self.with(b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn keep_where_at_least(self, value: Self, limit: Self) -> Self {
        PlainLanes(std::array::from_fn(|i| {
            if value.0[i] >= limit.0[i] {
                self.0[i]
            } else {
                0.0
            }
        }))
    }
    #[inline(always)]
    fn power_of_two(self) -> Self {
        PlainLanes(
            self.0
                .map(|n| f32::from_bits(((n as i32 + 127) << 23) as u32)),
        )
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2Lanes, Avx512Lanes};

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "processor intrinsics")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Lanes;

    /// Two vectors of eight.
    #[derive(Clone, Copy)]
    pub(in crate::kernels) struct Avx2Lanes(__m256, __m256);

    /// One vector of sixteen.
    #[derive(Clone, Copy)]
    pub(in crate::kernels) struct Avx512Lanes(__m512);

    /// Evaluates the expression for each half of an `Avx2Lanes`.
    macro_rules! halves {
        ($($name:ident),* => $body:expr) => {{
            // SAFETY: the processor has the instruction (see the module's doc); registers only.
            unsafe {
                Avx2Lanes(
                    { $(let $name = $name.0;)* $body },
                    { $(let $name = $name.1;)* $body },
                )
            }
        }};
    }

    impl Lanes for Avx2Lanes {
        const REGISTERS: usize = 8;

        #[inline(always)]
        fn splat(value: f32) -> Self {
            // SAFETY: the processor has the instruction (see the module's doc); registers only.
            unsafe { Avx2Lanes(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
        }
        #[inline(always)]
        fn load(from: &[f32; 16]) -> Self {
            let at = from.as_ptr();
            // SAFETY: the processor has the instruction; the array holds 16 values, loaded unaligned.
            unsafe { Avx2Lanes(_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))) }
        }
        #[inline(always)]
        fn load_bytes(from: &[u8; 64]) -> Self {
            let at = from.as_ptr().cast::<f32>();
            // SAFETY: the processor has the instruction; the array holds 64 bytes, loaded unaligned.
            unsafe { Avx2Lanes(_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))) }
        }
        #[inline(always)]
        fn load_f16(from: &[u16; 16]) -> Self {
            let at = from.as_ptr().cast::<__m128i>();
            // SAFETY: the processor has the instruction; the array holds 32 bytes, loaded unaligned.
            unsafe {
                Avx2Lanes(
                    _mm256_cvtph_ps(_mm_loadu_si128(at)),
                    _mm256_cvtph_ps(_mm_loadu_si128(at.add(1))),
                )
            }
        }
        #[inline(always)]
        fn load_f16_bytes(from: &[u8; 32]) -> Self {
            let at = from.as_ptr().cast::<__m128i>();
            // SAFETY: the processor has the instruction; the array holds 32 bytes, loaded unaligned.
            unsafe {
                Avx2Lanes(
                    _mm256_cvtph_ps(_mm_loadu_si128(at)),
                    _mm256_cvtph_ps(_mm_loadu_si128(at.add(1))),
                )
            }
        }
        #[inline(always)]
        fn load_bf16_bytes(from: &[u8; 32]) -> Self {
            let at = from.as_ptr().cast::<__m128i>();
            // SAFETY: the processor has the instruction; the array holds 32 bytes, loaded unaligned.
            unsafe {
                let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(at));
                let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.add(1)));
                Avx2Lanes(
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
                )
            }
        }
        #[inline(always)]
        fn store(self, to: &mut [f32; 16]) {
            let at = to.as_mut_ptr();
            // SAFETY: the processor has the instruction; the array holds 16 values, stored unaligned.
            unsafe {
                _mm256_storeu_ps(at, self.0);
                _mm256_storeu_ps(at.add(8), self.1);
            }
        }
        #[inline(always)]
        fn mul_add(self, b: Self, c: Self) -> Self {
            let a = self;
            halves!(a, b, c => _mm256_fmadd_ps(a, b, c))
        }
        #[inline(always)]
        fn add(self, b: Self) -> Self {
            let a = self;
            halves!(a, b => _mm256_add_ps(a, b))
        }
        #[inline(always)]
        fn sub(self, b: Self) -> Self {
            let a = self;
            halves!(a, b => _mm256_sub_ps(a, b))
        }
        #[inline(always)]
        fn mul(self, b: Self) -> Self {
            let a = self;
            halves!(a, b => _mm256_mul_ps(a, b))
        }
        #[inline(always)]
        fn div(self, b: Self) -> Self {
            let a = self;
            halves!(a, b => _mm256_div_ps(a, b))
        }
        #[inline(always)]
        fn max(self, b: Self) -> Self {
            let a = self;
            halves!(a, b => _mm256_max_ps(a, b))
        }
        #[inline(always)]
        fn keep_where_at_least(self, value: Self, limit: Self) -> Self {
            let a = self;
            halves!(a, value, limit => _mm256_and_ps(a, _mm256_cmp_ps::<_CMP_GE_OQ>(value, limit)))
        }
        #[inline(always)]
        fn power_of_two(self) -> Self {
            let a = self;
            halves!(a => _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(
                _mm256_cvtps_epi32(a),
                _mm256_set1_epi32(127),
            ))))
        }
        #[inline(always)]
        fn sum(self) -> f32 {
            // SAFETY: the processor has the instruction (see the module's doc); registers only. The order is that of
            // the trait's default.
            unsafe {
                let eight = _mm256_add_ps(self.0, self.1);
                let four = _mm_add_ps(
                    _mm256_castps256_ps128(eight),
                    _mm256_extractf128_ps::<1>(eight),
                );
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
            }
        }
        #[inline(always)]
        fn largest(self) -> f32 {
            // SAFETY: the processor has the instruction (see the module's doc); registers only. The order is that of
            // the trait's default.
            unsafe {
                let eight = _mm256_max_ps(self.0, self.1);
                let four = _mm_max_ps(
                    _mm256_castps256_ps128(eight),
                    _mm256_extractf128_ps::<1>(eight),
                );
                let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
            }
        }
    }

    impl Lanes for Avx512Lanes {
        const REGISTERS: usize = 32;

        #[inline(always)]
        fn splat(value: f32) -> Self {
            // SAFETY: the processor has the instruction (see the module's doc); registers only.
            unsafe { Avx512Lanes(_mm512_set1_ps(value)) }
        }
        #[inline(always)]
        fn load(from: &[f32; 16]) -> Self {
            // SAFETY: the processor has the instruction; the array holds 16 values, loaded unaligned.
            unsafe { Avx512Lanes(_mm512_loadu_ps(from.as_ptr())) }
        }
        #[inline(always)]
        fn load_bytes(from: &[u8; 64]) -> Self {
            // SAFETY: the processor has the instruction; the array holds 64 bytes, loaded unaligned.
            unsafe { Avx512Lanes(_mm512_loadu_ps(from.as_ptr().cast())) }
        }
        #[inline(always)]
        fn load_f16(from: &[u16; 16]) -> Self {
            // SAFETY: the processor has the instruction; the array holds 32 bytes, loaded unaligned.
            unsafe { Avx512Lanes(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast()))) }
        }
        #[inline(always)]
        fn load_f16_bytes(from: &[u8; 32]) -> Self {
            // SAFETY: the processor has the instruction; the array holds 32 bytes, loaded unaligned.
            unsafe { Avx512Lanes(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast()))) }
        }
        #[inline(always)]
        fn load_bf16_bytes(from: &[u8; 32]) -> Self {
            // SAFETY: the processor has the instruction; the array holds 32 bytes, loaded unaligned.
            unsafe {
                let halves = _mm256_loadu_si256(from.as_ptr().cast());
                let words = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves));
                Avx512Lanes(_mm512_castsi512_ps(words))
            }
        }
        #[inline(always)]
        fn store(self, to: &mut [f32; 16]) {
            // SAFETY: the processor has the instruction; the array holds 16 values, stored unaligned.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) }
        }
        #[inline(always)]
        fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: the processor has the instruction (see the module's doc); registers only.
            unsafe { Avx512Lanes(_mm512_fmadd_ps(self.0, b.0, c.0)) }
        }
        #[inline(always)]
        fn add(self, b: Self) -> Self {
            // SAFETY: the processor has the instruction (see the module's doc); registers only.
            unsafe { Avx512Lanes(_mm512_add_ps(self.0, b.0)) }
        }
        #[inline(always)]
        fn sub(self, b: Self) -> Self {
            // SAFETY: the processor has the instruction (see the module's doc); registers only.
            unsafe { Avx512Lanes(_mm512_sub_ps(self.0, b.0)) }
        }
        #[inline(always)]
        fn mul(self, b: Self) -> Self {
            // SAFETY: the processor has the instruction (see the module's doc); registers only.
            unsafe { Avx512Lanes(_mm512_mul_ps(self.0, b.0)) }
        }
        #[inline(always)]
        fn div(self, b: Self) -> Self {
            // SAFETY: the processor has the instruction (see the module's doc); registers only.
            unsafe { Avx512Lanes(_mm512_div_ps(self.0, b.0)) }
        }
        #[inline(always)]
        fn max(self, b: Self) -> Self {
            // SAFETY: the processor has the instruction (see the module's doc); registers only.
            unsafe { Avx512Lanes(_mm512_max_ps(self.0, b.0)) }
        }
        #[inline(always)]
        fn keep_where_at_least(self, value: Self, limit: Self) -> Self {
            // SAFETY: the processor has the instruction (see the module's doc); registers only.
            unsafe {
                let mask = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(value.0, limit.0);
                Avx512Lanes(_mm512_maskz_mov_ps(mask, self.0))
            }
        }
        #[inline(always)]
        fn power_of_two(self) -> Self {
            // SAFETY: the processor has the instruction (see the module's doc); registers only.
            unsafe {
                let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
                Avx512Lanes(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent)))
            }
        }
        #[inline(always)]
        fn sum(self) -> f32 {
            // SAFETY: the processor has the instruction (see the module's doc); registers only. The order is that of
            // the trait's default.
            unsafe {
                let upper = _mm512_castpd_ps(_mm512_castpd256_pd512(_mm512_extractf64x4_pd::<1>(
                    _mm512_castps_pd(self.0),
                )));
                let eight = _mm256_add_ps(
                    _mm512_castps512_ps256(self.0),
                    _mm512_castps512_ps256(upper),
                );
                let four = _mm_add_ps(
                    _mm256_castps256_ps128(eight),
                    _mm256_extractf128_ps::<1>(eight),
                );
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
            }
        }
    }
}

/// Makes `fn name(set, arguments..)`, which runs `inner::<L, ..>(arguments..)` compiled for the given instruction set.
/// `inner` has to be `#[inline(always)]`, down to the intrinsics: it has no target features of its own.
macro_rules! vectorised {
    (
        $(#[$meta:meta])*
        $visibility:vis fn $name:ident $(<$(const $generic:ident : $generic_type:ty),+>)?
        ($($argument:ident : $type:ty),* $(,)?) $(-> $result:ty)? => $inner:ident
    ) => {
        $(#[$meta])*
        $visibility fn $name $(<$(const $generic: $generic_type),+>)? (
            set: $crate::kernels::InstructionSet,
            $($argument: $type),*
        ) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2 $(<$(const $generic: $generic_type),+>)? ($($argument: $type),*) $(-> $result)? {
                $inner::<$crate::kernels::simd::Avx2Lanes $($(, $generic)+)?>($($argument),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
            fn avx512 $(<$(const $generic: $generic_type),+>)? ($($argument: $type),*) $(-> $result)? {
                $inner::<$crate::kernels::simd::Avx512Lanes $($(, $generic)+)?>($($argument),*)
            }
            match set {
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::InstructionSet::Avx2 => {
                    #[expect(unsafe_code, reason = "calls a function compiled for more instructions")]
                    // SAFETY: a pool has an instruction set only where the machine can run it.
                    unsafe { avx2 $(::<$($generic),+>)? ($($argument),*) }
                }
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::InstructionSet::Avx512 => {
                    #[expect(unsafe_code, reason = "calls a function compiled for more instructions")]
                    // SAFETY: a pool has an instruction set only where the machine can run it.
                    unsafe { avx512 $(::<$($generic),+>)? ($($argument),*) }
                }
                _ => $inner::<$crate::kernels::simd::PlainLanes $($(, $generic)+)?>($($argument),*),
            }
        }
    };
}
pub(super) use vectorised;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::InstructionSet;

    vectorised! {
        fn exp_of(x: &[f32; 16]) -> [f32; 16] => exp_of_on
    }

    #[inline(always)]
    fn exp_of_on<L: Lanes>(x: &[f32; 16]) -> [f32; 16] {
        let mut out = [0.0; 16];
        exp(L::load(x)).store(&mut out);
        out
    }

    #[test]
    fn exp_is_within_its_bound_and_the_same_on_every_set() {
        let sets = InstructionSet::ALL
            .into_iter()
            .filter(|set| set.is_available());
        for set in sets {
            for step in 0..40_000 {
                let x: [f32; 16] =
                    std::array::from_fn(|i| -87.3 + (step * 16 + i) as f32 * (175.3 / 640_000.0));
                let ours = exp_of(set, &x);
                assert_eq!(ours, exp_of(InstructionSet::Portable, &x), "{set} at {x:?}");
                for (ours, x) in ours.iter().zip(x) {
                    let error = f64::from(*ours) / f64::from(x).exp() - 1.0;
                    assert!(error.abs() < 2e-7, "{set}: e^{x} = {ours}, error {error}");
                }
            }
            let x = [
                f32::NEG_INFINITY,
                -1e30,
                -88.0,
                -87.4,
                0.0,
                -0.0,
                1.0,
                88.0,
                1e30,
                89.0,
                -1.0,
                0.5,
                2.0,
                3.0,
                4.0,
                5.0,
            ];
            let ours = exp_of(set, &x);
            assert_eq!(ours[..6], [0.0, 0.0, 0.0, 0.0, 1.0, 1.0], "{set}");
            assert_eq!(ours[7], ours[8], "{set}");
            assert_eq!(ours, exp_of(InstructionSet::Portable, &x));
        }
    }
}

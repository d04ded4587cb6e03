//! Floating-point formats and rounding that Rust does not have: binary16, bfloat16, directed rounding, flushing.
//!
//! Written without branches where they run for 32 lanes, so that they vectorise.

use super::lanes::Lane;

/// How a result is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
}

/// Zero, with its sign, for subnormal numbers.
#[inline(always)]
pub(super) fn flush(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits(if bits & 0x7F80_0000 == 0 {
        bits & 0x8000_0000
    } else {
        bits
    })
}

/// Clamped to 0..=1; NaN gives 0.
#[inline(always)]
pub(super) fn saturate(value: f32) -> f32 {
    if value >= 1.0 {
        1.0
    } else if value > 0.0 {
        value
    } else {
        0.0
    }
}

/// An f32 lane of an instruction with `.ftz` or `.sat`.
pub(super) trait Real: Lane {
    fn value(self) -> f32;
    fn new(value: f32) -> Self;
}

macro_rules! real {
    ($name:ident, $load:expr, $store:expr) => {
        #[derive(Clone, Copy, Debug)]
        pub(super) struct $name(f32);

        impl Lane for $name {
            type Bits = u32;
            #[inline(always)]
            fn from_bits(bits: u32) -> $name {
                let load: fn(f32) -> f32 = $load;
                $name(load(f32::from_bits(bits)))
            }
            #[inline(always)]
            fn to_bits(self) -> u32 {
                let store: fn(f32) -> f32 = $store;
                store(self.0).to_bits()
            }
        }

        impl Real for $name {
            #[inline(always)]
            fn value(self) -> f32 {
                self.0
            }
            #[inline(always)]
            fn new(value: f32) -> $name {
                $name(value)
            }
        }
    };
}

real!(Plain, |value| value, |value| value);
real!(Flushed, flush, flush);
real!(Saturated, |value| value, saturate);
real!(FlushedSaturated, flush, |value| saturate(flush(value)));

#[inline(always)]
pub(super) fn half_to_f32(half: u16) -> f32 {
    let shifted = u32::from(half & 0x7FFF) << 13;
    // Rebiases the exponent; exact for subnormal halves too.
    let scaled = (f32::from_bits(shifted) * f32::from_bits(0x7780_0000)).to_bits();
    let special = if shifted >= 0x0F80_0000 {
        0x7F80_0000
    } else {
        0
    };
    f32::from_bits(scaled | special | u32::from(half & 0x8000) << 16)
}

/// To nearest, ties to even. NaN becomes 0x7FFF, as on the hardware.
#[inline(always)]
pub(super) fn f32_to_half(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = bits >> 16 & 0x8000;
    let magnitude = bits & 0x7FFF_FFFF;
    // Adding 0.5 puts a subnormal half's bits, rounded, at the bottom of the mantissa.
    let subnormal = (f32::from_bits(magnitude) + 0.5)
        .to_bits()
        .wrapping_sub(0.5f32.to_bits());
    let odd = magnitude >> 13 & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xFFF + odd) >> 13;
    let finite = if magnitude < 113 << 23 {
        subnormal
    } else {
        normal
    };
    let large = if magnitude > 0x7F80_0000 {
        0x7FFF
    } else {
        0x7C00
    };
    // 65520 and above round to infinity.
    let half = if magnitude >= 0x477F_F000 {
        large
    } else {
        finite
    };
    let sign = if magnitude > 0x7F80_0000 { 0 } else { sign };
    (half | sign) as u16
}

/// As `f32_to_half` in another direction.
pub(super) fn f32_to_half_rounded(value: f32, rounding: Rounding) -> u16 {
    let half = f32_to_half(value);
    if value.is_nan() {
        return half;
    }
    let back = half_to_f32(half);
    let toward_zero = match rounding {
        Rounding::Nearest => return half,
        Rounding::Zero => true,
        Rounding::Down => value > 0.0,
        Rounding::Up => value < 0.0,
    };
    if toward_zero && back.abs() > value.abs() {
        half - 1
    } else if !toward_zero && back.abs() < value.abs() {
        half + 1
    } else {
        half
    }
}

#[inline(always)]
pub(super) fn bf16_to_f32(value: u16) -> f32 {
    f32::from_bits(u32::from(value) << 16)
}

/// To nearest, ties to even. NaN becomes 0x7FFF, as on the hardware.
#[inline(always)]
pub(super) fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
    if bits & 0x7FFF_FFFF > 0x7F80_0000 {
        0x7FFF
    } else {
        rounded as u16
    }
}

/// A binary16 lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct Half(pub(super) u16);
/// A bfloat16 lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct BrainHalf(pub(super) u16);

/// The two 16-bit formats: computed in f32 (f64 for a fused multiply and add) and rounded once.
pub(super) trait ShortFloat: Lane {
    fn widen(self) -> f32;
    fn narrow(value: f32) -> Self;
    fn bits(self) -> u16;
    fn of_bits(bits: u16) -> Self;

    /// a * b + c rounded once.
    #[inline(always)]
    fn fused(a: Self, b: Self, c: Self) -> Self {
        // The product of two short floats is exact in f32's 24 bits except for exponents out of its range, and in f64
        // always; the sum in f64, rounded to odd, then rounds correctly to the short format.
        let product = f64::from(a.widen()) * f64::from(b.widen());
        let addend = f64::from(c.widen());
        let sum = product + addend;
        Self::narrow(round_to_odd(sum, sum_error(product, addend, sum)))
    }
}

/// What `sum` lacks of a + b, exactly.
#[inline(always)]
fn sum_error(a: f64, b: f64, sum: f64) -> f64 {
    let b_part = sum - a;
    (a - (sum - b_part)) + (b - b_part)
}

/// sum + error as an f32 whose last bit is set if it is not exact: rounding that again to fewer bits is right.
#[inline(always)]
fn round_to_odd(sum: f64, error: f64) -> f32 {
    let truncated = round_pair(sum, error, Rounding::Zero);
    let exact = f64::from(truncated) == sum && (error == 0.0 || error.is_nan());
    if exact || !truncated.is_finite() {
        truncated
    } else {
        f32::from_bits(truncated.to_bits() | 1)
    }
}

/// The exact sum + error (|error| at most half a unit of the sum's last place) as an f32.
#[inline(always)]
pub(super) fn round_pair(sum: f64, error: f64, rounding: Rounding) -> f32 {
    let nearest = sum as f32;
    if !sum.is_finite() {
        return nearest;
    }
    // The part that `nearest` lacks; infinite where the nearest is infinity, with the right sign.
    let rest = (sum - f64::from(nearest)) + error;
    let above = rest < 0.0;
    let below = rest > 0.0;
    match rounding {
        Rounding::Nearest => nearest,
        Rounding::Down if above => nearest.next_down(),
        Rounding::Up if below => nearest.next_up(),
        Rounding::Zero if above && sum > 0.0 => nearest.next_down(),
        Rounding::Zero if below && sum < 0.0 => nearest.next_up(),
        _ => nearest,
    }
}

/// a + b in a direction.
pub(super) fn add_rounded(a: f32, b: f32, rounding: Rounding) -> f32 {
    fused_rounded(a, 1.0, b, rounding)
}

/// a * b in a direction.
pub(super) fn multiply_rounded(a: f32, b: f32, rounding: Rounding) -> f32 {
    let product = f64::from(a) * f64::from(b);
    if product == 0.0 {
        product as f32
    } else {
        round_pair(product, 0.0, rounding)
    }
}

/// a * b + c in a direction.
#[inline(always)]
pub(super) fn fused_rounded(a: f32, b: f32, c: f32, rounding: Rounding) -> f32 {
    let product = f64::from(a) * f64::from(b);
    let addend = f64::from(c);
    let sum = product + addend;
    if sum == 0.0 {
        // Exact zeros of both signs add to -0 only when rounding down.
        let mixed = product == 0.0
            && addend == 0.0
            && product.is_sign_negative() != addend.is_sign_negative();
        let cancelled = product != 0.0;
        return if mixed || cancelled {
            if rounding == Rounding::Down {
                -0.0
            } else {
                0.0
            }
        } else {
            sum as f32
        };
    }
    let error = sum_error(product, addend, sum);
    round_pair(sum, error, rounding)
}

macro_rules! short_float {
    ($name:ident, $widen:ident, $narrow:ident) => {
        impl Lane for $name {
            type Bits = u32;
            #[inline(always)]
            fn from_bits(bits: u32) -> $name {
                $name(bits as u16)
            }
            #[inline(always)]
            fn to_bits(self) -> u32 {
                u32::from(self.0)
            }
        }

        impl ShortFloat for $name {
            #[inline(always)]
            fn widen(self) -> f32 {
                $widen(self.0)
            }
            #[inline(always)]
            fn narrow(value: f32) -> $name {
                $name($narrow(value))
            }
            #[inline(always)]
            fn bits(self) -> u16 {
                self.0
            }
            #[inline(always)]
            fn of_bits(bits: u16) -> $name {
                $name(bits)
            }
        }
    };
}

short_float!(Half, half_to_f32, f32_to_half);
short_float!(BrainHalf, bf16_to_f32, f32_to_bf16);

/// Two short floats in one lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct PairOf<T>(pub(super) T, pub(super) T);

impl<T: ShortFloat> Lane for PairOf<T> {
    type Bits = u32;
    #[inline(always)]
    fn from_bits(bits: u32) -> PairOf<T> {
        PairOf(T::of_bits(bits as u16), T::of_bits((bits >> 16) as u16))
    }
    #[inline(always)]
    fn to_bits(self) -> u32 {
        u32::from(self.0.bits()) | u32::from(self.1.bits()) << 16
    }
}

/// PTX's minimum: a number rather than NaN, and -0 below +0.
#[inline(always)]
pub(super) fn minimum(a: f32, b: f32) -> f32 {
    let smaller = if a < b || (a == b && a.is_sign_negative()) {
        a
    } else {
        b
    };
    if a.is_nan() {
        b
    } else if b.is_nan() {
        a
    } else {
        smaller
    }
}

#[inline(always)]
pub(super) fn maximum(a: f32, b: f32) -> f32 {
    -minimum(-a, -b)
}

#[inline(always)]
pub(super) fn minimum_f64(a: f64, b: f64) -> f64 {
    if a.is_nan() || b < a || (a == b && b.is_sign_negative()) {
        b
    } else {
        a
    }
}

#[inline(always)]
pub(super) fn maximum_f64(a: f64, b: f64) -> f64 {
    -minimum_f64(-a, -b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_survives_the_way_to_f32_and_back() {
        for half in 0..=u16::MAX {
            let value = half_to_f32(half);
            if half & 0x7FFF > 0x7C00 {
                assert!(value.is_nan());
                assert_eq!(f32_to_half(value), 0x7FFF);
            } else {
                assert_eq!(f32_to_half(value), half, "{half:#06x} as {value}");
            }
        }
        assert_eq!(half_to_f32(0x3C00), 1.0);
        assert_eq!(half_to_f32(0x0001), 2f32.powi(-24));
        assert_eq!(half_to_f32(0xFBFF), -65504.0);
    }

    #[test]
    fn halves_round_to_the_nearest_with_ties_to_even() {
        // Between every two neighbours: a quarter, the middle, three quarters.
        for half in 0..0x7BFFu16 {
            let (low, high) = (
                f64::from(half_to_f32(half)),
                f64::from(half_to_f32(half + 1)),
            );
            let at = |part: f64| f32_to_half((low + (high - low) * part) as f32);
            assert_eq!(at(0.25), half);
            assert_eq!(at(0.5), half + (half & 1));
            assert_eq!(at(0.75), half + 1);
        }
        assert_eq!(f32_to_half(65519.0), 0x7BFF);
        assert_eq!(f32_to_half(65520.0), 0x7C00);
        assert_eq!(f32_to_half(-1e10), 0xFC00);
        assert_eq!(f32_to_half_rounded(1.0001, Rounding::Zero), 0x3C00);
        assert_eq!(f32_to_half_rounded(1.0001, Rounding::Up), 0x3C01);
        assert_eq!(f32_to_half_rounded(-1.0001, Rounding::Down), 0xBC01);
        assert_eq!(f32_to_half_rounded(1e6, Rounding::Zero), 0x7BFF);
    }

    #[test]
    fn bf16_rounds_to_the_nearest_with_ties_to_even() {
        assert_eq!(f32_to_bf16(1.0), 0x3F80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3F80_8000)), 0x3F80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3F81_8000)), 0x3F82);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3F80_8001)), 0x3F81);
        assert_eq!(f32_to_bf16(f32::MAX), 0x7F80);
        assert_eq!(f32_to_bf16(f32::NAN), 0x7FFF);
    }

    #[test]
    fn directed_rounding_brackets_the_exact_value() {
        let third = 1.0f32 / 3.0;
        assert_eq!(fused_rounded(third, 3.0, 0.0, Rounding::Nearest), 1.0);
        let exact = f64::from(third) * 3.0;
        for rounding in [Rounding::Down, Rounding::Zero, Rounding::Up] {
            let value = f64::from(fused_rounded(third, 3.0, 0.0, rounding));
            assert!(
                if rounding == Rounding::Up {
                    value >= exact
                } else {
                    value <= exact
                },
                "{rounding:?}"
            );
        }
        // An addend far below the last place still decides a directed rounding.
        assert_eq!(add_rounded(1.0, 1e-30, Rounding::Up), 1.0f32.next_up());
        assert_eq!(add_rounded(1.0, 1e-30, Rounding::Down), 1.0);
        assert_eq!(add_rounded(1.0, -1e-30, Rounding::Zero), 1.0f32.next_down());
        assert_eq!(multiply_rounded(f32::MAX, 2.0, Rounding::Zero), f32::MAX);
        assert_eq!(multiply_rounded(f32::MAX, 2.0, Rounding::Up), f32::INFINITY);
        assert!(add_rounded(1.0, -1.0, Rounding::Down).is_sign_negative());
    }

    #[test]
    fn a_fused_half_rounds_once() {
        let half = |value| Half(f32_to_half(value));
        assert_eq!(
            half_to_f32(Half::fused(half(3.0), half(5.0), half(1.0)).0),
            16.0
        );
        // 2048 + (1 + tiny): a sum rounded first to 2049 would then tie to 2048.
        let a = Half::fused(half(1.0), half(2048.0), half(1.001));
        assert_eq!(half_to_f32(a.0), 2050.0);
    }

    #[test]
    fn minimum_prefers_numbers_and_orders_zeros() {
        assert_eq!(minimum(f32::NAN, 1.0), 1.0);
        assert_eq!(maximum(1.0, f32::NAN), 1.0);
        assert!(minimum(0.0, -0.0).is_sign_negative());
        assert!(maximum(-0.0, 0.0).is_sign_positive());
        assert!(minimum(f32::NAN, f32::NAN).is_nan());
        assert_eq!(minimum_f64(f64::NAN, 2.0), 2.0);
        assert_eq!(minimum_f64(2.0, f64::NAN), 2.0);
        assert!(maximum_f64(-0.0, 0.0).is_sign_positive());
    }
}

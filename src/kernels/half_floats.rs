//! 16-bit floats in plain integer arithmetic, with the results of the processor's own conversions.

/// IEEE half precision to f32, exact.
#[inline(always)]
pub(super) fn f16_to_f32(half: u16) -> f32 {
    let sign = u32::from(half & 0x8000) << 16;
    let magnitude = u32::from(half & 0x7fff) << 13;
    // Shifted into place the exponent is 112 too small; the product also makes subnormals normal.
    let scaled = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000);
    let special = if half & 0x7c00 == 0x7c00 {
        0x7f80_0000
    } else {
        0
    };
    f32::from_bits(scaled.to_bits() | special | sign)
}

/// f32 to IEEE half precision, to nearest, ties to even; too large a magnitude becomes an infinity.
#[inline(always)]
pub(super) fn f32_to_f16(value: f32) -> u16 {
    half::f16::from_f32_const(value).to_bits()
}

/// bfloat16 to f32, exact.
#[inline(always)]
pub(super) fn bf16_to_f32(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_float_converts_as_the_half_crate_does() {
        for bits in 0..=u16::MAX {
            let expected = half::f16::from_bits(bits).to_f32_const();
            let ours = f16_to_f32(bits);
            if expected.is_nan() {
                assert!(ours.is_nan(), "{bits:04x}");
            } else {
                assert_eq!(ours.to_bits(), expected.to_bits(), "{bits:04x}");
                assert_eq!(f32_to_f16(ours), bits);
            }
        }
    }
}

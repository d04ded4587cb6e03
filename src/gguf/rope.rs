//! What the metadata say of rotary positions, and of how they are stretched beyond the context of the first training.

use super::GgufError;
use super::hyperparameters::{Keys, SIZE_MAX};

const BASE_DEFAULT: f32 = 10_000.0;

/// How positions are stretched. The model may also have a factor for each frequency, in tensors of their own:
/// `rope_freqs.weight` (Llama 3.1 and later), or those of `LongRope`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// Positions are divided by the factor (Chen et al., 2023, <https://arxiv.org/abs/2306.15595>).
    Linear {
        factor: f32,
    },
    Yarn(Yarn),
    /// Frequencies are divided by `rope_factors_long.weight` where a sequence may be longer than the original context, and
    /// by `rope_factors_short.weight` elsewhere (Ding et al., 2024, <https://arxiv.org/abs/2402.13753>).
    LongRope {
        /// Positions are divided by this as well; 1 in all files that are known.
        factor: f32,
        original_context_length: u32,
    },
}

/// Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023,
/// <https://arxiv.org/abs/2309.00071>), section 3: slow frequencies are divided by the factor, fast ones stay, with a ramp
/// between.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    pub factor: f32,
    /// Tokens that the model was trained for before it was stretched.
    pub original_context_length: u32,
    /// How much of the ramp is applied: 1, or 0 for none of it, which is linear scaling.
    pub extrapolation: f32,
    /// A frequency that turns so often within the original context stays.
    pub beta_fast: f32,
    /// One that turns no more often than this is divided by the whole factor.
    pub beta_slow: f32,
}

/// Rope as a file describes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rope {
    pub(super) dimensions: u32,
    pub(super) base: f32,
    pub(super) scaling: RopeScaling,
    pub(super) magnitude: f32,
}

const TYPE: &str = "rope.scaling.type";
const FACTOR: &str = "rope.scaling.factor";
const OLD_FACTOR: &str = "rope.scale_linear";
const ATTENTION_FACTOR: &str = "rope.scaling.attn_factor";
const ORIGINAL_CONTEXT: &str = "rope.scaling.original_context_length";

impl Keys<'_> {
    pub(super) fn rope(&self, key_length: u32, context_length: u32) -> Result<Rope, GgufError> {
        const DIMENSIONS: &str = "rope.dimension_count";
        const BASE: &str = "rope.freq_base";
        let dimensions = self.u32(DIMENSIONS)?.unwrap_or(key_length);
        if dimensions == 0 || !dimensions.is_multiple_of(2) || dimensions > key_length {
            return Err(self.error(
                DIMENSIONS,
                format_args!("is {dimensions}; an even number of 2 to {key_length}, the elements of a head, is expected"),
            ));
        }
        let base = self.positive(BASE)?.unwrap_or(BASE_DEFAULT);
        let scaling = self.rope_scaling(context_length)?;
        if matches!(scaling, RopeScaling::Yarn(_)) && base <= 1.0 {
            return Err(self.error(
                BASE,
                format_args!(
                    "is {base}; YaRN needs a base above 1, or no frequency is slower than another"
                ),
            ));
        }
        Ok(Rope {
            dimensions,
            base,
            scaling,
            magnitude: self.rope_magnitude(&scaling)?,
        })
    }

    /// The factor of linear scaling also stands in files without a type, and under an old key.
    fn rope_scaling(&self, context_length: u32) -> Result<RopeScaling, GgufError> {
        let factor = match self.scaling_factor(FACTOR)? {
            Some(factor) => Some(factor),
            None => self.scaling_factor(OLD_FACTOR)?,
        };
        let original_context_length = || match self.u32(ORIGINAL_CONTEXT)? {
            Some(length) => self.check_size(ORIGINAL_CONTEXT, length, SIZE_MAX),
            None => Ok(context_length),
        };
        match self.string(TYPE)? {
            None | Some("linear") => Ok(match factor {
                None => RopeScaling::None,
                Some(factor) => RopeScaling::Linear { factor },
            }),
            Some("none") => Ok(RopeScaling::None),
            Some("yarn") => Ok(RopeScaling::Yarn(Yarn {
                factor: factor.unwrap_or(1.0),
                original_context_length: original_context_length()?,
                extrapolation: self
                    .not_negative("rope.scaling.yarn_ext_factor")?
                    .unwrap_or(1.0),
                beta_fast: self
                    .positive("rope.scaling.yarn_beta_fast")?
                    .unwrap_or(32.0),
                beta_slow: self.positive("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            })),
            Some("longrope") => Ok(RopeScaling::LongRope {
                factor: factor.unwrap_or(1.0),
                original_context_length: original_context_length()?,
            }),
            Some(other) => Err(self.error(
                TYPE,
                format_args!(
                    "is {}, which is not supported; strata knows `none`, `linear`, `yarn` and `longrope`",
                    super::error::quote(other)
                ),
            )),
        }
    }

    /// What cosines and sines are multiplied by. YaRN sharpens attention by 1 + 0.1 ln(factor) on each side (section 3.4),
    /// and by the quotient of two of these where a file has the multiplier of the second.
    fn rope_magnitude(&self, scaling: &RopeScaling) -> Result<f32, GgufError> {
        let of_scaling = match scaling {
            RopeScaling::Yarn(yarn) if yarn.extrapolation > 0.0 => {
                let sharpened = |multiplier: f32| match yarn.factor > 1.0 {
                    true => 1.0 + 0.1 * multiplier * yarn.factor.ln(),
                    false => 1.0,
                };
                let multiplier = self.not_negative("rope.scaling.yarn_log_multiplier")?;
                sharpened(1.0) / multiplier.map_or(1.0, sharpened)
            }
            RopeScaling::Yarn(_) => self
                .positive("rope.scaling.yarn_attn_factor")?
                .unwrap_or(1.0),
            _ => 1.0,
        };
        let factor = self.positive(ATTENTION_FACTOR)?.unwrap_or(1.0);
        let magnitude = of_scaling * factor;
        if !magnitude.is_finite() || magnitude <= 0.0 {
            return Err(self.error(
                ATTENTION_FACTOR,
                format_args!("is {factor}: cosines and sines would be multiplied by {magnitude}"),
            ));
        }
        Ok(magnitude)
    }

    /// Zero and one both mean that nothing is scaled.
    fn scaling_factor(&self, suffix: &str) -> Result<Option<f32>, GgufError> {
        if self.f32(suffix)? == Some(0.0) {
            return Ok(None);
        }
        Ok(self.positive(suffix)?.filter(|&factor| factor != 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::super::hostile_tests::valid_file;
    use super::super::{Gguf, Hyperparameters, Value};
    use super::*;

    fn read(keys: &[(&str, Value)]) -> Result<(RopeScaling, f32), String> {
        let gguf = Gguf::parse(&valid_file(|metadata| {
            for (key, value) in keys {
                metadata.insert(format!("llama.rope.{key}"), value.clone());
            }
        }));
        let read = Hyperparameters::from_gguf(&gguf.unwrap());
        read.map(|read| (read.rope_scaling, read.rope_magnitude))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn linear_scaling_is_read_under_its_new_and_its_old_key() {
        use RopeScaling::{Linear, None};
        for (pairs, scaling) in [
            (&[][..], None),
            (&[("scaling.factor", 4.0f32)][..], Linear { factor: 4.0 }),
            (&[("scale_linear", 4.0)], Linear { factor: 4.0 }),
            (
                &[("scaling.factor", 2.0), ("scale_linear", 4.0)],
                Linear { factor: 2.0 },
            ),
            (&[("scaling.factor", 0.0)], None),
            (&[("scaling.factor", 1.0)], None),
        ] {
            let keys: Vec<(&str, Value)> = pairs
                .iter()
                .map(|&(key, value)| (key, value.into()))
                .collect();
            assert_eq!(read(&keys), Ok((scaling, 1.0)), "{pairs:?}");
        }
    }

    #[test]
    fn yarn_has_the_defaults_of_its_paper_and_takes_what_the_file_says() {
        let (scaling, magnitude) = read(&[
            ("scaling.type", "yarn".into()),
            ("scaling.factor", 4.0f32.into()),
            ("scaling.original_context_length", 64u32.into()),
        ])
        .unwrap();
        let expected = Yarn {
            factor: 4.0,
            original_context_length: 64,
            extrapolation: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
        };
        assert_eq!(scaling, RopeScaling::Yarn(expected));
        // 1 + 0.1 ln 4.
        assert!((magnitude - 1.138_629_4).abs() < 1e-6, "{magnitude}");

        let (scaling, magnitude) = read(&[
            ("scaling.type", "yarn".into()),
            ("scaling.factor", 16.0f32.into()),
            ("scaling.attn_factor", 1.5f32.into()),
            ("scaling.yarn_log_multiplier", 1.0f32.into()),
            ("scaling.yarn_beta_fast", 4.0f32.into()),
            ("scaling.yarn_beta_slow", 2.0f32.into()),
        ])
        .unwrap();
        let RopeScaling::Yarn(yarn) = scaling else {
            panic!("{scaling:?}");
        };
        assert_eq!((yarn.beta_fast, yarn.beta_slow), (4.0, 2.0));
        // The context length of the model where the original is not given.
        assert_eq!(yarn.original_context_length, 64);
        // A multiplier of 1 takes back what the factor brings.
        assert!((magnitude - 1.5).abs() < 1e-6, "{magnitude}");

        let (_, magnitude) = read(&[
            ("scaling.type", "yarn".into()),
            ("scaling.factor", 16.0f32.into()),
            ("scaling.yarn_ext_factor", 0.0f32.into()),
            ("scaling.yarn_attn_factor", 1.25f32.into()),
        ])
        .unwrap();
        assert_eq!(magnitude, 1.25);
        // Nothing is stretched, nothing is sharpened.
        let (_, magnitude) = read(&[("scaling.type", "yarn".into())]).unwrap();
        assert_eq!(magnitude, 1.0);
    }

    #[test]
    fn longrope_takes_its_magnitude_from_the_file() {
        let read = read(&[
            ("scaling.type", "longrope".into()),
            ("scaling.attn_factor", 1.25f32.into()),
            ("scaling.original_context_length", 96u32.into()),
        ]);
        let scaling = RopeScaling::LongRope {
            factor: 1.0,
            original_context_length: 96,
        };
        assert_eq!(read, Ok((scaling, 1.25)));
    }

    #[test]
    fn scalings_that_make_no_sense_name_the_key() {
        let check = |key: &str, value: Value, says: &str| {
            let yarn = ("scaling.type", Value::from("yarn"));
            let error = read(&[yarn, (key, value)]).unwrap_err();
            assert!(
                error.contains(&format!("`llama.rope.{key}`")) && error.contains(says),
                "{error}"
            );
        };
        check(
            "scaling.type",
            "ntk".into(),
            "`ntk`, which is not supported",
        );
        check("scaling.factor", f32::INFINITY.into(), "finite");
        check("scaling.factor", (-2.0f32).into(), "above zero");
        check("scaling.attn_factor", 0.0f32.into(), "above zero");
        check("scaling.attn_factor", f32::NAN.into(), "finite");
        check("scaling.yarn_ext_factor", (-1.0f32).into(), "zero or more");
        check("scaling.yarn_beta_fast", 0.0f32.into(), "above zero");
        check("scaling.yarn_beta_slow", f32::NAN.into(), "finite");
        check("scaling.yarn_log_multiplier", f32::NAN.into(), "finite");
        check("scaling.original_context_length", 0u32.into(), "is 0");
        check("freq_base", 1.0f32.into(), "above 1");
    }
}

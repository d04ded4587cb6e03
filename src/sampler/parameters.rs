//! What a request may ask of the sampler, and the ranges that are accepted.

/// How the next token of a request is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParameters {
    /// 0 is greedy; at most 100.
    pub temperature: f32,
    /// In (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub top_k: usize,
    /// In [0, 1]; 0 keeps all.
    pub min_p: f32,
    /// The same seed, prompt and parameters give the same tokens, in any company.
    pub seed: u64,
}

/// OpenAI accepts up to 2, llama.cpp anything. Beyond 100 every distribution is flat.
const TEMPERATURE_MAX: f32 = 100.0;

impl SamplingParameters {
    /// The most probable token, always.
    pub fn greedy() -> SamplingParameters {
        SamplingParameters {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 0,
        }
    }

    /// Checks every range, after conversion to f32: a JSON number such as 1e39 has become infinite by then.
    ///
    /// # Errors
    ///
    /// A sentence for the client that names the field.
    pub fn validate(&self) -> Result<(), String> {
        // `contains` is false for a NaN, so a NaN is refused everywhere.
        if !(0.0..=TEMPERATURE_MAX).contains(&self.temperature) {
            return Err(format!(
                "`temperature` must be between 0 and {TEMPERATURE_MAX}, and is {}",
                self.temperature
            ));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(format!(
                "`top_p` must be above 0 and at most 1, and is {}",
                self.top_p
            ));
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return Err(format!(
                "`min_p` must be between 0 and 1, and is {}",
                self.min_p
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(change: impl FnOnce(&mut SamplingParameters), named: Option<&str>) {
        let mut parameters = SamplingParameters::greedy();
        change(&mut parameters);
        match (parameters.validate(), named) {
            (Ok(()), None) => {}
            (Err(sentence), Some(field)) => {
                assert!(
                    sentence.starts_with(&format!("`{field}` ")),
                    "{sentence} for {parameters:?}"
                );
            }
            (result, _) => panic!("{result:?} for {parameters:?}"),
        }
    }

    #[test]
    fn ranges_are_checked_and_the_field_is_named() {
        for good in [0.0, -0.0, 1e-30, 1.0, 2.0, 3.0, 100.0] {
            check(|p| p.temperature = good, None);
        }
        for bad in [-1.0, 100.1, 1e39_f64 as f32, f32::NAN, f32::NEG_INFINITY] {
            check(|p| p.temperature = bad, Some("temperature"));
        }
        for good in [1e-30, 0.5, 1.0] {
            check(|p| p.top_p = good, None);
        }
        for bad in [0.0, -0.1, 1.1, f32::INFINITY, f32::NAN] {
            check(|p| p.top_p = bad, Some("top_p"));
        }
        for good in [0.0, 0.5, 1.0] {
            check(|p| p.min_p = good, None);
        }
        for bad in [-0.1, 1.1, f32::INFINITY, f32::NAN] {
            check(|p| p.min_p = bad, Some("min_p"));
        }
        for any in [0, 1, 1_000_000_000, usize::MAX] {
            check(|p| p.top_k = any, None);
        }
    }
}

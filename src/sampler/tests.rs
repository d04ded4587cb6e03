//! What the sampler keeps, draws and refuses.

use super::*;

fn parameters() -> SamplingParameters {
    SamplingParameters {
        temperature: 1.0,
        seed: 11,
        ..SamplingParameters::greedy()
    }
}

fn logits_of(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln() + 3.0).collect()
}

fn counts(parameters: &SamplingParameters, logits: &[f32], draws: usize) -> Vec<usize> {
    let mut sampler = Sampler::new(parameters);
    let mut scratch = Scratch::default();
    let mut counts = vec![0; logits.len()];
    for _ in 0..draws {
        counts[sampler.sample(logits, &mut scratch).unwrap() as usize] += 1;
    }
    counts
}

/// Pearson's chi-square of draws against probabilities that sum to 1.
fn chi_square(counts: &[usize], probabilities: &[f32]) -> f64 {
    let draws = counts.iter().sum::<usize>() as f64;
    std::iter::zip(counts, probabilities)
        .map(|(&count, &probability)| {
            let expected = f64::from(probability) * draws;
            (count as f64 - expected).powi(2) / expected
        })
        .sum()
}

/// Which tokens can be drawn.
fn kept(parameters: &SamplingParameters, logits: &[f32]) -> Vec<u32> {
    let max = largest_logit(logits).unwrap();
    let mut scratch = Scratch::default();
    filter(parameters, logits, max, &mut scratch);
    let mut ids: Vec<u32> = scratch.candidates.iter().map(|c| c.id).collect();
    ids.sort_unstable();
    ids
}

#[test]
fn draws_follow_the_distribution() {
    let probabilities = [0.05, 0.3, 0.1, 0.25, 0.02, 0.18, 0.04, 0.06];
    let counts = counts(&parameters(), &logits_of(&probabilities), 20_000);
    // 7 degrees of freedom: 24.3 is passed once in a thousand seeds, and the seed is fixed.
    let found = chi_square(&counts, &probabilities);
    assert!(found < 24.3, "chi-square {found} of {counts:?}");
}

#[test]
fn temperature_reshapes_the_distribution() {
    let probabilities: [f32; 3] = [0.6, 0.3, 0.1];
    for temperature in [0.5_f32, 2.0, 100.0] {
        let powers = probabilities.map(|p| p.powf(1.0 / temperature));
        let total: f32 = powers.iter().sum();
        let expected = powers.map(|p| p / total);
        let counts = counts(
            &SamplingParameters {
                temperature,
                ..parameters()
            },
            &logits_of(&probabilities),
            20_000,
        );
        let found = chi_square(&counts, &expected);
        assert!(found < 13.8, "chi-square {found} at {temperature}");
    }
}

#[test]
fn temperature_zero_takes_the_lowest_id_among_equals() {
    let mut sampler = Sampler::new(&SamplingParameters::greedy());
    let mut scratch = Scratch::default();
    for (logits, expected) in [
        (vec![0.0, 3.0, 3.0, 1.0], 1),
        (vec![-5.0, -4.0, -4.0], 1),
        (vec![f32::NEG_INFINITY, -1e30], 1),
        (vec![-0.0, 0.0], 0),
        (vec![2.0], 0),
    ] {
        assert_eq!(sampler.sample(&logits, &mut scratch), Ok(expected));
    }
}

#[test]
fn tiny_temperatures_take_the_most_probable() {
    for temperature in [1e-30, f32::MIN_POSITIVE, 1e-45] {
        let parameters = SamplingParameters {
            temperature,
            ..parameters()
        };
        let counts = counts(&parameters, &[-80.0, 90.0, 89.0, 0.0], 100);
        assert_eq!(counts, [0, 100, 0, 0], "at {temperature}");
    }
}

#[test]
fn filters_keep_what_they_say() {
    let probabilities = [0.1, 0.4, 0.2, 0.3];
    let logits = logits_of(&probabilities);
    let check = |change: &dyn Fn(&mut SamplingParameters), expected: &[u32]| {
        let mut parameters = parameters();
        change(&mut parameters);
        assert_eq!(kept(&parameters, &logits), expected, "{parameters:?}");
    };
    check(&|_| {}, &[0, 1, 2, 3]);
    check(&|p| p.top_k = 1, &[1]);
    check(&|p| p.top_k = 2, &[1, 3]);
    check(&|p| p.top_k = 4, &[0, 1, 2, 3]);
    check(&|p| p.top_k = 1_000_000_000, &[0, 1, 2, 3]);
    check(&|p| p.top_k = usize::MAX, &[0, 1, 2, 3]);
    check(&|p| p.top_p = 1e-30, &[1]);
    check(&|p| p.top_p = 0.39, &[1]);
    check(&|p| p.top_p = 0.41, &[1, 3]);
    check(&|p| p.top_p = 0.69, &[1, 3]);
    check(&|p| p.top_p = 0.71, &[1, 2, 3]);
    check(&|p| p.top_p = 0.91, &[0, 1, 2, 3]);
    check(&|p| p.min_p = 0.76, &[1]);
    check(&|p| p.min_p = 0.74, &[1, 3]);
    check(&|p| p.min_p = 0.24, &[0, 1, 2, 3]);
    check(&|p| p.min_p = 1.0, &[1]);
    // Of the two that top_k leaves, 0.4 and 0.3, the first has 0.571.
    check(&|p| (p.top_k, p.top_p) = (2, 0.56), &[1]);
    check(&|p| (p.top_k, p.top_p) = (2, 0.58), &[1, 3]);
    // Temperature comes last, so it changes no filter.
    check(&|p| (p.top_p, p.temperature) = (0.69, 100.0), &[1, 3]);
    check(&|p| (p.min_p, p.temperature) = (0.74, 0.01), &[1, 3]);
}

#[test]
fn masked_tokens_are_never_drawn() {
    let logits = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, 0.0];
    for (top_k, top_p, temperature) in [(0, 1.0, 1.0), (3, 1.0, 100.0), (0, 0.99, 1e-30)] {
        let parameters = SamplingParameters {
            top_k,
            top_p,
            temperature,
            ..parameters()
        };
        let counts = counts(&parameters, &logits, 200);
        assert_eq!((counts[0], counts[2]), (0, 0), "{parameters:?}");
        assert!(counts[1] > 0 && counts[3] > 0, "{counts:?}");
    }
}

#[test]
fn logits_that_are_not_numbers_are_refused() {
    for temperature in [0.0, 1.0] {
        let mut sampler = Sampler::new(&SamplingParameters {
            temperature,
            ..parameters()
        });
        let mut scratch = Scratch::default();
        let mut sample = |logits: &[f32]| sampler.sample(logits, &mut scratch);
        assert!(matches!(
            sample(&[1.0, f32::NAN, 2.0]),
            Err(SampleError::NotFinite { id: 1, .. })
        ));
        assert_eq!(
            sample(&[1.0, 0.0, f32::INFINITY]),
            Err(SampleError::NotFinite {
                id: 2,
                value: f32::INFINITY
            })
        );
        assert_eq!(
            sample(&[f32::NEG_INFINITY; 3]),
            Err(SampleError::NoCandidate)
        );
        assert_eq!(sample(&[]), Err(SampleError::NoCandidate));
        // The next call is not harmed.
        assert_eq!(sample(&[9.0]), Ok(0));
    }
}

#[test]
fn extreme_parameters_and_logits_never_panic() {
    let rows = [
        vec![f32::MAX, f32::MIN, 0.0],
        vec![f32::MIN; 3],
        vec![1e-45, -1e-45, 0.0],
        vec![7.0],
    ];
    for logits in &rows {
        for temperature in [0.0, 1e-45, 1e-30, 1.0, 100.0] {
            for top_p in [1e-45, 0.5, 1.0] {
                for top_k in [0, 1, 2, usize::MAX] {
                    for min_p in [0.0, 1e-45, 1.0] {
                        let parameters = SamplingParameters {
                            temperature,
                            top_p,
                            top_k,
                            min_p,
                            seed: u64::MAX,
                        };
                        parameters.validate().unwrap();
                        let total: usize = counts(&parameters, logits, 4).iter().sum();
                        assert_eq!(total, 4);
                    }
                }
            }
        }
    }
}

#[test]
fn one_seed_gives_one_sequence_and_two_seeds_two() {
    let logits: Vec<f32> = (0..1000).map(|i| ((i * 37) % 100) as f32 / 20.0).collect();
    let run = |seed: u64| {
        let mut sampler = Sampler::new(&SamplingParameters {
            seed,
            ..parameters()
        });
        // A scratch that others used holds nothing that matters.
        let mut scratch = Scratch::default();
        log_probabilities(&[0.0; 5000], 0, 5000, &mut scratch).unwrap();
        (0..32)
            .map(|_| sampler.sample(&logits, &mut scratch).unwrap())
            .collect::<Vec<u32>>()
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

#[test]
fn a_draw_at_the_border_takes_a_token_that_can_be_drawn() {
    assert_eq!(draw(&[0.0, 1.0, 0.0], 0.0), 1);
    assert_eq!(draw(&[0.5, 0.5], 0.0), 0);
    assert_eq!(draw(&[0.5, 0.5], 0.5), 1);
    assert_eq!(draw(&[0.1, 0.2, 0.0], 1.0 - f64::EPSILON / 2.0), 1);
    assert_eq!(draw(&[0.1, 0.2, 0.0], 1.0), 1);
}

#[test]
fn buffers_hold_the_vocabulary_once() {
    // All equal: every token is a candidate, and all are in one class of top_p.
    let logits = vec![1.0f32; 5000];
    let parameters = SamplingParameters {
        top_p: 0.999,
        ..parameters()
    };
    let mut sampler = Sampler::new(&parameters);
    let mut scratch = Scratch::default();
    log_probabilities(&logits, 0, 20, &mut scratch).unwrap();
    for _ in 0..3 {
        sampler.sample(&logits, &mut scratch).unwrap();
        let capacities = [
            scratch.candidates.capacity(),
            scratch.border.capacity(),
            scratch.weights.capacity(),
        ];
        assert_eq!(capacities, [5000; 3]);
    }
}

//! Predictions for whatever steps come, looked up while serving.

use super::Plan;
use super::scenario::Scenario;

/// Step times of a plan at widths that double and at both ends of the context; what lies between is interpolated.
#[derive(Clone, Debug, PartialEq)]
pub struct Forecast {
    context: u32,
    /// By width, ascending from 1.
    points: Vec<Point>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    width: u32,
    /// With nothing, and with a whole context, before the step's tokens.
    shallow_seconds: f64,
    deep_seconds: f64,
}

impl Forecast {
    /// Simulates a few steps of each width. Nothing that is measured later changes it.
    pub fn of(plan: &Plan) -> Forecast {
        let scenario = Scenario::of(plan);
        let context = plan.context;
        let mut widths: Vec<u32> = std::iter::successors(Some(1u32), |width| width.checked_mul(2))
            .take_while(|&width| width < plan.step_width)
            .collect();
        widths.push(plan.step_width.max(1));
        // Sequences that decode read their own part of the cache each, a prompt's tokens share one.
        widths.extend([plan.parallel, plan.parallel.saturating_add(1)]);
        widths.retain(|&width| width <= plan.step_width.max(1));
        widths.sort_unstable();
        widths.dedup();
        let points = widths.into_iter().map(|width| Point {
            width,
            shallow_seconds: scenario.predict(width, 0).step_seconds,
            deep_seconds: scenario.predict(width, context).step_seconds,
        });
        Forecast {
            context,
            points: points.collect(),
        }
    }

    /// Of a step of `width` tokens whose sequences hold `depth` positions already.
    pub fn step_seconds(&self, width: u32, depth: u32) -> f64 {
        let share = f64::from(depth.min(self.context)) / f64::from(self.context.max(1));
        let seconds = |point: &Point| {
            point.shallow_seconds + share * (point.deep_seconds - point.shallow_seconds)
        };
        let above = self.points.partition_point(|point| point.width < width);
        match (
            above.checked_sub(1).map(|below| &self.points[below]),
            self.points.get(above),
        ) {
            (Some(below), Some(above)) => {
                let span = f64::from(above.width - below.width);
                let share = f64::from(width - below.width) / span;
                seconds(below) + share * (seconds(above) - seconds(below))
            }
            (Some(only), None) | (None, Some(only)) => seconds(only),
            (None, None) => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_what_was_simulated_lies_a_straight_line() {
        let point = |width, shallow_seconds, deep_seconds| Point {
            width,
            shallow_seconds,
            deep_seconds,
        };
        let forecast = Forecast {
            context: 100,
            points: vec![point(1, 1.0, 3.0), point(4, 4.0, 8.0)],
        };
        for (width, depth, expected) in [
            (1, 0, 1.0),
            (1, 50, 2.0),
            (1, 100, 3.0),
            (1, 200, 3.0),
            (2, 0, 2.0),
            (4, 25, 5.0),
            (9, 0, 4.0),
        ] {
            let seconds = forecast.step_seconds(width, depth);
            assert!(
                (seconds - expected).abs() < 1e-9,
                "{width} tokens after {depth}: {seconds}, by hand {expected}"
            );
        }
    }
}

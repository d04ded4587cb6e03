//! Products of few tokens with weights of each type, and beside them candle's, over the same weights and in turn.

use cudarc::driver::CudaStream;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use serde_json::{Value, json};
use std::time::Instant;
use strata::gguf::TensorType;
use strata::kernels::cuda::{
    CudaKernels, DeviceMatrix, InputForm, MatrixProduct, QuantiseRows, quantised_input_bytes,
};
use strata::memory::DeviceAddress;
use strata::synth::{fill_floats, fill_random};

use super::candle::{self, CandleKernels, CandleProduct};
use super::{Memory, Outcome, Sizes};

/// The most tokens that the kernels for few tokens are made for, ours and candle's.
const TOKENS_MAX: usize = 8;

/// How far an output of candle's may be from ours, in units of the outputs' root mean square.
///
/// Both take the input in 8 bits, candle with a scale in half precision for each 32 elements, ours with one in single
/// precision for 32 or 256, so the same inputs are rounded differently. The input is spread evenly, so that the largest
/// of a block is about its bound, 127 steps: a step is 1/127 of the bound, its rounding error a step / sqrt(12), and
/// the input's root mean square the bound / sqrt(3). So one rounding makes outputs of independent weights differ from exact
/// ones by (1/127) / sqrt(12) * sqrt(3) = 0.004 of theirs, two of them by 0.0056. Where weights of 32 to a block have an
/// offset, of 8 for Q4_0, candle multiplies it by the sum of the inputs before they were rounded; what their errors are
/// multiplied by is then 0..16 in place of -8..8, which doubles it: about 0.01 at most. Five times that is allowed, for the
/// largest of a hundred thousand outputs. One block of 32 left out of rows of 4096 makes a difference of 0.09, a wrong row
/// one of 1.4.
const DIFFERENCE_MAX: f64 = 0.05;

/// A measurement for each type and number of tokens: seconds of a product alone, with its input quantised once before,
/// and of one together with the quantising. Where candle's product is not the same one, `wrong` says so, in place of its
/// times.
pub(super) fn measure(
    stream: &CudaStream,
    sizes: &Sizes,
    memory_rate: f64,
    kernels: &CudaKernels,
    candle: Option<&CandleKernels>,
) -> Outcome<Vec<Value>> {
    let mut measured = Vec::new();
    for kind in TensorType::ALL {
        let candle = candle.filter(|_| CandleKernels::multiplies(kind));
        let bench = Bench::new(stream, sizes, kind, kernels, candle)?;
        for tokens in 1..=TOKENS_MAX {
            measured.push(bench.of_tokens(tokens, memory_rate)?);
        }
    }
    Ok(measured)
}

/// The products with weights of one type.
struct Bench<'a> {
    stream: &'a CudaStream,
    kernels: &'a CudaKernels,
    candle: Option<&'a CandleKernels>,
    kind: TensorType,
    form: InputForm,
    rows: usize,
    columns: usize,
    rounds: usize,
    /// `count` matrices of these bytes, all with the same values.
    weights: Memory,
    matrix_bytes: usize,
    count: usize,
    /// f32 `[TOKENS_MAX, columns]`.
    input: Memory,
    ours: Buffers,
    candles: Buffers,
}

/// What each side has for itself.
struct Buffers {
    quantised: Memory,
    /// f32 `[tokens, rows]`.
    output: Memory,
}

/// Medians over rounds, of a product.
#[derive(Clone, Copy)]
struct Seconds {
    alone: f64,
    with_input: f64,
}

impl<'a> Bench<'a> {
    fn new(
        stream: &'a CudaStream,
        sizes: &Sizes,
        kind: TensorType,
        kernels: &'a CudaKernels,
        candle: Option<&'a CandleKernels>,
    ) -> Outcome<Bench<'a>> {
        let context = stream.context();
        let (rows, columns) = (sizes.rows, sizes.columns);
        let row_bytes = kind
            .row_bytes(columns as u64)
            .ok_or("rows of whole blocks")? as usize;
        let matrix_bytes = rows * row_bytes;
        let count = sizes.weights.div_ceil(matrix_bytes);
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let mut matrix = vec![0; matrix_bytes];
        let deviation = 1.0 / (columns as f32).sqrt();
        fill_random(kind, deviation, &mut random, &mut matrix);
        let mut input = vec![0; 4 * TOKENS_MAX * columns];
        fill_floats(TensorType::F32, 0.0, 1.0, &mut random, &mut input);
        let form = InputForm::of(kind);
        let buffers = |quantised: usize| -> Outcome<Buffers> {
            Ok(Buffers {
                quantised: Memory::filled(context, quantised.max(256), 0)?,
                output: Memory::filled(context, 4 * TOKENS_MAX * rows, 0)?,
            })
        };
        Ok(Bench {
            stream,
            kernels,
            candle,
            kind,
            form,
            rows,
            columns,
            rounds: sizes.rounds,
            weights: Memory::repeating(context, &matrix, count)?,
            matrix_bytes,
            count,
            input: Memory::repeating(context, &input, 1)?,
            ours: buffers(quantised_input_bytes(form, columns, TOKENS_MAX) as usize)?,
            candles: buffers(candle::quantised_bytes(columns, TOKENS_MAX))?,
        })
    }

    fn of_tokens(&self, tokens: usize, memory_rate: f64) -> Outcome<Value> {
        // No numbers until they are written: rows of a product of fewer tokens would pass for those of this one.
        for buffers in [&self.ours, &self.candles] {
            buffers.output.fill(4 * TOKENS_MAX * self.rows, 0xff)?;
        }
        self.quantise(tokens)?;
        let ours = |with_input: bool| -> Outcome<()> {
            for index in 0..self.count {
                if with_input {
                    self.quantise(tokens)?;
                }
                self.multiply(tokens, index)?;
            }
            Ok(())
        };
        let Some(candle) = self.candle else {
            let [alone, with_input] = self.race([&mut || ours(false), &mut || ours(true)])?;
            return Ok(self.report(tokens, memory_rate, Seconds { alone, with_input }));
        };
        let product = CandleProduct {
            kind: self.kind,
            rows: self.rows,
            columns: self.columns,
            tokens,
            input: &self.input,
            quantised: &self.candles.quantised,
            output: &self.candles.output,
        };
        candle.quantise(self.stream, &product)?;
        let candles = |with_input: bool| -> Outcome<()> {
            for index in 0..self.count {
                if with_input {
                    candle.quantise(self.stream, &product)?;
                }
                candle.multiply(self.stream, &product, self.weight(index).value())?;
            }
            Ok(())
        };
        let [
            ours_alone,
            candles_alone,
            ours_with_input,
            candles_with_input,
        ] = self.race([
            &mut || ours(false),
            &mut || candles(false),
            &mut || ours(true),
            &mut || candles(true),
        ])?;
        let (ours, candles) = (
            Seconds {
                alone: ours_alone,
                with_input: ours_with_input,
            },
            Seconds {
                alone: candles_alone,
                with_input: candles_with_input,
            },
        );
        let mut report = self.report(tokens, memory_rate, ours);
        let difference = self.difference(tokens)?;
        // One that is no number is not within it either.
        let is_within = difference <= DIFFERENCE_MAX;
        if !is_within {
            report["wrong"] = json!(format!(
                "{}, {tokens} tokens: candle's product differs from ours by {difference} of the outputs' root mean square, \
                 more than {DIFFERENCE_MAX}: these are not the same products",
                self.kind.name()
            ));
            return Ok(report);
        }
        report["candle"] = json!({
            "seconds": candles.alone,
            "bytes_per_second": self.matrix_bytes as f64 / candles.alone,
            "seconds_with_input": candles.with_input,
            "its_seconds_over_ours": candles.alone / ours.alone,
            "its_seconds_over_ours_with_input": candles.with_input / ours.with_input,
            "largest_difference": difference,
        });
        Ok(report)
    }

    fn report(&self, tokens: usize, memory_rate: f64, seconds: Seconds) -> Value {
        let rate = self.matrix_bytes as f64 / seconds.alone;
        json!({
            "type": self.kind.name(),
            "tokens": tokens,
            "seconds": seconds.alone,
            "bytes_per_second": rate,
            "share_of_memory": rate / memory_rate,
            "seconds_with_input": seconds.with_input,
        })
    }

    fn weight(&self, index: usize) -> DeviceAddress {
        self.weights.at(index * self.matrix_bytes)
    }

    fn quantise(&self, tokens: usize) -> Outcome<()> {
        if self.form == InputForm::Floats {
            return Ok(());
        }
        let rows = QuantiseRows {
            form: self.form,
            input: self.input.at(0),
            output: self.ours.quantised.at(0),
            columns: self.columns,
            tokens,
        };
        Ok(self.kernels.quantise_rows(self.stream, &rows)?)
    }

    fn multiply(&self, tokens: usize, index: usize) -> Outcome<()> {
        let input = match self.form {
            InputForm::Floats => &self.input,
            InputForm::Blocks32 | InputForm::Blocks256 => &self.ours.quantised,
        };
        let product = MatrixProduct {
            weight: DeviceMatrix {
                kind: self.kind,
                rows: self.rows,
                columns: self.columns,
                address: self.weight(index),
            },
            input: input.at(0),
            tokens,
            output: self.ours.output.at(0),
            stride: self.rows,
            first_column: 0,
        };
        Ok(self.kernels.matmul(self.stream, &product)?)
    }

    /// Seconds of a product in each of these ways, which queue one for each matrix: medians of rounds in which they take
    /// turns, so that a device that grows warm does so for all.
    fn race<const N: usize>(
        &self,
        mut ways: [&mut dyn FnMut() -> Outcome<()>; N],
    ) -> Outcome<[f64; N]> {
        let mut seconds = [const { Vec::new() }; N];
        // The first round is not counted.
        for round in 0..=self.rounds {
            for (way, seconds) in ways.iter_mut().zip(&mut seconds) {
                self.stream.synchronize()?;
                let began = Instant::now();
                way()?;
                self.stream.synchronize()?;
                if round > 0 {
                    seconds.push(began.elapsed().as_secs_f64() / self.count as f64);
                }
            }
        }
        Ok(seconds.map(|mut seconds| {
            seconds.sort_by(f64::total_cmp);
            seconds[seconds.len() / 2]
        }))
    }

    /// The largest difference of candle's outputs from ours, in units of their root mean square. No number where an output
    /// is none.
    fn difference(&self, tokens: usize) -> Outcome<f64> {
        let ours = self.ours.output.floats(tokens * self.rows)?;
        let candles = self.candles.output.floats(tokens * self.rows)?;
        let square = ours.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / ours.len() as f64;
        let pairs = ours.iter().zip(&candles);
        let differences =
            pairs.map(|(&ours, &candles)| (f64::from(ours) - f64::from(candles)).abs());
        // As f64::max, but what is no number stays.
        let largest = differences.fold(0.0, |a: f64, b| if b > a || b.is_nan() { b } else { a });
        Ok(largest / square.sqrt())
    }
}

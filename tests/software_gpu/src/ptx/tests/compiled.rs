//! What a compiler makes of `compiled.cu`, against the same in Rust.

use super::{BASE, Flat, Numbers};
use crate::ptx::float::{bf16_to_f32, f32_to_half, half_to_f32};
use crate::ptx::{Module, run};
use crate::seam::Launch;

/// Parts of one memory, each at a multiple of 256 bytes.
struct Parts {
    memory: Flat,
    parameters: Vec<u8>,
}

impl Parts {
    fn new() -> Parts {
        Parts {
            memory: Flat::new(0),
            parameters: Vec::new(),
        }
    }

    /// Adds a part and a pointer to it as the next parameter; its offset.
    fn add(&mut self, bytes: impl IntoIterator<Item = u8>) -> usize {
        let offset = self.memory.bytes.len().next_multiple_of(256);
        self.memory.bytes.resize(offset, 0xFF);
        self.memory.bytes.extend(bytes);
        self.parameters.extend((BASE + offset as u64).to_le_bytes());
        offset
    }

    fn run(&mut self, kernel: &str, launch: Launch, n: u32) {
        self.parameters.extend(n.to_le_bytes());
        let module = Module::parse(include_str!("compiled.ptx")).unwrap();
        let kernel = module.kernel(kernel).unwrap();
        assert_eq!(kernel.parameter_bytes(), self.parameters.len());
        run(&kernel, &launch, &self.parameters, &mut self.memory).unwrap();
    }

    fn at<const N: usize>(&self, offset: usize, index: usize) -> [u8; N] {
        self.memory.bytes[offset + index * N..][..N]
            .try_into()
            .unwrap()
    }

    fn f32(&self, offset: usize, index: usize) -> f32 {
        f32::from_le_bytes(self.at(offset, index))
    }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

fn shape(grid: [u32; 3], block: [u32; 3]) -> Launch {
    Launch {
        grid,
        block,
        ..Launch::default()
    }
}

fn random_floats(count: usize, scale: f32) -> Vec<f32> {
    let mut numbers = Numbers(3);
    (0..count)
        .map(|_| (numbers.next() as i32 as f32 / i32::MAX as f32) * scale)
        .collect()
}

#[test]
fn softmax() {
    for (n, threads) in [(1, 32), (100, 64), (1000, 256)] {
        let x = random_floats(n, 9.0);
        let mut parts = Parts::new();
        parts.add(bytes_of(&x));
        let y = parts.add(vec![0xFF; 4 * n]);
        parts.run("softmax", shape([1; 3], [threads, 1, 1]), n as u32);
        let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = x.iter().map(|&x| f64::from(x - largest).exp()).sum();
        for (index, &x) in x.iter().enumerate() {
            let (want, got) = (
                f64::from(x - largest).exp() / sum,
                f64::from(parts.f32(y, index)),
            );
            assert!(
                (got - want).abs() <= 1e-6 * want,
                "{n}, {index}: {got} for {want}"
            );
        }
    }
}

#[test]
fn functions() {
    let mut x = random_floats(2000, 8.0);
    // Far enough out for the slow way of reducing an angle.
    x.extend([0.0, -0.0, 1e-3, 100.0, -54_321.5, 1e6, 3e7, -2e9]);
    let mut parts = Parts::new();
    parts.add(bytes_of(&x));
    let y = parts.add(vec![0xFF; 48 * x.len()]);
    parts.run(
        "functions",
        shape([x.len().div_ceil(128) as u32, 1, 1], [128, 1, 1]),
        x.len() as u32,
    );
    for (index, &value) in x.iter().enumerate() {
        let a = f64::from(value);
        let whole =
            f64::from(value.round_ties_even() + value.floor() + value.ceil() + value.trunc());
        // The tolerances are those that CUDA documents, in units of the last place of the larger of value and 1.
        let expected = [
            a.sin(),
            f64::from(value * 1000.0).cos(),
            a.exp(),
            f64::from(value.abs() + 1e-3).ln(),
            a.tanh(),
            f64::from(value.abs() + 0.1).powf(f64::from(1.7f32)),
            a.abs().sqrt(),
            1.0 / f64::from(value.abs() + 1.0).sqrt(),
            error_function(a),
            whole,
            a.sin() / 3.0,
            f64::from(value % 0.7),
        ];
        for (function, want) in expected.into_iter().enumerate() {
            let got = f64::from(parts.f32(y, index * 12 + function));
            let tolerance = 4.0 * f64::from(f32::EPSILON) * want.abs().max(1.0);
            let both_infinite = got.is_infinite() && want > f64::from(f32::MAX);
            assert!(
                (got - want).abs() <= tolerance || both_infinite,
                "function {function} of {value}: {got} for {want}"
            );
        }
    }
}

/// By its series, or 1 beyond where f32 can tell the difference.
fn error_function(x: f64) -> f64 {
    if x.abs() > 5.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

const TABLE: [u8; 16] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3];

fn integer(a: u32, b: u32, i: u32) -> u64 {
    let wide = u64::from(a) << 32 | u64::from(b);
    let mut sum = (wide / u64::from(b | 1))
        .wrapping_add(wide % 1_000_003)
        .wrapping_add((i64::from(a as i32) / 7) as u64)
        .wrapping_add(i64::from(b as i32 % 13) as u64);
    match a % 7 {
        0 => sum = sum.wrapping_add(u64::from(b.count_ones())),
        1 => sum ^= u64::from(a.reverse_bits()),
        2 => {
            let first_set = if a == 0 { 0 } else { a.trailing_zeros() + 1 };
            sum = sum.wrapping_add(u64::from(b.leading_zeros() + first_set));
        }
        3 => sum = sum.wrapping_sub((u64::from(a) * u64::from(b)) >> 32),
        4 => sum = sum.wrapping_add(i64::from(i32::from(a as i8) * i32::from(b as i16)) as u64),
        5 => {
            let bytes = (u64::from(b) << 32 | u64::from(a)).to_le_bytes();
            sum = sum.wrapping_add(u64::from(u32::from_le_bytes([
                bytes[1], bytes[4], bytes[5], bytes[2],
            ])));
        }
        _ => sum = sum.wrapping_add(u64::from(b << 5 | a >> 27)),
    }
    let mut local: [u32; 8] = std::array::from_fn(|k| a.wrapping_mul(k as u32).wrapping_add(b));
    for k in 0..b & 15 {
        let value =
            local[k as usize & 7].wrapping_add(u32::from(TABLE[a.wrapping_add(k) as usize & 15]));
        local[a.wrapping_add(k) as usize & 7] ^= value;
    }
    for k in 0..8u32 {
        sum = sum
            .wrapping_mul(31)
            .wrapping_add(u64::from(local[k.wrapping_add(b) as usize & 7]));
    }
    let dot = (0..4).fold(i as i32, |sum, k| {
        sum.wrapping_add(i32::from(a.to_le_bytes()[k] as i8) * i32::from(b.to_le_bytes()[k] as i8))
    });
    let largest = i64::from((a as i32).max(b as i32)) as u64;
    sum.wrapping_add(i64::from(dot) as u64)
        .wrapping_add(largest)
        .wrapping_add(u64::from(a.min(b)))
}

#[test]
fn integers() {
    let mut numbers = Numbers(1);
    let mut x: Vec<u32> = (0..3000).map(|_| numbers.next() as u32).collect();
    x.extend([0, 1, u32::MAX, 0x8000_0000, 7, 0]);
    let n = x.len();
    let mut parts = Parts::new();
    parts.add(x.iter().flat_map(|value| value.to_le_bytes()));
    let y = parts.add(vec![0xFF; 8 * n]);
    let mut launch = shape([n.div_ceil(64) as u32, 1, 1], [64, 1, 1]);
    launch.block_order_seed = Some(9);
    parts.run("integers", launch, n as u32);
    for i in 0..n {
        let want = integer(x[i], x[(i + 1) % n], i as u32);
        assert_eq!(u64::from_le_bytes(parts.at(y, i)), want, "{i}: {:#x}", x[i]);
    }
}

#[test]
fn halves() {
    let n = 500;
    let x: Vec<u16> = random_floats(n, 4.0).into_iter().map(f32_to_half).collect();
    let z: Vec<u16> = random_floats(n, 2.0)
        .iter()
        .map(|value| (value.to_bits() >> 16) as u16)
        .collect();
    let mut parts = Parts::new();
    parts.add(x.iter().flat_map(|value| value.to_le_bytes()));
    parts.add(z.iter().flat_map(|value| value.to_le_bytes()));
    let y = parts.add(vec![0xFF; 4 * n]);
    let h = parts.add(vec![0xFF; 2 * n]);
    parts.run("halves", shape([4, 1, 1], [128, 1, 1]), n as u32);
    let weights = [0.5f32, 1.5, -2.0, 4.0];
    let round = |value: f32| half_to_f32(f32_to_half(value));
    for i in 0..n {
        let (a, b) = (half_to_f32(x[i]), half_to_f32(x[(i + 7) % n]));
        let (low, high) = (round(a * a + 0.25), round(b * b + 0.25));
        let bf = bf16_to_f32(z[i]);
        let sum = f64::from(round(a + b))
            + f64::from(low) * f64::from(high)
            + f64::from(bf + weights[i % 4]);
        let got = f64::from(parts.f32(y, i));
        assert!((got - sum).abs() < 1e-4, "{i}: {got} for {sum}");
        let most = round(bf).max(round(a * b));
        assert_eq!(half_to_f32(u16::from_le_bytes(parts.at(h, i))), most, "{i}");
    }
}

#[test]
fn histogram() {
    let mut numbers = Numbers(4);
    let x: Vec<u8> = (0..5000).map(|_| (numbers.next() % 256) as u8).collect();
    let mut parts = Parts::new();
    parts.add(x.iter().copied());
    let bins = parts.add([0; 1024]);
    let above = parts.add([0; 4]);
    let total = parts.add([0; 4]);
    parts.run("histogram", shape([7, 1, 1], [96, 1, 1]), x.len() as u32);
    for value in 0..256 {
        let want = x.iter().filter(|&&x| usize::from(x) == value).count() as u32;
        assert_eq!(u32::from_le_bytes(parts.at(bins, value)), want, "{value}");
    }
    let high = x.iter().filter(|&&x| x >= 128).count() as u32;
    assert_eq!(u32::from_le_bytes(parts.at(above, 0)), high);
    assert_eq!(
        parts.f32(total, 0),
        x.iter().map(|&x| f32::from(x)).sum::<f32>()
    );
}

#[test]
fn product() {
    let n = 37;
    let (a, b) = (random_floats(n * n, 1.0), random_floats(n * n + 5, 2.0));
    let mut parts = Parts::new();
    parts.add(bytes_of(&a));
    parts.add(bytes_of(&b));
    let c = parts.add(vec![0xFF; 4 * n * n]);
    let mut launch = shape([3, 3, 1], [16, 16, 1]);
    launch.dynamic_shared_bytes = 2 * 16 * 16 * 4;
    parts.run("product", launch, n as u32);
    for row in 0..n {
        for column in 0..n {
            // Zeros behind the end change nothing.
            let want = (0..n).fold(0f32, |sum, k| {
                a[row * n + k].mul_add(b[k * n + column], sum)
            });
            assert_eq!(parts.f32(c, row * n + column), want, "{row}, {column}");
        }
    }
}

//! Small PTX texts against plain Rust.

mod bits;
mod compiled;
mod control;
mod conversions;
mod exchange;
mod faults;
mod floats;
mod integers;
mod memory;
mod speed;

use super::Module;
use crate::seam::{Access, Fault, GlobalMemory, Launch};

/// One allocation.
struct Flat {
    bytes: Vec<u8>,
}

const BASE: u64 = 0x7000_0000_0000;

impl Flat {
    fn new(bytes: usize) -> Flat {
        Flat {
            bytes: vec![0xAA; bytes],
        }
    }

    fn of_words(words: &[u32]) -> Flat {
        Flat {
            bytes: words.iter().flat_map(|word| word.to_le_bytes()).collect(),
        }
    }

    fn words(&self) -> Vec<u32> {
        self.bytes
            .chunks_exact(4)
            .map(|chunk| u32::from_le_bytes(chunk.try_into().unwrap()))
            .collect()
    }
}

impl GlobalMemory for Flat {
    fn access(&mut self, address: u64, bytes: usize, _: Access) -> Result<*mut u8, Fault> {
        let offset = address.wrapping_sub(BASE) as usize;
        if offset
            .checked_add(bytes)
            .is_none_or(|end| end > self.bytes.len())
        {
            return Err(Fault(format!(
                "{bytes} bytes at {address:#x} in no allocation"
            )));
        }
        Ok(&raw mut self.bytes[offset])
    }
}

fn launch(blocks: u32, threads: u32) -> Launch {
    Launch {
        grid: [blocks, 1, 1],
        block: [threads, 1, 1],
        ..Launch::default()
    }
}

/// A kernel named `k` with one pointer, registers of all kinds, and %r0 = the thread's number in the grid.
fn kernel_text(declarations: &str, body: &str) -> String {
    format!(
        ".version 9.0\n.target sm_75\n.address_size 64\n{declarations}\n\
         .visible .entry k(.param .u64 p)\n{{\n\
         .reg .pred %p<10>;\n.reg .b16 %h<20>;\n.reg .b32 %r<40>;\n.reg .b64 %rd<40>;\n.reg .f32 %f<20>;\n\
         .reg .f64 %d<20>;\n\
         ld.param.u64 %rd0, [p];\n\
         mov.u32 %r0, %tid.x;\nmov.u32 %r39, %ctaid.x;\nmov.u32 %r38, %ntid.x;\n\
         mad.lo.u32 %r0, %r39, %r38, %r0;\n\
         {body}\nret;\n}}\n"
    )
}

/// Runs a kernel on memory that begins at [`BASE`].
fn execute(text: &str, launch: &Launch, memory: &mut Flat) -> Result<(), Fault> {
    let module = Module::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let kernel = module.kernel("k").unwrap();
    super::run(&kernel, launch, &BASE.to_le_bytes(), memory)
}

/// Runs `body` in each of `threads` threads of a block; one word for each, which `body` has put into %r1.
fn words_of(body: &str, threads: u32) -> Vec<u32> {
    let body = format!(
        "{body}\nmul.wide.u32 %rd1, %r0, 4;\nadd.u64 %rd1, %rd0, %rd1;\nst.global.u32 [%rd1], %r1;"
    );
    let mut memory = Flat::new(threads as usize * 4);
    execute(&kernel_text("", &body), &launch(1, threads), &mut memory).unwrap();
    memory.words()
}

/// Numbers that look random.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) ^ self.0.rotate_left(17)
    }
}

/// Integers and bit patterns of floats at whose edges operations go wrong, and random ones.
fn interesting(count: usize) -> Vec<[u64; 3]> {
    const EDGES: [u64; 26] = [
        0,
        1,
        2,
        3,
        7,
        31,
        32,
        33,
        63,
        64,
        0x7F,
        0x80,
        0xFF,
        0x7FFF,
        0x8000,
        0xFFFF,
        0x7FFF_FFFF,
        0x8000_0000,
        0xFFFF_FFFF,
        0x1_0000_0000,
        0x7FFF_FFFF_FFFF_FFFF,
        0x8000_0000_0000_0000,
        u64::MAX,
        0x3F80_0000,
        0x0080_0000,
        0x7F80_0000,
    ];
    let mut numbers = Numbers(7);
    let mut cases = Vec::new();
    for &a in &EDGES {
        for &b in &EDGES {
            cases.push([a, b, EDGES[numbers.next() as usize % EDGES.len()]]);
        }
    }
    while cases.len() < count {
        cases.push([
            numbers.next(),
            numbers.next(),
            numbers.next() >> (numbers.next() % 60),
        ]);
    }
    cases
}

/// f32 values of all kinds.
fn floats(count: usize) -> Vec<[u64; 3]> {
    const EDGES: [f32; 19] = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        1.5,
        2.5,
        -2.5,
        3.999,
        255.5,
        65504.0,
        65520.0,
        1e-40,
        -1e-42,
        1e-38,
        f32::MAX,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    let mut numbers = Numbers(11);
    let mut cases = Vec::new();
    for &a in &EDGES {
        for &b in &EDGES {
            cases.push(
                [a, b, EDGES[numbers.next() as usize % EDGES.len()]]
                    .map(|x| u64::from(x.to_bits())),
            );
        }
    }
    while cases.len() < count {
        let mut float = || {
            let bits = numbers.next() as u32;
            // Exponents near zero, so that sums and comparisons are not decided by them alone.
            u64::from(if bits & 1 == 0 {
                bits
            } else {
                bits & 0x83FF_FFFF | 0x3C00_0000
            })
        };
        cases.push([float(), float(), float()]);
    }
    cases
}

/// Runs `instructions` on each case: the sources are %rd1 to %rd3 and the same in %r, %h (16 bits), %f and %d; the
/// result is the register 4 of the kind that `result` names.
fn evaluate(instructions: &str, result: &str, cases: &[[u64; 3]]) -> Vec<u64> {
    let take = match result {
        "rd" => "",
        "r" => "cvt.u64.u32 %rd4, %r4;",
        "h" => "cvt.u64.u16 %rd4, %h4;",
        "f" => "mov.b32 %r4, %f4;\ncvt.u64.u32 %rd4, %r4;",
        "d" => "mov.b64 %rd4, %d4;",
        "p" => "selp.u64 %rd4, 1, 0, %p4;",
        other => panic!("{other}"),
    };
    let mut body = String::from("mul.wide.u32 %rd20, %r0, 32;\nadd.u64 %rd20, %rd0, %rd20;\n");
    for index in 1..=3 {
        body += &format!(
            "ld.global.u64 %rd{index}, [%rd20+{}];\ncvt.u32.u64 %r{index}, %rd{index};\n\
             cvt.u16.u64 %h{index}, %rd{index};\nmov.b32 %f{index}, %r{index};\nmov.b64 %d{index}, %rd{index};\n",
            8 * (index - 1)
        );
    }
    body += &format!("{instructions}\n{take}\nst.global.u64 [%rd20+24], %rd4;");
    let threads = 64;
    let blocks = cases.len().div_ceil(threads);
    let mut memory = Flat::new(blocks * threads * 32);
    for (case, chunk) in cases.iter().zip(memory.bytes.chunks_exact_mut(32)) {
        for (value, bytes) in case.iter().zip(chunk.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
    }
    execute(
        &kernel_text("", &body),
        &launch(blocks as u32, threads as u32),
        &mut memory,
    )
    .unwrap();
    let results = memory
        .bytes
        .chunks_exact(32)
        .map(|chunk| u64::from_le_bytes(chunk[24..].try_into().unwrap()));
    results.take(cases.len()).collect()
}

/// Holds an instruction against a function of the three sources.
fn check(instructions: &str, result: &str, expected: impl Fn(u64, u64, u64) -> u64) {
    check_on(
        &interesting(1500),
        instructions,
        result,
        |_, got, want| got == want,
        expected,
    );
}

/// As [`check`] on f32 sources and an f32 result; all NaN are equal.
fn check_f32(instructions: &str, expected: impl Fn(f32, f32, f32) -> f32) {
    let equal = |_: &[u64; 3], got: u64, want: u64| {
        got == want || f32::from_bits(got as u32).is_nan() && f32::from_bits(want as u32).is_nan()
    };
    check_on(&floats(1500), instructions, "f", equal, |a, b, c| {
        let [a, b, c] = [a, b, c].map(|bits| f32::from_bits(bits as u32));
        u64::from(expected(a, b, c).to_bits())
    });
}

fn check_on(
    cases: &[[u64; 3]],
    instructions: &str,
    result: &str,
    equal: impl Fn(&[u64; 3], u64, u64) -> bool,
    expected: impl Fn(u64, u64, u64) -> u64,
) {
    for (case, got) in cases.iter().zip(evaluate(instructions, result, cases)) {
        let [a, b, c] = *case;
        let want = expected(a, b, c);
        assert!(
            equal(case, got, want),
            "{instructions}: {a:#x} {b:#x} {c:#x} gave {got:#x}, not {want:#x}"
        );
    }
}

use std::cmp::Ordering::{Equal, Greater, Less};

use super::{check, check_f32, check_on, floats};
use crate::ptx::float::{
    Rounding, add_rounded, bf16_to_f32, f32_to_bf16, f32_to_half, flush, fused_rounded,
    half_to_f32, maximum, minimum, multiply_rounded, saturate,
};

#[test]
fn arithmetic() {
    check_f32("add.f32 %f4, %f1, %f2;", |a, b, _| a + b);
    check_f32("sub.rn.f32 %f4, %f1, %f2;", |a, b, _| a - b);
    check_f32("mul.f32 %f4, %f1, %f2;", |a, b, _| a * b);
    check_f32("fma.rn.f32 %f4, %f1, %f2, %f3;", f32::mul_add);
    check_f32("div.rn.f32 %f4, %f1, %f2;", |a, b, _| a / b);
    check_f32("rcp.rn.f32 %f4, %f1;", |a, _, _| 1.0 / a);
    check_f32("sqrt.rn.f32 %f4, %f1;", |a, _, _| a.sqrt());
    check_f32("abs.f32 %f4, %f1;", |a, _, _| a.abs());
    check_f32("neg.f32 %f4, %f1;", |a, _, _| -a);
    check_f32("min.f32 %f4, %f1, %f2;", |a, b, _| minimum(a, b));
    check_f32("max.f32 %f4, %f1, %f2;", |a, b, _| maximum(a, b));
    check_f32("max.NaN.f32 %f4, %f1, %f2;", |a, b, _| {
        if a.is_nan() || b.is_nan() {
            f32::NAN
        } else {
            maximum(a, b)
        }
    });
    check_f32("copysign.f32 %f4, %f1, %f2;", |a, b, _| b.copysign(a));
    check_f32("add.f32 %f4, %f1, 0f3F800000;", |a, _, _| a + 1.0);
    check_f32("mul.f32 %f4, %f1, 1.5;", |a, _, _| a * 1.5);
}

#[test]
fn modifiers() {
    check_f32("add.ftz.f32 %f4, %f1, %f2;", |a, b, _| {
        flush(flush(a) + flush(b))
    });
    check_f32("mul.sat.f32 %f4, %f1, %f2;", |a, b, _| saturate(a * b));
    check_f32("fma.rn.ftz.sat.f32 %f4, %f1, %f2, %f3;", |a, b, c| {
        saturate(flush(flush(a).mul_add(flush(b), flush(c))))
    });
    check_f32("add.rz.f32 %f4, %f1, %f2;", |a, b, _| {
        add_rounded(a, b, Rounding::Zero)
    });
    check_f32("mul.rp.f32 %f4, %f1, %f2;", |a, b, _| {
        multiply_rounded(a, b, Rounding::Up)
    });
    check_f32("fma.rm.f32 %f4, %f1, %f2, %f3;", |a, b, c| {
        fused_rounded(a, b, c, Rounding::Down)
    });
}

#[test]
fn directed_results_lie_on_the_right_side() {
    // Where the exact value fits in f64 (a product always does), rounding is checked against it.
    check_on(
        &floats(3000),
        "mul.rm.f32 %f4, %f1, %f2;",
        "f",
        |case, got, _| {
            let [a, b, _] = case.map(|bits| f64::from(f32::from_bits(bits as u32)));
            let (exact, got) = (a * b, f32::from_bits(got as u32));
            exact.is_nan()
                || f64::from(got) <= exact
                    && (f64::from(got) == exact || f64::from(got.next_up()) > exact)
        },
        |_, _, _| 0,
    );
}

#[test]
fn functions_are_as_exact_as_f32_allows() {
    check_f32("ex2.approx.f32 %f4, %f1;", |a, _, _| {
        f64::from(a).exp2() as f32
    });
    check_f32("ex2.approx.ftz.f32 %f4, %f1;", |a, _, _| {
        flush(f64::from(flush(a)).exp2() as f32)
    });
    check_f32("lg2.approx.f32 %f4, %f1;", |a, _, _| {
        f64::from(a).log2() as f32
    });
    check_f32("sin.approx.f32 %f4, %f1;", |a, _, _| {
        f64::from(a).sin() as f32
    });
    check_f32("cos.approx.f32 %f4, %f1;", |a, _, _| {
        f64::from(a).cos() as f32
    });
    check_f32("tanh.approx.f32 %f4, %f1;", |a, _, _| {
        f64::from(a).tanh() as f32
    });
    check_f32("rsqrt.approx.f32 %f4, %f1;", |a, _, _| {
        (1.0 / f64::from(a).sqrt()) as f32
    });
    check_f32("rcp.approx.ftz.f32 %f4, %f1;", |a, _, _| {
        flush(1.0 / flush(a))
    });
    check_f32("div.full.f32 %f4, %f1, %f2;", |a, b, _| a / b);
}

#[test]
fn doubles() {
    let double = |f: fn(f64, f64, f64) -> f64| {
        move |a: u64, b: u64, c: u64| {
            f(f64::from_bits(a), f64::from_bits(b), f64::from_bits(c)).to_bits()
        }
    };
    let check = |instructions: &str, expected: fn(f64, f64, f64) -> f64| {
        let equal = |_: &[u64; 3], got: u64, want: u64| {
            got == want || f64::from_bits(got).is_nan() && f64::from_bits(want).is_nan()
        };
        check_on(
            &super::interesting(1500),
            instructions,
            "d",
            equal,
            double(expected),
        );
    };
    check("add.f64 %d4, %d1, %d2;", |a, b, _| a + b);
    check("sub.rn.f64 %d4, %d1, %d2;", |a, b, _| a - b);
    check("mul.f64 %d4, %d1, %d2;", |a, b, _| a * b);
    check("fma.rn.f64 %d4, %d1, %d2, %d3;", f64::mul_add);
    check("div.rn.f64 %d4, %d1, %d2;", |a, b, _| a / b);
    check("sqrt.rn.f64 %d4, %d1;", |a, _, _| a.sqrt());
    check("neg.f64 %d4, %d1;", |a, _, _| -a);
    check("mul.f64 %d4, %d1, 0d4000000000000000;", |a, _, _| a * 2.0);
}

#[test]
fn comparisons_with_and_without_nan() {
    let check = |relation: &str, expected: fn(f32, f32) -> bool| {
        check_on(
            &floats(1000),
            &format!("setp.{relation}.f32 %p4, %f1, %f2;"),
            "p",
            |_, got, want| got == want,
            |a, b, _| u64::from(expected(f32::from_bits(a as u32), f32::from_bits(b as u32))),
        );
    };
    check("eq", |a, b| a == b);
    check("ne", |a, b| {
        matches!(a.partial_cmp(&b), Some(Less | Greater))
    });
    check("lt", |a, b| a < b);
    check("le", |a, b| a <= b);
    check("gt", |a, b| a > b);
    check("ge", |a, b| a >= b);
    check("equ", |a, b| a == b || a.is_nan() || b.is_nan());
    check("neu", |a, b| a != b);
    check("ltu", |a, b| matches!(a.partial_cmp(&b), None | Some(Less)));
    check("leu", |a, b| {
        matches!(a.partial_cmp(&b), None | Some(Less | Equal))
    });
    check("gtu", |a, b| {
        matches!(a.partial_cmp(&b), None | Some(Greater))
    });
    check("geu", |a, b| {
        matches!(a.partial_cmp(&b), None | Some(Greater | Equal))
    });
    check("num", |a, b| !a.is_nan() && !b.is_nan());
    check("nan", |a, b| a.is_nan() || b.is_nan());
    check("eq.ftz", |a, b| flush(a) == flush(b));
}

#[test]
fn properties() {
    let check = |property: &str, expected: fn(f32) -> bool| {
        check_on(
            &floats(600),
            &format!("testp.{property}.f32 %p4, %f1;"),
            "p",
            |_, got, want| got == want,
            |a, _, _| u64::from(expected(f32::from_bits(a as u32))),
        );
    };
    check("finite", f32::is_finite);
    check("infinite", f32::is_infinite);
    check("number", |a| !a.is_nan());
    check("notanumber", f32::is_nan);
    check("subnormal", f32::is_subnormal);
    check("normal", |a| a.is_normal() || a == 0.0);
}

/// Halves for one, two or three operands; all NaN are equal.
fn check_halves(instructions: &str, expected: impl Fn(u16, u16, u16) -> u16) {
    let nan = |bits: u64| bits & 0x7FFF > 0x7C00;
    let equal = |_: &[u64; 3], got: u64, want: u64| got == want || nan(got) && nan(want);
    check_on(
        &super::interesting(2000),
        instructions,
        "h",
        equal,
        |a, b, c| u64::from(expected(a as u16, b as u16, c as u16)),
    );
}

#[test]
fn halves() {
    let two =
        |f: fn(f32, f32) -> f32| move |a, b, _| f32_to_half(f(half_to_f32(a), half_to_f32(b)));
    check_halves("add.f16 %h4, %h1, %h2;", two(|a, b| a + b));
    check_halves("sub.f16 %h4, %h1, %h2;", two(|a, b| a - b));
    check_halves("mul.rn.f16 %h4, %h1, %h2;", two(|a, b| a * b));
    check_halves("min.f16 %h4, %h1, %h2;", two(minimum));
    check_halves("max.f16 %h4, %h1, %h2;", two(maximum));
    check_halves("neg.f16 %h4, %h1;", |a, _, _| a ^ 0x8000);
    check_halves("abs.f16 %h4, %h1;", |a, _, _| a & 0x7FFF);
    // The exact sum of a product of halves and a half has at most 80 bits, in f64 mostly fewer than 53.
    check_halves("fma.rn.f16 %h4, %h1, %h2, %h3;", |a, b, c| {
        let [a, b, c] = [a, b, c].map(|half| f64::from(half_to_f32(half)));
        f64_to_half(a.mul_add(b, c))
    });
}

/// By way of the two neighbours, in f64.
fn f64_to_half(value: f64) -> u16 {
    let near = f32_to_half(value as f32);
    if value.is_nan() || value.is_infinite() {
        return near;
    }
    let candidates = [near.wrapping_sub(1), near, near.wrapping_add(1)];
    let of = |half: u16| {
        // Infinity stands for the value that would follow the largest.
        let value = half_to_f32(half);
        if value.is_infinite() {
            f64::from(value.signum()) * 65536.0
        } else {
            f64::from(value)
        }
    };
    let mut best = near;
    for candidate in candidates {
        if half_to_f32(candidate).is_nan() {
            continue;
        }
        let (new, old) = ((of(candidate) - value).abs(), (of(best) - value).abs());
        if new < old || new == old && candidate & 1 == 0 && best & 1 == 1 {
            best = candidate;
        }
    }
    best
}

#[test]
fn pairs_of_halves_and_bfloats() {
    let nan = |half: u16| half & 0x7FFF > 0x7C00;
    let equal = |_: &[u64; 3], got: u64, want: u64| {
        [0, 16].iter().all(|shift| {
            let (got, want) = ((got >> shift) as u16, (want >> shift) as u16);
            got == want || nan(got) && nan(want)
        })
    };
    check_on(
        &super::interesting(1500),
        "add.f16x2 %r4, %r1, %r2;",
        "r",
        equal,
        |a, b, _| {
            [0, 16].iter().fold(0, |result, shift| {
                let sum = half_to_f32((a >> shift) as u16) + half_to_f32((b >> shift) as u16);
                result | u64::from(f32_to_half(sum)) << shift
            })
        },
    );
    let nan = |bits: u64| bits & 0x7FFF > 0x7F80;
    let equal = |_: &[u64; 3], got: u64, want: u64| got == want || nan(got) && nan(want);
    check_on(
        &super::interesting(1500),
        "mul.rn.bf16 %h4, %h1, %h2;",
        "h",
        equal,
        |a, b, _| u64::from(f32_to_bf16(bf16_to_f32(a as u16) * bf16_to_f32(b as u16))),
    );
    check("setp.lt.f16x2 %p5|%p4, %r1, %r2;", "p", |a, b, _| {
        u64::from(half_to_f32((a >> 16) as u16) < half_to_f32((b >> 16) as u16))
    });
    check("setp.gtu.f16 %p4, %h1, %h2;", "p", |a, b, _| {
        let order = half_to_f32(a as u16).partial_cmp(&half_to_f32(b as u16));
        u64::from(matches!(order, None | Some(Greater)))
    });
}

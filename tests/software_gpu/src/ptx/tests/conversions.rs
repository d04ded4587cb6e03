use super::{check, check_on, floats};
use crate::ptx::float::{f32_to_bf16, f32_to_half, flush, half_to_f32, saturate};

#[test]
fn between_integers() {
    check("cvt.u64.u32 %rd4, %r1;", "rd", |a, _, _| {
        u64::from(a as u32)
    });
    check("cvt.s64.s32 %rd4, %r1;", "rd", |a, _, _| a as i32 as u64);
    check("cvt.u32.u64 %r4, %rd1;", "r", |a, _, _| u64::from(a as u32));
    check("cvt.s32.s8 %r4, %r1;", "r", |a, _, _| {
        u64::from(a as i8 as u32)
    });
    check("cvt.u32.u8 %r4, %h1;", "r", |a, _, _| u64::from(a as u8));
    check("cvt.s16.s8 %h4, %h1;", "h", |a, _, _| {
        u64::from(a as i8 as u16)
    });
    check("cvt.u16.u32 %h4, %r1;", "h", |a, _, _| u64::from(a as u16));
    check("cvt.s8.s32 %r4, %r1;", "r", |a, _, _| {
        u64::from(a as i8 as i32 as u32)
    });
    check("cvt.u8.u32 %h4, %r1;", "h", |a, _, _| u64::from(a as u8));
    check("cvt.sat.u8.s32 %h4, %r1;", "h", |a, _, _| {
        (a as i32).clamp(0, 255) as u64
    });
    check("cvt.sat.s8.s32 %r4, %r1;", "r", |a, _, _| {
        u64::from((a as i32).clamp(-128, 127) as u32)
    });
    check("cvt.sat.u32.s64 %r4, %rd1;", "r", |a, _, _| {
        (a as i64).clamp(0, 0xFFFF_FFFF) as u64
    });
    check("cvt.u32.u16 %r4, %rd1;", "r", |a, _, _| u64::from(a as u16));
}

#[test]
fn from_integers_to_floats() {
    check("cvt.rn.f32.s32 %f4, %r1;", "f", |a, _, _| {
        u64::from((a as i32 as f32).to_bits())
    });
    check("cvt.rn.f32.u32 %f4, %r1;", "f", |a, _, _| {
        u64::from((a as u32 as f32).to_bits())
    });
    check("cvt.rn.f32.u64 %f4, %rd1;", "f", |a, _, _| {
        u64::from((a as f32).to_bits())
    });
    check("cvt.rn.f32.s8 %f4, %r1;", "f", |a, _, _| {
        u64::from((a as i8 as f32).to_bits())
    });
    check("cvt.rn.f32.u8 %f4, %h1;", "f", |a, _, _| {
        u64::from((a as u8 as f32).to_bits())
    });
    check("cvt.rn.f64.s64 %d4, %rd1;", "d", |a, _, _| {
        (a as i64 as f64).to_bits()
    });
    check("cvt.rn.f16.s32 %h4, %r1;", "h", |a, _, _| {
        // 24 bits of f32 may tie where the integer does not; these are exact.
        let value = a as i32;
        let clipped = value.clamp(-(1 << 20), 1 << 20);
        u64::from(f32_to_half(clipped as f32))
    });
    check_on(
        &super::interesting(1500),
        "cvt.rz.f32.s64 %f4, %rd1;",
        "f",
        |case, got, _| {
            let (exact, got) = (i128::from(case[0] as i64), f32::from_bits(got as u32));
            let value = got as i128;
            let next = if exact < 0 {
                got.next_down()
            } else {
                got.next_up()
            };
            value == exact || value.abs() < exact.abs() && (next as i128).abs() > exact.abs()
        },
        |_, _, _| 0,
    );
}

fn of_f32(instructions: &str, result: &str, expected: impl Fn(f32) -> u64) {
    let equal = |_: &[u64; 3], got: u64, want: u64| got == want;
    check_on(&floats(2000), instructions, result, equal, |a, _, _| {
        expected(f32::from_bits(a as u32))
    });
}

#[test]
fn from_floats_to_integers() {
    of_f32("cvt.rzi.s32.f32 %r4, %f1;", "r", |a| {
        u64::from(a as i32 as u32)
    });
    of_f32("cvt.rni.s32.f32 %r4, %f1;", "r", |a| {
        u64::from(a.round_ties_even() as i32 as u32)
    });
    of_f32("cvt.rmi.s32.f32 %r4, %f1;", "r", |a| {
        u64::from(a.floor() as i32 as u32)
    });
    of_f32("cvt.rpi.u32.f32 %r4, %f1;", "r", |a| {
        u64::from(a.ceil() as u32)
    });
    of_f32("cvt.rni.s8.f32 %r4, %f1;", "r", |a| {
        u64::from(a.round_ties_even() as i8 as i32 as u32)
    });
    of_f32("cvt.rzi.u64.f32 %rd4, %f1;", "rd", |a| a as u64);
    of_f32("cvt.rni.sat.u8.f32 %h4, %f1;", "h", |a| {
        u64::from(a.round_ties_even() as u8)
    });
    of_f32(
        "cvt.f64.f32 %d5, %f1; cvt.rzi.s32.f64 %r4, %d5;",
        "r",
        |a| u64::from(a as i32 as u32),
    );
}

#[test]
fn between_floats() {
    let bits = |value: f32| {
        if value.is_nan() {
            0x7FC0_0000
        } else {
            u64::from(value.to_bits())
        }
    };
    let check = |instructions: &str, expected: &dyn Fn(f32) -> f32| {
        let equal = |_: &[u64; 3], got: u64, want: u64| bits(f32::from_bits(got as u32)) == want;
        check_on(&floats(2000), instructions, "f", equal, |a, _, _| {
            bits(expected(f32::from_bits(a as u32)))
        });
    };
    check("cvt.rni.f32.f32 %f4, %f1;", &f32::round_ties_even);
    check("cvt.rzi.f32.f32 %f4, %f1;", &f32::trunc);
    check("cvt.rmi.f32.f32 %f4, %f1;", &f32::floor);
    check("cvt.rpi.ftz.f32.f32 %f4, %f1;", &|a| flush(a).ceil());
    check("cvt.sat.f32.f32 %f4, %f1;", &saturate);
    check("cvt.ftz.f32.f32 %f4, %f1;", &flush);
    check("cvt.f64.f32 %d5, %f1; cvt.rn.f32.f64 %f4, %d5;", &|a| a);
    check("cvt.rn.f16.f32 %h5, %f1; cvt.f32.f16 %f4, %h5;", &|a| {
        half_to_f32(f32_to_half(a))
    });
    check("cvt.rn.bf16.f32 %h5, %f1; cvt.f32.bf16 %f4, %h5;", &|a| {
        f32::from_bits(u32::from(f32_to_bf16(a)) << 16)
    });
    check("cvt.rz.bf16.f32 %h5, %f1; cvt.f32.bf16 %f4, %h5;", &|a| {
        f32::from_bits(a.to_bits() >> 16 << 16)
    });
    of_f32("cvt.rn.f16x2.f32 %r4, %f1, 0f40000000;", "r", |a| {
        u64::from(f32_to_half(a)) << 16 | 0x4000
    });
    of_f32("cvt.rn.bf16x2.f32 %r4, 0f40000000, %f1;", "r", |a| {
        u64::from(f32_to_bf16(a)) | 0x4000_0000
    });
    of_f32("cvt.rn.f16.f32 %h4, %f1;", "h", |a| {
        u64::from(f32_to_half(a))
    });
}

use super::check;
use super::integers::{h, r};

#[test]
fn logic_and_shifts() {
    check("and.b32 %r4, %r1, %r2;", "r", r(|a, b, _| a & b));
    check("or.b64 %rd4, %rd1, %rd2;", "rd", |a, b, _| a | b);
    check("xor.b16 %h4, %h1, %h2;", "h", h(|a, b, _| a ^ b));
    check("not.b32 %r4, %r1;", "r", r(|a, _, _| !a));
    check("not.b16 %h4, %h1;", "h", h(|a, _, _| !a));
    check("cnot.b32 %r4, %r1;", "r", r(|a, _, _| u32::from(a == 0)));
    check(
        "shl.b32 %r4, %r1, %r2;",
        "r",
        r(|a, b, _| a.checked_shl(b).unwrap_or(0)),
    );
    check("shl.b64 %rd4, %rd1, %r2;", "rd", |a, b, _| {
        a.checked_shl(b as u32).unwrap_or(0)
    });
    check("shl.b16 %h4, %h1, 3;", "h", h(|a, _, _| a << 3));
    check(
        "shr.u32 %r4, %r1, %r2;",
        "r",
        r(|a, b, _| a.checked_shr(b).unwrap_or(0)),
    );
    check("shr.s32 %r4, %r1, %r2;", "r", |a, b, _| {
        u64::from(((a as i32) >> (b as u32).min(31)) as u32)
    });
    check("shr.s64 %rd4, %rd1, %r2;", "rd", |a, b, _| {
        ((a as i64) >> (b as u32).min(63)) as u64
    });
    check("shr.u16 %h4, %h1, %r2;", "h", |a, b, _| {
        u64::from((a as u16).checked_shr(b as u32).unwrap_or(0))
    });
    check(
        "shf.l.wrap.b32 %r4, %r1, %r2, %r3;",
        "r",
        r(|a, b, c| ((u64::from(b) << 32 | u64::from(a)) << (c & 31) >> 32) as u32),
    );
    check(
        "shf.r.wrap.b32 %r4, %r1, %r2, %r3;",
        "r",
        r(|a, b, c| ((u64::from(b) << 32 | u64::from(a)) >> (c & 31)) as u32),
    );
    check(
        "shf.r.clamp.b32 %r4, %r1, %r2, %r3;",
        "r",
        r(|a, b, c| ((u64::from(b) << 32 | u64::from(a)) >> c.min(32)) as u32),
    );
    check(
        "shf.l.clamp.b32 %r4, %r1, %r2, %r3;",
        "r",
        r(|a, b, c| {
            if c >= 32 {
                a
            } else if c == 0 {
                b
            } else {
                b << c | a >> (32 - c)
            }
        }),
    );
    for table in [0x96u32, 0xE8, 0x80, 0xFE, 0x1B, 0xCA] {
        check(
            &format!("lop3.b32 %r4, %r1, %r2, %r3, {table:#x};"),
            "r",
            r(|a, b, c| {
                (0..32).fold(0, |result, bit| {
                    let index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1;
                    result | (table >> index & 1) << bit
                })
            }),
        );
    }
}

#[test]
fn bit_fields() {
    check("popc.b32 %r4, %r1;", "r", r(|a, _, _| a.count_ones()));
    check("popc.b64 %r4, %rd1;", "r", |a, _, _| {
        u64::from(a.count_ones())
    });
    check("clz.b32 %r4, %r1;", "r", r(|a, _, _| a.leading_zeros()));
    check("brev.b32 %r4, %r1;", "r", r(|a, _, _| a.reverse_bits()));
    check("brev.b64 %rd4, %rd1;", "rd", |a, _, _| a.reverse_bits());
    check(
        "bfind.u32 %r4, %r1;",
        "r",
        r(|a, _, _| a.checked_ilog2().unwrap_or(u32::MAX)),
    );
    check(
        "bfind.s32 %r4, %r1;",
        "r",
        r(|a, _, _| {
            (if (a as i32) < 0 { !a } else { a })
                .checked_ilog2()
                .unwrap_or(u32::MAX)
        }),
    );
    check(
        "bfind.shiftamt.u32 %r4, %r1;",
        "r",
        r(|a, _, _| a.checked_ilog2().map_or(u32::MAX, |bit| 31 - bit)),
    );
    check(
        "bfe.u32 %r4, %r1, %r2, %r3;",
        "r",
        r(|a, b, c| field(u64::from(a), b, c, 32, false) as u32),
    );
    check(
        "bfe.s32 %r4, %r1, %r2, %r3;",
        "r",
        r(|a, b, c| field(u64::from(a), b, c, 32, true) as u32),
    );
    check("bfe.u64 %rd4, %rd1, %r2, %r3;", "rd", |a, b, c| {
        field(a, b as u32, c as u32, 64, false)
    });
    check("bfe.s64 %rd4, %rd1, %r2, %r3;", "rd", |a, b, c| {
        field(a, b as u32, c as u32, 64, true)
    });
    check(
        "bfi.b32 %r4, %r1, %r2, %r3, 9;",
        "r",
        r(|a, b, c| {
            let mut result = b;
            for bit in 0..9 {
                let to = (c & 255) + bit;
                if to < 32 {
                    result = result & !(1 << to) | (a >> bit & 1) << to;
                }
            }
            result
        }),
    );
    check("bfi.b64 %rd4, %rd1, %rd2, 60, %r3;", "rd", |a, b, c| {
        (0..(c & 255).min(4)).fold(b, |result, bit| {
            result & !(1 << (60 + bit)) | (a >> bit & 1) << (60 + bit)
        })
    });
}

/// `bfe` as the PTX manual writes it, bit by bit.
fn field(a: u64, b: u32, c: u32, width: u32, signed: bool) -> u64 {
    let (position, length) = (b & 255, c & 255);
    let most = width - 1;
    let bit = |index: u32| a >> index & 1;
    let sign = if !signed || length == 0 {
        0
    } else {
        bit((position + length - 1).min(most))
    };
    let mut result = 0;
    for index in 0..width {
        let value = if index < length && position + index <= most {
            bit(position + index)
        } else {
            sign
        };
        result |= value << index;
    }
    result
}

#[test]
fn dot_products_of_bytes() {
    check("dp4a.s32.s32 %r4, %r1, %r2, %r3;", "r", |a, b, c| {
        let (a, b) = ((a as u32).to_le_bytes(), (b as u32).to_le_bytes());
        let sum = (0..4)
            .map(|i| i32::from(a[i] as i8) * i32::from(b[i] as i8))
            .sum::<i32>();
        u64::from((c as i32).wrapping_add(sum) as u32)
    });
    check("dp4a.u32.u32 %r4, %r1, %r2, %r3;", "r", |a, b, c| {
        let (a, b) = ((a as u32).to_le_bytes(), (b as u32).to_le_bytes());
        let sum = (0..4)
            .map(|i| u32::from(a[i]) * u32::from(b[i]))
            .sum::<u32>();
        u64::from((c as u32).wrapping_add(sum))
    });
    check("dp4a.u32.s32 %r4, %r1, %r2, %r3;", "r", |a, b, c| {
        let (a, b) = ((a as u32).to_le_bytes(), (b as u32).to_le_bytes());
        let sum = (0..4)
            .map(|i| i32::from(a[i]) * i32::from(b[i] as i8))
            .sum::<i32>();
        u64::from((c as i32).wrapping_add(sum) as u32)
    });
    check("dp4a.s32.u32 %r4, %r1, %r2, %r3;", "r", |a, b, c| {
        let (a, b) = ((a as u32).to_le_bytes(), (b as u32).to_le_bytes());
        let sum = (0..4)
            .map(|i| i32::from(a[i] as i8) * i32::from(b[i]))
            .sum::<i32>();
        u64::from((c as i32).wrapping_add(sum) as u32)
    });
    check("dp2a.lo.s32.s32 %r4, %r1, %r2, %r3;", "r", |a, b, c| {
        let product = |i: u32| i32::from((a >> (16 * i)) as i16) * i32::from((b >> (8 * i)) as i8);
        u64::from((c as i32).wrapping_add(product(0)).wrapping_add(product(1)) as u32)
    });
    check("dp2a.hi.u32.u32 %r4, %r1, %r2, %r3;", "r", |a, b, c| {
        let product =
            |i: u32| u32::from((a >> (16 * i)) as u16) * u32::from((b >> (16 + 8 * i)) as u8);
        u64::from((c as u32).wrapping_add(product(0)).wrapping_add(product(1)))
    });
}

#[test]
fn bytes_are_permuted() {
    check("prmt.b32 %r4, %r1, %r2, %r3;", "r", |a, b, c| {
        let bytes = (u64::from(b as u32) << 32 | u64::from(a as u32)).to_le_bytes();
        (0..4).fold(0, |result, i| {
            let selector = c as usize >> (4 * i) & 15;
            let byte = bytes[selector & 7];
            let byte = if selector & 8 != 0 {
                if byte & 128 != 0 { 255 } else { 0 }
            } else {
                byte
            };
            result | u64::from(byte) << (8 * i)
        })
    });
    check("prmt.b32 %r4, %r1, %r2, 0x7632;", "r", |a, b, _| {
        u64::from((a as u32) >> 16) | u64::from(b as u32 >> 16) << 16
    });
    check("prmt.b32.f4e %r4, %r1, %r2, 1;", "r", |a, b, _| {
        u64::from((a as u32) >> 8) | (b & 255) << 24
    });
    check("prmt.b32.rc8 %r4, %r1, %r2, 2;", "r", |a, _, _| {
        (a >> 16 & 255) * 0x0101_0101
    });
    check("prmt.b32.ecl %r4, %r1, %r2, 2;", "r", |a, _, _| {
        let byte = |i: u64| a >> (8 * i) & 255;
        byte(2) | byte(2) << 8 | byte(2) << 16 | byte(3) << 24
    });
}

use super::check;

pub(super) fn r(f: impl Fn(u32, u32, u32) -> u32) -> impl Fn(u64, u64, u64) -> u64 {
    move |a, b, c| u64::from(f(a as u32, b as u32, c as u32))
}

fn s(f: impl Fn(i32, i32, i32) -> i32) -> impl Fn(u64, u64, u64) -> u64 {
    move |a, b, c| u64::from(f(a as i32, b as i32, c as i32) as u32)
}

pub(super) fn h(f: impl Fn(u16, u16, u16) -> u16) -> impl Fn(u64, u64, u64) -> u64 {
    move |a, b, c| u64::from(f(a as u16, b as u16, c as u16))
}

#[test]
fn sums_and_products() {
    check(
        "add.u32 %r4, %r1, %r2;",
        "r",
        r(|a, b, _| a.wrapping_add(b)),
    );
    check("add.s64 %rd4, %rd1, %rd2;", "rd", |a, b, _| {
        a.wrapping_add(b)
    });
    check(
        "add.s16 %h4, %h1, %h2;",
        "h",
        h(|a, b, _| a.wrapping_add(b)),
    );
    check(
        "add.sat.s32 %r4, %r1, %r2;",
        "r",
        s(|a, b, _| a.saturating_add(b)),
    );
    check(
        "sub.sat.s32 %r4, %r1, %r2;",
        "r",
        s(|a, b, _| a.saturating_sub(b)),
    );
    check(
        "sub.u32 %r4, %r1, %r2;",
        "r",
        r(|a, b, _| a.wrapping_sub(b)),
    );
    check("sub.s64 %rd4, %rd1, -5;", "rd", |a, _, _| a.wrapping_add(5));
    check(
        "mul.lo.s32 %r4, %r1, %r2;",
        "r",
        r(|a, b, _| a.wrapping_mul(b)),
    );
    check("mul.lo.u64 %rd4, %rd1, %rd2;", "rd", |a, b, _| {
        a.wrapping_mul(b)
    });
    check(
        "mul.lo.u16 %h4, %h1, %h2;",
        "h",
        h(|a, b, _| a.wrapping_mul(b)),
    );
    check(
        "mul.hi.u32 %r4, %r1, %r2;",
        "r",
        r(|a, b, _| ((u64::from(a) * u64::from(b)) >> 32) as u32),
    );
    check(
        "mul.hi.s32 %r4, %r1, %r2;",
        "r",
        s(|a, b, _| ((i64::from(a) * i64::from(b)) >> 32) as i32),
    );
    check("mul.hi.u64 %rd4, %rd1, %rd2;", "rd", |a, b, _| {
        ((u128::from(a) * u128::from(b)) >> 64) as u64
    });
    check("mul.hi.s64 %rd4, %rd1, %rd2;", "rd", |a, b, _| {
        ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64
    });
    check(
        "mul.hi.u16 %h4, %h1, %h2;",
        "h",
        h(|a, b, _| ((u32::from(a) * u32::from(b)) >> 16) as u16),
    );
    check("mul.wide.u32 %rd4, %r1, %r2;", "rd", |a, b, _| {
        u64::from(a as u32) * u64::from(b as u32)
    });
    check("mul.wide.s32 %rd4, %r1, %r2;", "rd", |a, b, _| {
        (i64::from(a as i32) * i64::from(b as i32)) as u64
    });
    check("mul.wide.s16 %r4, %h1, %h2;", "r", |a, b, _| {
        u64::from((i32::from(a as i16) * i32::from(b as i16)) as u32)
    });
    check("mul.wide.u16 %r4, %h1, %h2;", "r", |a, b, _| {
        u64::from(u32::from(a as u16) * u32::from(b as u16))
    });
    check(
        "mad.lo.s32 %r4, %r1, %r2, %r3;",
        "r",
        r(|a, b, c| a.wrapping_mul(b).wrapping_add(c)),
    );
    check("mad.wide.s32 %rd4, %r1, %r2, %rd3;", "rd", |a, b, c| {
        (i64::from(a as i32) * i64::from(b as i32)).wrapping_add(c as i64) as u64
    });
    check(
        "mad.hi.u32 %r4, %r1, %r2, %r3;",
        "r",
        r(|a, b, c| (((u64::from(a) * u64::from(b)) >> 32) as u32).wrapping_add(c)),
    );
    check(
        "mul24.lo.u32 %r4, %r1, %r2;",
        "r",
        r(|a, b, _| (a & 0xFF_FFFF).wrapping_mul(b & 0xFF_FFFF)),
    );
    check(
        "mad24.lo.s32 %r4, %r1, %r2, %r3;",
        "r",
        s(|a, b, c| (a << 8 >> 8).wrapping_mul(b << 8 >> 8).wrapping_add(c)),
    );
}

#[test]
fn carries_go_from_one_word_to_the_next() {
    let split = "mov.b64 {%r5, %r6}, %rd1; mov.b64 {%r7, %r8}, %rd2;";
    check(
        &format!(
            "{split} add.cc.u32 %r9, %r5, %r7; addc.u32 %r10, %r6, %r8; mov.b64 %rd4, {{%r9, %r10}};"
        ),
        "rd",
        |a, b, _| a.wrapping_add(b),
    );
    check(
        &format!(
            "{split} sub.cc.u32 %r9, %r5, %r7; subc.u32 %r10, %r6, %r8; mov.b64 %rd4, {{%r9, %r10}};"
        ),
        "rd",
        |a, b, _| a.wrapping_sub(b),
    );
    check(
        "add.cc.u64 %rd5, %rd1, %rd2; addc.cc.u64 %rd6, %rd1, %rd2; addc.u64 %rd4, %rd3, 0;",
        "rd",
        |a, b, c| {
            let (_, first) = a.overflowing_add(b);
            let (sum, one) = a.overflowing_add(b);
            let (_, two) = sum.overflowing_add(u64::from(first));
            c.wrapping_add(u64::from(one | two))
        },
    );
}

#[test]
fn long_products_by_words() {
    // The lower 64 bits of %rd1 * %r2 + %rd3, word by word.
    check(
        "mov.b64 {%r5, %r6}, %rd1; mov.b64 {%r7, %r8}, %rd3;
         mad.lo.cc.u32 %r9, %r5, %r2, %r7; madc.hi.u32 %r10, %r5, %r2, %r8;
         mad.lo.u32 %r10, %r6, %r2, %r10; mov.b64 %rd4, {%r9, %r10};",
        "rd",
        |a, b, c| a.wrapping_mul(u64::from(b as u32)).wrapping_add(c),
    );
    check(
        "mad.lo.cc.u64 %rd5, %rd1, %rd2, %rd3; madc.hi.cc.u64 %rd6, %rd1, %rd2, %rd3; addc.u64 %rd4, %rd6, 0;",
        "rd",
        |a, b, c| {
            let low = u128::from(a) * u128::from(b);
            let carry = (low as u64).overflowing_add(c).1;
            let high = u128::from((low >> 64) as u64) + u128::from(c) + u128::from(carry);
            (high as u64).wrapping_add((high >> 64) as u64)
        },
    );
}

#[test]
fn division_by_zero_gives_all_ones() {
    check(
        "div.u32 %r4, %r1, %r2;",
        "r",
        r(|a, b, _| a.checked_div(b).unwrap_or(u32::MAX)),
    );
    check(
        "div.s32 %r4, %r1, %r2;",
        "r",
        s(|a, b, _| if b == 0 { -1 } else { a.wrapping_div(b) }),
    );
    check("div.u64 %rd4, %rd1, %rd2;", "rd", |a, b, _| {
        a.checked_div(b).unwrap_or(u64::MAX)
    });
    check(
        "div.u16 %h4, %h1, %h2;",
        "h",
        h(|a, b, _| a.checked_div(b).unwrap_or(u16::MAX)),
    );
    check(
        "rem.u32 %r4, %r1, %r2;",
        "r",
        r(|a, b, _| a.checked_rem(b).unwrap_or(a)),
    );
    check("rem.s64 %rd4, %rd1, %rd2;", "rd", |a, b, _| {
        (if b == 0 {
            a as i64
        } else {
            (a as i64).wrapping_rem(b as i64)
        }) as u64
    });
}

#[test]
fn order_and_sign() {
    check("min.s32 %r4, %r1, %r2;", "r", s(|a, b, _| a.min(b)));
    check("min.u32 %r4, %r1, %r2;", "r", r(|a, b, _| a.min(b)));
    check("max.s64 %rd4, %rd1, %rd2;", "rd", |a, b, _| {
        (a as i64).max(b as i64) as u64
    });
    check("max.u16 %h4, %h1, %h2;", "h", h(|a, b, _| a.max(b)));
    check(
        "min.s16 %h4, %h1, %h2;",
        "h",
        h(|a, b, _| (a as i16).min(b as i16) as u16),
    );
    check("abs.s32 %r4, %r1;", "r", s(|a, _, _| a.wrapping_abs()));
    check("neg.s32 %r4, %r1;", "r", s(|a, _, _| a.wrapping_neg()));
    check("neg.s64 %rd4, %rd1;", "rd", |a, _, _| a.wrapping_neg());
    check(
        "sad.u32 %r4, %r1, %r2, %r3;",
        "r",
        r(|a, b, c| c.wrapping_add(a.abs_diff(b))),
    );
    check("sad.s32 %r4, %r1, %r2, %r3;", "r", |a, b, c| {
        u64::from((c as u32).wrapping_add((a as i32).abs_diff(b as i32)))
    });
}

#[test]
fn comparisons_of_integers_and_their_combination() {
    check("setp.lt.s32 %p4, %r1, %r2;", "p", |a, b, _| {
        u64::from((a as i32) < b as i32)
    });
    check("setp.lt.u32 %p4, %r1, %r2;", "p", |a, b, _| {
        u64::from((a as u32) < b as u32)
    });
    check("setp.hs.u32 %p4, %r1, %r2;", "p", |a, b, _| {
        u64::from(a as u32 >= b as u32)
    });
    check("setp.ge.s64 %p4, %rd1, %rd2;", "p", |a, b, _| {
        u64::from(a as i64 >= b as i64)
    });
    check("setp.ne.b16 %p4, %h1, %h2;", "p", |a, b, _| {
        u64::from(a as u16 != b as u16)
    });
    check("setp.gt.s16 %p4, %h1, -1;", "p", |a, _, _| {
        u64::from(a as i16 >= 0)
    });
    check(
        "setp.lt.u32 %p1, %r1, %r3; setp.eq.and.u32 %p4, %r2, %r3, %p1;",
        "p",
        |a, b, c| u64::from(b as u32 == c as u32 && (a as u32) < c as u32),
    );
    check(
        "setp.lt.u32 %p1, %r1, %r3; setp.eq.or.u32 %p4|%p5, %r2, %r3, !%p1;",
        "p",
        |a, b, c| u64::from(b as u32 == c as u32 || a as u32 >= c as u32),
    );
    check(
        "setp.lt.u32 %p1, %r1, %r3; setp.eq.xor.u32 %p5|%p4, %r2, %r3, %p1;",
        "p",
        |a, b, c| u64::from((b as u32 != c as u32) ^ ((a as u32) < c as u32)),
    );
    check(
        "setp.lt.u32 %p1, %r1, %r2; setp.lt.u32 %p2, %r2, %r3; and.pred %p3, %p1, %p2; not.pred %p4, %p3;",
        "p",
        |a, b, c| u64::from(!((a as u32) < b as u32 && (b as u32) < c as u32)),
    );
    check("mov.pred %p4, -1; @%p4 mov.pred %p4, 0;", "p", |_, _, _| 0);
    check(
        "setp.eq.u32 %p1, %r1, %r2; selp.b32 %r4, %r1, %r3, %p1;",
        "r",
        r(|a, b, c| if a == b { a } else { c }),
    );
    check(
        "slct.b32.s32 %r4, %r1, %r2, %r3;",
        "r",
        r(|a, b, c| if c as i32 >= 0 { a } else { b }),
    );
    check("set.lt.u32.s32 %r4, %r1, %r2;", "r", |a, b, _| {
        if (a as i32) < b as i32 {
            0xFFFF_FFFF
        } else {
            0
        }
    });
}

#[test]
fn registers_are_packed_and_unpacked() {
    check(
        "mov.b64 {%r5, %r6}, %rd1; mov.b64 %rd4, {%r6, %r5};",
        "rd",
        |a, _, _| a.rotate_left(32),
    );
    check(
        "mov.b32 {%h5, %h6}, %r1; mov.b32 %r4, {%h6, %h5};",
        "r",
        r(|a, _, _| a.rotate_left(16)),
    );
    check("mov.b32 {_, %h4}, %r1;", "h", |a, _, _| a >> 16 & 0xFFFF);
    check(
        "mov.b64 {%h5, %h6, %h7, %h8}, %rd1; mov.b64 %rd4, {%h8, %h7, %h6, %h5};",
        "rd",
        |a, _, _| a >> 48 | (a >> 32 & 0xFFFF) << 16 | (a >> 16 & 0xFFFF) << 32 | a << 48,
    );
}

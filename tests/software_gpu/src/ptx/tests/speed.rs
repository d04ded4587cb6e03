//! How fast the interpreter is: `cargo test --release speed -- --ignored --nocapture`.

use std::time::Instant;

use super::{Flat, execute, kernel_text, launch};

/// Lane-instructions a second of a loop of `instructions`.
fn measure(name: &str, setup: &str, instructions: &str) -> f64 {
    let loops = 2000;
    let body = format!(
        "{setup}\nmov.u32 %r30, 0;\n$loop:\n{instructions}\nadd.u32 %r30, %r30, 1;\nsetp.lt.u32 %p9, %r30, {loops};\n\
         @%p9 bra $loop;"
    );
    let count = instructions.matches(';').count() + 3;
    let text = kernel_text("", &body);
    let mut memory = Flat::new(1 << 16);
    let (blocks, threads) = (4, 256);
    let start = Instant::now();
    execute(&text, &launch(blocks, threads), &mut memory).unwrap();
    let executed = f64::from(blocks * threads) * f64::from(loops) * count as f64;
    let rate = executed / start.elapsed().as_secs_f64();
    println!(
        "{name}: {:.0} million lane-instructions a second, {:.1} ns a warp's",
        rate / 1e6,
        32e9 / rate
    );
    rate
}

#[test]
fn runs_on_a_small_scale() {
    // The floor is 20 million; a debug build or a busy machine reaches it too.
    let rate = measure(
        "integer",
        "",
        "mad.lo.u32 %r1, %r0, 3, %r30; xor.b32 %r2, %r1, %r0; dp4a.s32.s32 %r3, %r1, %r2, %r3;",
    );
    assert!(rate > 20e6);
}

#[test]
#[ignore = "a measurement"]
fn speed() {
    measure(
        "integer",
        "",
        "mad.lo.u32 %r1, %r0, 3, %r30; xor.b32 %r2, %r1, %r0; dp4a.s32.s32 %r3, %r1, %r2, %r3;",
    );
    measure(
        "float",
        "mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f3F7FFFFF;",
        "fma.rn.f32 %f1, %f1, %f2, %f2; add.f32 %f3, %f1, %f2; mul.f32 %f4, %f3, %f1;",
    );
    measure(
        "wide",
        "",
        "mul.wide.u32 %rd1, %r0, 4; add.u64 %rd2, %rd1, %rd0; shl.b64 %rd3, %rd2, 2;",
    );
    measure(
        "load adjacent",
        "mul.wide.u32 %rd1, %r0, 4; add.u64 %rd1, %rd1, %rd0;",
        "ld.global.nc.f32 %f1, [%rd1]; ld.global.nc.f32 %f2, [%rd1+1024];",
    );
    measure(
        "load strided",
        "mul.wide.u32 %rd1, %r0, 34; add.u64 %rd1, %rd1, %rd0;",
        "ld.global.nc.u16 %h1, [%rd1]; ld.global.nc.u16 %h2, [%rd1+1024];",
    );
    measure(
        "load vector",
        "mul.wide.u32 %rd1, %r0, 16; add.u64 %rd1, %rd1, %rd0;",
        "ld.global.nc.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];",
    );
    measure(
        "shared",
        ".shared .align 16 .b8 s[4096]; mov.u32 %r1, %tid.x; shl.b32 %r1, %r1, 2; mov.u32 %r2, s; add.u32 %r1, %r1, %r2;",
        "st.shared.f32 [%r1], %f1; ld.shared.f32 %f2, [%r1];",
    );
    measure(
        "shuffle",
        "",
        "shfl.sync.bfly.b32 %r1, %r0, 16, 31, -1; shfl.sync.bfly.b32 %r2, %r1, 8, 31, -1;",
    );
    measure(
        "ex2",
        "mov.f32 %f1, 0f3F800000;",
        "ex2.approx.f32 %f2, %f1; ex2.approx.f32 %f3, %f2;",
    );
    measure(
        "halves",
        "mov.u16 %h1, 0x3C00;",
        "cvt.f32.f16 %f1, %h1; cvt.rn.f16.f32 %h1, %f1;",
    );
    measure(
        "setp",
        "",
        "setp.lt.s32 %p1, %r30, %r0; selp.b32 %r1, %r0, %r30, %p1; @%p1 add.u32 %r2, %r1, %r2;",
    );
    measure(
        "lop3 prmt",
        "",
        "lop3.b32 %r1, %r0, %r30, 240, 0xEA; prmt.b32 %r2, %r1, %r0, 0x5140;",
    );
}

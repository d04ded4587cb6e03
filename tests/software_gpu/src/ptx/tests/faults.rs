use super::{Flat, execute, kernel_text, launch};
use crate::ptx::Module;

/// Runs a body that has to fail; the message must contain all of `parts`.
fn check_fault(body: &str, threads: u32, parts: &[&str]) {
    let text = kernel_text("", body);
    let mut memory = Flat::new(1024);
    let fault = execute(&text, &launch(1, threads), &mut memory).expect_err(body);
    for part in parts {
        assert!(fault.0.contains(part), "`{part}` is not in: {fault}");
    }
    assert!(fault.0.starts_with("kernel k, "), "{fault}");
}

fn check_refused(text: &str, parts: &[&str]) {
    let error = Module::parse(text).expect_err(text).to_string();
    for part in parts {
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
}

#[test]
fn what_is_not_known_is_refused_when_parsed() {
    let line = "line 18";
    check_refused(
        &kernel_text("", "frobnicate.u32 %r1, %r2;"),
        &["kernel k", line, "frobnicate.u32"],
    );
    check_refused(
        &kernel_text("", "add.strange.u32 %r1, %r2, %r3;"),
        &["kernel k", line, ".strange", "add"],
    );
    check_refused(
        &kernel_text(
            "",
            "wmma.load.a.sync.aligned.row.m16n16k16.f16 {%r1}, [%rd0];",
        ),
        &["wmma"],
    );
    check_refused(
        &kernel_text("", "match.any.sync.b32 %r1, %r2, -1;"),
        &["match.any"],
    );
    check_refused(
        &kernel_text("", "fma.rz.f64 %d1, %d2, %d3, %d4;"),
        &["fma.rz.f64"],
    );
    check_refused(
        &kernel_text("", "add.u32 %r1, %q2, %r3;"),
        &["%q2", "not declared"],
    );
    check_refused(
        &kernel_text("", "bra $nowhere;"),
        &["$nowhere", "not defined"],
    );
    check_refused(&kernel_text("", "add.u64 %rd1, %r2, %rd3;"), &["narrower"]);
    check_refused(
        &kernel_text("", "add.u32 %r1, %r2;"),
        &["2 operands where 3"],
    );
    check_refused(
        &kernel_text("", "ld.global.v4.u64 {%rd1, %rd2, %rd3, %rd4}, [%rd0];"),
        &["ld.global.v4.u64"],
    );
    check_refused(&kernel_text("", "st.param.u32 [p], %r1;"), &["only read"]);
    check_refused(
        &kernel_text("", "call.uni f;"),
        &["function `f`", "call.uni"],
    );
    check_refused(
        &kernel_text(".func f() { call f; }", "call f;"),
        &["a recursion"],
    );
    check_refused(
        &kernel_text(".func f() { ret; }", "@%p1 call f;"),
        &["a guard"],
    );
    check_refused(".version 9.0\n.unknown 3", &["line 2", ".unknown"]);
}

#[test]
fn opcodes_are_listed_even_if_unknown() {
    let opcodes = Module::opcodes(&kernel_text(
        "",
        "frobnicate.u32 %r1, %r2; add.u32 %r1, %r1, 1;",
    ));
    assert!(
        opcodes.contains("frobnicate.u32")
            && opcodes.contains("add.u32")
            && opcodes.contains("ld.param.u64")
    );
}

#[test]
fn out_of_bounds() {
    check_fault(
        "mul.wide.u32 %rd1, %r0, 4; add.u64 %rd1, %rd1, %rd0; st.global.u32 [%rd1+960], %r0;",
        32,
        &[
            "line 18",
            "st.global.u32 [%rd1+960]",
            "block (0, 0, 0), thread (16, 0, 0)",
            "in no allocation",
        ],
    );
    check_fault("ld.global.f32 %f1, [%rd0+1024];", 1, &["in no allocation"]);
    check_fault(
        ".shared .align 4 .b8 s[64]; ld.shared.u32 %r1, [s+64];",
        1,
        &["shared memory, which has 64 bytes"],
    );
    check_fault(
        ".local .align 4 .b8 s[64]; st.local.u64 [s+64], %rd1;",
        1,
        &["local memory, which has 64 bytes"],
    );
    check_fault(
        "ld.param.u32 %r1, [p+8];",
        1,
        &["parameter memory, which has 8 bytes"],
    );
    check_fault(
        "ld.const.u32 %r1, [0];",
        1,
        &["constant memory, which has 0 bytes"],
    );
    check_fault(
        "mov.u64 %rd1, 0; ld.global.u32 %r1, [%rd1];",
        1,
        &["0x0 in no allocation"],
    );
}

#[test]
fn misaligned() {
    check_fault(
        "ld.global.u32 %r1, [%rd0+2];",
        4,
        &["is not a multiple of 4", "ld.global.u32"],
    );
    check_fault(
        "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd0+8];",
        4,
        &["is not a multiple of 16"],
    );
    check_fault(
        "mul.wide.u32 %rd1, %r0, 1; add.u64 %rd1, %rd1, %rd0; st.global.u16 [%rd1], 0;",
        4,
        &["thread (1, 0, 0)", "is not a multiple of 2"],
    );
    check_fault(
        ".shared .align 8 .b8 s[64]; st.shared.u64 [s+4], %rd0;",
        1,
        &["is not a multiple of 8"],
    );
}

#[test]
fn races_in_shared_memory() {
    // Each thread reads its neighbour's cell without a barrier.
    let body = |between: &str| {
        format!(
            ".shared .align 4 .b8 s[516];
             mov.u32 %r1, s; shl.b32 %r2, %r0, 2; add.u32 %r1, %r1, %r2;
             st.shared.u32 [%r1], %r0;
             {between}
             ld.shared.u32 %r3, [%r1+4];"
        )
    };
    check_fault(
        &body(""),
        128,
        &[
            "a race for byte",
            "this write by warp 1 and the read by warp 0",
            "st.shared.u32",
            "ld.shared.u32",
        ],
    );
    let mut memory = Flat::new(4);
    execute(
        &kernel_text("", &body("bar.sync 0;")),
        &launch(1, 128),
        &mut memory,
    )
    .unwrap();
    // Within a warp there is none.
    execute(&kernel_text("", &body("")), &launch(1, 32), &mut memory).unwrap();
    // Bytes side by side do not race where the kernel's accesses are of bytes.
    let bytes =
        ".shared .align 4 .b8 s[64]; mov.u32 %r1, s; mov.u32 %r2, %warpid; add.u32 %r1, %r1, %r2;
                 st.shared.u8 [%r1], %r0;";
    execute(&kernel_text("", bytes), &launch(1, 128), &mut memory).unwrap();
    check_fault(
        ".shared .align 4 .b8 s[4]; st.shared.u32 [s], %r0;",
        64,
        &["this write by warp 1 and the write by warp 0"],
    );
}

#[test]
fn shared_memory_and_registers_begin_as_poison() {
    let words = super::words_of(".shared .align 4 .b8 s[256]; ld.shared.u32 %r1, [s+8];", 1);
    assert_eq!(words, [u32::MAX]);
    assert_eq!(super::words_of("", 4), [u32::MAX; 4]);
    assert_eq!(super::words_of("@%p3 mov.u32 %r1, 4;", 2), [4; 2]);
    // Not with what the block before has left.
    let text = kernel_text(
        "",
        ".shared .align 4 .u32 s; .local .align 4 .u32 l;
         setp.eq.u32 %p1, %r0, 0;
         @%p1 mov.u32 %r1, 1; @%p1 st.shared.u32 [s], %r1; @%p1 st.local.u32 [l], %r1;
         ld.shared.u32 %r2, [s]; ld.local.u32 %r3, [l];
         mul.wide.u32 %rd1, %r0, 16; add.u64 %rd1, %rd1, %rd0;
         st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r0};",
    );
    let mut memory = Flat::new(32);
    execute(&text, &launch(2, 1), &mut memory).unwrap();
    assert_eq!(
        memory.words(),
        [1, 1, 1, 0, u32::MAX, u32::MAX, u32::MAX, 1]
    );
    let words = super::words_of(".local .align 4 .b8 s[8]; ld.local.u32 %r1, [s+4];", 40);
    assert_eq!(words, [u32::MAX; 40]);
}

#[test]
fn lanes_that_never_meet() {
    check_fault(
        "setp.lt.u32 %p1, %r0, 4;
         @%p1 bra $other;
         shfl.sync.idx.b32 %r1, %r0, 0, 31, -1;
         bra $end;
         $other:
         vote.sync.ballot.b32 %r1, %p1, -1;
         $end:",
        32,
        &[
            "nobody can go on",
            "lanes 0xfffffff0 at line 20 (shfl.sync",
            "lanes 0x0000000f at line 23 (vote.sync",
        ],
    );
    check_fault(
        "shfl.sync.idx.b32 %r1, %r0, 0, 31, 0xffff;",
        32,
        &["not among the members 0x0000ffff"],
    );
}

#[test]
fn barriers_that_part_of_a_block_reaches() {
    check_fault(
        "setp.lt.u32 %p1, %r0, 32; @%p1 bra $other; bar.sync 1; bra $end; $other: bar.sync 2; $end:",
        64,
        &[
            "nobody can go on",
            "warp 0 lanes 0xffffffff at line 18 (setp",
            "warp 1",
        ],
    );
    check_fault(
        "setp.lt.u32 %p1, %r0, 40; @%p1 exit;\nbar.sync 0;",
        64,
        &[
            "only lanes 0xffffff00 of warp 1 have reached",
            "have exited",
        ],
    );
    check_fault(
        "setp.lt.u32 %p1, %r0, 8;\n@%p1 bra $other;\nbar.sync 0;\nbra $end;\n$other:\nbar.sync 0;\n$end:",
        32,
        &["divided between this barrier", "line 23 (bar.sync 0;)"],
    );
    check_fault("bar.sync 16;", 32, &["barrier 16 does not exist"]);
    // A whole warp may go.
    let mut memory = Flat::new(4);
    let text = kernel_text("", "setp.lt.u32 %p1, %r0, 32; @%p1 exit; bar.sync 0;");
    execute(&text, &launch(1, 96), &mut memory).unwrap();
}

#[test]
fn a_loop_without_an_end() {
    check_fault(
        "$loop:\n@%p1 bra $loop;",
        64,
        &[
            "the block does not end",
            "warp 1 lanes 0xffffffff at line 19 (@%p1 bra $loop;)",
        ],
    );
    // One warp may wait in a loop for what another writes.
    let words = super::words_of(
        ".shared .align 4 .u32 flag;
         setp.ge.u32 %p1, %r0, 32;
         @%p1 bra $set;
         $wait:
         atom.shared.or.b32 %r1, [flag], 0;
         setp.ne.u32 %p2, %r1, 5;
         @%p2 bra $wait;
         bra $end;
         $set:
         atom.shared.exch.b32 %r1, [flag], 5;
         $end:",
        33,
    );
    assert_eq!(words[..32], [5; 32]);
}

#[test]
fn a_trap_and_a_bad_launch() {
    check_fault(
        "setp.eq.u32 %p1, %r0, 3; @%p1 trap;",
        8,
        &["thread (3, 0, 0): the kernel gives up"],
    );
    let text = kernel_text("", "");
    let mut memory = Flat::new(4);
    for threads in [0, 1025] {
        let fault = execute(&text, &launch(1, threads), &mut memory).unwrap_err();
        assert!(fault.0.contains("a launch of"), "{fault}");
    }
    assert!(execute(&text, &launch(0, 1), &mut memory).is_err());
    let limited = text.replace(".u64 p)", ".u64 p)\n.maxntid 16, 4\n.minnctapersm 1");
    execute(&limited, &launch(1, 64), &mut memory).unwrap();
    let fault = execute(&limited, &launch(1, 65), &mut memory).unwrap_err();
    assert!(fault.0.contains("takes 64 at most"), "{fault}");
    let module = Module::parse(&text).unwrap();
    let fault = crate::ptx::run(
        &module.kernel("k").unwrap(),
        &launch(1, 1),
        &[0; 4],
        &mut memory,
    )
    .unwrap_err();
    assert!(
        fault.0.contains("4 bytes of parameters where 8 are needed"),
        "{fault}"
    );
}

#[test]
fn a_damaged_text_is_refused_or_parsed_but_nothing_worse() {
    let text = include_str!("compiled.ptx");
    let words: Vec<&str> = text.split_inclusive([' ', '\t', '\n']).collect();
    let mut numbers = super::Numbers(8);
    let mut refused = 0;
    for _ in 0..300 {
        let mut damaged = words.clone();
        for _ in 0..1 + numbers.next() % 3 {
            let at = numbers.next() as usize % damaged.len();
            let other = numbers.next() as usize % words.len();
            match numbers.next() % 4 {
                0 => drop(damaged.remove(at)),
                1 => damaged[at] = words[other],
                2 => damaged.insert(
                    at,
                    [
                        ";",
                        "}",
                        "{",
                        "[",
                        "\"",
                        "0x",
                        "@",
                        "<",
                        "18446744073709551615",
                        ".",
                    ][other % 10],
                ),
                _ => damaged.truncate(at.max(10)),
            }
        }
        refused += u32::from(Module::parse(&damaged.concat()).is_err());
    }
    assert!(refused > 150, "{refused}");
}

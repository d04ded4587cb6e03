use super::{Flat, Numbers, execute, kernel_text, launch, words_of};

#[test]
fn special_registers() {
    let body = "
        mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;
        mov.u32 %r4, %ntid.x; mov.u32 %r5, %ntid.y;
        mov.u32 %r6, %ctaid.x; mov.u32 %r7, %ctaid.y; mov.u32 %r8, %nctaid.x;
        mad.lo.u32 %r9, %r3, %r5, %r2; mad.lo.u32 %r9, %r9, %r4, %r1;
        mad.lo.u32 %r10, %r7, %r8, %r6;
        mad.lo.u32 %r11, %r10, 24, %r9;
        mul.wide.u32 %rd1, %r11, 16; add.u64 %rd1, %rd1, %rd0;
        mov.u32 %r12, %laneid; mov.u32 %r13, %warpid; mov.u32 %r14, %lanemask_lt; mov.u32 %r15, WARP_SZ;
        st.global.v4.u32 [%rd1], {%r12, %r13, %r14, %r15};";
    let mut memory = Flat::new(24 * 6 * 16);
    let mut shape = launch(3, 4);
    shape.grid[1] = 2;
    shape.block = [4, 3, 2];
    shape.block_order_seed = Some(3);
    execute(&kernel_text("", body), &shape, &mut memory).unwrap();
    for (thread, words) in memory.words().chunks(4).enumerate() {
        let thread = thread as u32 % 24;
        assert_eq!(words, [thread, 0, (1 << thread) - 1, 32]);
    }
}

#[test]
fn a_loop_of_a_different_length_in_each_lane() {
    // Collatz: how many steps each thread's number + 1 takes.
    let words = words_of(
        "
        add.u32 %r2, %r0, 1;
        mov.u32 %r1, 0;
        $again:
        setp.eq.u32 %p1, %r2, 1;
        @%p1 bra $done;
        and.b32 %r3, %r2, 1;
        setp.eq.u32 %p2, %r3, 0;
        @%p2 bra $even;
        mad.lo.u32 %r2, %r2, 3, 1;
        bra.uni $next;
        $even:
        shr.u32 %r2, %r2, 1;
        $next:
        add.u32 %r1, %r1, 1;
        bra $again;
        $done:",
        100,
    );
    for (i, &steps) in words.iter().enumerate() {
        let (mut value, mut expected) = (i as u64 + 1, 0);
        while value != 1 {
            value = if value % 2 == 0 {
                value / 2
            } else {
                3 * value + 1
            };
            expected += 1;
        }
        assert_eq!(steps, expected, "{i}");
    }
}

#[test]
fn cold_code_behind_the_end_comes_back() {
    let words = words_of(
        "
        mov.u32 %r1, 1;
        setp.lt.u32 %p1, %r0, 5;
        @%p1 bra $cold;
        $warm:
        add.u32 %r1, %r1, %r0;
        bra $store;
        $cold:
        mov.u32 %r1, 100;
        bra $warm;
        $store:",
        32,
    );
    assert!(
        words
            .iter()
            .enumerate()
            .all(|(i, &word)| word == i as u32 + if i < 5 { 100 } else { 1 })
    );
}

#[test]
fn a_table_of_branches() {
    let words = words_of(
        "
        and.b32 %r2, %r0, 3;
        $targets: .branchtargets $a, $b, $c, $b;
        brx.idx %r2, $targets;
        $a: mov.u32 %r1, 10; bra $end;
        $b: mov.u32 %r1, 20; bra $end;
        $c: mov.u32 %r1, 30; bra $end;
        $end:",
        64,
    );
    assert!(
        words
            .iter()
            .enumerate()
            .all(|(i, &word)| word == [10, 20, 30, 20][i % 4])
    );
}

#[test]
fn guarded_writes_keep_the_other_lanes() {
    let words = words_of(
        "
        mov.u32 %r1, 7;
        setp.gt.u32 %p1, %r0, 10;
        @%p1 add.u32 %r1, %r0, 0;
        @!%p1 mul.lo.u32 %r1, %r1, 3;
        @%p1 cvt.u64.u32 %rd9, %r0;
        @%p1 add.u64 %rd9, %rd9, 1;
        @%p1 cvt.u32.u64 %r1, %rd9;",
        50,
    );
    assert!(
        words
            .iter()
            .enumerate()
            .all(|(i, &word)| word == if i > 10 { i as u32 + 1 } else { 21 })
    );
}

#[test]
fn some_lanes_exit_early() {
    let text = kernel_text(
        "",
        "mul.wide.u32 %rd1, %r0, 4; add.u64 %rd1, %rd1, %rd0;
         setp.ge.u32 %p1, %r0, 50; @%p1 ret;
         st.global.u32 [%rd1], %r0;",
    );
    let mut memory = Flat::of_words(&[99; 96]);
    execute(&text, &launch(3, 32), &mut memory).unwrap();
    let expected: Vec<u32> = (0..96).map(|i| if i < 50 { i } else { 99 }).collect();
    assert_eq!(memory.words(), expected);
}

#[test]
fn a_tree_of_sums_over_barriers_in_any_order_of_warps() {
    let body = "
        .shared .align 4 .f32 sums[256];
        mov.u32 %r1, %tid.x;
        cvt.rn.f32.u32 %f1, %r1;
        shl.b32 %r2, %r1, 2;
        mov.u32 %r3, sums;
        add.u32 %r4, %r3, %r2;
        st.shared.f32 [%r4], %f1;
        mov.u32 %r5, 128;
        $loop:
        bar.sync 0;
        setp.ge.u32 %p1, %r1, %r5;
        @%p1 bra $skip;
        shl.b32 %r6, %r5, 2;
        add.u32 %r7, %r4, %r6;
        ld.shared.f32 %f2, [%r7];
        ld.shared.f32 %f3, [%r4];
        add.f32 %f3, %f3, %f2;
        st.shared.f32 [%r4], %f3;
        $skip:
        shr.u32 %r5, %r5, 1;
        setp.ne.u32 %p2, %r5, 0;
        @%p2 bra $loop;
        setp.eq.u32 %p3, %r1, 0;
        mov.u32 %r8, %ctaid.x;
        mul.wide.u32 %rd1, %r8, 4;
        add.u64 %rd1, %rd1, %rd0;
        @%p3 ld.shared.f32 %f4, [sums];
        @%p3 st.global.f32 [%rd1], %f4;";
    for seed in [None, Some(1), Some(2), Some(77)] {
        let mut memory = Flat::new(12);
        let mut shape = launch(3, 256);
        shape.block_order_seed = seed;
        execute(&kernel_text("", body), &shape, &mut memory).unwrap();
        assert_eq!(memory.words(), [32640f32.to_bits(); 3]);
    }
}

#[test]
fn many_registers_share_rows_and_keep_their_values() {
    // A long random program on 60 registers with branches, against the same in Rust.
    let mut numbers = Numbers(5);
    let mut body = String::from(".reg .b32 %x<60>;\n.reg .b64 %y<20>;\n");
    let mut values: Vec<Vec<u32>> = (0..32)
        .map(|lane| (0..60).map(|i| lane * 100 + i).collect())
        .collect();
    let mut wide: Vec<Vec<u64>> = vec![vec![5; 20]; 32];
    for i in 0..60 {
        body += &format!("mad.lo.u32 %x{i}, %r0, 100, {i};\n");
    }
    for i in 0..20 {
        body += &format!("mov.u64 %y{i}, 5;\n");
    }
    for step in 0..600 {
        let [a, b, c] = [0; 3].map(|_| numbers.next() as usize % 60);
        let [u, v] = [0; 2].map(|_| numbers.next() as usize % 20);
        match numbers.next() % 5 {
            0 => {
                body += &format!("add.u32 %x{a}, %x{b}, %x{c};\n");
                values
                    .iter_mut()
                    .for_each(|x| x[a] = x[b].wrapping_add(x[c]));
            }
            1 => {
                body += &format!("mad.wide.u32 %y{u}, %x{b}, %x{c}, %y{v};\n");
                for (x, y) in values.iter().zip(&mut wide) {
                    y[u] = (u64::from(x[b]) * u64::from(x[c])).wrapping_add(y[v]);
                }
            }
            2 => {
                body += &format!("cvt.u32.u64 %x{a}, %y{v};\n");
                values
                    .iter_mut()
                    .zip(&wide)
                    .for_each(|(x, y)| x[a] = y[v] as u32);
            }
            3 => {
                body += &format!(
                    "setp.lt.u32 %p1, %x{b}, %x{c};\n@%p1 xor.b32 %x{a}, %x{b}, {step};\n"
                );
                for x in &mut values {
                    x[a] = if x[b] < x[c] { x[b] ^ step } else { x[a] };
                }
            }
            _ => {
                body += &format!(
                    "setp.gt.u32 %p2, %x{a}, %x{b};\n@%p2 bra $s{step};\nmov.u32 %x{c}, %x{a};\n\
                     sub.u32 %x{a}, %x{b}, %x{a};\n$s{step}:\n"
                );
                for x in &mut values {
                    if x[a] <= x[b] {
                        x[c] = x[a];
                        x[a] = x[b].wrapping_sub(x[a]);
                    }
                }
            }
        }
    }
    body += "mov.u32 %r1, 0;\n";
    for i in 0..60 {
        body += &format!("mad.lo.u32 %r1, %r1, 31, %x{i};\n");
    }
    let expected: Vec<u32> = values
        .iter()
        .map(|x| {
            x.iter()
                .fold(0u32, |sum, &x| sum.wrapping_mul(31).wrapping_add(x))
        })
        .collect();
    assert_eq!(words_of(&body, 32), expected);
}

#[test]
fn a_guarded_write_keeps_its_row_around_a_loop() {
    let words = words_of(
        "mov.u32 %r1, 0; mov.u32 %r2, 0;
         $again:
         add.u32 %r9, %r2, 100;
         add.u32 %r1, %r1, %r9;
         setp.eq.u32 %p1, %r2, 0;
         @%p1 mov.u32 %r5, 5000;
         add.u32 %r1, %r1, %r5;
         add.u32 %r2, %r2, 1;
         setp.lt.u32 %p2, %r2, 3;
         @%p2 bra $again;",
        32,
    );
    assert_eq!(words, [100 + 101 + 102 + 3 * 5000; 32]);
}

#[test]
fn scopes_hide_registers() {
    let words = words_of(
        "mov.u32 %r1, 1;
         { .reg .b32 %r1; mov.u32 %r1, 5; { .reg .b32 t; add.u32 t, %r1, 1; mov.u32 %r2, t; } }
         add.u32 %r1, %r1, %r2;",
        1,
    );
    assert_eq!(words, [7]);
}

#[test]
fn functions_are_called_with_parameters_and_results() {
    let declarations = "
        .extern .func (.param .b32 r) elsewhere (.param .b32 a);
        .func (.param .b32 result) power(.param .b32 power_base, .param .align 8 .b8 power_rest[16])
        {
        .reg .b32 %r<9>; .reg .pred %p<3>; .local .align 8 .b8 depot[8];
        ld.param.u32 %r1, [power_base];
        ld.param.u32 %r2, [power_rest+8];
        mov.u32 %r3, 1;
        st.local.u32 [depot+4], %r3;
        setp.gt.u32 %p1, %r2, 100;
        @%p1 ret;
        $again:
        setp.eq.u32 %p1, %r2, 0;
        @%p1 bra $done;
        mul.lo.u32 %r3, %r3, %r1;
        sub.u32 %r2, %r2, 1;
        bra $again;
        $done:
        st.param.b32 [result], %r3;
        ret;
        }
        .func (.param .b32 twice_result) twice(.param .b32 twice_base)
        {
        .reg .b32 %r<5>; .param .b32 a; .param .align 8 .b8 b[16]; .param .b32 c;
        ld.param.u32 %r1, [twice_base];
        st.param.b32 [a], %r1;
        st.param.b32 [b+8], 3;
        call.uni (c), power, (a, b);
        ld.param.b32 %r2, [c];
        st.param.b32 [twice_result], %r2;
        }";
    let body = "
        { .param .b32 a; .param .align 8 .b8 b[16]; .param .b32 c;
        st.param.b32 [a], %r0;
        and.b32 %r5, %r0, 3;
        st.param.b32 [b+8], %r5;
        call (c), power, (a, b);
        ld.param.b32 %r6, [c];
        }
        { .param .b32 a; .param .b32 c;
        st.param.b32 [a], %r0;
        call.uni (c), twice, (a);
        ld.param.b32 %r7, [c];
        }
        add.u32 %r1, %r6, %r7;
        mul.wide.u32 %rd1, %r0, 4; add.u64 %rd1, %rd1, %rd0; st.global.u32 [%rd1], %r1;";
    let mut memory = Flat::new(64 * 4);
    execute(
        &kernel_text(declarations, body),
        &launch(1, 64),
        &mut memory,
    )
    .unwrap();
    for (i, word) in memory.words().into_iter().enumerate() {
        let i = i as u32;
        assert_eq!(word, i.pow(i & 3) + i.pow(3));
    }
}

/// A program whose parts jump anywhere, forwards and back, until a thread's fuel is used up. Each thread goes its own way.
fn maze(seed: u64) -> String {
    const PARTS: usize = 14;
    let mut numbers = Numbers(seed);
    let mut body = String::from(
        ".reg .b32 %x<12>;\n.reg .b64 %y<4>;\nmov.u32 %r30, 60;\n\
         mov.u64 %y0, 1; mov.u64 %y1, 2; mov.u64 %y2, 3; mov.u64 %y3, 4;\n",
    );
    for i in 0..12 {
        body += &format!("mad.lo.u32 %x{i}, %r0, {}, {i};\n", 2 * i + 1);
    }
    for part in 0..PARTS {
        body += &format!("$part{part}:\n");
        for _ in 0..numbers.next() % 6 {
            let [a, b, c] = [0; 3].map(|_| numbers.next() % 12);
            let [u, v] = [0; 2].map(|_| numbers.next() % 4);
            body += &match numbers.next() % 6 {
                0 => format!("add.u32 %x{a}, %x{b}, %x{c};\n"),
                1 => format!("mad.lo.u32 %x{a}, %x{b}, %x{c}, {part};\n"),
                2 => format!("mad.wide.u32 %y{u}, %x{b}, %x{c}, %y{v};\n"),
                3 => format!("cvt.u32.u64 %x{a}, %y{u};\n"),
                4 => {
                    format!("setp.lt.u32 %p1, %x{a}, %x{b};\n@%p1 xor.b32 %x{c}, %x{a}, {part};\n")
                }
                _ => format!("shf.l.wrap.b32 %x{a}, %x{b}, %x{c}, %x{a};\n"),
            };
        }
        let (a, target) = (numbers.next() % 12, numbers.next() as usize % PARTS);
        let bit = 1 << (numbers.next() % 12);
        body += &format!(
            "sub.u32 %r30, %r30, 1;\nsetp.le.s32 %p2, %r30, 0;\n@%p2 bra $end;\n\
             and.b32 %r31, %x{a}, {bit};\nsetp.ne.u32 %p3, %r31, 0;\n@%p3 bra $part{target};\n"
        );
    }
    body += "bra $part0;\n$end:\nmov.u32 %r1, 0;\n";
    for i in 0..12 {
        body += &format!("mad.lo.u32 %r1, %r1, 31, %x{i};\n");
    }
    body + "cvt.u32.u64 %r2, %y0; xor.b32 %r1, %r1, %r2;\n\
            mul.wide.u32 %rd1, %r0, 4; add.u64 %rd1, %rd1, %rd0; st.global.u32 [%rd1], %r1;"
}

#[test]
fn lanes_that_go_different_ways_compute_what_single_threads_do() {
    for seed in 0..60 {
        let text = kernel_text("", &maze(seed));
        let (mut together, mut alone) = (Flat::new(96 * 4), Flat::new(96 * 4));
        execute(&text, &launch(2, 48), &mut together).unwrap();
        execute(&text, &launch(96, 1), &mut alone).unwrap();
        assert_eq!(together.words(), alone.words(), "seed {seed}");
    }
}

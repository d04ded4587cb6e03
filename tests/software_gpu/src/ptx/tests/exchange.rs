use super::{Flat, execute, kernel_text, launch, words_of};

#[test]
fn shuffles() {
    let shuffled = |mode: &str, offset: u32, clamp: u32| {
        words_of(
            &format!(
                "mul.lo.u32 %r2, %r0, 10;
                 shfl.sync.{mode}.b32 %r1|%p1, %r2, {offset}, {clamp}, -1;
                 @!%p1 add.u32 %r1, %r1, 1000;"
            ),
            32,
        )
    };
    for (lane, &word) in shuffled("bfly", 5, 31).iter().enumerate() {
        assert_eq!(word, (lane as u32 ^ 5) * 10);
    }
    for (lane, &word) in shuffled("down", 3, 31).iter().enumerate() {
        let lane = lane as u32;
        assert_eq!(
            word,
            if lane < 29 {
                (lane + 3) * 10
            } else {
                lane * 10 + 1000
            }
        );
    }
    for (lane, &word) in shuffled("up", 2, 0).iter().enumerate() {
        let lane = lane as u32;
        assert_eq!(
            word,
            if lane >= 2 {
                (lane - 2) * 10
            } else {
                lane * 10 + 1000
            }
        );
    }
    // Segments of eight: clamp 0x1800 | 7, as for a width of 8.
    for (lane, &word) in shuffled("idx", 3, 0x181F).iter().enumerate() {
        assert_eq!(word, (lane as u32 / 8 * 8 + 3) * 10);
    }
    for (lane, &word) in shuffled("down", 1, 0x181F).iter().enumerate() {
        let lane = lane as u32;
        assert_eq!(
            word,
            if lane % 8 < 7 {
                (lane + 1) * 10
            } else {
                lane * 10 + 1000
            }
        );
    }
}

#[test]
fn a_sum_over_the_warp_by_shuffles() {
    let mut body = String::from("add.u32 %r1, %r0, 1;\n");
    for offset in [16, 8, 4, 2, 1] {
        body += &format!(
            "shfl.sync.bfly.b32 %r2, %r1, {offset}, 31, 0xffffffff;\nadd.u32 %r1, %r1, %r2;\n"
        );
    }
    assert_eq!(words_of(&body, 32), [528; 32]);
}

#[test]
fn lanes_wait_for_each_other_before_a_shuffle() {
    // The odd lanes come later, by a way that lies behind.
    let words = words_of(
        "
        and.b32 %r3, %r0, 1;
        setp.eq.u32 %p1, %r3, 1;
        mov.u32 %r2, %r0;
        @%p1 bra $odd;
        $meet:
        shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;
        bra $end;
        $odd:
        add.u32 %r2, %r0, 100;
        bra $meet;
        $end:",
        32,
    );
    assert!(
        words
            .iter()
            .enumerate()
            .all(|(i, &word)| word == (i as u32 ^ 1) + if i % 2 == 0 { 100 } else { 0 })
    );
}

#[test]
fn halves_of_a_warp_shuffle_apart() {
    let words = words_of(
        "
        setp.lt.u32 %p1, %r0, 16;
        selp.b32 %r3, 0xffff, 0xffff0000, %p1;
        shfl.sync.bfly.b32 %r1, %r0, 15, 31, %r3;
        @%p1 bra $end;
        shfl.sync.idx.b32 %r1, %r1, 16, 31, %r3;
        $end:",
        32,
    );
    assert!(
        words
            .iter()
            .enumerate()
            .all(|(i, &word)| word == if i < 16 { 15 - i as u32 } else { 31 })
    );
}

#[test]
fn the_barrier_of_a_warp_joins_two_ways() {
    let words = words_of(
        "
        .shared .align 4 .b8 cells[128];
        mov.u32 %r5, cells; shl.b32 %r6, %r0, 2; add.u32 %r6, %r6, %r5;
        setp.lt.u32 %p1, %r0, 16;
        @%p1 bra $low;
        add.u32 %r2, %r0, 200;
        st.shared.u32 [%r6], %r2;
        bar.warp.sync 0xffffffff;
        bra $end;
        $low:
        add.u32 %r2, %r0, 100;
        st.shared.u32 [%r6], %r2;
        bar.warp.sync 0xffffffff;
        $end:
        xor.b32 %r7, %r0, 31; shl.b32 %r7, %r7, 2; add.u32 %r7, %r7, %r5;
        ld.shared.u32 %r1, [%r7];",
        32,
    );
    assert!(words.iter().enumerate().all(|(i, &word)| {
        let other = 31 - i as u32;
        word == other + if other < 16 { 100 } else { 200 }
    }));
}

#[test]
fn votes() {
    let voted =
        |instructions: &str| words_of(&format!("setp.lt.u32 %p1, %r0, 5;\n{instructions}"), 32);
    assert_eq!(voted("vote.sync.ballot.b32 %r1, %p1, -1;"), [31; 32]);
    assert_eq!(voted("vote.sync.ballot.b32 %r1, !%p1, -1;"), [!31; 32]);
    assert_eq!(
        voted("vote.sync.any.pred %p2, %p1, -1; selp.u32 %r1, 1, 0, %p2;"),
        [1; 32]
    );
    assert_eq!(
        voted("vote.sync.all.pred %p2, %p1, -1; selp.u32 %r1, 1, 0, %p2;"),
        [0; 32]
    );
    assert_eq!(
        voted("vote.sync.uni.pred %p2, %p1, -1; selp.u32 %r1, 1, 0, %p2;"),
        [0; 32]
    );
    let words = voted("mov.u32 %r1, 0; @%p1 activemask.b32 %r1;");
    assert!(
        words
            .iter()
            .enumerate()
            .all(|(i, &word)| word == if i < 5 { 31 } else { 0 })
    );
    assert_eq!(voted("redux.sync.add.u32 %r1, %r0, -1;"), [496; 32]);
    assert_eq!(
        voted("sub.u32 %r2, 3, %r0; redux.sync.min.s32 %r1, %r2, -1;"),
        [(3 - 31) as u32; 32]
    );
}

#[test]
fn exited_lanes_are_not_waited_for() {
    let text = kernel_text(
        "",
        "setp.ge.u32 %p1, %r0, 20; @%p1 exit;
         vote.sync.ballot.b32 %r1, 1, -1;",
    );
    assert!(
        super::Module::parse(&text).is_err(),
        "a vote needs a predicate"
    );
    let text = kernel_text(
        "",
        "setp.ge.u32 %p1, %r0, 20; @%p1 exit;
         vote.sync.ballot.b32 %r1, !%p1, -1;
         mul.wide.u32 %rd1, %r0, 4; add.u64 %rd1, %rd1, %rd0; st.global.u32 [%rd1], %r1;",
    );
    let mut memory = Flat::new(80);
    execute(&text, &launch(1, 32), &mut memory).unwrap();
    assert_eq!(memory.words(), [0xF_FFFF; 20]);
}

#[test]
fn lanes_that_exit_later_are_no_longer_waited_for() {
    let text = kernel_text(
        "",
        "setp.ge.u32 %p1, %r0, 20; @%p1 bra $gone;
         vote.sync.ballot.b32 %r1, !%p1, -1;
         mul.wide.u32 %rd1, %r0, 4; add.u64 %rd1, %rd1, %rd0; st.global.u32 [%rd1], %r1;
         bra $end;
         $gone:
         exit;
         $end:",
    );
    let mut memory = Flat::new(80);
    execute(&text, &launch(1, 32), &mut memory).unwrap();
    assert_eq!(memory.words(), [0xF_FFFF; 20]);
}

#[test]
fn lanes_are_together_again_where_their_ways_join() {
    let words = words_of(
        "and.b32 %r2, %r0, 1; setp.eq.u32 %p1, %r2, 0;
         @%p1 bra $even;
         add.u32 %r3, %r0, 1;
         add.u32 %r3, %r3, 1;
         $even:
         activemask.b32 %r1;",
        32,
    );
    assert_eq!(words, [u32::MAX; 32]);
}

#[test]
fn barriers_with_a_reduction() {
    let words = words_of(
        "
        setp.lt.u32 %p1, %r0, 40;
        barrier.cta.red.popc.aligned.u32 %r2, 0, %p1;
        bar.red.and.pred %p2, 1, %p1;
        bar.red.or.pred %p3, 1, 64, !%p1;
        selp.u32 %r3, 1000, 0, %p2;
        selp.u32 %r4, 100, 0, %p3;
        add.u32 %r1, %r2, %r3;
        add.u32 %r1, %r1, %r4;",
        64,
    );
    assert_eq!(words, [140; 64]);
}

#[test]
fn one_warp_waits_for_what_another_arrives_with() {
    let words = words_of(
        "
        .shared .align 4 .u32 cell;
        mov.u32 %r1, 5;
        mov.u32 %r2, %warpid;
        setp.eq.u32 %p1, %r2, 0;
        @%p1 bra $consumer;
        setp.eq.u32 %p2, %r0, 32;
        @%p2 st.shared.u32 [cell], 42;
        bar.arrive 3, 64;
        bra $end;
        $consumer:
        bar.sync 3, 64;
        ld.shared.u32 %r1, [cell];
        $end:",
        64,
    );
    assert!(
        words
            .iter()
            .enumerate()
            .all(|(i, &word)| word == if i < 32 { 42 } else { 5 })
    );
}

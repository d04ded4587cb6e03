use super::{BASE, Flat, Numbers, execute, kernel_text, launch, words_of};
use crate::ptx::{Module, run};
use crate::seam::{Access, Fault, GlobalMemory};

#[test]
fn vectors_bytes_and_offsets() {
    let body = "
        mul.wide.u32 %rd1, %r0, 32; add.u64 %rd1, %rd0, %rd1;
        ld.global.nc.L1::evict_last.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];
        add.u32 %r5, %r1, %r4;
        add.u32 %r6, %r2, %r3;
        st.global.v2.u32 [%rd1+16], {%r5, %r6};
        ld.global.u8 %h1, [%rd1+1];
        ld.global.s8 %r7, [%rd1+3];
        st.global.u16 [%rd1+24], %h1;
        st.global.u8 [%rd1+26], %r7;
        st.global.u8 [%rd1+27], 7;
        ld.global.s16 %rd5, [%rd1+2];
        st.global.u32 [%rd1+28], %rd5;";
    let input: Vec<u32> = (0..64 * 8)
        .map(|i| 0x8183_8587u32.wrapping_mul(i + 1))
        .collect();
    let mut memory = Flat::of_words(&input);
    execute(&kernel_text("", body), &launch(2, 32), &mut memory).unwrap();
    for (before, after) in input.chunks(8).zip(memory.words().chunks(8)) {
        assert_eq!(after[4], before[0].wrapping_add(before[3]));
        assert_eq!(after[5], before[1].wrapping_add(before[2]));
        let bytes = before[0].to_le_bytes();
        assert_eq!(after[6].to_le_bytes(), [bytes[1], 0, bytes[3], 7]);
        assert_eq!(after[7] as i32, before[0] as i32 >> 16);
    }
}

#[test]
fn a_float_vector_is_loaded_from_its_address_register() {
    // The destinations may take the row of the address, whose last use this is.
    let body = "
        cvt.u64.u32 %rd1, %r0; shl.b64 %rd1, %rd1, 4; add.u64 %rd1, %rd1, %rd0;
        ld.global.v2.u64 {%rd1, %rd2}, [%rd1];
        cvt.u64.u32 %rd3, %r0; shl.b64 %rd3, %rd3, 4; add.u64 %rd3, %rd3, %rd0;
        st.global.v2.u64 [%rd3], {%rd2, %rd1};";
    let input: Vec<u32> = (0..128).collect();
    let mut memory = Flat::of_words(&input);
    execute(&kernel_text("", body), &launch(1, 32), &mut memory).unwrap();
    let expected: Vec<u32> = input
        .chunks(4)
        .flat_map(|quad| [quad[2], quad[3], quad[0], quad[1]])
        .collect();
    assert_eq!(memory.words(), expected);
}

#[test]
fn shared_memory_holds_what_other_threads_wrote() {
    let declarations = ".extern .shared .align 16 .b8 pool[];";
    let body = "
        .shared .align 4 .b8 tile[512];
        mov.u32 %r1, tile;
        shl.b32 %r2, %r0, 2;
        add.u32 %r3, %r1, %r2;
        st.shared.u32 [%r3], %r0;
        mov.u32 %r7, pool;
        add.u32 %r7, %r7, %r2;
        st.shared.u32 [%r7], %r2;
        bar.sync 0;
        xor.b32 %r4, %r2, 252;
        add.u32 %r5, %r1, %r4;
        ld.shared.u32 %r6, [%r5];
        ld.shared.u32 %r9, [tile+12];
        mov.u32 %r10, pool;
        add.u32 %r10, %r10, %r4;
        ld.shared.u32 %r11, [%r10];
        add.u32 %r6, %r6, %r9;
        add.u32 %r6, %r6, %r11;
        cvt.u64.u32 %rd1, %r2;
        add.u64 %rd1, %rd1, %rd0;
        st.global.u32 [%rd1], %r6;";
    let mut memory = Flat::new(64 * 4);
    let text = kernel_text(declarations, body);
    let mut shape = launch(1, 64);
    shape.dynamic_shared_bytes = 256;
    execute(&text, &shape, &mut memory).unwrap();
    let expected: Vec<u32> = (0..64).map(|i| (63 - i) + 3 + 4 * (63 - i)).collect();
    assert_eq!(memory.words(), expected);
}

#[test]
fn shared_and_local_memory_by_generic_addresses() {
    let words = words_of(
        "
        .shared .align 8 .b8 cell[256];
        .local .align 8 .b8 depot[16];
        .reg .b64 %SP; .reg .b64 %SPL;
        mov.u64 %SPL, depot;
        cvta.local.u64 %SP, %SPL;
        st.local.u32 [%SPL+4], %r0;
        mul.lo.u32 %r5, %r0, 3;
        st.u32 [%SP+8], %r5;
        mov.u64 %rd2, cell;
        cvta.shared.u64 %rd3, %rd2;
        mul.wide.u32 %rd4, %r0, 4;
        add.u64 %rd3, %rd3, %rd4;
        st.u32 [%rd3], 1000;
        cvta.to.shared.u64 %rd5, %rd3;
        ld.shared.u32 %r6, [%rd5];
        ld.u32 %r7, [%SP+4];
        ld.local.u32 %r8, [%SPL+8];
        isspacep.shared %p1, %rd3;
        isspacep.local %p2, %rd3;
        selp.u32 %r9, 10000, 0, %p1;
        @%p2 add.u32 %r9, %r9, 50000;
        add.u32 %r1, %r6, %r7;
        add.u32 %r1, %r1, %r8;
        add.u32 %r1, %r1, %r9;
        // Lanes of one instruction in different spaces.
        setp.lt.u32 %p3, %r0, 8;
        selp.b64 %rd6, %rd3, %SP, %p3;
        @!%p3 add.u64 %rd6, %rd6, 4;
        ld.u32 %r10, [%rd6];
        add.u32 %r1, %r1, %r10;",
        40,
    );
    for (i, &word) in words.iter().enumerate() {
        let i = i as u32;
        assert_eq!(
            word,
            11000 + 4 * i + if i < 8 { 1000 } else { i },
            "thread {i}"
        );
    }
}

#[test]
fn constants_and_variables_of_the_module() {
    let declarations = "
        .const .align 4 .u32 table[4] = {10, 20, 30, 40};
        .global .align 4 .b8 bytes[8] = {1, 2, 3, 4, 5};
        .global .align 4 .u32 counter;";
    let body = "
        and.b32 %r1, %r0, 3; mul.wide.u32 %rd1, %r1, 4;
        mov.u64 %rd2, table; add.u64 %rd3, %rd2, %rd1; ld.const.u32 %r2, [%rd3];
        cvta.const.u64 %rd4, %rd2; add.u64 %rd4, %rd4, %rd1; ld.u32 %r3, [%rd4];
        mov.u64 %rd5, bytes; cvta.global.u64 %rd5, %rd5; cvt.u64.u32 %rd6, %r1; add.u64 %rd5, %rd5, %rd6;
        ld.global.nc.u8 %r4, [%rd5+1];
        add.u32 %r5, %r2, %r3; add.u32 %r5, %r5, %r4;
        red.global.add.u32 [counter], 2;
        mul.wide.u32 %rd7, %r0, 4; add.u64 %rd7, %rd7, %rd0; st.global.u32 [%rd7], %r5;
        bar.sync 0;
        ld.global.u32 %r6, [counter];
        st.global.u32 [%rd7+128], %r6;";
    let mut memory = Flat::new(256);
    execute(
        &kernel_text(declarations, body),
        &launch(1, 32),
        &mut memory,
    )
    .unwrap();
    let words = memory.words();
    for i in 0..32u32 {
        assert_eq!(words[i as usize], 20 * (i % 4 + 1) + i % 4 + 2);
        assert_eq!(words[32 + i as usize], 64);
    }
}

#[test]
fn parameters_lie_where_they_are_declared() {
    let text = "
        .entry k(.param .u64 p, .param .u8 small, .param .align 8 .b8 block[12], .param .f32 x)
        {
        .reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .f32 %f<4>;
        ld.param.u64 %rd1, [p];
        ld.param.u8 %r1, [small];
        ld.param.u32 %r2, [block+8];
        ld.param.f32 %f1, [x];
        st.global.v2.u32 [%rd1], {%r1, %r2};
        st.global.f32 [%rd1+8], %f1;
        mov.b64 %rd2, block;
        ld.param.u32 %r3, [%rd2+4];
        st.global.u32 [%rd1+12], %r3;
        }";
    let module = super::Module::parse(text).unwrap();
    let kernel = module.kernel("k").unwrap();
    let places: Vec<(usize, usize)> = kernel
        .parameters()
        .iter()
        .map(|place| (place.offset, place.bytes))
        .collect();
    assert_eq!(places, [(0, 8), (8, 1), (16, 12), (28, 4)]);
    assert_eq!(kernel.parameter_bytes(), 32);
    let mut block = vec![0; 32];
    block[..8].copy_from_slice(&super::BASE.to_le_bytes());
    block[8] = 200;
    block[20] = 9;
    block[24] = 77;
    block[28..].copy_from_slice(&1.5f32.to_le_bytes());
    let mut memory = Flat::new(16);
    crate::ptx::run(&kernel, &launch(1, 1), &block, &mut memory).unwrap();
    assert_eq!(memory.words(), [200, 77, 1.5f32.to_bits(), 9]);
}

#[test]
fn atomics_return_the_old_value() {
    let body = "
        atom.global.add.u32 %r1, [%rd0], 1;
        mul.wide.u32 %rd1, %r1, 4; add.u64 %rd1, %rd1, %rd0;
        st.global.u32 [%rd1+64], %r0;
        atom.global.max.s32 %r2, [%rd0+4], %r0;
        cvt.rn.f32.u32 %f1, %r0;
        red.global.add.f32 [%rd0+8], %f1;
        atom.cas.b32 %r3, [%rd0+12], 5, %r0;
        atom.global.exch.b64 %rd2, [%rd0+16], 77;
        red.global.or.b32 [%rd0+24], 6;
        atom.global.inc.u32 %r4, [%rd0+28], 9;
        .shared .align 4 .u32 total;
        setp.eq.u32 %p1, %r0, 0;
        @%p1 st.shared.u32 [total], 0;
        bar.sync 0;
        atom.shared.add.u32 %r5, [total], %r0;
        bar.sync 0;
        ld.shared.u32 %r6, [total];
        @%p1 st.global.u32 [%rd0+32], %r6;";
    let mut words = vec![0u32; 16 + 64];
    words[1] = -5i32 as u32;
    words[3] = 5;
    let mut memory = Flat::of_words(&words);
    execute(&kernel_text("", body), &launch(1, 64), &mut memory).unwrap();
    let words = memory.words();
    assert_eq!(words[..4], [64, 63, 2016f32.to_bits(), 0]);
    assert_eq!(words[4..9], [77, 0, 6, 4, 2016]);
    let mut threads = words[16..80].to_vec();
    threads.sort_unstable();
    assert_eq!(threads, (0..64).collect::<Vec<u32>>());
}

/// Counts how often each byte is touched.
struct Recorder {
    memory: Flat,
    touched: Vec<bool>,
}

impl GlobalMemory for Recorder {
    fn access(&mut self, address: u64, bytes: usize, access: Access) -> Result<*mut u8, Fault> {
        let pointer = self.memory.access(address, bytes, access)?;
        self.touched[(address - BASE) as usize..][..bytes].fill(true);
        Ok(pointer)
    }
}

/// The data's place behind the lanes' offsets and results.
const DATA: usize = 1024;

/// Offsets of 32 lanes, as kernels have them: in steps, in groups, the same, anywhere; none for a lane that is left out.
fn offsets(numbers: &mut Numbers, bytes: usize) -> Vec<Option<usize>> {
    let (kind, mask, group) = (
        numbers.next() % 5,
        numbers.next() as u32 | numbers.next() as u32,
        1 << (numbers.next() % 5),
    );
    let all = numbers.next().is_multiple_of(3);
    let first = numbers.next() as usize % 32;
    (0..32usize)
        .map(|lane| {
            let place = match kind {
                0 => first + lane,
                1 => first,
                2 => lane / group * 40 + lane % group + first,
                3 => lane % group + first,
                _ => numbers.next() as usize % 100,
            };
            (all || mask >> lane & 1 != 0).then_some(place * bytes)
        })
        .collect()
}

#[test]
fn exactly_the_bytes_of_the_lanes_that_load_are_touched() {
    for (load, bytes) in [("u8", 1), ("u16", 2), ("u32", 4)] {
        let body = format!(
            "mul.wide.u32 %rd1, %r0, 4; add.u64 %rd1, %rd1, %rd0;
             ld.global.u32 %r2, [%rd1]; setp.ne.u32 %p1, %r2, 0xffffffff;
             mov.u32 %r1, 77;
             cvt.u64.u32 %rd2, %r2; add.u64 %rd2, %rd2, %rd0;
             @%p1 ld.global.{load} %r1, [%rd2+{DATA}];
             st.global.u32 [%rd1+128], %r1;"
        );
        let module = Module::parse(&kernel_text("", &body)).unwrap();
        let kernel = module.kernel("k").unwrap();
        let mut numbers = Numbers(bytes as u64);
        for round in 0..400 {
            let offsets = offsets(&mut numbers, bytes);
            let mut memory = Flat::new(DATA + 8192);
            for (index, byte) in memory.bytes[DATA..].iter_mut().enumerate() {
                *byte = (index * 7 + index / 256) as u8;
            }
            for (lane, offset) in offsets.iter().enumerate() {
                let word = offset.map_or(u32::MAX, |offset| offset as u32);
                memory.bytes[lane * 4..][..4].copy_from_slice(&word.to_le_bytes());
            }
            let touched = vec![false; memory.bytes.len()];
            let mut recorder = Recorder { memory, touched };
            run(&kernel, &launch(1, 32), &BASE.to_le_bytes(), &mut recorder).unwrap();
            let mut expected = vec![false; recorder.touched.len()];
            expected[..256].fill(true);
            let words = recorder.memory.words();
            for (lane, offset) in offsets.iter().enumerate() {
                let mut value = 77;
                if let Some(offset) = offset {
                    expected[DATA + offset..][..bytes].fill(true);
                    let mut word = [0; 4];
                    word[..bytes].copy_from_slice(&recorder.memory.bytes[DATA + offset..][..bytes]);
                    value = u32::from_le_bytes(word);
                }
                assert_eq!(
                    words[32 + lane],
                    value,
                    "{load}, round {round}, lane {lane}: {offsets:?}"
                );
            }
            assert!(
                recorder.touched == expected,
                "{load}, round {round}: {offsets:?}"
            );
        }
    }
}

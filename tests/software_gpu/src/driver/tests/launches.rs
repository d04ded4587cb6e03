//! Modules, functions and launches.

use super::*;

#[test]
fn a_kernel_computes() {
    for seed in 0..20 {
        let mut program = Program::start(seed);
        let stream = program.stream(NON_BLOCKING);
        let values: Vec<u32> = (0..1000).collect();
        let (a, b) = (
            program.allocate_with(&values),
            program.allocate_with(&[5; 1000]),
        );
        let before = counters();
        ok(program.launch("accumulate", &[b, a], 1000, stream));
        ok(program.launch("accumulate", &[b, a], 500, stream));
        let sums = program.read(b, 1000);
        for (index, sum) in (0..1000).zip(sums) {
            let expected = if index < 500 {
                3 * (15 + index) + index
            } else {
                15 + index
            };
            assert_eq!(sum, expected, "element {index}");
        }
        let after = counters();
        assert_eq!(after.launches - before.launches, 2);
        assert_eq!(after.operations - before.operations, 3);
        expect_no_report();
    }
}

#[test]
fn parameters_are_copied_at_the_call() {
    let mut program = Program::start(ON_DEMAND);
    let stream = program.stream(NON_BLOCKING);
    let (a, b) = (
        program.allocate_with(&[1; 64]),
        program.allocate_with(&[2; 64]),
    );
    let (mut target, mut source, mut count) = (b, a, 64_u32);
    let parameters: [*const u8; 3] = [
        (&raw const target).cast(),
        (&raw const source).cast(),
        (&raw const count).cast(),
    ];
    let function = program.function("copy");
    // SAFETY: as many pointers as parameters.
    ok(unsafe {
        cuLaunchKernel(
            function,
            1,
            1,
            1,
            64,
            1,
            1,
            0,
            stream,
            parameters.as_ptr(),
            std::ptr::null(),
        )
    });
    (target, source, count) = (0, 0, 7);
    assert_eq!(program.read(b, 64), [1; 64]);
    assert_eq!((target, source, count), (0, 0, 7));
    expect_no_report();
}

#[test]
fn launches_outside_the_limits_are_refused() {
    let program = Program::start(0);
    let function = program.function("copy");
    let launch = |grid: [u32; 3], block: [u32; 3], shared_bytes| {
        let values = [0_u64; 3];
        let pointers = [
            (&raw const values[0]).cast(),
            (&raw const values[1]).cast(),
            (&raw const values[2]).cast(),
        ];
        let ([x, y, z], [bx, by, bz], pointers) = (grid, block, pointers.as_ptr());
        // SAFETY: as many pointers as parameters.
        unsafe {
            cuLaunchKernel(
                function,
                x,
                y,
                z,
                bx,
                by,
                bz,
                shared_bytes,
                0,
                pointers,
                std::ptr::null(),
            )
        }
    };
    ok(launch([1, 1, 1], [64, 1, 1], 0));
    ok(launch([1, 65_535, 1], [1, 1, 1], 0));
    for grid in [[0, 1, 1], [1, 65_536, 1], [1, 1, 65_536], [1 << 31, 1, 1]] {
        assert_eq!(launch(grid, [1, 1, 1], 0), 1, "{grid:?}");
    }
    for block in [[0, 1, 1], [1025, 1, 1], [32, 33, 1], [1, 1, 65]] {
        assert_eq!(launch([1, 1, 1], block, 0), 1, "{block:?}");
    }
    ok(launch([1, 1, 1], [1, 1, 1], 48 << 10));
    assert_eq!(launch([1, 1, 1], [1, 1, 1], (48 << 10) + 1), 1);
    assert_eq!(cuFuncSetAttribute(function, 8, (64 << 10) + 1), 1);
    ok(cuFuncSetAttribute(function, 8, 64 << 10));
    ok(launch([1, 1, 1], [1, 1, 1], 64 << 10));
    assert_eq!(
        // SAFETY: null where the driver must see it.
        unsafe {
            cuLaunchKernel(
                function,
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                0,
                std::ptr::null(),
                std::ptr::null(),
            )
        },
        1
    );
    expect_no_report();
}

#[test]
fn functions_are_found_by_name_and_end_with_their_module() {
    let program = Program::start(0);
    let module = program.load(KERNELS);
    let find = |module, name: &std::ffi::CStr| {
        let mut function = 0;
        // SAFETY: valid pointers.
        (
            unsafe { cuModuleGetFunction(&raw mut function, module, name.as_ptr()) },
            function,
        )
    };
    let (status, function) = find(module, c"copy");
    ok(status);
    assert_eq!(find(module, c"copy"), (0, function));
    assert_eq!(find(module, c"move").0, 500);
    assert_eq!(find(7, c"copy").0, 400);
    let mut value = 0;
    // SAFETY: a valid pointer.
    ok(unsafe { cuFuncGetAttribute(&raw mut value, 0, function) });
    assert_eq!(value, 1024);
    ok(cuModuleUnload(module));
    assert_eq!(
        // SAFETY: a valid pointer.
        unsafe { cuFuncGetAttribute(&raw mut value, 0, function) },
        400
    );
    assert_eq!(find(module, c"copy").0, 400);
}

#[test]
fn what_is_no_ptx_is_refused() {
    let _program = Program::start(0);
    let load = |image: &[u8]| {
        let mut module = 0;
        // SAFETY: the image ends in a zero.
        unsafe { cuModuleLoadData(&raw mut module, image.as_ptr().cast()) }
    };
    assert_eq!(load(b"\x7fELF\x02\0"), 209);
    assert_eq!(load(b"\x50\xED\x55\xBA\0"), 209);
    assert_eq!(load(b"\xFF\xFE\0"), 200);
    assert_eq!(load(b".version 9.0\n.target sm_75\n.address_size 64\n.visible .entry k() { nonsense.u32 %r1; ret; }\0"), 218);
    let mut module = 0;
    assert_eq!(
        // SAFETY: valid pointers.
        unsafe { cuModuleLoad(&raw mut module, c"/nowhere/kernels.ptx".as_ptr()) },
        301
    );
    expect_no_report();
}

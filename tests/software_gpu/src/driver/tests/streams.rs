//! Streams and events: calls return before their work is done, and work is done in the end.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::super::call::CONTEXT;
use super::*;

const NOT_READY: u32 = 600;

unsafe extern "C" fn count(counter: *mut libc::c_void) {
    // SAFETY: the test's counter, which lives until the stream is synchronised.
    unsafe { &*counter.cast::<AtomicU32>() }.fetch_add(1, Ordering::SeqCst);
}

fn enqueue_count(stream: usize, counter: &AtomicU32) {
    // SAFETY: the counter lives until the stream is synchronised.
    ok(unsafe { cuLaunchHostFunc(stream, Some(count), std::ptr::from_ref(counter) as usize) });
}

#[test]
fn work_waits_for_nobody_and_somebody_waits_for_work() {
    let mut program = Program::start(ON_DEMAND);
    let (stream, event) = (program.stream(NON_BLOCKING), program.event());
    let counter = AtomicU32::new(0);
    enqueue_count(stream, &counter);
    ok(cuEventRecord(event, stream));
    assert_eq!(counter.load(Ordering::SeqCst), 0);
    assert_eq!(cuStreamQuery(stream), NOT_READY);
    ok(cuEventSynchronize(event));
    assert_eq!(counter.load(Ordering::SeqCst), 1);
    ok(cuEventQuery(event));
    ok(cuStreamQuery(stream));
}

/// Holds a stream until it is opened, which it is at the latest when it is dropped. A test has it after its program, which
/// waits for its streams.
struct Gate(&'static AtomicU32);

impl Gate {
    /// Holds what the stream is given from now on.
    fn hold(stream: usize) -> Gate {
        unsafe extern "C" fn wait(open: *mut libc::c_void) {
            // SAFETY: the gate's number, which lives for ever.
            let open = unsafe { &*open.cast::<AtomicU32>() };
            while open.load(Ordering::SeqCst) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let open: &'static AtomicU32 = Box::leak(Box::default());
        // SAFETY: the function is given what it takes.
        ok(unsafe { cuLaunchHostFunc(stream, Some(wait), std::ptr::from_ref(open) as usize) });
        Gate(open)
    }

    fn open(&self) {
        self.0.store(1, Ordering::SeqCst);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}

#[test]
fn a_slow_operation_does_not_hold_the_caller() {
    let mut program = Program::start(0);
    let (stream, event) = (program.stream(NON_BLOCKING), program.event());
    let a = program.allocate_with(&[1; 64]);
    let buffer = program.page_locked(64);
    buffer.write([9; 64]);
    let gate = Gate::hold(stream);
    buffer.to_device(a, stream);
    ok(program.launch("accumulate", &[a, a], 64, stream));
    ok(cuEventRecord(event, stream));
    assert_eq!(cuEventQuery(event), NOT_READY);
    assert_eq!(cuStreamQuery(stream), NOT_READY);
    gate.open();
    ok(cuStreamSynchronize(stream));
    assert_eq!(program.read(a, 1), [36]);
    expect_no_report();
}

#[test]
fn queries_get_their_answer_in_the_end() {
    for seed in 0..12 {
        let mut program = Program::start(seed);
        let (stream, event) = (program.stream(NON_BLOCKING), program.event());
        let counter = AtomicU32::new(0);
        enqueue_count(stream, &counter);
        ok(cuEventRecord(event, stream));
        let start = Instant::now();
        while cuEventQuery(event) == NOT_READY {
            assert!(start.elapsed() < Duration::from_secs(5), "seed {seed}");
        }
        assert_eq!(counter.load(Ordering::SeqCst), 1);
        enqueue_count(stream, &counter);
        while cuStreamQuery(stream) == NOT_READY {}
        assert_eq!(counter.load(Ordering::SeqCst), 2);
    }
}

#[test]
fn work_goes_on_when_nobody_calls() {
    for seed in 0..8 {
        let mut program = Program::start(seed);
        let stream = program.stream(NON_BLOCKING);
        let counter = AtomicU32::new(0);
        (0..10).for_each(|_| enqueue_count(stream, &counter));
        let start = Instant::now();
        while counter.load(Ordering::SeqCst) < 10 {
            assert!(start.elapsed() < Duration::from_secs(5), "seed {seed}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn a_destroyed_stream_does_its_work() {
    let mut program = Program::start(ON_DEMAND);
    let stream = program.stream(NON_BLOCKING);
    let counter = AtomicU32::new(0);
    enqueue_count(stream, &counter);
    ok(cuStreamDestroy_v2(stream));
    program.streams.clear();
    ok(cuCtxSynchronize());
    assert_eq!(counter.load(Ordering::SeqCst), 1);
}

#[test]
fn an_event_that_was_never_recorded_is_over() {
    let mut program = Program::start(ON_DEMAND);
    let (stream, event) = (program.stream(NON_BLOCKING), program.event());
    ok(cuEventQuery(event));
    ok(cuEventSynchronize(event));
    ok(cuStreamWaitEvent(stream, event, 0));
    ok(cuStreamQuery(stream));
}

#[test]
fn a_wait_outlives_its_event() {
    let mut program = Program::start(ON_DEMAND);
    let (first, second) = (program.stream(NON_BLOCKING), program.stream(NON_BLOCKING));
    let event = program.event();
    let a = program.allocate_with(&[1; 64]);
    ok(cuMemsetD32Async(a, 7, 64, first));
    ok(cuEventRecord(event, first));
    ok(cuStreamWaitEvent(second, event, 0));
    ok(cuEventDestroy_v2(event));
    program.events.clear();
    ok(cuMemsetD32Async(a, 8, 64, second));
    ok(cuStreamSynchronize(second));
    assert_eq!(program.read(a, 1), [8]);
    expect_no_report();
}

#[test]
fn events_tell_the_time_between_them() {
    let mut program = Program::start(0);
    let stream = program.stream(NON_BLOCKING);
    let untimed = program.event();
    let created = software_gpu_timed_events();
    let timed = [0; 2].map(|_| timed_event(&mut program));
    assert_eq!(software_gpu_timed_events() - created, 2);
    let elapsed = |start, end| {
        let mut milliseconds = 0.0;
        // SAFETY: a valid pointer.
        (
            unsafe { cuEventElapsedTime_v2(&raw mut milliseconds, start, end) },
            milliseconds,
        )
    };
    assert_eq!(elapsed(timed[0], timed[1]).0, 400, "never recorded");
    ok(cuEventRecord(timed[0], stream));
    ok(cuEventSynchronize(timed[0]));
    let gate = Gate::hold(stream);
    ok(cuEventRecord(timed[1], stream));
    ok(cuEventRecord(untimed, stream));
    assert_eq!(elapsed(timed[0], timed[1]).0, NOT_READY);
    std::thread::sleep(Duration::from_millis(20));
    gate.open();
    ok(cuEventSynchronize(untimed));
    let (status, milliseconds) = elapsed(timed[0], timed[1]);
    ok(status);
    assert!(milliseconds >= 19.0, "{milliseconds}");
    assert_eq!(elapsed(timed[0], untimed).0, 400);
}

#[test]
fn waits_that_take_a_core_are_counted() {
    let mut program = Program::start(0);
    let stream = program.stream(NON_BLOCKING);
    for (flags, spins) in [
        (0, 1),
        (DISABLE_TIMING, 1),
        (BLOCKING_SYNC | DISABLE_TIMING, 0),
    ] {
        let mut event = 0;
        // SAFETY: a valid pointer.
        ok(unsafe { cuEventCreate(&raw mut event, flags) });
        program.events.push(event);
        ok(cuEventRecord(event, stream));
        let before = software_gpu_spinning_waits();
        ok(cuEventSynchronize(event));
        assert_eq!(
            software_gpu_spinning_waits() - before,
            spins,
            "flags {flags}"
        );
    }
}

fn timed_event(program: &mut Program) -> usize {
    let mut event = 0;
    // SAFETY: a valid pointer.
    ok(unsafe { cuEventCreate(&raw mut event, 0) });
    program.events.push(event);
    event
}

/// `None` where the device has not come so far.
fn milliseconds_between(start: usize, end: usize) -> Option<f32> {
    let mut milliseconds = 0.0;
    // SAFETY: a valid pointer.
    match unsafe { cuEventElapsedTime_v2(&raw mut milliseconds, start, end) } {
        NOT_READY => None,
        status => {
            ok(status);
            Some(milliseconds)
        }
    }
}

#[test]
fn a_copy_over_a_slow_link_holds_up_those_who_wait_for_it_and_nobody_else() {
    for seed in 0..8 {
        let mut program = Program::start(seed);
        let (copies, compute) = (program.stream(NON_BLOCKING), program.stream(NON_BLOCKING));
        let (a, b) = (
            program.allocate_with(&[1; 64]),
            program.allocate_with(&[2; 64]),
        );
        let buffer = program.page_locked(64);
        buffer.write([9; 64]);
        let copied = program.event();
        let moments = [0; 3].map(|_| timed_event(&mut program));
        // A byte in a second: what ends, ends without it.
        software_gpu_set_link_rate(1);
        buffer.to_device(a, copies);
        ok(cuEventRecord(copied, copies));
        ok(program.launch("accumulate", &[b, b], 64, compute));
        ok(cuEventRecord(moments[0], compute));
        ok(cuStreamSynchronize(compute));
        ok(cuEventRecord(moments[1], compute));
        ok(cuStreamWaitEvent(compute, copied, 0));
        ok(program.launch("accumulate", &[a, a], 64, compute));
        ok(cuEventRecord(moments[2], compute));
        ok(cuEventSynchronize(moments[1]));
        for _ in 0..10 {
            assert_eq!(cuEventQuery(copied), NOT_READY, "seed {seed}");
            assert_eq!(cuStreamQuery(compute), NOT_READY, "seed {seed}");
        }
        assert_eq!(milliseconds_between(moments[1], moments[2]), None);
        std::thread::sleep(Duration::from_millis(20));
        software_gpu_set_link_rate(0);
        ok(cuStreamSynchronize(compute));
        let waited = milliseconds_between(moments[1], moments[2]).unwrap();
        assert!(waited >= 19.0, "seed {seed}: {waited}");
        assert_eq!(
            (program.read(a, 1), program.read(b, 1)),
            (vec![36], vec![8])
        );
        expect_no_report();
    }
}

#[test]
fn a_host_that_refills_what_is_on_the_link_is_reported() {
    let mut program = Program::start(0);
    let stream = program.stream(NON_BLOCKING);
    let a = program.allocate_with(&[1; 64]);
    let buffer = program.page_locked(64);
    buffer.write([9; 64]);
    software_gpu_set_link_rate(1);
    buffer.to_device(a, stream);
    buffer.write([8; 64]);
    software_gpu_set_link_rate(0);
    expect_report(&["copy of 256 bytes to the device"]);
}

#[test]
fn a_host_function_must_not_call_the_driver() {
    unsafe extern "C" fn call(status: *mut libc::c_void) {
        // SAFETY: the test's cell.
        unsafe { &*status.cast::<AtomicU32>() }.store(cuCtxSynchronize(), Ordering::SeqCst);
    }
    let mut program = Program::start(0);
    let stream = program.stream(0);
    let status = AtomicU32::new(0);
    // SAFETY: the cell lives until the stream is synchronised.
    ok(unsafe { cuLaunchHostFunc(stream, Some(call), std::ptr::from_ref(&status) as usize) });
    ok(cuStreamSynchronize(stream));
    assert_eq!(status.load(Ordering::SeqCst), 800);
}

#[test]
fn streams_know_their_properties() {
    let mut program = Program::start(0);
    let mut stream = 0;
    let (mut least, mut greatest, mut priority, mut flags, mut capturing) = (1, 1, 1, 7, 7);
    // SAFETY: valid pointers.
    unsafe {
        ok(cuCtxGetStreamPriorityRange(
            &raw mut least,
            &raw mut greatest,
        ));
        ok(cuStreamCreateWithPriority(
            &raw mut stream,
            NON_BLOCKING,
            -100,
        ));
        program.streams.push(stream);
        ok(cuStreamGetPriority(stream, &raw mut priority));
        ok(cuStreamGetFlags(stream, &raw mut flags));
        ok(cuStreamIsCapturing(stream, &raw mut capturing));
    }
    assert_eq!(
        (least, greatest, priority, flags, capturing),
        (0, -5, -5, 1, 0)
    );
    assert_eq!(cuStreamBeginCapture_v2(stream, 0), 801);
}

#[test]
fn each_thread_has_a_stream_of_its_own() {
    let mut program = Program::start(0);
    let a = program.allocate_with(&[1; 64]);
    ok(cuMemsetD32Async(a, 7, 64, 2));
    ok(cuStreamSynchronize(2));
    assert_eq!(program.read(a, 1), [7]);
    expect_no_report();
}

#[test]
fn threads_share_the_device() {
    for seed in 0..12 {
        let mut program = Program::start(seed);
        let parts: Vec<_> = (0..4)
            .map(|_| {
                (
                    program.stream(NON_BLOCKING),
                    program.page_locked(64),
                    program.allocate_with(&[1; 64]),
                )
            })
            .collect();
        let program = &program;
        std::thread::scope(|scope| {
            for (index, (stream, buffer, memory)) in parts.into_iter().enumerate() {
                scope.spawn(move || {
                    ok(cuCtxSetCurrent(CONTEXT));
                    for round in 0..30 {
                        let value = round * 4 + index as u32;
                        buffer.write([value; 64]);
                        buffer.to_device(memory, stream);
                        ok(program.launch("accumulate", &[memory, memory], 64, stream));
                        buffer.copy_from_device(memory, stream);
                        ok(cuStreamSynchronize(stream));
                        assert_eq!(buffer.read(), [4 * value; 64]);
                    }
                });
            }
        });
        expect_no_report();
    }
}

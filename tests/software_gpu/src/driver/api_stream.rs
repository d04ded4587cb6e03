//! Exported: streams, events and host functions.

#![expect(unsafe_code, reason = "the driver's C functions")]
#![expect(
    clippy::missing_safety_doc,
    reason = "pointers are null or valid, as CUDA's documentation says"
)]

use std::sync::{Arc, Mutex, OnceLock};

use super::attributes::PRIORITIES;
use super::call::{CONTEXT, call, expect_context, put, release_call, waiting_call};
use super::device::Device;
use super::handles::{Event, Handles};
use super::left_out::{EVENT_SYNCHRONISATIONS, STREAM_WAITS};
use super::lock;
use super::operation::{HostFunction, Recording, What, Work};
use super::queue::StreamKind;
use super::reports::LiveCounters;
use super::status::{Refusal, Status};

const STREAM_NON_BLOCKING: u32 = 1;
/// Blocking wait, no timing, between processes.
const EVENT_FLAGS: u32 = 7;
const EVENT_BLOCKING_SYNC: u32 = 1;
const EVENT_DISABLE_TIMING: u32 = 2;
const EVENT_INTERPROCESS: u32 = 4;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut usize, flags: u32) -> u32 {
    // SAFETY: the program's pointer.
    call("cuStreamCreate", |device| unsafe {
        create_stream(device, stream, flags, 0)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut usize,
    flags: u32,
    priority: i32,
) -> u32 {
    // SAFETY: the program's pointer.
    call("cuStreamCreateWithPriority", |device| unsafe {
        create_stream(device, stream, flags, priority)
    })
}

/// # Safety
/// `stream` is null or may be written.
unsafe fn create_stream(
    device: &Device,
    stream: *mut usize,
    flags: u32,
    priority: i32,
) -> Result<(), Refusal> {
    expect_context()?;
    if flags & !STREAM_NON_BLOCKING != 0 {
        return Err(Refusal::new(
            Status::INVALID_VALUE,
            format!("flags {flags:#x}"),
        ));
    }
    let handle = Handles::new_handle();
    // SAFETY: the caller's promise.
    unsafe { put(stream, handle) }?;
    let kind = if flags == STREAM_NON_BLOCKING {
        StreamKind::NonBlocking
    } else {
        StreamKind::Blocking
    };
    device
        .queue()
        .create_stream(handle, kind, priority.clamp(PRIORITIES.1, PRIORITIES.0));
    Ok(())
}

/// What is in the stream still runs.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: usize) -> u32 {
    release_call("cuStreamDestroy_v2", |device| {
        match device.queue().destroy_stream(stream) {
            true => Ok(()),
            false => Err(Refusal::new(
                Status::INVALID_HANDLE,
                format!("{stream:#x} is no stream that can be destroyed"),
            )),
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: usize) -> u32 {
    waiting_call("cuStreamSynchronize", |device| {
        let slot = slot(device, stream)?;
        device.synchronise_stream(slot);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(stream: usize) -> u32 {
    waiting_call("cuStreamQuery", |device| {
        let slot = slot(device, stream)?;
        let (step, clock) = device.queue().last(slot);
        device.query(step, &clock)
    })
}

/// A stream of the calling thread's context; streams by handle need no current context.
fn slot(device: &Device, stream: usize) -> Result<usize, Refusal> {
    if stream <= 2 {
        expect_context()?;
    }
    device.slot(stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetFlags(stream: usize, flags: *mut u32) -> u32 {
    call("cuStreamGetFlags", |device| {
        let slot = slot(device, stream)?;
        let kind = device.queue().stream(slot).kind;
        // SAFETY: the program's pointer.
        unsafe { put(flags, u32::from(kind == StreamKind::NonBlocking)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetPriority(stream: usize, priority: *mut i32) -> u32 {
    call("cuStreamGetPriority", |device| {
        let slot = slot(device, stream)?;
        let known = device.queue().stream(slot).priority;
        // SAFETY: the program's pointer.
        unsafe { put(priority, known) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetCtx(stream: usize, context: *mut usize) -> u32 {
    call("cuStreamGetCtx", |device| {
        slot(device, stream)?;
        // SAFETY: the program's pointer.
        unsafe { put(context, CONTEXT) }
    })
}

/// Never: graphs are not supported.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(stream: usize, status: *mut u32) -> u32 {
    call("cuStreamIsCapturing", |device| {
        slot(device, stream)?;
        // SAFETY: the program's pointer.
        unsafe { put(status, 0) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(_stream: usize, _mode: u32) -> u32 {
    call("cuStreamBeginCapture_v2", |_| {
        Err(Refusal::new(
            Status::NOT_SUPPORTED,
            "graphs are not supported",
        ))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: usize, event: usize, flags: u32) -> u32 {
    call("cuStreamWaitEvent", |device| {
        if flags != 0 {
            return Err(Refusal::new(
                Status::INVALID_VALUE,
                format!("flags {flags:#x}"),
            ));
        }
        let slot = slot(device, stream)?;
        let event = lock(&device.handles).event(event)?;
        if STREAM_WAITS.comes() {
            return Ok(());
        }
        let recording = lock(&event.recording).clone();
        // An event that was never recorded is over.
        if let Some(recording) = recording {
            device.enqueue_behind(slot, What::Wait, Some(&recording), |_, _, _| Work::Wait);
        }
        Ok(())
    })
}

/// Runs a function of the program in its turn, on a thread of the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchHostFunc(
    stream: usize,
    function: Option<unsafe extern "C" fn(*mut libc::c_void)>,
    argument: usize,
) -> u32 {
    call("cuLaunchHostFunc", |device| {
        let slot = slot(device, stream)?;
        let function =
            function.ok_or_else(|| Refusal::new(Status::INVALID_VALUE, "the function is null"))?;
        let work = Work::HostFunction(HostFunction { function, argument });
        device.enqueue(slot, What::HostFunction, |_, _, _| work);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut usize, flags: u32) -> u32 {
    call("cuEventCreate", |device| {
        expect_context()?;
        let between_processes = flags & EVENT_INTERPROCESS != 0;
        if event.is_null()
            || flags & !EVENT_FLAGS != 0
            || between_processes && flags & EVENT_DISABLE_TIMING == 0
        {
            return Err(Refusal::new(
                Status::INVALID_VALUE,
                format!("flags {flags:#x} at a pointer {event:?}"),
            ));
        }
        if between_processes {
            return Err(Refusal::new(
                Status::NOT_SUPPORTED,
                "events between processes",
            ));
        }
        let has_timing = flags & EVENT_DISABLE_TIMING == 0;
        LiveCounters::add(&device.reports.counters.timed_events, u64::from(has_timing));
        let handle = lock(&device.handles).add_event(Event {
            has_timing,
            is_slept_for: flags & EVENT_BLOCKING_SYNC != 0,
            recording: Mutex::new(None),
        });
        // SAFETY: the program's pointer.
        unsafe { put(event, handle) }
    })
}

/// Waits for the event keep what they wait for.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: usize) -> u32 {
    release_call("cuEventDestroy_v2", |device| {
        lock(&device.handles).remove_event(event)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: usize, stream: usize) -> u32 {
    call("cuEventRecord", |device| {
        let slot = slot(device, stream)?;
        let event = lock(&device.handles).event(event)?;
        // Held across the call, so that two threads leave the later recording.
        let mut current = lock(&event.recording);
        device.enqueue(slot, What::Record, |step, clock, _| {
            let recording = Arc::new(Recording {
                step,
                clock: clock.clone(),
                over: OnceLock::new(),
            });
            *current = Some(recording.clone());
            Work::Record(recording)
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecordWithFlags(event: usize, stream: usize, flags: u32) -> u32 {
    match flags {
        0 => cuEventRecord(event, stream),
        _ => call("cuEventRecordWithFlags", |_| {
            Err(Refusal::new(
                Status::NOT_SUPPORTED,
                format!("flags {flags:#x}"),
            ))
        }),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: usize) -> u32 {
    waiting_call("cuEventQuery", |device| {
        let event = lock(&device.handles).event(event)?;
        let recording = lock(&event.recording).clone();
        match recording {
            Some(recording) => device.query(recording.step, &recording.clock),
            // It was never recorded.
            None => Ok(()),
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: usize) -> u32 {
    waiting_call("cuEventSynchronize", |device| {
        let event = lock(&device.handles).event(event)?;
        let counters = &device.reports.counters;
        LiveCounters::add(&counters.event_waits, 1);
        LiveCounters::add(&counters.spinning_waits, u64::from(!event.is_slept_for));
        let recording = lock(&event.recording).clone();
        if let Some(recording) = recording
            && !EVENT_SYNCHRONISATIONS.comes()
        {
            device.synchronise_recording(&recording);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime_v2(
    milliseconds: *mut f32,
    start: usize,
    end: usize,
) -> u32 {
    call("cuEventElapsedTime_v2", |device| {
        let time = |handle| {
            let event = lock(&device.handles).event(handle)?;
            let recording = lock(&event.recording).clone();
            match recording {
                Some(recording) if event.has_timing => recording
                    .over
                    .get()
                    .copied()
                    .ok_or_else(|| Refusal::silent(Status::NOT_READY)),
                Some(_) => Err(Refusal::new(
                    Status::INVALID_HANDLE,
                    "an event was created without timing",
                )),
                None => Err(Refusal::new(
                    Status::INVALID_HANDLE,
                    "an event was never recorded",
                )),
            }
        };
        let (start, end) = (time(start)?, time(end)?);
        let elapsed = match end.checked_duration_since(start) {
            Some(elapsed) => elapsed.as_secs_f32(),
            None => -start.duration_since(end).as_secs_f32(),
        };
        // SAFETY: the program's pointer.
        unsafe { put(milliseconds, elapsed * 1000.0) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(
    milliseconds: *mut f32,
    start: usize,
    end: usize,
) -> u32 {
    // SAFETY: the program's pointer.
    unsafe { cuEventElapsedTime_v2(milliseconds, start, end) }
}

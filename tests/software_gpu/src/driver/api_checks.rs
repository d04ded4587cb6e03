//! Exported for tests: reports, counters, the seed and the rate of the link. The real driver has none of these.

#![expect(unsafe_code, reason = "exported C functions")]

use std::sync::atomic::Ordering;

use super::device::Device;
use super::left_out::{COPIES_TO_DEVICE, EVENT_SYNCHRONISATIONS, LAUNCHES, STREAM_WAITS};
use super::reports::Counters;

/// The number of reports that have not been taken.
#[unsafe(no_mangle)]
pub extern "C" fn software_gpu_reports() -> u64 {
    Device::get().reports.count()
}

/// Takes the oldest report: writes its text (UTF-8, cut to `length` bytes, no zero behind it) and returns how many bytes
/// were written; 0 if there is none. With the last report goes the error that calls have answered since the first.
///
/// # Safety
/// `buffer` is writable for `length` bytes; it may be null if `length` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn software_gpu_take_report(buffer: *mut u8, length: usize) -> usize {
    let Some(text) = Device::get().reports.take() else {
        return 0;
    };
    let mut bytes = text.len().min(length);
    while !text.is_char_boundary(bytes) {
        bytes -= 1;
    }
    if bytes > 0 {
        // SAFETY: `bytes` is at most `length`, which the caller vouches for.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), buffer, bytes) };
    }
    bytes
}

/// Writes the totals since the process began.
///
/// # Safety
/// `counters` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn software_gpu_counters(counters: *mut Counters) {
    let device = Device::get();
    let totals = device
        .reports
        .counters
        .read(device.memory.used_bytes_most());
    // SAFETY: the caller's promise.
    unsafe { counters.write(totals) };
}

/// Sets the seed of the order of work; everything that was held back is released first. 0 is the order of the calls.
#[unsafe(no_mangle)]
pub extern "C" fn software_gpu_set_seed(seed: u64) {
    Device::get().set_seed(seed);
}

/// Sets the rate of copies to the device, in bytes per second; 0: they take no time. What is on the link begins anew.
#[unsafe(no_mangle)]
pub extern "C" fn software_gpu_set_link_rate(bytes_per_second: u64) {
    let rate = (bytes_per_second > 0).then_some(bytes_per_second as f64);
    Device::get().set_link_rate(rate);
}

/// How many events with a time have been created since the process began.
#[unsafe(no_mangle)]
pub extern "C" fn software_gpu_timed_events() -> u64 {
    let counters = &Device::get().reports.counters;
    counters.timed_events.load(Ordering::Relaxed)
}

/// Waits of a thread for an event, since the process began.
#[unsafe(no_mangle)]
pub extern "C" fn software_gpu_event_waits() -> u64 {
    let counters = &Device::get().reports.counters;
    counters.event_waits.load(Ordering::Relaxed)
}

/// Of those, waits for an event that was not created with `CU_EVENT_BLOCKING_SYNC`: on a GPU the thread takes a core
/// meanwhile.
#[unsafe(no_mangle)]
pub extern "C" fn software_gpu_spinning_waits() -> u64 {
    let counters = &Device::get().reports.counters;
    counters.spinning_waits.load(Ordering::Relaxed)
}

/// Leaves out the `number`th `cuStreamWaitEvent`, counted from 1 and from now; 0: none. Gives how many were still to come
/// before the one that was ordered last: 0 where it has been left out.
#[unsafe(no_mangle)]
pub extern "C" fn software_gpu_leave_out_stream_wait(number: u64) -> u64 {
    STREAM_WAITS.order(number)
}

/// The same for `cuEventSynchronize`.
#[unsafe(no_mangle)]
pub extern "C" fn software_gpu_leave_out_event_synchronisation(number: u64) -> u64 {
    EVENT_SYNCHRONISATIONS.order(number)
}

/// The same for `cuMemcpyHtoDAsync`, which is refused with `CUDA_ERROR_OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
pub extern "C" fn software_gpu_refuse_copy_to_device(number: u64) -> u64 {
    COPIES_TO_DEVICE.order(number)
}

/// The same for `cuLaunchKernel`.
#[unsafe(no_mangle)]
pub extern "C" fn software_gpu_refuse_launch(number: u64) -> u64 {
    LAUNCHES.order(number)
}

//! What every exported function does around its own work.

#![expect(unsafe_code, reason = "writes answers through the program's pointers")]

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::device::Device;
use super::gpu;
use super::status::{Refusal, Status};

/// The handle of the one context, the device's primary.
pub(super) const CONTEXT: usize = 0x5347_0000_0008;

/// `cuInit` was called.
pub(super) static INITIALISED: AtomicBool = AtomicBool::new(false);
/// How often the primary context is retained.
pub(super) static RETAINED: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// The calling thread's current context.
    pub(super) static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// A call that does nothing once a report was made, as on a GPU after a fault.
pub(super) fn call(name: &str, body: impl FnOnce(&'static Device) -> Result<(), Refusal>) -> u32 {
    answer(name, || {
        let device = device()?;
        expect_no_report(device)?;
        body(device)
    })
}

/// A call that waits for work, and so says whether that led to a report.
pub(super) fn waiting_call(
    name: &str,
    body: impl FnOnce(&'static Device) -> Result<(), Refusal>,
) -> u32 {
    call(name, |device| {
        body(device)?;
        expect_no_report(device)
    })
}

/// A call that gives something back: it does so in any case, then says whether a report was made.
pub(super) fn release_call(
    name: &str,
    body: impl FnOnce(&'static Device) -> Result<(), Refusal>,
) -> u32 {
    answer(name, || {
        let device = device()?;
        body(device)?;
        expect_no_report(device)
    })
}

/// A call that answers in any case.
pub(super) fn plain_call(name: &str, body: impl FnOnce() -> Result<(), Refusal>) -> u32 {
    answer(name, body)
}

/// Fails where the calling thread has no current context.
pub(super) fn expect_context() -> Result<(), Refusal> {
    if CURRENT.get() == CONTEXT && RETAINED.load(Ordering::SeqCst) > 0 {
        return Ok(());
    }
    Err(Refusal::new(
        Status::INVALID_CONTEXT,
        "the calling thread has no current context",
    ))
}

/// Writes an answer; a null pointer is refused.
///
/// # Safety
/// `pointer` is null or points to a `T` that may be written.
pub(super) unsafe fn put<T>(pointer: *mut T, value: T) -> Result<(), Refusal> {
    if pointer.is_null() {
        return Err(Refusal::new(
            Status::INVALID_VALUE,
            "a pointer for the answer is null",
        ));
    }
    // SAFETY: not null, and else the caller's promise.
    unsafe { pointer.write_unaligned(value) };
    Ok(())
}

fn device() -> Result<&'static Device, Refusal> {
    if gpu::is_gpu_thread() {
        return Err(Refusal::new(
            Status::NOT_PERMITTED,
            "a host function must not call the driver",
        ));
    }
    if !INITIALISED.load(Ordering::SeqCst) {
        return Err(Refusal::new(
            Status::NOT_INITIALIZED,
            "cuInit was not called",
        ));
    }
    Ok(Device::get())
}

fn expect_no_report(device: &Device) -> Result<(), Refusal> {
    match device.reports.sticky() {
        Some(status) => Err(Refusal::silent(status)),
        None => Ok(()),
    }
}

fn answer(name: &str, body: impl FnOnce() -> Result<(), Refusal>) -> u32 {
    match body() {
        Ok(()) => Status::SUCCESS.0,
        Err(refusal) => {
            if !refusal.reason.is_empty() {
                let status = refusal
                    .status
                    .name()
                    .and_then(|name| name.to_str().ok())
                    .unwrap_or("?");
                eprintln!(
                    "software-gpu (refused): {name}: {}: {status}",
                    refusal.reason
                );
            }
            refusal.status.0
        }
    }
}

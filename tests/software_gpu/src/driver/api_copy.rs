//! Exported: copies and fills.
//!
//! What the synchronous forms promise is what CUDA's "API synchronization behavior" says: copies to the host are over
//! when the call returns, and copies from page-locked memory; a copy from pageable memory is then staged, its transfer
//! may still run; copies on the device and fills are not waited for. Asynchronous copies from or to pageable memory are
//! waited for here, but promise nothing.

#![expect(unsafe_code, reason = "the driver's C functions")]
#![expect(
    clippy::missing_safety_doc,
    reason = "pointers are null or valid, as CUDA's documentation says"
)]

use super::call::{call, expect_context, waiting_call};
use super::clock::Clock;
use super::device::Device;
use super::left_out::COPIES_TO_DEVICE;
use super::lock;
use super::operation::{HostAddress, HostSource, Pattern, What, Work};
use super::queue::NULL_STREAM;
use super::reports::LiveCounters;
use super::status::{Refusal, Status};
use crate::seam::Access;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Synchronous,
    Asynchronous,
}

fn expect_range(device: &Device, address: u64, bytes: u64) -> Result<(), Refusal> {
    let refusal = |reason| Refusal::new(Status::INVALID_VALUE, reason);
    device
        .memory
        .check(address, bytes)
        .map(drop)
        .map_err(refusal)
}

fn expect_host(device: &Device, address: usize, bytes: usize) -> Result<bool, Refusal> {
    if address == 0 {
        return Err(Refusal::new(
            Status::INVALID_VALUE,
            "the host pointer is null",
        ));
    }
    if device.memory.owns(address as u64) {
        let reason = format!("the host pointer {address:#x} is a device address");
        return Err(Refusal::new(Status::INVALID_VALUE, reason));
    }
    lock(&device.page_locked).covers(address, bytes)
}

/// # Safety
/// `source` is readable for `bytes` bytes; if it is page-locked, for as long as it stays so.
unsafe fn to_device(
    device: &Device,
    (destination, source, bytes): (u64, usize, usize),
    slot: usize,
    mode: Mode,
) -> Result<(), Refusal> {
    expect_context()?;
    if bytes == 0 {
        return Ok(());
    }
    expect_range(device, destination, bytes as u64)?;
    let (host, device_bytes) = (HostAddress(source), bytes as u64);
    if expect_host(device, source, bytes)? {
        let source = HostSource::PageLocked(host);
        let work = Work::ToDevice {
            destination,
            source,
            bytes: device_bytes,
        };
        let what = What::ToDevice {
            bytes: device_bytes,
            staged: false,
        };
        let (step, clock) = device.enqueue_transfer(slot, what, (host, bytes), Access::Read, work);
        if mode == Mode::Synchronous {
            device.wait(step);
            device.learn(&clock);
        }
        return Ok(());
    }
    match mode {
        Mode::Synchronous => device.synchronise_stream(slot),
        Mode::Asynchronous => LiveCounters::add(&device.reports.counters.pageable_async_copies, 1),
    }
    // SAFETY: the caller's promise; the copy is made before the call returns.
    let staged: Box<[u8]> =
        unsafe { std::slice::from_raw_parts(source as *const u8, bytes) }.into();
    let what = What::ToDevice {
        bytes: device_bytes,
        staged: mode == Mode::Synchronous,
    };
    let source = HostSource::Staged(staged);
    let step = device.enqueue(slot, what, |_, _, _| Work::ToDevice {
        destination,
        source,
        bytes: device_bytes,
    });
    if mode == Mode::Asynchronous {
        device.wait(step);
    }
    Ok(())
}

fn to_host(
    device: &Device,
    (destination, source, bytes): (usize, u64, usize),
    slot: usize,
    mode: Mode,
) -> Result<(), Refusal> {
    expect_context()?;
    if bytes == 0 {
        return Ok(());
    }
    expect_range(device, source, bytes as u64)?;
    let host = HostAddress(destination);
    let work = Work::ToHost {
        destination: host,
        source,
        bytes: bytes as u64,
    };
    let what = What::ToHost {
        bytes: bytes as u64,
    };
    let mut known = Clock::default();
    let page_locked = expect_host(device, destination, bytes)?;
    let step = if page_locked {
        let (step, clock) = device.enqueue_transfer(slot, what, (host, bytes), Access::Write, work);
        known = clock;
        step
    } else {
        if mode == Mode::Asynchronous {
            LiveCounters::add(&device.reports.counters.pageable_async_copies, 1);
        }
        device.enqueue(slot, what, |_, clock, _| {
            known = clock.clone();
            work
        })
    };
    if mode == Mode::Synchronous || !page_locked {
        device.wait(step);
    }
    if mode == Mode::Synchronous {
        device.learn(&known);
    }
    Ok(())
}

fn on_device(
    device: &Device,
    (destination, source, bytes): (u64, u64, usize),
    slot: usize,
) -> Result<(), Refusal> {
    expect_context()?;
    if bytes == 0 {
        return Ok(());
    }
    let bytes = bytes as u64;
    expect_range(device, destination, bytes)?;
    expect_range(device, source, bytes)?;
    device.enqueue(slot, What::OnDevice { bytes }, |_, _, _| Work::OnDevice {
        destination,
        source,
        bytes,
    });
    Ok(())
}

fn fill(
    device: &Device,
    destination: u64,
    pattern: Pattern,
    count: usize,
    slot: usize,
) -> Result<(), Refusal> {
    expect_context()?;
    if count == 0 {
        return Ok(());
    }
    if !destination.is_multiple_of(pattern.bytes as u64) {
        let reason = format!("{destination:#x} is not aligned to {} bytes", pattern.bytes);
        return Err(Refusal::new(Status::INVALID_VALUE, reason));
    }
    let bytes = (count as u64).saturating_mul(pattern.bytes as u64);
    expect_range(device, destination, bytes)?;
    device.enqueue(slot, What::Fill { bytes }, |_, _, _| Work::Fill {
        destination,
        pattern,
        bytes,
    });
    Ok(())
}

/// Either side may be host or device memory, as the addresses say.
///
/// # Safety
/// Host ranges are as `to_device` needs them.
unsafe fn any(
    device: &Device,
    (destination, source, bytes): (u64, u64, usize),
    slot: usize,
    mode: Mode,
) -> Result<(), Refusal> {
    match (device.memory.owns(destination), device.memory.owns(source)) {
        // SAFETY: the caller's promise.
        (true, false) => unsafe {
            to_device(device, (destination, source as usize, bytes), slot, mode)
        },
        (false, true) => to_host(device, (destination as usize, source, bytes), slot, mode),
        (true, true) => on_device(device, (destination, source, bytes), slot),
        (false, false) => Err(Refusal::new(
            Status::NOT_SUPPORTED,
            "a copy from host to host memory",
        )),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(destination: u64, source: usize, bytes: usize) -> u32 {
    // SAFETY: the program's pointer.
    waiting_call("cuMemcpyHtoD_v2", |device| unsafe {
        to_device(
            device,
            (destination, source, bytes),
            NULL_STREAM,
            Mode::Synchronous,
        )
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    destination: u64,
    source: usize,
    bytes: usize,
    stream: usize,
) -> u32 {
    call("cuMemcpyHtoDAsync_v2", |device| {
        if COPIES_TO_DEVICE.comes() {
            return Err(Refusal::new(
                Status::OUT_OF_MEMORY,
                "as it was ordered to be",
            ));
        }
        // SAFETY: the program's pointer.
        unsafe {
            to_device(
                device,
                (destination, source, bytes),
                device.slot(stream)?,
                Mode::Asynchronous,
            )
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(destination: usize, source: u64, bytes: usize) -> u32 {
    waiting_call("cuMemcpyDtoH_v2", |device| {
        to_host(
            device,
            (destination, source, bytes),
            NULL_STREAM,
            Mode::Synchronous,
        )
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    destination: usize,
    source: u64,
    bytes: usize,
    stream: usize,
) -> u32 {
    call("cuMemcpyDtoHAsync_v2", |device| {
        to_host(
            device,
            (destination, source, bytes),
            device.slot(stream)?,
            Mode::Asynchronous,
        )
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoD_v2(destination: u64, source: u64, bytes: usize) -> u32 {
    call("cuMemcpyDtoD_v2", |device| {
        on_device(device, (destination, source, bytes), NULL_STREAM)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(
    destination: u64,
    source: u64,
    bytes: usize,
    stream: usize,
) -> u32 {
    call("cuMemcpyDtoDAsync_v2", |device| {
        on_device(device, (destination, source, bytes), device.slot(stream)?)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy(destination: u64, source: u64, bytes: usize) -> u32 {
    // SAFETY: the program's pointers.
    waiting_call("cuMemcpy", |device| unsafe {
        any(
            device,
            (destination, source, bytes),
            NULL_STREAM,
            Mode::Synchronous,
        )
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyAsync(
    destination: u64,
    source: u64,
    bytes: usize,
    stream: usize,
) -> u32 {
    // SAFETY: the program's pointers.
    call("cuMemcpyAsync", |device| unsafe {
        any(
            device,
            (destination, source, bytes),
            device.slot(stream)?,
            Mode::Asynchronous,
        )
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8_v2(destination: u64, value: u8, count: usize) -> u32 {
    let pattern = Pattern {
        value: value.into(),
        bytes: 1,
    };
    call("cuMemsetD8_v2", |device| {
        fill(device, destination, pattern, count, NULL_STREAM)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD16_v2(destination: u64, value: u16, count: usize) -> u32 {
    let pattern = Pattern {
        value: value.into(),
        bytes: 2,
    };
    call("cuMemsetD16_v2", |device| {
        fill(device, destination, pattern, count, NULL_STREAM)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32_v2(destination: u64, value: u32, count: usize) -> u32 {
    let pattern = Pattern { value, bytes: 4 };
    call("cuMemsetD32_v2", |device| {
        fill(device, destination, pattern, count, NULL_STREAM)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(destination: u64, value: u8, count: usize, stream: usize) -> u32 {
    let pattern = Pattern {
        value: value.into(),
        bytes: 1,
    };
    call("cuMemsetD8Async", |device| {
        fill(device, destination, pattern, count, device.slot(stream)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD16Async(
    destination: u64,
    value: u16,
    count: usize,
    stream: usize,
) -> u32 {
    let pattern = Pattern {
        value: value.into(),
        bytes: 2,
    };
    call("cuMemsetD16Async", |device| {
        fill(device, destination, pattern, count, device.slot(stream)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32Async(
    destination: u64,
    value: u32,
    count: usize,
    stream: usize,
) -> u32 {
    let pattern = Pattern { value, bytes: 4 };
    call("cuMemsetD32Async", |device| {
        fill(device, destination, pattern, count, device.slot(stream)?)
    })
}

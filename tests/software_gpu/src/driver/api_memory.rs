//! Exported: device memory and page-locked host memory.

#![expect(unsafe_code, reason = "the driver's C functions")]
#![expect(
    clippy::missing_safety_doc,
    reason = "pointers are null or valid, as CUDA's documentation says"
)]

use super::call::{CONTEXT, call, expect_context, put, release_call};
use super::device::Device;
use super::lock;
use super::memory::Allocation;
use super::operation::{What, Work};
use super::status::{Refusal, Status};

/// Flags of `cuMemHostAlloc`: portable, mapped, write-combined.
const HOST_ALLOCATE_FLAGS: u32 = 7;
/// Flags of `cuMemHostRegister`: portable, mapped, read-only. I/O memory is not supported.
const HOST_REGISTER_FLAGS: u32 = 1 | 2 | 8;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> u32 {
    call("cuMemAlloc_v2", |device| {
        expect_context()?;
        if address.is_null() || bytes == 0 {
            return Err(Refusal::new(
                Status::INVALID_VALUE,
                format!("{bytes} bytes at a pointer {address:?}"),
            ));
        }
        let allocation = allocate(device, bytes)?;
        device.note_allocation(&allocation);
        // SAFETY: the program's pointer.
        unsafe { put(address, allocation.start) }
    })
}

/// Room for an allocation; where there is none, work that frees memory may have to end first.
fn allocate(device: &Device, bytes: usize) -> Result<Allocation, Refusal> {
    if let Some(allocation) = device.memory.allocate(bytes as u64) {
        return Ok(allocation);
    }
    device.synchronise();
    device.memory.allocate(bytes as u64).ok_or_else(|| {
        let (free, total) = device.memory.free_and_total();
        Refusal::new(
            Status::OUT_OF_MEMORY,
            format!("{bytes} bytes of {free} free bytes ({total} in all)"),
        )
    })
}

/// Waits for all work before the memory goes, as the real driver does.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: u64) -> u32 {
    release_call("cuMemFree_v2", |device| {
        if address == 0 {
            return Ok(());
        }
        let refusal = |reason| Refusal::new(Status::INVALID_VALUE, reason);
        let allocation = device.memory.queue_free(address).map_err(refusal)?;
        device.synchronise();
        lock(&device.shadow).forget(&allocation);
        device.memory.release(address);
        Ok(())
    })
}

/// The address is known at once; the memory is the program's for what comes after this in the stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: usize) -> u32 {
    call("cuMemAllocAsync", |device| {
        expect_context()?;
        if address.is_null() {
            return Err(Refusal::new(
                Status::INVALID_VALUE,
                "the pointer for the address is null",
            ));
        }
        let slot = device.slot(stream)?;
        if bytes == 0 {
            // SAFETY: the program's pointer.
            return unsafe { put(address, 0) };
        }
        let allocation = allocate(device, bytes)?;
        device.enqueue(
            slot,
            What::Allocate {
                bytes: bytes as u64,
            },
            |step, _, label| {
                lock(&device.shadow).allocate(&allocation, step, label.clone());
                Work::Allocate
            },
        );
        // SAFETY: the program's pointer.
        unsafe { put(address, allocation.start) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeAsync(address: u64, stream: usize) -> u32 {
    release_call("cuMemFreeAsync", |device| {
        if address == 0 {
            return Ok(());
        }
        let slot = device.slot(stream)?;
        let refusal = |reason| Refusal::new(Status::INVALID_VALUE, reason);
        let allocation = device.memory.queue_free(address).map_err(refusal)?;
        device.enqueue(slot, What::Free, |_, _, _| Work::Free(allocation));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAddressRange_v2(
    base: *mut u64,
    bytes: *mut usize,
    address: u64,
) -> u32 {
    call("cuMemGetAddressRange_v2", |device| {
        let unknown = || {
            Refusal::new(
                Status::NOT_FOUND,
                format!("{address:#x} lies in no allocation"),
            )
        };
        let allocation = device.memory.find(address).ok_or_else(unknown)?;
        // SAFETY: the program's pointers; either may be null.
        unsafe {
            if !base.is_null() {
                put(base, allocation.start)?;
            }
            if !bytes.is_null() {
                put(bytes, allocation.bytes as usize)?;
            }
        }
        Ok(())
    })
}

/// Context, memory type (host 1, device 2) and device ordinal of an address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(
    data: *mut libc::c_void,
    attribute: u32,
    address: u64,
) -> u32 {
    call("cuPointerGetAttribute", |device| {
        let on_device = device.memory.find(address).is_some();
        if !on_device && lock(&device.page_locked).flags(address as usize).is_none() {
            let reason = format!("{address:#x} is neither device nor page-locked memory");
            return Err(Refusal::new(Status::INVALID_VALUE, reason));
        }
        // SAFETY: the program's pointer, to what the attribute says.
        unsafe {
            match attribute {
                1 => put(data.cast(), CONTEXT),
                2 => put(data.cast(), if on_device { 2_u32 } else { 1 }),
                9 => put(data.cast(), 0_i32),
                _ => Err(Refusal::new(
                    Status::NOT_SUPPORTED,
                    format!("pointer attribute {attribute}"),
                )),
            }
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(address: *mut *mut u8, bytes: usize, flags: u32) -> u32 {
    call("cuMemHostAlloc", |device| {
        expect_context()?;
        if address.is_null() || flags & !HOST_ALLOCATE_FLAGS != 0 {
            return Err(Refusal::new(
                Status::INVALID_VALUE,
                format!("flags {flags:#x} at a pointer {address:?}"),
            ));
        }
        let memory = lock(&device.page_locked).allocate(bytes, flags)?;
        // SAFETY: the program's pointer.
        unsafe { put(address, memory) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocHost_v2(address: *mut *mut u8, bytes: usize) -> u32 {
    // SAFETY: the program's pointer.
    unsafe { cuMemHostAlloc(address, bytes, 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(address: usize) -> u32 {
    release_call("cuMemFreeHost", |device| {
        give_back(device, |table, host| table.free(address, host))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostRegister_v2(address: usize, bytes: usize, flags: u32) -> u32 {
    call("cuMemHostRegister_v2", |device| {
        expect_context()?;
        if flags & !HOST_REGISTER_FLAGS != 0 {
            return Err(Refusal::new(
                Status::INVALID_VALUE,
                format!("flags {flags:#x}"),
            ));
        }
        lock(&device.page_locked).register(address, bytes, flags)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostUnregister(address: usize) -> u32 {
    release_call("cuMemHostUnregister", |device| {
        give_back(device, |table, host| table.unregister(address, host))
    })
}

/// Frees or unregisters page-locked memory: no queued copy may still use it, and one that the host has not waited for is
/// a report.
fn give_back(
    device: &Device,
    end: impl FnOnce(
        &mut super::page_locked::PageLocked,
        &super::clock::Clock,
    ) -> Result<Vec<String>, Refusal>,
) -> Result<(), Refusal> {
    let host = device.queue().host().clone();
    device.run_everything();
    let reports = end(&mut lock(&device.page_locked), &host)?;
    device.report_all(Status::LAUNCH_FAILED, reports);
    Ok(())
}

//! Exported: the driver, the device and its context.

#![expect(unsafe_code, reason = "the driver's C functions")]
#![expect(
    clippy::missing_safety_doc,
    reason = "pointers are null or valid, as CUDA's documentation says"
)]

use std::ffi::c_char;
use std::ptr;
use std::sync::atomic::Ordering;

use super::attributes;
use super::call::{
    CONTEXT, CURRENT, INITIALISED, RETAINED, call, expect_context, plain_call, put, release_call,
    waiting_call,
};
use super::device::Device;
use super::lock;
use super::status::{Refusal, Status};

/// The handle of the device's one memory pool.
const MEMORY_POOL: usize = 0x5347_0000_000C;

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: u32) -> u32 {
    plain_call("cuInit", || {
        if flags != 0 {
            return Err(Refusal::new(Status::INVALID_VALUE, "flags are not 0"));
        }
        if Device::get().settings.devices == 0 {
            return Err(Refusal::new(Status::NO_DEVICE, "there is none"));
        }
        INITIALISED.store(true, Ordering::SeqCst);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut i32) -> u32 {
    // SAFETY: the program's pointer.
    plain_call("cuDriverGetVersion", || unsafe {
        put(version, attributes::DRIVER_VERSION)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(status: u32, text: *mut *const c_char) -> u32 {
    plain_call("cuGetErrorName", || {
        let name = Status(status).name();
        // SAFETY: the program's pointer.
        unsafe { put(text, name.map_or(ptr::null(), |name| name.as_ptr())) }?;
        name.map(drop)
            .ok_or_else(|| Refusal::new(Status::INVALID_VALUE, format!("{status} is no status")))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(status: u32, text: *mut *const c_char) -> u32 {
    plain_call("cuGetErrorString", || {
        let message = Status(status).text();
        // SAFETY: the program's pointer.
        unsafe {
            put(
                text,
                message.map_or(ptr::null(), |message| message.as_ptr()),
            )
        }?;
        message
            .map(drop)
            .ok_or_else(|| Refusal::new(Status::INVALID_VALUE, format!("{status} is no status")))
    })
}

/// A query about the device: needs cuInit, and answers whatever has been reported.
fn device_call(name: &str, device: i32, body: impl FnOnce() -> Result<(), Refusal>) -> u32 {
    plain_call(name, || {
        expect_initialised()?;
        expect_device(device)?;
        body()
    })
}

fn expect_initialised() -> Result<(), Refusal> {
    match INITIALISED.load(Ordering::SeqCst) {
        true => Ok(()),
        false => Err(Refusal::new(
            Status::NOT_INITIALIZED,
            "cuInit was not called",
        )),
    }
}

fn expect_device(device: i32) -> Result<(), Refusal> {
    match device {
        0 => Ok(()),
        _ => Err(Refusal::new(
            Status::INVALID_DEVICE,
            format!("there is no device {device}"),
        )),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut i32) -> u32 {
    // SAFETY: the program's pointer.
    device_call("cuDeviceGetCount", 0, || unsafe { put(count, 1) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut i32, ordinal: i32) -> u32 {
    // SAFETY: the program's pointer.
    device_call("cuDeviceGet", ordinal, || unsafe { put(device, 0) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: i32, device: i32) -> u32 {
    device_call("cuDeviceGetName", device, || {
        let room = usize::try_from(length).unwrap_or(0);
        if name.is_null() || room == 0 {
            return Err(Refusal::new(Status::INVALID_VALUE, "no room for the name"));
        }
        let length = attributes::NAME.len().min(room - 1);
        // SAFETY: the program gives `room` bytes at `name`; `length` and the zero behind it fit.
        unsafe {
            ptr::copy_nonoverlapping(attributes::NAME.as_ptr(), name.cast(), length);
            name.add(length).write(0);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: i32) -> u32 {
    device_call("cuDeviceTotalMem_v2", device, || {
        let (_, total) = Device::get().memory.free_and_total();
        // SAFETY: the program's pointer.
        unsafe { put(bytes, total as usize) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut i32, attribute: u32, device: i32) -> u32 {
    device_call("cuDeviceGetAttribute", device, || {
        let unknown = || {
            Refusal::new(
                Status::INVALID_VALUE,
                format!("{attribute} is no device attribute"),
            )
        };
        let known = attributes::device_attribute(attribute).ok_or_else(unknown)?;
        // SAFETY: the program's pointer.
        unsafe { put(value, known) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: i32) -> u32 {
    // SAFETY: the program's pointer.
    device_call("cuDeviceGetUuid", device, || unsafe {
        put(uuid, *b"software-gpu\0\0\0\x01")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32) -> u32 {
    // SAFETY: the program's pointer.
    unsafe { cuDeviceGetUuid(uuid, device) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetDefaultMemPool(pool: *mut usize, device: i32) -> u32 {
    // SAFETY: the program's pointer.
    device_call("cuDeviceGetDefaultMemPool", device, || unsafe {
        put(pool, MEMORY_POOL)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetMemPool(pool: *mut usize, device: i32) -> u32 {
    // SAFETY: the program's pointer.
    device_call("cuDeviceGetMemPool", device, || unsafe {
        put(pool, MEMORY_POOL)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolTrimTo(pool: usize, _bytes_to_keep: usize) -> u32 {
    device_call("cuMemPoolTrimTo", 0, || expect_pool(pool))
}

/// Attributes are accepted and change nothing: freed memory goes back at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolSetAttribute(
    pool: usize,
    _attribute: u32,
    _value: *mut u8,
) -> u32 {
    device_call("cuMemPoolSetAttribute", 0, || expect_pool(pool))
}

fn expect_pool(pool: usize) -> Result<(), Refusal> {
    match pool {
        MEMORY_POOL => Ok(()),
        _ => Err(Refusal::new(
            Status::INVALID_VALUE,
            format!("{pool:#x} is no memory pool"),
        )),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, device: i32) -> u32 {
    device_call("cuDevicePrimaryCtxRetain", device, || {
        // SAFETY: the program's pointer.
        unsafe { put(context, CONTEXT) }?;
        RETAINED.fetch_add(1, Ordering::SeqCst);
        Ok(())
    })
}

/// The last release waits for all work; what the program has not given back stays, so that nothing dangles.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: i32) -> u32 {
    release_call("cuDevicePrimaryCtxRelease_v2", |gpu| {
        expect_device(device)?;
        let fewer = |count: u32| count.checked_sub(1);
        match RETAINED.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fewer) {
            Err(_) => Err(Refusal::new(
                Status::INVALID_CONTEXT,
                "the primary context is not retained",
            )),
            Ok(1) => {
                gpu.synchronise();
                Ok(())
            }
            Ok(_) => Ok(()),
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxGetState(
    device: i32,
    flags: *mut u32,
    active: *mut i32,
) -> u32 {
    device_call("cuDevicePrimaryCtxGetState", device, || {
        // SAFETY: the program's pointers.
        unsafe {
            put(flags, 0)?;
            put(active, i32::from(RETAINED.load(Ordering::SeqCst) > 0))
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: usize) -> u32 {
    device_call("cuCtxSetCurrent", 0, || {
        if context != 0 && (context != CONTEXT || RETAINED.load(Ordering::SeqCst) == 0) {
            return Err(Refusal::new(
                Status::INVALID_CONTEXT,
                format!("{context:#x} is no context"),
            ));
        }
        CURRENT.set(context);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut usize) -> u32 {
    // SAFETY: the program's pointer.
    device_call("cuCtxGetCurrent", 0, || unsafe {
        put(context, CURRENT.get())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(device: *mut i32) -> u32 {
    device_call("cuCtxGetDevice", 0, || {
        expect_context()?;
        // SAFETY: the program's pointer.
        unsafe { put(device, 0) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetFlags(_flags: u32) -> u32 {
    device_call("cuCtxSetFlags", 0, expect_context)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) -> u32 {
    device_call("cuCtxGetStreamPriorityRange", 0, || {
        expect_context()?;
        // SAFETY: the program's pointers; either may be null.
        unsafe {
            if !least.is_null() {
                put(least, attributes::PRIORITIES.0)?;
            }
            if !greatest.is_null() {
                put(greatest, attributes::PRIORITIES.1)?;
            }
        }
        Ok(())
    })
}

/// Stack, printf buffer and heap have sizes that nothing here uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetLimit(value: *mut usize, limit: u32) -> u32 {
    device_call("cuCtxGetLimit", 0, || {
        expect_context()?;
        let known = match limit {
            0 => 1024,
            1 => 1 << 20,
            2 => 8 << 20,
            _ => {
                return Err(Refusal::new(
                    Status::UNSUPPORTED_LIMIT,
                    format!("limit {limit} is not supported"),
                ));
            }
        };
        // SAFETY: the program's pointer.
        unsafe { put(value, known) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetLimit(limit: u32, _value: usize) -> u32 {
    device_call("cuCtxSetLimit", 0, || {
        expect_context()?;
        match limit {
            0..=2 => Ok(()),
            _ => Err(Refusal::new(
                Status::UNSUPPORTED_LIMIT,
                format!("limit {limit} is not supported"),
            )),
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> u32 {
    waiting_call("cuCtxSynchronize", |device| {
        expect_context()?;
        device.synchronise();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32 {
    call("cuMemGetInfo_v2", |device| {
        expect_context()?;
        let (free_bytes, total_bytes) = device.memory.free_and_total();
        // SAFETY: the program's pointers.
        unsafe {
            put(free, free_bytes as usize)?;
            put(total, total_bytes as usize)
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostGetFlags(flags: *mut u32, address: usize) -> u32 {
    call("cuMemHostGetFlags", |device| {
        let unknown = || {
            Refusal::new(
                Status::INVALID_VALUE,
                format!("{address:#x} is not page-locked"),
            )
        };
        let known = lock(&device.page_locked)
            .flags(address)
            .ok_or_else(unknown)?;
        // SAFETY: the program's pointer.
        unsafe { put(flags, known) }
    })
}

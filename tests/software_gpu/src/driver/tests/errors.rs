//! Wrong calls get the answers of the real driver, and are no reports.

use super::*;
use std::ffi::{CStr, c_char};
use std::ptr;

const INVALID_VALUE: u32 = 1;
const INVALID_HANDLE: u32 = 400;

#[test]
fn wrong_handles_are_refused() {
    let mut program = Program::start(0);
    let (stream, event) = (program.stream(NON_BLOCKING), program.event());
    for wrong in [3, 0x1234_5678, event] {
        assert_eq!(cuStreamSynchronize(wrong), INVALID_HANDLE);
        assert_eq!(cuStreamDestroy_v2(wrong), INVALID_HANDLE);
        assert_eq!(cuStreamWaitEvent(wrong, event, 0), INVALID_HANDLE);
        assert_eq!(cuMemsetD8Async(0, 0, 1, wrong), INVALID_HANDLE);
    }
    for wrong in [0, 1, stream] {
        assert_eq!(cuEventRecord(wrong, stream), INVALID_HANDLE);
        assert_eq!(cuEventQuery(wrong), INVALID_HANDLE);
        assert_eq!(cuEventDestroy_v2(wrong), INVALID_HANDLE);
        assert_eq!(cuModuleUnload(wrong), INVALID_HANDLE);
        assert_eq!(cuFuncSetCacheConfig(wrong, 0), INVALID_HANDLE);
    }
    assert_eq!(cuStreamDestroy_v2(0), INVALID_HANDLE);
    assert_eq!(program.launch("copy", &[0, 0], 1, event), INVALID_HANDLE);
    expect_no_report();
}

#[test]
fn a_handle_is_wrong_after_its_end() {
    let mut program = Program::start(0);
    let (stream, event) = (program.stream(0), program.event());
    ok(cuStreamDestroy_v2(stream));
    ok(cuEventDestroy_v2(event));
    assert_eq!(cuStreamDestroy_v2(stream), INVALID_HANDLE);
    assert_eq!(cuStreamQuery(stream), INVALID_HANDLE);
    assert_eq!(cuEventDestroy_v2(event), INVALID_HANDLE);
    program.streams.clear();
    program.events.clear();
    expect_no_report();
}

#[test]
fn null_pointers_and_wrong_sizes_are_refused() {
    let mut program = Program::start(0);
    let address = program.allocate_with(&[0; 16]);
    let (values, mut place) = ([0_u32; 64], 0);
    let host = values.as_ptr() as usize;
    // SAFETY: null where the driver must see it, else valid.
    unsafe {
        assert_eq!(cuMemAlloc_v2(ptr::null_mut(), 16), INVALID_VALUE);
        assert_eq!(cuMemAlloc_v2(&raw mut place, 0), INVALID_VALUE);
        assert_eq!(cuMemHostAlloc(ptr::null_mut(), 16, 0), INVALID_VALUE);
        assert_eq!(cuStreamCreate(ptr::null_mut(), 0), INVALID_VALUE);
        assert_eq!(cuEventCreate(ptr::null_mut(), 0), INVALID_VALUE);
        assert_eq!(cuMemcpyHtoD_v2(address, 0, 16), INVALID_VALUE);
        assert_eq!(cuMemcpyHtoD_v2(0, host, 16), INVALID_VALUE);
        assert_eq!(cuMemcpyHtoD_v2(address, host, 65), INVALID_VALUE);
        assert_eq!(
            cuMemcpyHtoD_v2(address, address as usize, 16),
            INVALID_VALUE
        );
        assert_eq!(cuMemcpyDtoH_v2(host, address + 60, 5), INVALID_VALUE);
        assert_eq!(cuMemcpyHtoDAsync_v2(address - 1, host, 4, 0), INVALID_VALUE);
        ok(cuMemcpyHtoD_v2(0, 0, 0));
    }
    assert_eq!(cuMemcpyDtoD_v2(address + 8, address, 60), INVALID_VALUE);
    assert_eq!(cuMemsetD8_v2(address, 0, 65), INVALID_VALUE);
    assert_eq!(cuMemFree_v2(address + 256), INVALID_VALUE);
    ok(cuMemFree_v2(0));
    expect_no_report();
}

#[test]
fn page_locking_follows_its_table() {
    let mut program = Program::start(0);
    let address = program.allocate_with(&[0; 1024]);
    let memory = vec![1_u32; 4096];
    let start = memory.as_ptr() as usize;
    // SAFETY: the memory is there until it is unregistered.
    unsafe {
        assert_eq!(cuMemHostRegister_v2(0, 4096, 0), INVALID_VALUE);
        assert_eq!(cuMemHostRegister_v2(start, 0, 0), INVALID_VALUE);
        assert_eq!(
            cuMemHostRegister_v2(4096, 4096, 0),
            INVALID_VALUE,
            "nothing is mapped there"
        );
        ok(cuMemHostRegister_v2(start, 8192, 1));
        assert_eq!(cuMemHostRegister_v2(start, 8192, 0), 712);
        assert_eq!(cuMemHostRegister_v2(start + 8000, 1000, 0), 712);
        let mut flags = 0;
        ok(cuMemHostGetFlags(&raw mut flags, start + 100));
        assert_eq!(flags, 1);
        // Half of it is page-locked.
        assert_eq!(
            cuMemcpyHtoDAsync_v2(address, start + 8000, 1000, 0),
            INVALID_VALUE
        );
        assert_eq!(cuMemHostUnregister(start + 4096), 713);
        assert_eq!(cuMemFreeHost(start), INVALID_VALUE);
        ok(cuMemHostUnregister(start));
        assert_eq!(cuMemHostUnregister(start), 713);
        assert_eq!(
            cuMemHostGetFlags(&raw mut flags, start + 100),
            INVALID_VALUE
        );
    }
    expect_no_report();
}

#[test]
fn a_thread_needs_a_current_context() {
    let program = Program::start(0);
    let status = std::thread::spawn(|| {
        let (mut context, mut address) = (1, 0);
        // SAFETY: valid pointers.
        unsafe {
            ok(cuCtxGetCurrent(&raw mut context));
            assert_eq!(context, 0);
            cuMemAlloc_v2(&raw mut address, 16)
        }
    });
    assert_eq!(status.join().unwrap(), 201);
    assert_eq!(cuCtxSetCurrent(77), 201);
    // SAFETY: the ordinal is refused first.
    assert_eq!(unsafe { cuDeviceGet(ptr::null_mut(), 1) }, 101);
    drop(program);
}

#[test]
fn errors_have_names_and_texts() {
    let text = |function: unsafe extern "C" fn(u32, *mut *const c_char) -> u32, status| {
        let mut text = ptr::null();
        // SAFETY: a valid pointer.
        ok(unsafe { function(status, &raw mut text) });
        // SAFETY: the driver's texts end in a zero.
        unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned()
    };
    assert_eq!(text(cuGetErrorName, 700), "CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_eq!(text(cuGetErrorString, 2), "out of memory");
    let mut name = ptr::null();
    assert_eq!(
        // SAFETY: a valid pointer.
        unsafe { cuGetErrorName(4711, &raw mut name) },
        INVALID_VALUE
    );
    assert!(name.is_null());
}

#[test]
fn the_device_describes_itself() {
    let program = Program::start(0);
    let (mut count, mut value, mut bytes, mut version) = (0, 0, 0, 0);
    let mut name = [0; 8];
    let mut uuid = [0; 16];
    // SAFETY: valid pointers.
    unsafe {
        ok(cuDeviceGetCount(&raw mut count));
        ok(cuDeviceGetAttribute(&raw mut value, 75, 0));
        ok(cuDeviceTotalMem_v2(&raw mut bytes, 0));
        ok(cuDriverGetVersion(&raw mut version));
        ok(cuDeviceGetUuid_v2(&raw mut uuid, 0));
        ok(cuDeviceGetName(name.as_mut_ptr(), 8, 0));
        assert_eq!(cuDeviceGetAttribute(&raw mut value, 9999, 0), INVALID_VALUE);
    }
    assert_eq!((count, value, version), (1, 7, 13_000));
    assert!(bytes >= 1 << 16);
    assert_eq!(name.map(|byte| byte as u8), *b"softwar\0");
    assert_ne!(uuid, [0; 16]);
    drop(program);
}

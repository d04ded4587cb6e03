//! Exported: modules, functions and launches.

#![expect(unsafe_code, reason = "the driver's C functions")]
#![expect(
    clippy::missing_safety_doc,
    reason = "pointers are null or valid, as CUDA's documentation says"
)]

use std::ffi::{CStr, c_char};
use std::sync::atomic::Ordering;

use super::attributes::{self, SHARED_BYTES_OPT_IN};
use super::call::{call, expect_context, put, release_call};
use super::device::Device;
use super::handles::Function;
use super::left_out::LAUNCHES;
use super::lock;
use super::operation::{What, Work};
use super::status::{Refusal, Status};
use crate::ptx;
use crate::seam::Launch;

/// The first bytes of compiled code: an ELF file, and a bundle of several.
const ELF_MAGIC: [u8; 4] = *b"\x7fELF";
const FAT_BINARY_MAGIC: [u8; 4] = 0xBA55_ED50_u32.to_le_bytes();

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut usize, image: *const c_char) -> u32 {
    call("cuModuleLoadData", |device| {
        if image.is_null() {
            return Err(Refusal::new(Status::INVALID_VALUE, "the image is null"));
        }
        // SAFETY: PTX ends in a zero; compiled code starts with four bytes that are not zero.
        let image = unsafe { CStr::from_ptr(image) }.to_bytes();
        // SAFETY: the program's pointer.
        unsafe { load(device, module, image) }
    })
}

/// Options of the compiler change nothing here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadDataEx(
    module: *mut usize,
    image: *const c_char,
    _options: u32,
    _names: *mut u32,
    _values: *mut *mut libc::c_void,
) -> u32 {
    // SAFETY: the program's pointers.
    unsafe { cuModuleLoadData(module, image) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoad(module: *mut usize, path: *const c_char) -> u32 {
    call("cuModuleLoad", |device| {
        // SAFETY: the program's pointer.
        let path = unsafe { text(path) }?;
        let missing = |error| Refusal::new(Status::FILE_NOT_FOUND, format!("read {path}: {error}"));
        let image = std::fs::read(&path).map_err(missing)?;
        // SAFETY: the program's pointer.
        unsafe { load(device, module, &image) }
    })
}

/// # Safety
/// `module` is null or may be written.
unsafe fn load(device: &Device, module: *mut usize, image: &[u8]) -> Result<(), Refusal> {
    expect_context()?;
    if image.starts_with(&ELF_MAGIC) || image.starts_with(&FAT_BINARY_MAGIC) {
        return Err(Refusal::new(
            Status::NO_BINARY_FOR_GPU,
            "compiled code cannot run here; load PTX",
        ));
    }
    let Ok(source) = std::str::from_utf8(image) else {
        return Err(Refusal::new(Status::INVALID_IMAGE, "the image is not text"));
    };
    let refusal = |error: ptx::PtxError| Refusal::new(Status::INVALID_PTX, error.to_string());
    let loaded = ptx::Module::parse(source).map_err(refusal)?;
    let handle = lock(&device.handles).add_module(loaded);
    // SAFETY: the caller's promise.
    unsafe { put(module, handle) }
}

/// Launches that are queued keep their kernels.
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: usize) -> u32 {
    release_call("cuModuleUnload", |device| {
        lock(&device.handles).remove_module(module)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: *mut usize,
    module: usize,
    name: *const c_char,
) -> u32 {
    call("cuModuleGetFunction", |device| {
        // SAFETY: the program's pointer.
        let name = unsafe { text(name) }?;
        let handle = lock(&device.handles).function_named(module, &name)?;
        // SAFETY: the program's pointer.
        unsafe { put(function, handle) }
    })
}

/// Variables of modules have no addresses that a program could use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetGlobal_v2(
    _address: *mut u64,
    _bytes: *mut usize,
    module: usize,
    name: *const c_char,
) -> u32 {
    call("cuModuleGetGlobal_v2", |device| {
        lock(&device.handles).module(module)?;
        // SAFETY: the program's pointer.
        let name = unsafe { text(name) }?;
        Err(Refusal::new(
            Status::NOT_FOUND,
            format!("variable {name}: variables of modules are not supported"),
        ))
    })
}

/// # Safety
/// `pointer` is null or points to a string that ends in a zero.
unsafe fn text(pointer: *const c_char) -> Result<String, Refusal> {
    if pointer.is_null() {
        return Err(Refusal::new(Status::INVALID_VALUE, "a name is null"));
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(pointer) }.to_str();
    text.map(str::to_owned)
        .map_err(|_| Refusal::new(Status::INVALID_VALUE, "a name is not UTF-8"))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetAttribute(
    value: *mut i32,
    attribute: u32,
    function: usize,
) -> u32 {
    call("cuFuncGetAttribute", |device| {
        let function = lock(&device.handles).function(function)?;
        let known = match attribute {
            0 => attributes::BLOCK_THREADS_MAX as i32,
            1 => function.kernel.static_shared_bytes() as i32,
            // Constants and spills are not counted here; 32 registers stand for any number.
            2 | 3 | 7 => 0,
            4 => 32,
            5 | 6 => 75,
            8 => function.dynamic_shared_bytes_max.load(Ordering::Relaxed) as i32,
            9 => -1,
            10..=15 => 0,
            _ => {
                return Err(Refusal::new(
                    Status::INVALID_VALUE,
                    format!("{attribute} is no function attribute"),
                ));
            }
        };
        // SAFETY: the program's pointer.
        unsafe { put(value, known) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(function: usize, attribute: u32, value: i32) -> u32 {
    call("cuFuncSetAttribute", |device| {
        let function = lock(&device.handles).function(function)?;
        let refusal = |reason| Err(Refusal::new(Status::INVALID_VALUE, reason));
        match attribute {
            8 => {
                let room =
                    SHARED_BYTES_OPT_IN as i64 - function.kernel.static_shared_bytes() as i64;
                if !(0..=room).contains(&i64::from(value)) {
                    return refusal(format!(
                        "{value} bytes of dynamic shared memory are not between 0 and {room}"
                    ));
                }
                function
                    .dynamic_shared_bytes_max
                    .store(value as u32, Ordering::Relaxed);
                Ok(())
            }
            9 if (-1..=100).contains(&value) => Ok(()),
            _ => refusal(format!(
                "function attribute {attribute} cannot be set to {value}"
            )),
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetCacheConfig(function: usize, _config: u32) -> u32 {
    call("cuFuncSetCacheConfig", |device| {
        lock(&device.handles).function(function).map(drop)
    })
}

/// Blocks that fit on a multiprocessor at once, by threads and shared memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut i32,
    function: usize,
    block_threads: i32,
    dynamic_shared_bytes: usize,
) -> u32 {
    call("cuOccupancyMaxActiveBlocksPerMultiprocessor", |device| {
        let function = lock(&device.handles).function(function)?;
        if !(1..=attributes::BLOCK_THREADS_MAX as i32).contains(&block_threads) {
            return Err(Refusal::new(
                Status::INVALID_VALUE,
                format!("a block of {block_threads} threads"),
            ));
        }
        let by_threads = attributes::MULTIPROCESSOR_THREADS / block_threads;
        let shared_bytes = function.kernel.static_shared_bytes() + dynamic_shared_bytes;
        let by_memory = (SHARED_BYTES_OPT_IN as usize)
            .checked_div(shared_bytes)
            .map_or(16, |count| count.min(16));
        // SAFETY: the program's pointer.
        unsafe { put(blocks, by_threads.min(by_memory as i32)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    blocks: *mut i32,
    function: usize,
    block_threads: i32,
    dynamic_shared_bytes: usize,
    _flags: u32,
) -> u32 {
    // SAFETY: the program's pointer.
    unsafe {
        cuOccupancyMaxActiveBlocksPerMultiprocessor(
            blocks,
            function,
            block_threads,
            dynamic_shared_bytes,
        )
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: usize,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared_bytes: u32,
    stream: usize,
    parameters: *const *const u8,
    extra: *const *const u8,
) -> u32 {
    call("cuLaunchKernel", |device| {
        if LAUNCHES.comes() {
            return Err(Refusal::new(
                Status::OUT_OF_MEMORY,
                "as it was ordered to be",
            ));
        }
        expect_context()?;
        let slot = device.slot(stream)?;
        let function = lock(&device.handles).function(function)?;
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        expect_shape(&function, grid, block, shared_bytes)?;
        if !extra.is_null() {
            return Err(Refusal::new(Status::NOT_SUPPORTED, "parameters by `extra`"));
        }
        // SAFETY: the program's pointers.
        let parameters = unsafe { copy_parameters(&function, parameters) }?;
        let block_order_seed = device.queue().block_order_seed();
        let launch = Launch {
            grid,
            block,
            dynamic_shared_bytes: shared_bytes,
            block_order_seed,
        };
        let kernel = function.kernel.clone();
        let what = What::Kernel(function.name.clone());
        device.enqueue(slot, what, |_, _, _| Work::Launch {
            kernel,
            launch,
            parameters,
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchCooperativeKernel(
    _function: usize,
    _grid_x: u32,
    _grid_y: u32,
    _grid_z: u32,
    _block_x: u32,
    _block_y: u32,
    _block_z: u32,
    _shared_bytes: u32,
    _stream: usize,
    _parameters: *const *const u8,
) -> u32 {
    call("cuLaunchCooperativeKernel", |_| {
        Err(Refusal::new(Status::NOT_SUPPORTED, "cooperative launches"))
    })
}

/// The limits of a launch.
fn expect_shape(
    function: &Function,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
) -> Result<(), Refusal> {
    let name = &function.name;
    let within = |sizes: [u32; 3], limits: [u32; 3]| {
        sizes
            .iter()
            .zip(limits)
            .all(|(size, max)| (1..=max).contains(size))
    };
    if !within(grid, attributes::GRID_MAX) {
        return Err(Refusal::new(
            Status::INVALID_VALUE,
            format!("kernel {name}: a grid of {grid:?} blocks"),
        ));
    }
    let threads: u64 = block.iter().map(|size| u64::from(*size)).product();
    if !within(block, attributes::BLOCK_MAX) || threads > u64::from(attributes::BLOCK_THREADS_MAX) {
        return Err(Refusal::new(
            Status::INVALID_VALUE,
            format!("kernel {name}: a block of {block:?} threads"),
        ));
    }
    let shared_bytes_max = function.dynamic_shared_bytes_max.load(Ordering::Relaxed);
    if shared_bytes > shared_bytes_max {
        let reason = format!(
            "kernel {name}: {shared_bytes} bytes of dynamic shared memory, of which it may have {shared_bytes_max}"
        );
        return Err(Refusal::new(Status::INVALID_VALUE, reason));
    }
    Ok(())
}

/// The parameter block of a launch.
///
/// # Safety
/// `pointers` is null, or has for each parameter of the kernel a pointer to as many bytes as it has.
unsafe fn copy_parameters(
    function: &Function,
    pointers: *const *const u8,
) -> Result<Box<[u8]>, Refusal> {
    let mut block = vec![0_u8; function.kernel.parameter_bytes()].into_boxed_slice();
    for (index, parameter) in function.kernel.parameters().iter().enumerate() {
        if pointers.is_null() {
            let reason = format!("kernel {} has parameters and none are given", function.name);
            return Err(Refusal::new(Status::INVALID_VALUE, reason));
        }
        // SAFETY: the caller's promise.
        let pointer = unsafe { pointers.add(index).read() };
        if pointer.is_null() {
            let reason = format!(
                "kernel {}: the pointer to parameter {index} is null",
                function.name
            );
            return Err(Refusal::new(Status::INVALID_VALUE, reason));
        }
        // SAFETY: the caller's promise.
        let value = unsafe { std::slice::from_raw_parts(pointer, parameter.bytes) };
        block[parameter.offset..parameter.offset + parameter.bytes].copy_from_slice(value);
    }
    Ok(block)
}

//! The driver as a program meets it: through its C functions, each test alone with the device.

#![expect(unsafe_code, reason = "calls C functions and shares memory with them")]

mod copies;
mod errors;
mod faults;
mod launches;
mod order;
mod pipeline;
mod streams;

use std::ffi::CString;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::api_checks::{
    software_gpu_counters, software_gpu_reports, software_gpu_set_link_rate, software_gpu_set_seed,
    software_gpu_spinning_waits, software_gpu_take_report, software_gpu_timed_events,
};
use super::api_copy::*;
use super::api_device::*;
use super::api_memory::*;
use super::api_module::*;
use super::api_stream::*;
use super::reports::Counters;

/// Kernels over `u32` elements, one a thread.
const KERNELS: &str = include_str!("kernels.ptx");

/// Holds back all work until somebody synchronises.
const ON_DEMAND: u64 = 4;
const NON_BLOCKING: u32 = 1;
const BLOCKING_SYNC: u32 = 1;
const DISABLE_TIMING: u32 = 2;

/// A program that has the device for itself. What it made is given back at its end.
struct Program {
    module: usize,
    /// By name; looked up at the start, because nothing can be after a report.
    functions: [(&'static str, usize); 2],
    allocations: Vec<u64>,
    host_allocations: Vec<usize>,
    streams: Vec<usize>,
    events: Vec<usize>,
    _alone: MutexGuard<'static, ()>,
}

impl Program {
    fn start(seed: u64) -> Program {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        ok(cuInit(0));
        let mut context = 0;
        // SAFETY: a valid pointer.
        ok(unsafe { cuDevicePrimaryCtxRetain(&raw mut context, 0) });
        ok(cuCtxSetCurrent(context));
        take_reports();
        software_gpu_set_seed(seed);
        let mut program = Program {
            module: 0,
            functions: [("copy", 0), ("accumulate", 0)],
            allocations: Vec::new(),
            host_allocations: Vec::new(),
            streams: Vec::new(),
            events: Vec::new(),
            _alone: alone,
        };
        program.module = program.load(KERNELS);
        program.functions = program
            .functions
            .map(|(name, _)| (name, program.look_up(name)));
        program
    }

    fn load(&self, text: &str) -> usize {
        let text = CString::new(text).unwrap();
        let mut module = 0;
        // SAFETY: valid pointers.
        ok(unsafe { cuModuleLoadData(&raw mut module, text.as_ptr()) });
        module
    }

    fn function(&self, name: &str) -> usize {
        self.functions
            .iter()
            .find(|(known, _)| *known == name)
            .unwrap()
            .1
    }

    fn look_up(&self, name: &str) -> usize {
        let name = CString::new(name).unwrap();
        let mut function = 0;
        // SAFETY: valid pointers.
        ok(unsafe { cuModuleGetFunction(&raw mut function, self.module, name.as_ptr()) });
        function
    }

    fn allocate(&mut self, bytes: usize) -> u64 {
        let mut address = 0;
        // SAFETY: a valid pointer.
        ok(unsafe { cuMemAlloc_v2(&raw mut address, bytes) });
        self.allocations.push(address);
        address
    }

    /// An allocation that holds `values`, which everything later knows of.
    fn allocate_with(&mut self, values: &[u32]) -> u64 {
        let address = self.allocate(size_of_val(values));
        // SAFETY: the values are there.
        ok(unsafe { cuMemcpyHtoD_v2(address, values.as_ptr() as usize, size_of_val(values)) });
        ok(cuCtxSynchronize());
        address
    }

    fn page_locked(&mut self, count: usize) -> HostBuffer {
        let mut address = std::ptr::null_mut();
        // SAFETY: a valid pointer.
        ok(unsafe { cuMemHostAlloc(&raw mut address, count * 4, 0) });
        self.host_allocations.push(address as usize);
        HostBuffer {
            address: address as usize,
            count,
        }
    }

    fn stream(&mut self, flags: u32) -> usize {
        let mut stream = 0;
        // SAFETY: a valid pointer.
        ok(unsafe { cuStreamCreate(&raw mut stream, flags) });
        self.streams.push(stream);
        stream
    }

    fn event(&mut self) -> usize {
        let mut event = 0;
        // SAFETY: a valid pointer.
        ok(unsafe { cuEventCreate(&raw mut event, DISABLE_TIMING) });
        self.events.push(event);
        event
    }

    /// Launches a kernel on `count` elements; addresses come first in its parameters, then the count.
    fn launch(&self, name: &str, addresses: &[u64], count: u32, stream: usize) -> u32 {
        let mut parameters: Vec<*const u8> = addresses
            .iter()
            .map(|address| (&raw const *address).cast())
            .collect();
        parameters.push((&raw const count).cast());
        let (function, blocks) = (self.function(name), count.div_ceil(64));
        let pointers = parameters.as_ptr();
        // SAFETY: as many pointers as the kernel has parameters.
        unsafe {
            cuLaunchKernel(
                function,
                blocks,
                1,
                1,
                64,
                1,
                1,
                0,
                stream,
                pointers,
                std::ptr::null(),
            )
        }
    }

    /// What device memory holds, after everything.
    fn read(&self, address: u64, count: usize) -> Vec<u32> {
        ok(cuCtxSynchronize());
        let mut values = vec![0; count];
        // SAFETY: the values have room.
        ok(unsafe { cuMemcpyDtoH_v2(values.as_mut_ptr() as usize, address, count * 4) });
        values
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        software_gpu_set_link_rate(0);
        take_reports();
        for stream in self.streams.drain(..) {
            cuStreamDestroy_v2(stream);
        }
        for event in self.events.drain(..) {
            cuEventDestroy_v2(event);
        }
        for address in self.allocations.drain(..) {
            cuMemFree_v2(address);
        }
        for address in self.host_allocations.drain(..) {
            // SAFETY: the program's own memory, which it uses no more.
            unsafe { cuMemFreeHost(address) };
        }
        cuModuleUnload(self.module);
        take_reports();
        software_gpu_set_seed(0);
        cuDevicePrimaryCtxRelease_v2(0);
    }
}

/// Page-locked memory of a program, by address, since the device uses it at the same time.
#[derive(Clone, Copy)]
struct HostBuffer {
    address: usize,
    count: usize,
}

impl HostBuffer {
    fn bytes(&self) -> usize {
        self.count * 4
    }

    fn write(&self, values: impl IntoIterator<Item = u32>) {
        for (index, value) in values.into_iter().take(self.count).enumerate() {
            // SAFETY: inside the buffer.
            unsafe { (self.address as *mut u32).add(index).write_volatile(value) };
        }
    }

    fn read(&self) -> Vec<u32> {
        // SAFETY: inside the buffer.
        (0..self.count)
            .map(|index| unsafe { (self.address as *const u32).add(index).read_volatile() })
            .collect()
    }

    fn to_device(self, destination: u64, stream: usize) {
        // SAFETY: the buffer is there until the program ends.
        ok(unsafe { cuMemcpyHtoDAsync_v2(destination, self.address, self.bytes(), stream) });
    }

    fn copy_from_device(self, source: u64, stream: usize) {
        // SAFETY: the buffer is there until the program ends.
        ok(unsafe { cuMemcpyDtoHAsync_v2(self.address, source, self.bytes(), stream) });
    }
}

#[track_caller]
fn ok(status: u32) {
    assert_eq!(status, 0, "{:?}", super::status::Status(status).name());
}

fn counters() -> Counters {
    let mut counters = Counters::default();
    // SAFETY: a valid pointer.
    unsafe { software_gpu_counters(&raw mut counters) };
    counters
}

/// Lets everything run and takes all reports.
fn take_reports() -> Vec<String> {
    let mut reports = Vec::new();
    loop {
        while software_gpu_reports() > 0 {
            let mut text = vec![0; 4096];
            // SAFETY: the room is there.
            let bytes = unsafe { software_gpu_take_report(text.as_mut_ptr(), text.len()) };
            text.truncate(bytes);
            reports.push(String::from_utf8(text).unwrap());
        }
        if cuCtxSynchronize() == 0 && software_gpu_reports() == 0 {
            return reports;
        }
    }
}

/// Exactly one report, with all of these words in it.
#[track_caller]
fn expect_report(words: &[&str]) {
    let reports = take_reports();
    assert_eq!(reports.len(), 1, "{reports:#?}");
    for word in words {
        assert!(
            reports[0].contains(word),
            "{word:?} is not in {:?}",
            reports[0]
        );
    }
}

#[track_caller]
fn expect_no_report() {
    let reports = take_reports();
    assert!(reports.is_empty(), "{reports:#?}");
}

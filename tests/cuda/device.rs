//! The device that the tests use, and what the software GPU says about it.

#![expect(
    unsafe_code,
    reason = "calls what the software GPU exports beside the driver's interface"
)]

use std::ffi::{CStr, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};
use strata::model::Gpu;

/// The device and, where it is the software GPU, the way to its settings and reports. One test at a time has it: budgets
/// are of free memory, and reports are of all that runs.
pub(crate) struct Device {
    pub(crate) gpu: Gpu,
    pub(crate) software: Option<SoftwareGpu>,
    _alone: MutexGuard<'static, ()>,
}

static ALONE: Mutex<()> = Mutex::new(());

/// `None`: there is none, and the test has said that it skips.
pub(crate) fn device() -> Option<Device> {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    match Gpu::open(0) {
        Ok(gpu) => Some(Device {
            gpu,
            software: SoftwareGpu::find(),
            _alone: alone,
        }),
        Err(error) => {
            assert!(
                std::env::var_os("STRATA_REQUIRE_GPU").is_none(),
                "a device is required: {error}"
            );
            println!("skipped: {error}");
            None
        }
    }
}

impl Device {
    /// Lets the software GPU's scheduler choose by this seed. A GPU has its own mind.
    pub(crate) fn set_seed(&self, seed: u64) {
        if let Some(software) = &self.software {
            // SAFETY: the function takes a number.
            unsafe { (software.set_seed)(seed) };
        }
    }

    /// What the software GPU has found wrong since the last time.
    pub(crate) fn reports(&self) -> Vec<String> {
        let mut reports = Vec::new();
        if let Some(software) = &self.software {
            let mut buffer = vec![0u8; 4096];
            loop {
                // SAFETY: the function writes at most so many bytes to the buffer and says how many.
                let length = unsafe { (software.take_report)(buffer.as_mut_ptr(), buffer.len()) };
                if length == 0 {
                    break;
                }
                let text = &buffer[..length.min(buffer.len())];
                reports.push(String::from_utf8_lossy(text).into_owned());
            }
        }
        reports
    }

    pub(crate) fn assert_nothing_reported(&self, what: &str) {
        let reports = self.reports();
        assert!(reports.is_empty(), "{what}: {reports:#?}");
    }
}

pub(crate) struct SoftwareGpu {
    set_seed: unsafe extern "C" fn(u64),
    take_report: unsafe extern "C" fn(*mut u8, usize) -> usize,
}

impl SoftwareGpu {
    fn find() -> Option<SoftwareGpu> {
        // SAFETY: asks for a library that is loaded already, and for functions by name; one that has them is the
        // software GPU, whose declarations these are.
        unsafe {
            let library =
                libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
            let library = if library.is_null() {
                libc::dlopen(c"libcuda.so".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD)
            } else {
                library
            };
            if library.is_null() {
                return None;
            }
            let function = |name: &CStr| -> Option<*mut c_void> {
                let found = libc::dlsym(library, name.as_ptr());
                (!found.is_null()).then_some(found)
            };
            Some(SoftwareGpu {
                set_seed: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(u64)>(function(
                    c"software_gpu_set_seed",
                )?),
                take_report: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*mut u8, usize) -> usize,
                >(function(c"software_gpu_take_report")?),
            })
        }
    }
}

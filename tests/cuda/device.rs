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

impl Drop for Device {
    fn drop(&mut self) {
        // The next test has a link without a rate, however this one ends.
        if let Some(software) = &self.software {
            software.set_link_rate(0);
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

/// Kinds of calls of which the software GPU leaves one out.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wait {
    /// A stream's for an event.
    Stream,
    /// The host's for an event.
    Host,
    /// No wait: a copy to the device, which is refused.
    Copy,
    /// A launch of a kernel, which is refused.
    Launch,
}

impl SoftwareGpu {
    /// Leaves out the wait with this number, from 1 and from now on; 0: none. Gives how many were to come before the one
    /// that was ordered last.
    pub(crate) fn leave_out(&self, wait: Wait, number: u64) -> u64 {
        let order = match wait {
            Wait::Stream => self.leave_out_stream_wait,
            Wait::Host => self.leave_out_event_synchronisation,
            Wait::Copy => self.refuse_copy_to_device,
            Wait::Launch => self.refuse_launch,
        };
        // SAFETY: the functions take a number and give one.
        unsafe { order(number) }
    }

    /// Copies to the device take their time at this rate, in bytes per second; 0: no time of their own.
    pub(crate) fn set_link_rate(&self, bytes_per_second: u64) {
        // SAFETY: the function takes a number.
        unsafe { (self.set_link_rate)(bytes_per_second) };
    }

    /// Timed events that have been created since the process began.
    pub(crate) fn timed_events(&self) -> u64 {
        // SAFETY: the function takes nothing.
        unsafe { (self.timed_events)() }
    }

    /// Waits of a thread for an event since the process began: all, and those in which it would have taken a core beside a
    /// real device.
    pub(crate) fn event_waits(&self) -> (u64, u64) {
        // SAFETY: the functions take nothing.
        unsafe { ((self.event_waits)(), (self.spinning_waits)()) }
    }

    fn find() -> Option<SoftwareGpu> {
        // SAFETY: asks for a library that is loaded already.
        let library = [c"libcuda.so", c"libcuda.so.1"]
            .into_iter()
            .find_map(|name| unsafe {
                let library = libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
                (!library.is_null()).then_some(library)
            })?;
        let address = |name: &CStr| -> Option<*mut c_void> {
            // SAFETY: asks for a symbol of a library that stays loaded.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            (!found.is_null()).then_some(found)
        };
        let of_number = |name| {
            let address = address(name)?;
            // SAFETY: only the software GPU has functions of these names, and this is their type.
            Some(unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(u64) -> u64>(address)
            })
        };
        let take_report = address(c"software_gpu_take_report")?;
        let of_nothing = |name| {
            let address = address(name)?;
            // SAFETY: as above.
            Some(unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> u64>(address)
            })
        };
        Some(SoftwareGpu {
            set_seed: of_number(c"software_gpu_set_seed")?,
            set_link_rate: of_number(c"software_gpu_set_link_rate")?,
            leave_out_stream_wait: of_number(c"software_gpu_leave_out_stream_wait")?,
            leave_out_event_synchronisation: of_number(
                c"software_gpu_leave_out_event_synchronisation",
            )?,
            refuse_copy_to_device: of_number(c"software_gpu_refuse_copy_to_device")?,
            refuse_launch: of_number(c"software_gpu_refuse_launch")?,
            timed_events: of_nothing(c"software_gpu_timed_events")?,
            event_waits: of_nothing(c"software_gpu_event_waits")?,
            spinning_waits: of_nothing(c"software_gpu_spinning_waits")?,
            // SAFETY: as above.
            take_report: unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut u8, usize) -> usize>(
                    take_report,
                )
            },
        })
    }
}

pub(crate) struct SoftwareGpu {
    /// What it gives means nothing.
    set_seed: unsafe extern "C" fn(u64) -> u64,
    /// As above.
    set_link_rate: unsafe extern "C" fn(u64) -> u64,
    timed_events: unsafe extern "C" fn() -> u64,
    event_waits: unsafe extern "C" fn() -> u64,
    spinning_waits: unsafe extern "C" fn() -> u64,
    leave_out_stream_wait: unsafe extern "C" fn(u64) -> u64,
    leave_out_event_synchronisation: unsafe extern "C" fn(u64) -> u64,
    refuse_copy_to_device: unsafe extern "C" fn(u64) -> u64,
    refuse_launch: unsafe extern "C" fn(u64) -> u64,
    take_report: unsafe extern "C" fn(*mut u8, usize) -> usize,
}

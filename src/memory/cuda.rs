//! A CUDA device: its context, the stream that computes and the stream that copies.
//!
//! The driver's library is looked for when a device is opened, so that a program starts without one.
//! Nothing here is allocated by the way: the arenas take their memory once, and all that follows moves bytes and orders
//! streams. Any thread may call; each call makes the context current on its thread.
//!
//! A GPU computes later than it is told to, and a failure shows at a later call, perhaps on another thread. So the
//! first failure of any call is kept until `synchronise`, which whoever needs to know that a step's results are right
//! asks. After most failures the driver refuses everything: the device is lost to this process.

#![expect(
    unsafe_code,
    reason = "calls the CUDA driver with addresses of arenas, whose life and bounds are shown at each call"
)]

use super::cuda_clock::{Clock, Moment, TimedEvents};
use super::cuda_event::OrderingEvent;
use super::{Event, Phase};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Left free on the device where `--device-memory` is `auto`: what the driver takes for the context, its kernels and its
/// stacks beyond what it has taken when it is asked, and a screen that may be attached.
pub const DEVICE_RESERVE_BYTES: u64 = 512 << 20;

/// Why the device cannot be used, or can no longer be.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CudaError {
    #[error("libcuda.so.1 is not found; it comes with the driver of an NVIDIA card")]
    NoDriver,
    #[error("libcuda.so.1 has no {0}: the driver is older than CUDA 13.0, or damaged")]
    NoFunction(&'static str),
    #[error("the driver is of CUDA {}.{}, and strata needs one of CUDA 13.0 or later", version / 1000, version % 1000 / 10)]
    OldDriver { version: i32 },
    #[error("open CUDA device {ordinal}: {why}")]
    Open { ordinal: usize, why: String },
    #[error("the CUDA driver failed to {action}: {why}")]
    Call { action: &'static str, why: String },
    #[error("the CUDA device is lost to this process: {0}")]
    Lost(String),
}

/// One opened device.
pub struct CudaDevice {
    context: Arc<CudaContext>,
    compute: Arc<CudaStream>,
    copies: Arc<CudaStream>,
    name: String,
    /// Since the last `synchronise`.
    first_failure: Mutex<Option<CudaError>>,
    timed_events: Arc<TimedEvents>,
    /// Where a trace wants times by the host's clock.
    clock: OnceLock<Clock>,
}

impl CudaDevice {
    /// Opens the device with this number, in the driver's order.
    pub fn open(ordinal: usize) -> Result<Arc<CudaDevice>, CudaError> {
        find_cuda_driver()?;
        let refused = |error: DriverError| CudaError::Open {
            ordinal,
            why: in_words(error),
        };
        let context = CudaContext::new(ordinal).map_err(refused)?;
        // SAFETY: cudarc's slices, which tracking is for, are not used: arenas lend addresses, and streams are ordered
        // by the events of rings. With tracking, each launch would wait for the other stream.
        unsafe { context.disable_event_tracking() };
        // A thread that waits for a stream sleeps: the cores are for those that compute. `OrderingEvent` says so itself.
        context.set_blocking_synchronize().map_err(refused)?;
        Ok(Arc::new(CudaDevice {
            compute: context.new_stream().map_err(refused)?,
            copies: context.new_stream().map_err(refused)?,
            name: context.name().map_err(refused)?,
            context,
            first_failure: Mutex::new(None),
            timed_events: Arc::default(),
            clock: OnceLock::new(),
        }))
    }

    /// What the driver calls it.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The stream on which kernels are launched, in the order of a step.
    pub fn compute_stream(&self) -> &Arc<CudaStream> {
        &self.compute
    }

    /// Free and total bytes of device memory.
    pub fn memory_bytes(&self) -> Result<(u64, u64), CudaError> {
        let (free, total) = self
            .context
            .mem_get_info()
            .map_err(|error| call("ask for free memory", error))?;
        Ok((free as u64, total as u64))
    }

    /// The event of all that was given to the compute stream so far.
    pub fn record_compute(&self) -> Event {
        self.record(&self.compute, "record an event of the compute stream")
    }

    /// What is given to the compute stream from now on waits for `event`. Does not block.
    pub fn compute_waits_for(&self, event: &Event) {
        self.wait_on_stream(&self.compute, event);
    }

    /// From now on moments have times by the host's clock. Waits for the compute stream.
    pub fn start_clock(&self) {
        if let Some(clock) = self.timed(Clock::start(&self.timed_events, &self.compute)) {
            // A second start changes nothing.
            let _ = self.clock.set(clock);
        }
    }

    /// Holds the clock against the host's again, where it runs: between two steps, for it waits for the compute stream.
    pub fn adjust_clock(&self) {
        if let Some(clock) = self.clock.get() {
            self.timed(clock.adjust(&self.timed_events, &self.compute));
        }
    }

    /// When all that was given to the compute stream so far is done. Does not block. `None`: the device has failed.
    pub fn compute_moment(&self) -> Option<Moment> {
        self.moment(&self.compute)
    }

    /// The same of the copy stream, where the clock runs.
    pub(super) fn copy_moment(&self) -> Option<Moment> {
        self.clock.get()?;
        self.moment(&self.copies)
    }

    fn moment(&self, stream: &CudaStream) -> Option<Moment> {
        self.timed(self.timed_events.moment(stream, self.clock.get()))
    }

    /// The time from one moment to a later one of the same stream, by the device; `None` where the stream has not come so
    /// far. Does not block. A device that failed has no more to do: its moments are over at once.
    pub fn time_between(&self, earlier: &Moment, later: &Moment) -> Option<Duration> {
        self.timed(earlier.until(later))
            .unwrap_or(Some(Duration::ZERO))
    }

    /// When a moment was, by the host's clock. Does not block. `None`: that clock did not run when the moment was asked for,
    /// or the moment is yet to come.
    pub fn time_of(&self, moment: &Moment) -> Option<Instant> {
        self.timed(moment.on_host()).flatten()
    }

    /// A call of the clock may be the one that is told of an earlier failure.
    fn timed<T>(&self, outcome: Result<T, DriverError>) -> Option<T> {
        outcome
            .map_err(|error| self.noted("tell a time", Err(error)))
            .ok()
    }

    /// Waits until all that was given to the compute stream is done, and reports the first failure since the last call.
    pub fn synchronise(&self) -> Result<(), CudaError> {
        // The first answer may be that of an earlier call, given before anything was waited for.
        let waited = self.compute.synchronize();
        self.noted("finish the computation", waited);
        let waited = waited.or_else(|_| self.compute.synchronize());
        let failure = self.lock_failure().take();
        match (waited, failure) {
            (Ok(()), None) => Ok(()),
            (Ok(()), Some(failure)) => Err(failure),
            (Err(error), failure) => Err(CudaError::Lost(match failure {
                Some(failure) => failure.to_string(),
                None => in_words(error),
            })),
        }
    }

    /// The first failure since the last call of this or of `synchronise`, if there is one: what is given to a stream after it
    /// would work on what never arrived.
    pub fn check(&self) -> Result<(), CudaError> {
        self.lock_failure().take().map_or(Ok(()), Err)
    }

    /// Waits until all that was given to the compute stream is done. A failure is kept for `synchronise`.
    pub(super) fn wait_for_compute(&self) {
        self.noted("finish the computation", self.compute.synchronize());
    }

    /// Waits until both streams have done everything: nothing uses memory any more.
    pub(super) fn finish_all(&self) {
        let _ = self.compute.synchronize();
        let _ = self.copies.synchronize();
    }

    fn lock_failure(&self) -> std::sync::MutexGuard<'_, Option<CudaError>> {
        self.first_failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn copy_waits_for(&self, event: &Event) {
        self.wait_on_stream(&self.copies, event);
    }

    pub(super) fn record_copies(&self) -> Event {
        self.record(&self.copies, "record an event of the copy stream")
    }

    /// Gives the copy stream a copy to the device.
    ///
    /// # Safety
    /// Until an event that is recorded after this call is complete, nobody writes the `bytes` bytes at `source`, and
    /// nobody but this stream uses those at `destination`, an address in an arena on this device.
    pub(super) unsafe fn copy_to_device(&self, source: *const u8, destination: u64, bytes: usize) {
        // SAFETY: by the caller's promise.
        unsafe { self.upload(&self.copies, source, destination, bytes) };
    }

    /// Gives the compute stream a copy to the device.
    ///
    /// # Safety
    /// As for `copy_to_device`; kernels that were launched before may still use the destination, those launched after
    /// see what is copied.
    pub(super) unsafe fn compute_to_device(
        &self,
        source: *const u8,
        destination: u64,
        bytes: usize,
    ) {
        // SAFETY: by the caller's promise.
        unsafe { self.upload(&self.compute, source, destination, bytes) };
    }

    /// Gives a stream a copy to the device.
    ///
    /// # Safety
    /// As for `copy_to_device`.
    unsafe fn upload(
        &self,
        stream: &CudaStream,
        source: *const u8,
        destination: u64,
        bytes: usize,
    ) {
        if bytes == 0 {
            return;
        }
        let given = self.context.bind_to_thread().and_then(|()| {
            // SAFETY: the caller promises that the source stays as it is until the copy is over.
            unsafe {
                let source = std::slice::from_raw_parts(source, bytes);
                result::memcpy_htod_async(destination, source, stream.cu_stream())
            }
        });
        self.noted("copy to the device", given);
    }

    /// Gives the compute stream a copy from the device.
    ///
    /// # Safety
    /// Until `synchronise` has returned nobody else uses the `bytes` bytes at `destination`; those at `source` lie in an
    /// arena on this device.
    pub(super) unsafe fn compute_from_device(
        &self,
        source: u64,
        destination: *mut u8,
        bytes: usize,
    ) {
        if bytes == 0 {
            return;
        }
        let given = self.context.bind_to_thread().and_then(|()| {
            // SAFETY: the caller lends the destination until the copy is over.
            unsafe {
                let destination = std::slice::from_raw_parts_mut(destination, bytes);
                result::memcpy_dtoh_async(destination, source, self.compute.cu_stream())
            }
        });
        self.noted("copy from the device", given);
    }

    /// Gives the compute stream the order to fill memory with a byte.
    ///
    /// # Safety
    /// The `bytes` bytes at `address` lie in an arena on this device, and only the compute stream uses them.
    pub(super) unsafe fn fill(&self, address: u64, value: u8, bytes: usize) {
        let given = self.context.bind_to_thread().and_then(|()| {
            // SAFETY: by the caller's promise.
            unsafe { result::memset_d8_async(address, value, bytes, self.compute.cu_stream()) }
        });
        self.noted("fill device memory", given);
    }

    /// Takes device memory. It is given back by `release` only.
    pub(super) fn allocate(&self, bytes: usize) -> Result<u64, CudaError> {
        let allocated = self.context.bind_to_thread().and_then(|()| {
            // SAFETY: the context is current; the address is kept by the arena, which releases it once.
            unsafe { result::malloc_sync(bytes) }
        });
        // Whoever takes an arena has advice of its own.
        allocated.map_err(|error| CudaError::Call {
            action: "allocate device memory",
            why: named(error),
        })
    }

    /// # Safety
    /// `address` is from `allocate` and is not used any more, by streams neither.
    pub(super) unsafe fn release(&self, address: u64) {
        let freed = self
            .context
            .bind_to_thread()
            // SAFETY: by the caller's promise.
            .and_then(|()| unsafe { result::free_sync(address) });
        self.noted("free device memory", freed);
    }

    /// Locks memory of this process to its pages, so that the device copies from it by itself.
    ///
    /// # Safety
    /// The `bytes` bytes at `start` are mapped, and stay so until `unlock_pages(start)`.
    pub(super) unsafe fn lock_pages(&self, start: *mut u8, bytes: usize) -> Result<(), CudaError> {
        let locked = self.context.bind_to_thread().and_then(|()| {
            // SAFETY: by the caller's promise; the flag makes the pages known to every context.
            unsafe {
                sys::cuMemHostRegister_v2(start.cast(), bytes, sys::CU_MEMHOSTREGISTER_PORTABLE)
                    .result()
            }
        });
        // It is memory of the host, of which the caller knows more.
        locked.map_err(|error| CudaError::Call {
            action: "lock memory to its pages",
            why: named(error),
        })
    }

    /// # Safety
    /// `start` was given to `lock_pages`, and no copy from or to there is under way.
    pub(super) unsafe fn unlock_pages(&self, start: *mut u8) {
        let unlocked = self
            .context
            .bind_to_thread()
            // SAFETY: by the caller's promise.
            .and_then(|()| unsafe { sys::cuMemHostUnregister(start.cast()).result() });
        self.noted("unlock memory from its pages", unlocked);
    }

    fn record(&self, stream: &CudaStream, action: &'static str) -> Event {
        match OrderingEvent::record(stream) {
            Ok(event) => Event::of_device(event),
            Err(error) => {
                // Nothing is computed any more; `synchronise` says why.
                self.noted(action, Err(error));
                Event::recorded()
            }
        }
    }

    fn wait_on_stream(&self, stream: &CudaStream, event: &Event) {
        match event.device_event() {
            Some(event) => self.noted("wait for an event", event.hold(stream)),
            // What another thread of the host does cannot be waited for by a stream.
            None => event.wait(),
        }
    }

    /// Waits for an event of this device.
    pub(super) fn wait(&self, event: &Event) {
        match event.device_event() {
            Some(event) => self.noted("wait for a copy", event.wait()),
            None => event.wait(),
        }
    }

    fn noted(&self, action: &'static str, outcome: Result<(), DriverError>) {
        if let Err(error) = outcome {
            self.lock_failure()
                .get_or_insert_with(|| call(action, error));
        }
    }
}

impl std::fmt::Debug for CudaDevice {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("CudaDevice")
            .field("ordinal", &self.ordinal())
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

fn call(action: &'static str, error: DriverError) -> CudaError {
    CudaError::Call {
        action,
        why: in_words(error),
    }
}

/// "CUDA_ERROR_INVALID_VALUE: invalid argument"; where the device has no memory left, with when that was, the likeliest
/// cause and what to try first: the arena is taken already, so it is the driver that wants more.
pub fn in_words(error: DriverError) -> String {
    let name = named(error);
    match error.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => format!(
            "{name} while {}; most likely another program has taken memory of the device, or the budget leaves the driver \
             too little; first give a smaller --device-memory",
            Phase::now()
        ),
        _ => name,
    }
}

/// The number of an error that the driver has no name for.
fn named(error: DriverError) -> String {
    match (error.error_name(), error.error_string()) {
        (Ok(name), Ok(text)) => format!("{}: {}", name.to_string_lossy(), text.to_string_lossy()),
        _ => format!("error {}", error.0 as u32),
    }
}

/// The oldest driver that takes the kernels' PTX.
const DRIVER_VERSION_MIN: i32 = 13_000;

/// What this program calls of the driver. cudarc looks functions up when they are called, and panics where one is missing.
const FUNCTIONS: [&str; 37] = [
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSetFlags",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuMemsetD8_v2",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// Looks for the driver's library, and whether it is one that CUDA devices can be opened with.
pub fn find_cuda_driver() -> Result<(), CudaError> {
    // SAFETY: loads the library, if there is one, and lets it go; its initialisers are the driver's own.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    // SAFETY: the library could be opened a moment ago. Of its functions only the version's is called, which writes one
    // int; that is its type in every version.
    unsafe {
        let library = sys::culib();
        let Ok(version_of) =
            library.get::<unsafe extern "C" fn(*mut i32) -> u32>(b"cuDriverGetVersion\0")
        else {
            return Err(CudaError::NoFunction("cuDriverGetVersion"));
        };
        let mut version = 0;
        if version_of(&raw mut version) == 0 && version < DRIVER_VERSION_MIN {
            return Err(CudaError::OldDriver { version });
        }
        for name in FUNCTIONS {
            if library
                .get::<unsafe extern "C" fn()>(name.as_bytes())
                .is_err()
            {
                return Err(CudaError::NoFunction(name));
            }
        }
    }
    Ok(())
}

//! Events that order the streams of a CUDA device, and that a thread sleeps for.
//!
//! A thread that waits for an event spins unless the event was created with `CU_EVENT_BLOCKING_SYNC`, whatever its context
//! says about waiting (CUDA driver API, `cuEventSynchronize`). The copy thread waits nearly always, and the cores are for
//! those that compute. cudarc creates events with one flag only, and two are needed.

#![expect(
    unsafe_code,
    reason = "calls the CUDA driver with an event that it has created and destroys once"
)]

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use std::sync::Arc;

const FLAGS: u32 = sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32
    | sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;

/// An event that a stream has been told to record, once.
#[derive(Debug)]
pub(super) struct OrderingEvent {
    event: sys::CUevent,
    context: Arc<CudaContext>,
}

// SAFETY: the driver's handles may be used from any thread, by several at once.
unsafe impl Send for OrderingEvent {}
// SAFETY: as above.
unsafe impl Sync for OrderingEvent {}

impl OrderingEvent {
    /// Happens when the stream has done all that it was given so far.
    pub(super) fn record(stream: &CudaStream) -> Result<OrderingEvent, DriverError> {
        let context = Arc::clone(stream.context());
        context.bind_to_thread()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: the pointer may be written.
        unsafe { sys::cuEventCreate(&raw mut event, FLAGS) }.result()?;
        let event = OrderingEvent { event, context };
        // SAFETY: the event was created above, in the stream's context.
        unsafe { result::event::record(event.event, stream.cu_stream()) }?;
        Ok(event)
    }

    /// What the stream is given from now on waits. Does not block.
    pub(super) fn hold(&self, stream: &CudaStream) -> Result<(), DriverError> {
        self.context.bind_to_thread()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both live as long as they are borrowed; the driver keeps what it needs of the event.
        unsafe { result::stream::wait_event(stream.cu_stream(), self.event, flags) }
    }

    /// Sleeps until it has happened.
    pub(super) fn wait(&self) -> Result<(), DriverError> {
        self.context.bind_to_thread()?;
        // SAFETY: the event lives as long as it is borrowed.
        unsafe { result::event::synchronize(self.event) }
    }

    pub(super) fn is_complete(&self) -> Result<bool, DriverError> {
        // SAFETY: the event lives as long as it is borrowed.
        match unsafe { result::event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Drop for OrderingEvent {
    fn drop(&mut self) {
        // What failed before is kept, as cudarc's own events keep it, for a call that is asked for its outcome.
        self.context.record_err(self.context.bind_to_thread());
        // SAFETY: it was created once and is destroyed once; streams that wait for it keep what they wait for.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}

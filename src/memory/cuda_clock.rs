//! When a CUDA device did what, by the host's clock.
//!
//! A moment is a timed event on a stream. The device counts time from one event to another, so each moment is counted
//! from a base: an event whose time on the host's clock is known within the time that it takes to record it and to hear
//! of it. Bases are renewed between steps, before the count loses its precision (it is a float of milliseconds) and the
//! two clocks drift apart.

use cudarc::driver::{CudaEvent, CudaStream, DriverError, sys};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The first base is the best of so many: the one that was heard of soonest.
const FIRST_BASES: usize = 8;

/// Gives `Moment`s. May be used from any thread.
pub(super) struct Clock {
    base: Mutex<Arc<Base>>,
}

/// An event that has happened.
#[derive(Debug)]
struct Base {
    event: CudaEvent,
    at: Instant,
}

/// A moment in a stream of a device, which may be yet to come. `CudaDevice::time_of` tells when it was.
#[derive(Debug)]
pub struct Moment {
    event: CudaEvent,
    base: Arc<Base>,
}

impl Clock {
    /// Waits for the stream.
    pub(super) fn start(stream: &CudaStream) -> Result<Clock, DriverError> {
        let (mut uncertain, mut best) = heard(stream)?;
        for _ in 1..FIRST_BASES {
            let (other_uncertain, other) = heard(stream)?;
            if other_uncertain < uncertain {
                (uncertain, best) = (other_uncertain, other);
            }
        }
        Ok(Clock {
            base: Mutex::new(Arc::new(best)),
        })
    }

    /// Takes a new base; waits for the stream. Moments that were recorded before keep theirs.
    pub(super) fn adjust(&self, stream: &CudaStream) -> Result<(), DriverError> {
        let former = self.base();
        let (uncertain, mut base) = heard(stream)?;
        // By the former base, so that the two agree, unless that cannot be.
        let counted = former.after(&base.event)?;
        if counted <= base.at && base.at - counted <= uncertain {
            base.at = counted;
        }
        *self.base.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(base);
        Ok(())
    }

    pub(super) fn moment(&self, stream: &CudaStream) -> Result<Moment, DriverError> {
        // First the base: it lies before the event then.
        let base = self.base();
        let event = record(stream)?;
        Ok(Moment { event, base })
    }

    fn base(&self) -> Arc<Base> {
        Arc::clone(&self.base.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Base {
    /// When an event happened that was recorded after this one; waits for it.
    fn after(&self, event: &CudaEvent) -> Result<Instant, DriverError> {
        let milliseconds = f64::from(self.event.elapsed_ms(event)?);
        let since = Duration::try_from_secs_f64(milliseconds.max(0.0) / 1e3);
        Ok(self.at + since.unwrap_or_default())
    }
}

impl Moment {
    /// Waits until it has been.
    pub(super) fn on_host(&self) -> Result<Instant, DriverError> {
        self.base.after(&self.event)
    }
}

/// A base, and how long before it was heard of it may have been.
fn heard(stream: &CudaStream) -> Result<(Duration, Base), DriverError> {
    let earliest = Instant::now();
    let event = record(stream)?;
    event.synchronize()?;
    let at = Instant::now();
    Ok((at - earliest, Base { event, at }))
}

fn record(stream: &CudaStream) -> Result<CudaEvent, DriverError> {
    stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT))
}

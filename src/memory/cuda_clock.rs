//! When a CUDA device did what: how long after what else, and, where a trace wants it, by the host's clock.
//!
//! A moment is a timed event on a stream. The device counts time from one event to another. For times on the host's clock
//! each moment is counted from a base: an event whose time on that clock is known within the time that it takes to record
//! it and to hear of it. Bases are renewed between steps, before the count loses its precision (it is a float of
//! milliseconds) and the two clocks drift apart.
//!
//! Events are recorded again when whoever had them is done with them, so that a step creates none.

#![expect(
    unsafe_code,
    reason = "asks the driver for the time between two events"
)]

use cudarc::driver::{CudaEvent, CudaStream, DriverError, result, sys};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The first base is the best of so many: the one that was heard of soonest.
const FIRST_BASES: usize = 8;

/// Timed events that are kept to be recorded again; what a step has beyond them is created and destroyed.
const EVENTS_KEPT_MAX: usize = 4096;

/// Gives moments times on the host's clock. May be used from any thread.
pub(super) struct Clock {
    base: Mutex<Arc<Base>>,
}

/// An event that has happened.
#[derive(Debug)]
pub(super) struct Base {
    event: TimedEvent,
    at: Instant,
}

/// A moment in a stream of a device, which may be yet to come. `CudaDevice::time_between` and `time_of` tell when it was.
#[derive(Debug)]
pub struct Moment {
    event: TimedEvent,
    /// Where the clock runs.
    base: Option<Arc<Base>>,
}

/// The timed events of a device that nobody has. May be used from any thread.
#[derive(Debug, Default)]
pub(super) struct TimedEvents(Mutex<Vec<CudaEvent>>);

/// A timed event that has been recorded. Dropping it, which may be before it has happened, lets it be recorded again.
#[derive(Debug)]
struct TimedEvent {
    /// `None` only while it is dropped.
    event: Option<CudaEvent>,
    home: Arc<TimedEvents>,
}

impl TimedEvents {
    fn record(self: &Arc<Self>, stream: &CudaStream) -> Result<TimedEvent, DriverError> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let event = match kept {
            Some(event) => event,
            None => stream
                .context()
                .new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT))?,
        };
        event.record(stream)?;
        Ok(TimedEvent {
            event: Some(event),
            home: Arc::clone(self),
        })
    }

    /// The moment when all that was given to the stream so far is done.
    pub(super) fn moment(
        self: &Arc<Self>,
        stream: &CudaStream,
        clock: Option<&Clock>,
    ) -> Result<Moment, DriverError> {
        // First the base: it lies before the event then.
        let base = clock.map(Clock::base);
        let event = self.record(stream)?;
        Ok(Moment { event, base })
    }
}

impl TimedEvent {
    fn event(&self) -> &CudaEvent {
        match &self.event {
            Some(event) => event,
            None => unreachable!("the event is being dropped"),
        }
    }

    /// How long after this event the later one happened; `None` where one of the two has not. Does not wait.
    fn until(&self, later: &TimedEvent) -> Result<Option<Duration>, DriverError> {
        let (first, second) = (self.event(), later.event());
        first.context().bind_to_thread()?;
        // SAFETY: both events live as long as they are borrowed, and were created with their time.
        let elapsed = unsafe { result::event::elapsed(first.cu_event(), second.cu_event()) };
        match elapsed {
            Ok(milliseconds) => {
                let seconds = f64::from(milliseconds.max(0.0)) / 1e3;
                let elapsed = Duration::try_from_secs_f64(seconds);
                Ok(Some(elapsed.unwrap_or_default()))
            }
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Drop for TimedEvent {
    fn drop(&mut self) {
        let mut kept = self.home.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < EVENTS_KEPT_MAX {
            kept.extend(self.event.take());
        }
    }
}

impl Clock {
    /// Waits for the stream.
    pub(super) fn start(
        events: &Arc<TimedEvents>,
        stream: &CudaStream,
    ) -> Result<Clock, DriverError> {
        let (mut uncertain, mut best) = heard(events, stream)?;
        for _ in 1..FIRST_BASES {
            let (other_uncertain, other) = heard(events, stream)?;
            if other_uncertain < uncertain {
                (uncertain, best) = (other_uncertain, other);
            }
        }
        Ok(Clock {
            base: Mutex::new(Arc::new(best)),
        })
    }

    /// Takes a new base; waits for the stream. Moments that were recorded before keep theirs.
    pub(super) fn adjust(
        &self,
        events: &Arc<TimedEvents>,
        stream: &CudaStream,
    ) -> Result<(), DriverError> {
        let former = self.base();
        let (uncertain, mut base) = heard(events, stream)?;
        // By the former base, so that the two agree, unless that cannot be.
        if let Some(counted) = former.after(&base.event)?
            && counted <= base.at
            && base.at - counted <= uncertain
        {
            base.at = counted;
        }
        *self.base.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(base);
        Ok(())
    }

    fn base(&self) -> Arc<Base> {
        Arc::clone(&self.base.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Base {
    /// When an event happened that was recorded after this one; `None` where it has not.
    fn after(&self, event: &TimedEvent) -> Result<Option<Instant>, DriverError> {
        let since = self.event.until(event)?;
        Ok(since.map(|since| self.at + since))
    }
}

impl Moment {
    /// How long after this moment the later one came; `None` where one of the two is yet to come. Does not wait.
    pub(super) fn until(&self, later: &Moment) -> Result<Option<Duration>, DriverError> {
        self.event.until(&later.event)
    }

    /// By the host's clock; `None` where that did not run when the moment was recorded, or the moment is yet to come.
    pub(super) fn on_host(&self) -> Result<Option<Instant>, DriverError> {
        match &self.base {
            Some(base) => base.after(&self.event),
            None => Ok(None),
        }
    }
}

/// A base, and how long before it was heard of it may have been.
fn heard(events: &Arc<TimedEvents>, stream: &CudaStream) -> Result<(Duration, Base), DriverError> {
    let earliest = Instant::now();
    let event = events.record(stream)?;
    event.event().synchronize()?;
    let at = Instant::now();
    Ok((at - earliest, Base { event, at }))
}

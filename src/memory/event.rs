//! An event: something that happens once, recorded by one thread or stream and waited for by others.
//!
//! A host's event has the shape of a CUDA event, so that the emulated device follows the same protocol: a copy waits
//! for the event of the last use of its destination, and records the event that the next use waits for.

use super::cuda_event::OrderingEvent;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// A handle; clones are the same event. Whatever the recording thread wrote before `record` is seen after `wait`, and
/// after `is_complete` has answered true.
#[derive(Clone, Debug)]
pub struct Event(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Host(Arc<State>),
    /// Recorded on a stream of a device.
    Device(Arc<OrderingEvent>),
}

#[derive(Debug, Default)]
struct State {
    /// Set under the mutex, read without it: most waits find the event complete.
    complete: AtomicBool,
    mutex: Mutex<()>,
    changed: Condvar,
}

impl Default for Event {
    fn default() -> Event {
        Event(Kind::Host(Arc::default()))
    }
}

impl Event {
    /// An event of the host that has not happened yet.
    pub fn new() -> Event {
        Event::default()
    }

    /// An event that has happened: there is nothing to wait for.
    pub fn recorded() -> Event {
        let event = Event::new();
        event.record();
        event
    }

    /// An event that a stream has been told to record.
    pub(super) fn of_device(event: OrderingEvent) -> Event {
        Event(Kind::Device(Arc::new(event)))
    }

    /// For streams to wait on.
    pub(super) fn device_event(&self) -> Option<&OrderingEvent> {
        match &self.0 {
            Kind::Host(_) => None,
            Kind::Device(event) => Some(event),
        }
    }

    /// The event of the host has happened. A second call changes nothing.
    ///
    /// # Panics
    /// On an event of a device, which its stream records.
    pub fn record(&self) {
        let Kind::Host(state) = &self.0 else {
            panic!("a stream records its own events");
        };
        let held = state.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        state.complete.store(true, Ordering::Release);
        drop(held);
        state.changed.notify_all();
    }

    pub fn is_complete(&self) -> bool {
        match &self.0 {
            Kind::Host(state) => state.complete.load(Ordering::Acquire),
            Kind::Device(event) => event.is_complete().unwrap_or(true),
        }
    }

    /// Blocks until the event has happened. A device that failed has no more to do: its events count as complete, and
    /// `CudaDevice::synchronise` reports the failure.
    pub fn wait(&self) {
        let state = match &self.0 {
            Kind::Host(state) => state,
            Kind::Device(event) => {
                let _ = event.wait();
                return;
            }
        };
        if self.is_complete() {
            return;
        }
        let mut held = state.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        while !self.is_complete() {
            held = state
                .changed
                .wait(held)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiters_on_all_clones_see_what_was_written_before() {
        let event = Event::new();
        let written = Arc::new(Mutex::new(0));
        assert!(!event.is_complete());
        let waiters: Vec<_> = (0..4)
            .map(|_| {
                let (event, written) = (event.clone(), Arc::clone(&written));
                std::thread::spawn(move || {
                    event.wait();
                    *written.lock().unwrap()
                })
            })
            .collect();
        *written.lock().unwrap() = 7;
        event.record();
        event.record();
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), 7);
        }
        event.wait();
        assert!(Event::recorded().is_complete());
    }
}

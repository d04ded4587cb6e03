//! An event: something that happens once, recorded by one thread and waited for by others.
//!
//! It has the shape of a CUDA event, so that the emulated device follows the same protocol: a copy waits for the event
//! of the last use of its destination, and records the event that the next use waits for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// A handle; clones are the same event. Whatever the recording thread wrote before `record` is seen after `wait`, and
/// after `is_complete` has answered true.
#[derive(Clone, Debug, Default)]
pub struct Event(Arc<State>);

#[derive(Debug, Default)]
struct State {
    /// Set under the mutex, read without it: most waits find the event complete.
    complete: AtomicBool,
    mutex: Mutex<()>,
    changed: Condvar,
}

impl Event {
    /// An event that has not happened yet.
    pub fn new() -> Event {
        Event::default()
    }

    /// An event that has happened: there is nothing to wait for.
    pub fn recorded() -> Event {
        let event = Event::new();
        event.record();
        event
    }

    /// The event has happened. A second call changes nothing.
    pub fn record(&self) {
        let held = self.0.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.complete.store(true, Ordering::Release);
        drop(held);
        self.0.changed.notify_all();
    }

    pub fn is_complete(&self) -> bool {
        self.0.complete.load(Ordering::Acquire)
    }

    /// Blocks until the event has happened.
    pub fn wait(&self) {
        if self.is_complete() {
            return;
        }
        let mut held = self.0.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        while !self.is_complete() {
            held = self
                .0
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

//! The driver: memory, streams, events and modules of one device, behind the C functions of `libcuda.so.1`.
//!
//! The exported functions ([`api_device`], [`api_memory`], [`api_copy`], [`api_stream`], [`api_module`]) check what they
//! are given as the real driver does and change the one [`device::Device`] of the process. A call that starts work puts
//! an [`operation::Operation`] into a [`queue::Queue`]; one thread ([`gpu`]) runs the operations that the queue has
//! released, in an order that the seed chooses ([`schedule`]). What an operation touches ([`touch`]) is checked against
//! the history of the memory by vector clocks ([`clock`], [`shadow`], [`pass`]); page-locked host memory is watched by its hash
//! ([`page_locked`]). What the checks find is a report ([`reports`]): a line on stderr, and an error that stays.
//! [`api_checks`] exports the functions with which tests ask for reports and set the seed.
//!
//! Threads: calls come from any thread. Lock order: handles, an event's recording, page-locked table, queue, shadow,
//! memory table, reports. Nothing is held while an operation's bytes are moved, except the page-locked table during a
//! copy into page-locked memory.

pub mod api_checks;
pub mod api_copy;
pub mod api_device;
pub mod api_memory;
pub mod api_module;
pub mod api_stream;
mod attributes;
mod call;
mod clock;
mod device;
mod gpu;
mod handles;
mod left_out;
mod memory;
mod operation;
mod page_locked;
mod pass;
mod queue;
pub mod reports;
mod schedule;
mod settings;
mod shadow;
mod status;
#[cfg(test)]
mod tests;
mod touch;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, also after a thread has panicked with the lock: the panic is reported where it was.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

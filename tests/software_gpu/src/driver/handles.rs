//! What a program holds by handle, streams aside: events, modules and functions.
//!
//! A handle is a number that is given out once and points to nothing, so a wrong one is always noticed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::operation::Recording;
use super::status::{Refusal, Status};
use crate::ptx::{Kernel, Module};

#[derive(Default)]
pub(super) struct Handles {
    events: HashMap<usize, Arc<Event>>,
    modules: HashMap<usize, Arc<Module>>,
    functions: HashMap<usize, Arc<Function>>,
}

/// An event and what it stands for since it was last recorded.
#[derive(Default)]
pub(super) struct Event {
    pub(super) has_timing: bool,
    /// Who waits for it sleeps, and does not spin.
    pub(super) is_slept_for: bool,
    pub(super) recording: Mutex<Option<Arc<Recording>>>,
}

/// A kernel of a loaded module.
pub(super) struct Function {
    pub(super) module: usize,
    pub(super) kernel: Arc<Kernel>,
    pub(super) name: Arc<str>,
    /// The most dynamic shared memory that a launch may ask for; `cuFuncSetAttribute` raises it.
    pub(super) dynamic_shared_bytes_max: AtomicU32,
}

impl Handles {
    /// A number that no other handle has.
    pub(super) fn new_handle() -> usize {
        static NEXT: AtomicUsize = AtomicUsize::new(0x5347_0000_0010);
        NEXT.fetch_add(16, Ordering::Relaxed)
    }

    pub(super) fn add_event(&mut self, event: Event) -> usize {
        let handle = Handles::new_handle();
        self.events.insert(handle, Arc::new(event));
        handle
    }

    pub(super) fn event(&self, handle: usize) -> Result<Arc<Event>, Refusal> {
        self.events
            .get(&handle)
            .cloned()
            .ok_or_else(|| unknown(handle, "event"))
    }

    pub(super) fn remove_event(&mut self, handle: usize) -> Result<(), Refusal> {
        self.events
            .remove(&handle)
            .map(drop)
            .ok_or_else(|| unknown(handle, "event"))
    }

    pub(super) fn add_module(&mut self, module: Module) -> usize {
        let handle = Handles::new_handle();
        self.modules.insert(handle, Arc::new(module));
        handle
    }

    pub(super) fn module(&self, handle: usize) -> Result<Arc<Module>, Refusal> {
        self.modules
            .get(&handle)
            .cloned()
            .ok_or_else(|| unknown(handle, "module"))
    }

    /// Unloads a module; its functions go with it.
    pub(super) fn remove_module(&mut self, handle: usize) -> Result<(), Refusal> {
        self.modules
            .remove(&handle)
            .ok_or_else(|| unknown(handle, "module"))?;
        self.functions
            .retain(|_, function| function.module != handle);
        Ok(())
    }

    /// The function of a module with a name; the same handle each time it is asked for.
    pub(super) fn function_named(&mut self, module: usize, name: &str) -> Result<usize, Refusal> {
        let loaded = self.module(module)?;
        let mut known = self.functions.iter();
        if let Some((handle, _)) =
            known.find(|(_, known)| known.module == module && *known.name == *name)
        {
            return Ok(*handle);
        }
        let missing = || {
            Refusal::new(
                Status::NOT_FOUND,
                format!("the module has no kernel {name}"),
            )
        };
        let kernel = loaded.kernel(name).ok_or_else(missing)?;
        let shared_bytes = kernel
            .static_shared_bytes()
            .min(super::attributes::SHARED_BYTES as usize) as u32;
        let function = Function {
            module,
            kernel,
            name: name.into(),
            dynamic_shared_bytes_max: AtomicU32::new(
                super::attributes::SHARED_BYTES - shared_bytes,
            ),
        };
        let handle = Handles::new_handle();
        self.functions.insert(handle, Arc::new(function));
        Ok(handle)
    }

    pub(super) fn function(&self, handle: usize) -> Result<Arc<Function>, Refusal> {
        self.functions
            .get(&handle)
            .cloned()
            .ok_or_else(|| unknown(handle, "function"))
    }
}

fn unknown(handle: usize, kind: &str) -> Refusal {
    Refusal::new(Status::INVALID_HANDLE, format!("{handle:#x} is no {kind}"))
}

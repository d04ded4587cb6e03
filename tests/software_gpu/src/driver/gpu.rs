//! The GPU: one thread that runs the released operations, one after another, and checks what each touches.

#![expect(
    unsafe_code,
    reason = "moves bytes between host and device memory and calls host functions"
)]

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::ptr;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use super::device::Device;
use super::lock;
use super::operation::{
    HostAddress, HostFunction, HostSource, Label, Operation, Pattern, What, Work,
};
use super::page_locked::hash_of;
use super::pass::{Finding, Pass};
use super::reports::LiveCounters;
use super::status::Status;
use super::touch::{KernelMemory, Touches};
use crate::ptx::{self, Kernel};
use crate::seam::{Access, Launch};

thread_local! {
    static IS_GPU_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Whether the caller is a host function, which must not call the driver.
pub(super) fn is_gpu_thread() -> bool {
    IS_GPU_THREAD.get()
}

/// Starts the thread; it lives as long as the process.
pub(super) fn start(device: &'static Device) {
    let body = move || {
        IS_GPU_THREAD.set(true);
        let mut gpu = Gpu {
            device,
            touches: Touches::new(device.memory.range_bytes()),
        };
        loop {
            gpu.run(device.next_operation());
        }
    };
    if let Err(error) = thread::Builder::new()
        .name("software-gpu".to_owned())
        .spawn(body)
    {
        panic!("software-gpu: start the GPU thread: {error}");
    }
}

struct Gpu {
    device: &'static Device,
    touches: Touches,
}

impl Gpu {
    fn run(&mut self, operation: Operation) {
        let (step, label) = (operation.step, operation.label.clone());
        // A panic is this crate's own failure. It must reach the program, which waits, as an error.
        if panic::catch_unwind(AssertUnwindSafe(|| self.execute(operation))).is_err() {
            self.device.reports.make(
                Status::LAUNCH_FAILED,
                &format!("{label} failed inside the software GPU"),
            );
        }
        LiveCounters::add(&self.device.reports.counters.operations, 1);
        self.device.finish(step);
        let settled = {
            let crowded = lock(&self.device.shadow).is_crowded();
            crowded.then(|| self.device.queue().settled())
        };
        if let Some(settled) = settled {
            let mut shadow = lock(&self.device.shadow);
            // Under the lock: an allocation that is noted later is not of this walk.
            let allocations = self.device.memory.snapshot();
            shadow.collect(&settled, &allocations);
        }
    }

    fn execute(&mut self, operation: Operation) {
        let counters = &self.device.reports.counters;
        match &operation.work {
            Work::ToDevice {
                destination,
                source,
                bytes,
            } => {
                LiveCounters::add(&counters.to_device_bytes, *bytes);
                self.copy_to_device(&operation, *destination, source, *bytes);
            }
            Work::ToHost {
                destination,
                source,
                bytes,
            } => {
                LiveCounters::add(&counters.to_host_bytes, *bytes);
                self.copy_to_host(&operation, *destination, *source, *bytes);
            }
            Work::OnDevice {
                destination,
                source,
                bytes,
            } => {
                self.copy_on_device(&operation, *destination, *source, *bytes);
            }
            Work::Fill {
                destination,
                pattern,
                bytes,
            } => self.fill(&operation, *destination, *pattern, *bytes),
            Work::Launch {
                kernel,
                launch,
                parameters,
            } => {
                LiveCounters::add(&counters.launches, 1);
                self.launch(&operation, kernel, launch, parameters);
            }
            Work::Record(recording) => {
                // An operation runs once, so the cell is empty.
                let _ = recording.over.set(Instant::now());
            }
            Work::Wait => {}
            // It was noted at the call, so that whoever uses the memory too early is seen.
            Work::Allocate => {}
            Work::HostFunction(function) => self.call(&operation, function),
            Work::Free(allocation) => {
                self.check(&operation, |pass| {
                    pass.range(allocation.start, allocation.bytes, Access::Write)
                });
                lock(&self.device.shadow).forget(allocation);
                self.device.memory.release(allocation.start);
            }
        }
    }

    fn copy_to_device(
        &self,
        operation: &Operation,
        destination: u64,
        source: &HostSource,
        bytes: u64,
    ) {
        if !self.is_allocated(&operation.label, "writes", destination, bytes) {
            return;
        }
        let from = match source {
            HostSource::Staged(staged) => staged.as_ptr(),
            HostSource::PageLocked(address) => address.0 as *const u8,
        };
        let to = self.device.memory.byte(destination);
        // SAFETY: the destination is allocated and only this thread touches device memory. The source is staged bytes, or
        // page-locked memory of the program that is freed or unregistered only after all work; the program may be writing
        // it now, which is what the hash is for.
        unsafe { ptr::copy_nonoverlapping(from, to, bytes as usize) };
        if let HostSource::PageLocked(_) = source {
            // SAFETY: the bytes just copied.
            let hash = unsafe { hash_of(to, bytes as usize) };
            let report = lock(&self.device.page_locked).check_read(operation.step, hash);
            self.device
                .report_all(Status::LAUNCH_FAILED, report.into_iter().collect());
        }
        self.check(operation, |pass| {
            pass.range(destination, bytes, Access::Write)
        });
    }

    fn copy_to_host(
        &self,
        operation: &Operation,
        destination: HostAddress,
        source: u64,
        bytes: u64,
    ) {
        if !self.is_allocated(&operation.label, "reads", source, bytes) {
            return;
        }
        let from = self.device.memory.byte(source);
        // SAFETY: the source is allocated. The destination is page-locked memory, freed or unregistered only after all
        // work, or memory of a call that waits for this copy.
        let copy =
            || unsafe { ptr::copy_nonoverlapping(from, destination.0 as *mut u8, bytes as usize) };
        let reports = lock(&self.device.page_locked).write(operation.step, copy);
        self.device.report_all(Status::LAUNCH_FAILED, reports);
        self.check(operation, |pass| pass.range(source, bytes, Access::Read));
    }

    fn copy_on_device(&self, operation: &Operation, destination: u64, source: u64, bytes: u64) {
        let label = &operation.label;
        if !self.is_allocated(label, "reads", source, bytes)
            || !self.is_allocated(label, "writes", destination, bytes)
        {
            return;
        }
        let memory = &self.device.memory;
        // SAFETY: both ranges are allocated and only this thread touches device memory; they may overlap.
        unsafe {
            ptr::copy(
                memory.byte(source),
                memory.byte(destination),
                bytes as usize,
            )
        };
        self.check(operation, |pass| {
            pass.range(source, bytes, Access::Read);
            pass.range(destination, bytes, Access::Write);
        });
    }

    fn fill(&self, operation: &Operation, destination: u64, pattern: Pattern, bytes: u64) {
        if !self.is_allocated(&operation.label, "writes", destination, bytes) {
            return;
        }
        let to = self.device.memory.byte(destination);
        let value = pattern.value.to_le_bytes();
        // SAFETY: the range is allocated and only this thread touches device memory.
        let to = unsafe { std::slice::from_raw_parts_mut(to, bytes as usize) };
        match pattern.bytes {
            1 => to.fill(value[0]),
            _ => to
                .chunks_mut(pattern.bytes)
                .for_each(|chunk| chunk.copy_from_slice(&value[..chunk.len()])),
        }
        self.check(operation, |pass| {
            pass.range(destination, bytes, Access::Write)
        });
    }

    fn launch(
        &mut self,
        operation: &Operation,
        kernel: &Kernel,
        launch: &Launch,
        parameters: &[u8],
    ) {
        let mut memory = KernelMemory::new(&self.device.memory, &mut self.touches);
        let outcome = ptx::run(kernel, launch, parameters, &mut memory);
        let status = if memory.out_of_bounds {
            Status::ILLEGAL_ADDRESS
        } else {
            Status::LAUNCH_FAILED
        };
        let touches = &mut self.touches;
        check(self.device, operation, |pass| {
            touches.drain(|granule, reads, writes| pass.granule(granule, reads, writes));
        });
        if let Err(fault) = outcome {
            self.device
                .reports
                .make(status, &format!("{}: {fault}", operation.label));
        }
    }

    fn call(&self, operation: &Operation, function: &HostFunction) {
        // The host is told here that the work before is over.
        self.device.learn(&operation.clock);
        // SAFETY: the program gave the function and its argument for this call, as cuLaunchHostFunc says.
        unsafe { (function.function)(function.argument as *mut libc::c_void) };
    }

    /// Whether a copy's or fill's range is allocated now (it was at the call); if not, that is a report.
    fn is_allocated(&self, label: &Label, verb: &str, address: u64, bytes: u64) -> bool {
        match self.device.memory.check(address, bytes) {
            Ok(_) => {
                self.device.memory.prepare(address, bytes);
                true
            }
            Err(reason) => {
                self.device.reports.make(
                    Status::ILLEGAL_ADDRESS,
                    &format!("{label} {verb} out of bounds: {reason}"),
                );
                false
            }
        }
    }

    fn check(&self, operation: &Operation, touch: impl FnOnce(&mut Pass<'_>)) {
        check(self.device, operation, touch);
    }
}

/// Takes what an operation has touched to the order checker and reports what that finds.
fn check(device: &Device, operation: &Operation, touch: impl FnOnce(&mut Pass<'_>)) {
    let findings = {
        let mut shadow = lock(&device.shadow);
        let unwritten = device.settings.unwritten;
        let mut pass = shadow.pass(
            operation.step,
            &operation.clock,
            operation.label.clone(),
            unwritten,
        );
        touch(&mut pass);
        pass.finish()
    };
    for finding in findings {
        let text = describe(device, &operation.label, &finding);
        device.reports.make(Status::LAUNCH_FAILED, &text);
    }
}

fn describe(device: &Device, label: &Arc<Label>, finding: &Finding) -> String {
    let place = |address: u64| match device.memory.find(address) {
        Some(allocation) => format!(
            "{address:#x} (byte {} of allocation {}, {} bytes)",
            address - allocation.start,
            allocation.number,
            allocation.bytes
        ),
        None => format!("{address:#x}"),
    };
    match finding {
        Finding::Unwritten { address } => {
            format!(
                "read of unwritten memory: {label} reads {}, which nothing has written",
                place(*address)
            )
        }
        Finding::Unordered {
            address,
            access,
            other,
            other_access,
        } => {
            let verb = |label: &Label, access: Access| match (&label.what, access) {
                (What::Free, _) => "frees",
                (What::Allocate { .. } | What::HostAllocate { .. }, _) => "allocates",
                (_, Access::Read) => "reads",
                (_, Access::Write) => "writes",
            };
            let staged = [label, other]
                .iter()
                .any(|label| matches!(label.what, What::ToDevice { staged: true, .. }));
            let note = if staged {
                " (a synchronous copy from pageable memory may return before its transfer ends: synchronise its stream)"
            } else {
                ""
            };
            format!(
                "unordered access: {label} {} {}, which {other} {}; nothing orders the two{note}",
                verb(label, *access),
                place(*address),
                verb(other, *other_access)
            )
        }
    }
}

//! The engine thread's life: load, loop, sleep, stop; and the handle through which everybody else sees it.

use super::shared::Shared;
use super::step_loop::{StepLoop, Turn};
use super::{EngineSettings, EngineStatus, Failure, Load, Request, SubmitError};
use crate::metrics::Metrics;
use crate::model::Model;
use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often parked sequences look whether their clients have read. A channel cannot wake the engine thread.
const PARKED_POLL: Duration = Duration::from_millis(2);

/// Starts engines.
pub struct Engine;

impl Engine {
    /// Spawns the engine thread, which makes the model and then serves requests until
    /// [`EngineHandle::shutdown`]. Returns at once: [`EngineHandle::status`] says how far the loading is.
    ///
    /// `make_model` runs on the engine thread, inside a rayon pool of that one thread, and so does everything that
    /// the model does later: data parallelism of libraries runs inline there.
    ///
    /// # Errors
    ///
    /// The thread cannot be spawned.
    pub fn start<E: Display>(
        make_model: impl FnOnce(&Progress) -> Result<Box<dyn Model>, E> + Send + 'static,
        settings: EngineSettings,
        metrics: &Metrics,
    ) -> std::io::Result<EngineHandle> {
        assert!(
            settings.parallel > 0 && settings.step_width > 0,
            "no sequence can run: {settings:?}"
        );
        let capacity = settings.parallel.saturating_add(settings.queue_max);
        let shared = Arc::new(Shared::new(capacity, metrics.clone()));
        let thread = std::thread::Builder::new().name("engine".into()).spawn({
            let shared = Arc::clone(&shared);
            move || {
                let _end = End(Arc::clone(&shared));
                run(make_model, settings, &shared);
            }
        })?;
        Ok(EngineHandle {
            owner: Arc::new(Owner {
                shared,
                thread: Mutex::new(Some(thread)),
            }),
        })
    }
}

/// Tells how far the loading is. May be cloned and used on any thread.
#[derive(Clone)]
pub struct Progress {
    shared: Arc<Shared>,
}

impl Progress {
    /// `ratio` in 0..=1 of the work is done.
    pub fn set(&self, ratio: f64) {
        self.shared.set_progress(ratio.clamp(0.0, 1.0) as f32);
    }

    /// True when nobody waits for the model any more: the server is shutting down. Loading had better end with an
    /// error then.
    pub fn is_cancelled(&self) -> bool {
        self.shared.is_shutting_down()
    }
}

/// A door to the engine thread, for any thread. When the last handle is dropped, the engine shuts down without grace.
#[derive(Clone)]
pub struct EngineHandle {
    owner: Arc<Owner>,
}

struct Owner {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.shared.shut_down(Instant::now());
    }
}

impl EngineHandle {
    /// Queues a request. Never blocks; a request that is refused is dropped, and its channel closes.
    ///
    /// # Errors
    ///
    /// As [`SubmitError`] says. At most `parallel + queue_max` requests run and wait together.
    pub fn submit(&self, request: Request) -> Result<(), SubmitError> {
        self.owner.shared.submit(request)
    }

    pub fn status(&self) -> EngineStatus {
        self.owner.shared.status()
    }

    pub fn load(&self) -> Load {
        self.owner.shared.load()
    }

    /// From now on requests are refused, and those that wait are failed. Those that run have `grace` to end; then
    /// they are failed too, in the middle of a step if need be. Returns at once. A second call can only shorten the
    /// grace.
    pub fn shutdown(&self, grace: Duration) {
        let now = Instant::now();
        // A grace beyond the clock's end is some years.
        let deadline = now
            .checked_add(grace)
            .unwrap_or(now + Duration::from_secs(1 << 30));
        self.owner.shared.shut_down(deadline);
    }

    /// Blocks until the model is loaded, or never will be. Not for async threads.
    pub fn wait_until_loaded(&self) -> EngineStatus {
        self.owner.shared.wait_until_loaded();
        self.status()
    }

    /// Blocks until the engine thread has ended, and says how. Not for async threads.
    pub fn wait_until_ended(&self) -> EngineStatus {
        self.owner.shared.wait_until_ended();
        self.status()
    }

    /// Blocks until the engine thread has ended and what it owned is freed. Not for async threads.
    pub fn join(&self) {
        self.owner.shared.wait_until_ended();
        let mut thread = self
            .owner
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            // A panic in it has been reported when it happened.
            let _ = thread.join();
        }
    }
}

/// However the thread ends, everybody learns of it.
struct End(Arc<Shared>);

impl Drop for End {
    fn drop(&mut self) {
        if !self.0.is_shutting_down() {
            self.0.fail(&Failure::Internal.to_string());
        }
        self.0.set_ended();
    }
}

fn run<E: Display>(
    make_model: impl FnOnce(&Progress) -> Result<Box<dyn Model>, E>,
    settings: EngineSettings,
    shared: &Arc<Shared>,
) {
    let progress = Progress {
        shared: Arc::clone(shared),
    };
    let loaded = catch_unwind(AssertUnwindSafe(|| -> Result<_, String> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(1)
            .use_current_thread()
            .build()
            .map_err(|error| error.to_string())?;
        let model = make_model(&progress).map_err(|error| format!("{error:#}"))?;
        Ok((pool, model))
    }));
    // The pool lives as long as the loop.
    let (_pool, model) = match loaded {
        Ok(Ok(loaded)) => loaded,
        Ok(Err(_)) if shared.is_shutting_down() => return,
        // Told by whoever waits for the model.
        Ok(Err(error)) => return shared.fail(&error),
        Err(panic) => {
            let cause = format!("loading the model panicked: {}", message(&*panic));
            tracing::error!("{cause}");
            return shared.fail(&cause);
        }
    };
    progress.set(1.0);
    let mut step_loop = StepLoop::new(model, settings, Arc::clone(shared));
    shared.set_ready();
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run_loop(&mut step_loop, shared))) {
        let cause = format!("{}: {}", Failure::Internal, message(&*panic));
        tracing::error!("{cause}");
        // In this order, so that whoever hears of a failure finds the status changed already. What the panic left
        // behind may be broken too.
        shared.fail(&cause);
        let given_up = catch_unwind(AssertUnwindSafe(|| {
            step_loop.give_up_all(&Failure::Internal);
        }));
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(step_loop)));
        if given_up.is_err() || dropped.is_err() {
            tracing::error!("cleaning up after the error panicked as well");
        }
    }
}

fn run_loop(step_loop: &mut StepLoop, shared: &Shared) {
    loop {
        match step_loop.turn(Instant::now()) {
            Turn::Stepped => {}
            Turn::Lost => return,
            Turn::AllParked => shared.wait_for_change(PARKED_POLL),
            Turn::Idle if shared.is_shutting_down() => return,
            Turn::Idle => shared.wait_for_work(),
        }
    }
}

/// What a panic said.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without a message")
}

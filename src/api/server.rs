//! The socket: accepting, bounds of time and number, and shutting down.

use super::stall::StallGuard;
use super::{Served, router};
use crate::config::Config;
use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

/// Connections at once; others wait in the listener's backlog.
const CONNECTIONS_MAX: usize = 512;
/// For all headers of a request to arrive, and for an idle connection to send the next.
const HEADER_TIME_MAX: Duration = Duration::from_secs(60);
/// The same for the first request of a connection: one that says nothing takes a place from those that would.
const FIRST_HEADERS_TIME_MAX: Duration = Duration::from_secs(10);
/// Headers of one request.
const HEADER_BYTES_MAX: usize = 64 << 10;
/// After accepting failed (no file descriptors, most likely), until the next try.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Threads that serve HTTP; computing has its own.
const ASYNC_THREADS: usize = 2;
const BLOCKING_THREADS_MAX: usize = 8;
/// How long an idle blocking thread stays: for ever. Where the system gives no further thread, work waits for one that is
/// there; without any, the request would be what fails.
const BLOCKING_KEEP_ALIVE: Duration = Duration::from_secs(u32::MAX as u64);
/// So long after it was joined a thread no longer counts against the limits.
const THREADS_END: Duration = Duration::from_millis(5);
/// After the grace, for clients to hear that their answers were cut off.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// For work on blocking threads when the server ends.
const BLOCKING_GRACE: Duration = Duration::from_secs(1);

/// Why the address cannot be served.
#[derive(Debug, thiserror::Error)]
#[error("listen on {address}: {problem}")]
pub struct ListenError {
    address: String,
    problem: String,
}

/// Ends a server from any thread; clones are of the same server.
#[derive(Clone, Debug)]
pub struct Stop(watch::Sender<bool>);

impl Default for Stop {
    fn default() -> Stop {
        Stop(watch::channel(false).0)
    }
}

impl Stop {
    pub fn new() -> Stop {
        Stop::default()
    }

    /// No new requests; those that run have the grace.
    pub fn stop(&self) {
        self.0.send_replace(true);
    }

    pub fn is_stopped(&self) -> bool {
        *self.0.borrow()
    }

    async fn stopped(&self) {
        // The sender is ours, so the channel is open.
        let _ = self.0.subscribe().wait_for(|stop| *stop).await;
    }
}

/// Takes the address, before anything slow is done. Connections wait until [`HttpThreads::serve`].
pub fn listen(address: &str) -> Result<std::net::TcpListener, ListenError> {
    let bind = || {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    bind().map_err(|error: std::io::Error| ListenError {
        address: address.to_owned(),
        problem: match error.kind() {
            ErrorKind::AddrInUse => {
                "the port is taken; stop the program that has it, or choose another with --listen"
                    .to_owned()
            }
            ErrorKind::PermissionDenied => {
                "this user may not; choose a port above 1023 with --listen".to_owned()
            }
            ErrorKind::AddrNotAvailable => {
                "this machine does not have the address; choose another with --listen".to_owned()
            }
            _ => format!("{error}; choose another address with --listen"),
        },
    })
}

/// The threads that serve HTTP.
pub struct HttpThreads(Runtime);

impl HttpThreads {
    /// Starts them. To be called before other threads are started that may take the last ones that the system gives: the
    /// runtime panics where it gets none.
    ///
    /// # Errors
    ///
    /// The system gives no threads.
    pub fn start() -> std::io::Result<HttpThreads> {
        check_threads(ASYNC_THREADS + 1)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(ASYNC_THREADS)
            .max_blocking_threads(BLOCKING_THREADS_MAX)
            .thread_keep_alive(BLOCKING_KEEP_ALIVE)
            .thread_name("http")
            .enable_all()
            .build()?;
        // Starts the first blocking thread.
        drop(runtime.spawn_blocking(|| ()));
        Ok(HttpThreads(runtime))
    }

    /// Serves until `stop`, then lets running requests end within the grace.
    ///
    /// # Errors
    ///
    /// The listener cannot be set up.
    pub fn serve(
        self,
        listener: std::net::TcpListener,
        served: Served,
        config: &Config,
        stop: &Stop,
    ) -> std::io::Result<()> {
        let served = self.0.block_on(async {
            let listener = TcpListener::from_std(listener)?;
            run(listener, served, config, stop).await;
            Ok(())
        });
        self.0.shutdown_timeout(BLOCKING_GRACE);
        served
    }
}

/// The system refused a thread.
fn no_thread(error: std::io::Error) -> std::io::Error {
    let limits = "the control group's, `ulimit -u`";
    std::io::Error::other(format!("{error}; raise the limit on threads ({limits})"))
}

/// Whether the system gives so many threads.
fn check_threads(count: usize) -> std::io::Result<()> {
    let gate = Arc::new(Mutex::new(()));
    // Until all are there.
    let closed = gate.lock();
    let start = |_| {
        let gate = Arc::clone(&gate);
        let thread = std::thread::Builder::new().name("http".to_owned());
        thread.spawn(move || drop(gate.lock()))
    };
    let threads: std::io::Result<Vec<_>> = (0..count).map(start).collect();
    drop(closed);
    for thread in threads.map_err(no_thread)? {
        // It does nothing that could panic.
        let _ = thread.join();
    }
    std::thread::sleep(THREADS_END);
    Ok(())
}

/// From here on SIGTERM and SIGINT stop the server, and a second one ends the process at once.
///
/// # Errors
///
/// The thread or the signals cannot be set up.
pub fn watch_signals(stop: Stop) -> std::io::Result<()> {
    on_signal(move |name, _| {
        tracing::info!("{name}: no new requests; a second signal ends at once");
        stop.stop();
    })
}

/// From here on the first SIGTERM or SIGINT is answered with `act`, which is told its name and the code that shells give to
/// it, and a second one ends the process with that code. A thread of its own watches, so that this holds whatever else
/// the process is doing.
///
/// # Errors
///
/// The thread or the signals cannot be set up.
pub fn on_signal(act: impl FnOnce(&'static str, i32) + Send + 'static) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    // From here on signals do not end the process by themselves.
    let mut signals = runtime.block_on(async { Signals::new() })?;
    let watch = async move {
        let (name, code) = signals.next().await;
        act(name, code);
        let (_, code) = signals.next().await;
        std::process::exit(code);
    };
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || runtime.block_on(watch))
        .map_err(no_thread)?;
    Ok(())
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Its name, and the code of a process that it ends.
    async fn next(&mut self) -> (&'static str, i32) {
        tokio::select! {
            _ = self.terminate.recv() => ("SIGTERM", 143),
            _ = self.interrupt.recv() => ("SIGINT", 130),
        }
    }
}

/// Serves until `stop`, and then for at most the grace: the engine ends what runs longer, which leaves a moment to
/// tell the clients.
pub async fn run(listener: TcpListener, served: Served, config: &Config, stop: &Stop) {
    let engine = served.engine.clone();
    let router = router(served, config);
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.stopped() => break,
            Some(_) = connections.join_next() => {}
            Some((stream, slot)) = accept(&listener, &slots) => {
                let served = connection(stream, router.clone(), config.stall_timeout, stop.clone());
                connections.spawn(async move {
                    served.await;
                    drop(slot);
                });
            }
        }
    }
    // From here on connections are refused.
    drop(listener);
    engine.shutdown(config.grace);
    let all_ended = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(config.grace + LAST_WORDS, all_ended)
        .await
        .is_err()
    {
        tracing::warn!(
            connections = connections.len(),
            "the grace is over; connections are cut"
        );
        connections.shutdown().await;
    }
}

async fn accept(
    listener: &TcpListener,
    slots: &Arc<Semaphore>,
) -> Option<(TcpStream, OwnedSemaphorePermit)> {
    let slot = Arc::clone(slots).acquire_owned().await.ok()?;
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return Some((stream, slot)),
            Err(error) => {
                tracing::warn!(%error, "accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn connection(stream: TcpStream, router: Router, stall_timeout: Duration, stop: Stop) {
    // Tokens are small and each should leave at once. A connection that is gone already shows below.
    let _ = stream.set_nodelay(true);
    let stream = TokioIo::new(StallGuard::new(stream, stall_timeout));
    let asked = AtomicBool::new(false);
    let router = TowerToHyperService::new(router);
    let service = service_fn(|request| {
        asked.store(true, Ordering::Relaxed);
        router.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME_MAX)
        .max_buf_size(HEADER_BYTES_MAX)
        .serve_connection(stream, service);
    let mut connection = std::pin::pin!(connection);
    let silent = async {
        tokio::time::sleep(FIRST_HEADERS_TIME_MAX).await;
        if asked.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = silent => {
            tracing::debug!("a connection asked nothing");
            return;
        }
        () = stop.stopped() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection broke off");
    }
}

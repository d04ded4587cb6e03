//! The socket: accepting, bounds of time and number, and shutting down.

use super::stall::StallGuard;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

/// Connections at once; others wait in the listener's backlog.
const CONNECTIONS_MAX: usize = 512;
/// For all headers of a request to arrive, and for an idle connection to send the next.
const HEADER_TIME_MAX: Duration = Duration::from_secs(60);
/// Headers of one request.
const HEADER_BYTES_MAX: usize = 64 << 10;
/// After accepting failed (no file descriptors, most likely), until the next try.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Threads that serve HTTP; computing has its own.
const ASYNC_THREADS: usize = 2;
const BLOCKING_THREADS_MAX: usize = 8;
/// For work on blocking threads when the server ends.
const BLOCKING_GRACE: Duration = Duration::from_secs(1);

/// Why the address cannot be served.
#[derive(Debug, thiserror::Error)]
#[error("listen on {address}: {problem}")]
pub struct ListenError {
    address: String,
    problem: String,
}

#[derive(Clone, Copy, Debug)]
pub struct ServerOptions {
    /// For running requests after the first signal.
    pub grace: Duration,
    /// For a client that takes no bytes.
    pub stall_timeout: Duration,
}

/// Takes the address, before anything slow is done. Connections wait until [`serve`].
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
                "the port is taken; stop the program that has it, or choose another with --listen".to_owned()
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

/// Serves until SIGTERM or SIGINT, then lets running requests end within the grace. A second signal ends the process
/// at once, with the code that shells give to that signal.
pub fn serve(
    listener: std::net::TcpListener,
    router: Router,
    options: ServerOptions,
) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(ASYNC_THREADS)
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .thread_name("http")
        .enable_all()
        .build()?;
    let served = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let listener = TcpListener::from_std(listener)?;
        let (stop, stopping) = watch::channel(false);
        tokio::spawn(async move {
            let name = signals.next().await.0;
            tracing::info!("{name}: no new requests; a second signal ends at once");
            stop.send_replace(true);
            std::process::exit(signals.next().await.1);
        });
        run(listener, router, options, stopping).await;
        Ok(())
    });
    runtime.shutdown_timeout(BLOCKING_GRACE);
    served
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

/// Serves until `stopping` holds true, and then for at most the grace.
pub async fn run(
    listener: TcpListener,
    router: Router,
    options: ServerOptions,
    mut stopping: watch::Receiver<bool>,
) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = stopped(&mut stopping) => break,
            Some(_) = connections.join_next() => {}
            Some((stream, slot)) = accept(&listener, &slots) => {
                let served = connection(stream, router.clone(), options, stopping.clone());
                connections.spawn(async move {
                    served.await;
                    drop(slot);
                });
            }
        }
    }
    // From here on connections are refused.
    drop(listener);
    let all_ended = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(options.grace, all_ended).await.is_err() {
        tracing::warn!(connections = connections.len(), "the grace is over; connections are cut");
        connections.shutdown().await;
    }
}

/// A sender that is gone counts as a stop.
async fn stopped(stopping: &mut watch::Receiver<bool>) {
    let _ = stopping.wait_for(|stop| *stop).await;
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

async fn connection(
    stream: TcpStream,
    router: Router,
    options: ServerOptions,
    mut stopping: watch::Receiver<bool>,
) {
    // Tokens are small and each should leave at once. A connection that is gone already shows below.
    let _ = stream.set_nodelay(true);
    let stream = TokioIo::new(StallGuard::new(stream, options.stall_timeout));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME_MAX)
        .max_buf_size(HEADER_BYTES_MAX)
        .serve_connection(stream, TowerToHyperService::new(router));
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stopped(&mut stopping) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection broke off");
    }
}

//! Request bodies: read under a limit of size, time and memory, and parsed off the async threads.

use super::Api;
use super::error::ApiError;
use axum::body::{Body, BodyDataStream, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::header;
use futures_core::Stream;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinError;
use tokio::time::{Instant, timeout_at};

/// The largest body that is read. A prompt of a million tokens is about 4 MiB.
pub const BODY_BYTES_MAX: usize = 16 << 20;
/// All bodies that are being read or parsed, together, less `UNCOUNTED_BYTES` of each.
const BODIES_BYTES_MAX: usize = 64 << 20;
/// The beginning of each body is free, so that large ones do not keep small ones out; connections bound it.
const UNCOUNTED_BYTES: usize = 64 << 10;
/// For others to give back what a large body needs; then the client hears that the server is busy.
const ROOM_WAIT_MAX: Duration = Duration::from_secs(1);
/// How much of a body that is too large is read and thrown away, so that the client gets to read the answer instead
/// of a reset connection.
const DISCARDED_BYTES_MAX: usize = 64 << 20;
/// From the headers to the last byte of the body, less what the server made it wait.
const BODY_TIME_MAX: Duration = Duration::from_secs(60);
/// Requests that are parsed, rendered and tokenised at the same time.
const PREPARATIONS_MAX: usize = 4;
/// Reports of memory at the same time.
const REPORTS_MAX: usize = 1;
/// Waiting for another report included.
const REPORT_TIME_MAX: Duration = Duration::from_secs(5);

/// The bounds that all requests share.
pub(super) struct Intake {
    /// One permit is a KiB.
    bodies: Arc<Semaphore>,
    preparations: Arc<Semaphore>,
    reports: Arc<Semaphore>,
}

impl Intake {
    pub(super) fn new() -> Intake {
        Intake {
            bodies: Arc::new(Semaphore::new(BODIES_BYTES_MAX >> 10)),
            preparations: Arc::new(Semaphore::new(PREPARATIONS_MAX)),
            reports: Arc::new(Semaphore::new(REPORTS_MAX)),
        }
    }
}

/// A whole body, counted against `BODIES_BYTES_MAX` until dropped.
pub(super) struct Received {
    bytes: Bytes,
    _room: Room,
}

impl Received {
    pub(super) fn json<T: serde::de::DeserializeOwned>(&self) -> Result<T, ApiError> {
        if self.bytes.is_empty() {
            return Err(ApiError::bad_request(
                "the request's body is empty; send JSON",
            ));
        }
        serde_json::from_slice(&self.bytes).map_err(|error| {
            let what = match error.classify() {
                serde_json::error::Category::Data => "is not what this endpoint takes",
                _ => "is not valid JSON",
            };
            ApiError::bad_request(format!("the request's body {what}: {error}"))
        })
    }
}

/// What `curl -d` sends unless told otherwise: nobody means it.
const CURL_DEFAULT: &str = "application/x-www-form-urlencoded";

/// Reads the body of a JSON request. A missing `Content-Type`, and curl's default, are taken for JSON; any other type is
/// refused.
pub(super) async fn receive(api: &Api, request: Request) -> Result<Received, ApiError> {
    if let Some(given) = request.headers().get(header::CONTENT_TYPE) {
        let given = String::from_utf8_lossy(given.as_bytes());
        let essence = given.split(';').next().unwrap_or_default().trim();
        let subtype = essence.to_ascii_lowercase();
        if subtype != "application/json"
            && subtype != CURL_DEFAULT
            && !(subtype.starts_with("application/") && subtype.ends_with("+json"))
        {
            return Err(ApiError::not_json(&given));
        }
    }
    let waits = request.headers().contains_key(header::EXPECT);
    read(&api.intake.bodies, request.into_body(), waits).await
}

/// The part of `BODIES_BYTES_MAX` that a body has, of which it takes more as it grows: a client that has sent nothing
/// holds nothing.
#[derive(Default)]
struct Room(Option<OwnedSemaphorePermit>);

impl Room {
    /// Room for so many bytes; false where others do not give it back soon.
    async fn grow(&mut self, bodies: &Arc<Semaphore>, bytes: usize) -> bool {
        let counted = bytes.saturating_sub(UNCOUNTED_BYTES).div_ceil(1 << 10);
        let held = self.0.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        // At most BODY_BYTES_MAX in KiB, which fits.
        let missing = counted.saturating_sub(held) as u32;
        if missing == 0 {
            return true;
        }
        let acquire = Arc::clone(bodies).acquire_many_owned(missing);
        match tokio::time::timeout(ROOM_WAIT_MAX, acquire).await {
            Ok(Ok(more)) => {
                match &mut self.0 {
                    Some(permit) => permit.merge(more),
                    none => *none = Some(more),
                }
                true
            }
            _ => false,
        }
    }
}

async fn read(bodies: &Arc<Semaphore>, body: Body, waits: bool) -> Result<Received, ApiError> {
    let announced = body.size_hint().exact();
    let mut body = body.into_data_stream();
    let mut deadline = Instant::now() + BODY_TIME_MAX;
    if announced.is_some_and(|bytes| bytes > BODY_BYTES_MAX as u64) {
        // A client that waits for `100 Continue` has sent nothing yet.
        if !waits {
            discard(&mut body, 0, deadline).await;
        }
        return Err(ApiError::body_too_large(BODY_BYTES_MAX));
    }
    let largest = announced.map_or(BODY_BYTES_MAX, |bytes| bytes as usize);
    let mut room = Room::default();
    let mut bytes = Vec::new();
    while let Some(data) = timeout_at(deadline, next(&mut body))
        .await
        .map_err(|_| ApiError::body_too_slow())?
    {
        let data = data.map_err(|_| ApiError::bad_request("the request's body broke off"))?;
        let needed = bytes.len() + data.len();
        if needed > BODY_BYTES_MAX {
            discard(&mut body, needed, deadline).await;
            return Err(ApiError::body_too_large(BODY_BYTES_MAX));
        }
        if needed > bytes.capacity() {
            let capacity = needed.max((2 * bytes.capacity()).min(largest));
            let asked = Instant::now();
            if !room.grow(bodies, capacity).await {
                drop((bytes, room));
                discard(&mut body, needed, deadline).await;
                return Err(ApiError::busy(
                    "the server is reading as many large requests as it has room for; try again later",
                ));
            }
            deadline += asked.elapsed();
            bytes.reserve_exact(capacity - bytes.len());
        }
        bytes.extend_from_slice(&data);
    }
    Ok(Received {
        bytes: bytes.into(),
        _room: room,
    })
}

async fn next(body: &mut BodyDataStream) -> Option<Result<Bytes, axum::Error>> {
    std::future::poll_fn(|context| Pin::new(&mut *body).poll_next(context)).await
}

async fn discard(body: &mut BodyDataStream, mut seen_bytes: usize, deadline: Instant) {
    while seen_bytes < DISCARDED_BYTES_MAX
        && let Ok(Some(Ok(data))) = timeout_at(deadline, next(body)).await
    {
        seen_bytes += data.len();
    }
}

/// Runs `work` (parsing, templates, tokenisation) on a blocking thread. If the client leaves, what runs is finished
/// and thrown away.
pub(super) async fn off_thread<T: Send + 'static>(
    api: &Api,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    match run(&api.intake.preparations, work).await {
        Ok(result) => result,
        Err(error) => {
            tracing::error!(%error, "preparing a request failed");
            Err(ApiError::internal(
                "the server failed to prepare this request",
            ))
        }
    }
}

/// Runs the report of memory on a blocking thread; one at a time, so that whoever asks often keeps nobody else waiting.
pub(super) async fn report(api: Arc<Api>) -> Result<serde_json::Value, ApiError> {
    let reports = Arc::clone(&api.intake.reports);
    let report = run(&reports, move || (api.memory)());
    match tokio::time::timeout(REPORT_TIME_MAX, report).await {
        Ok(Ok(report)) => Ok(report),
        Ok(Err(error)) => {
            tracing::error!(%error, "report memory");
            Err(ApiError::internal("the server failed to report its memory"))
        }
        Err(_) => Err(ApiError::busy(
            "the server is busy with other reports of its memory; try again later",
        )),
    }
}

/// The permit goes with the work: it is free again when the work has ended, not when the client has left.
async fn run<T: Send + 'static>(
    places: &Arc<Semaphore>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    // The semaphore is never closed.
    let permit = Arc::clone(places).acquire_owned().await.ok();
    tokio::task::spawn_blocking(move || {
        let _permit = permit;
        work()
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap()
            .block_on(future)
    }

    #[test]
    fn work_keeps_its_place_when_the_client_has_left() {
        block_on(async {
            let places = Arc::new(Semaphore::new(1));
            let (go, wait) = std::sync::mpsc::channel::<()>();
            let left = run(&places, move || wait.recv());
            assert!(
                tokio::time::timeout(Duration::from_millis(50), left)
                    .await
                    .is_err()
            );
            assert_eq!(places.available_permits(), 0);
            go.send(()).unwrap();
            run(&places, || ()).await.unwrap();
            assert_eq!(places.available_permits(), 1);
        });
    }

    #[test]
    fn a_body_has_room_as_it_grows_and_is_refused_where_others_have_it() {
        block_on(async {
            let bodies = Arc::new(Semaphore::new(100));
            let body = |bytes: usize| Body::from(vec![b' '; bytes]);
            // The size is announced here, so that exactly as much is taken.
            let large = read(&bodies, body(UNCOUNTED_BYTES + (60 << 10)), false).await;
            assert_eq!(bodies.available_permits(), 40);
            let other = read(&bodies, body(UNCOUNTED_BYTES + (60 << 10)), false).await;
            let error = other.err().unwrap();
            assert_eq!(error.status(), 503);
            assert_eq!(error.body()["error"]["code"], "busy");
            assert_eq!(bodies.available_permits(), 40);
            assert!(read(&bodies, body(UNCOUNTED_BYTES), false).await.is_ok());
            drop(large);
            assert_eq!(bodies.available_permits(), 100);
        });
    }
}

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

/// The largest body that is read. A prompt of a million tokens is about 4 MiB.
pub const BODY_BYTES_MAX: usize = 16 << 20;
/// All bodies that are being read or parsed, together.
const BODIES_BYTES_MAX: usize = 256 << 20;
/// How much of a body that is too large is read and thrown away, so that the client gets to read the answer instead
/// of a reset connection.
const DISCARDED_BYTES_MAX: usize = 64 << 20;
/// From the headers to the last byte of the body.
const BODY_TIME_MAX: Duration = Duration::from_secs(60);
/// Requests that are parsed, rendered and tokenised at the same time.
const PREPARATIONS_MAX: usize = 4;

/// The bounds that all requests share.
pub(super) struct Intake {
    /// One permit is a KiB.
    bodies: Arc<Semaphore>,
    preparations: Semaphore,
}

impl Intake {
    pub(super) fn new() -> Intake {
        Intake {
            bodies: Arc::new(Semaphore::new(BODIES_BYTES_MAX >> 10)),
            preparations: Semaphore::new(PREPARATIONS_MAX),
        }
    }
}

/// A whole body, counted against `BODIES_BYTES_MAX` until dropped.
pub(super) struct Received {
    bytes: Bytes,
    _memory: OwnedSemaphorePermit,
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
    tokio::time::timeout(BODY_TIME_MAX, read(api, request.into_body(), waits))
        .await
        .map_err(|_| ApiError::body_too_slow())?
}

async fn read(api: &Api, body: Body, waits: bool) -> Result<Received, ApiError> {
    let hint = body.size_hint();
    let mut body = body.into_data_stream();
    let announced = hint.exact().unwrap_or(BODY_BYTES_MAX as u64);
    if announced > BODY_BYTES_MAX as u64 {
        // A client that waits for `100 Continue` has sent nothing yet.
        if !waits {
            discard(&mut body, 0).await;
        }
        return Err(ApiError::body_too_large(BODY_BYTES_MAX));
    }
    // Rounded up: no body is free. At most BODY_BYTES_MAX, which fits.
    let permits = (announced >> 10) as u32 + 1;
    let memory = Arc::clone(&api.intake.bodies)
        .acquire_many_owned(permits)
        .await
        .map_err(|_| ApiError::internal("the server is shutting down"))?;
    let mut bytes = Vec::with_capacity(hint.exact().map_or(0, |exact| exact as usize));
    while let Some(data) = next(&mut body).await {
        let data = data.map_err(|_| ApiError::bad_request("the request's body broke off"))?;
        if bytes.len() + data.len() > BODY_BYTES_MAX {
            discard(&mut body, bytes.len()).await;
            return Err(ApiError::body_too_large(BODY_BYTES_MAX));
        }
        bytes.extend_from_slice(&data);
    }
    Ok(Received {
        bytes: bytes.into(),
        _memory: memory,
    })
}

async fn next(body: &mut BodyDataStream) -> Option<Result<Bytes, axum::Error>> {
    std::future::poll_fn(|context| Pin::new(&mut *body).poll_next(context)).await
}

async fn discard(body: &mut BodyDataStream, mut seen_bytes: usize) {
    while seen_bytes < DISCARDED_BYTES_MAX
        && let Some(Ok(data)) = next(body).await
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
    let _permit = api.intake.preparations.acquire().await;
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => {
            tracing::error!(%error, "preparing a request failed");
            Err(ApiError::internal(
                "the server failed to prepare this request",
            ))
        }
    }
}

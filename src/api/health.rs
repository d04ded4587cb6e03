//! What operators ask: `/health`, `/metrics`, `/memory`.

use super::Api;
use super::body::report;
use super::error::ApiError;
use crate::engine::EngineStatus;
use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;

/// 200 only where a request would be taken: a readiness probe.
pub(super) async fn health(State(api): State<Arc<Api>>) -> Response {
    let (status, body) = match api.engine.status() {
        EngineStatus::Ready => (StatusCode::OK, json!({"status": "ok"})),
        EngineStatus::Loading { progress } => (
            StatusCode::SERVICE_UNAVAILABLE,
            json!({"status": "loading", "progress": progress}),
        ),
        EngineStatus::ShuttingDown => (
            StatusCode::SERVICE_UNAVAILABLE,
            json!({"status": "shutting_down"}),
        ),
        // Why is the operator's to read, in the log: this page is open to all.
        EngineStatus::Failed(_) => (StatusCode::SERVICE_UNAVAILABLE, json!({"status": "failed"})),
    };
    (status, Json(body)).into_response()
}

pub(super) async fn metrics(State(api): State<Arc<Api>>) -> Response {
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], api.metrics.render()).into_response()
}

/// The kernel walks this process's page tables for it, which takes a while where there are many.
pub(super) async fn memory(State(api): State<Arc<Api>>) -> Result<Json<Value>, ApiError> {
    report(api).await.map(Json)
}

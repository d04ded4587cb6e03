//! `/v1/models`.

use super::Api;
use super::error::ApiError;
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) async fn list(State(api): State<Arc<Api>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [description(&api)]}))
}

pub(super) async fn one(
    State(api): State<Arc<Api>>,
    name: Result<Path<String>, PathRejection>,
) -> Response {
    match name {
        Ok(Path(name)) if name == *api.model_name => Json(description(&api)).into_response(),
        Ok(Path(name)) => ApiError::no_such_model(&name, &api.model_name).into_response(),
        Err(_) => {
            ApiError::bad_request("the model's name in the path is not UTF-8").into_response()
        }
    }
}

fn description(api: &Api) -> Value {
    json!({
        "id": *api.model_name,
        "object": "model",
        "created": api.started,
        "owned_by": "strata",
        "max_model_len": api.context,
        "meta": {
            "n_vocab": api.tokenizer.vocabulary_size(),
            "n_ctx": api.context,
            "n_ctx_train": api.model_context,
        },
    })
}

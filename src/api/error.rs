//! Every failure that a client can meet, and its status. All of them, axum's own included, leave as OpenAI's envelope
//! `{"error": {"message", "type", "param", "code"}}`.

use crate::engine::{Failure, SubmitError};
use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// Seconds after which a client may try again when the queue was full.
const RETRY_AFTER_QUEUE_FULL: u32 = 1;
/// The same when the server is busy with other requests' bodies.
const RETRY_AFTER_BUSY: u32 = 1;
/// The same while the model is loading.
const RETRY_AFTER_LOADING: u32 = 5;

/// What is sent instead of an answer. The message is for the client: it says what to do, and shows no internals.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ApiError {
    status: StatusCode,
    message: String,
    kind: &'static str,
    param: Option<&'static str>,
    code: Option<&'static str>,
    retry_after: Option<u32>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> ApiError {
        ApiError {
            status,
            message: message.into(),
            kind,
            param: None,
            code: None,
            retry_after: None,
        }
    }

    fn of_client(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError::new(status, "invalid_request_error", message)
    }

    /// 400 without a field to blame.
    pub(super) fn bad_request(message: impl Into<String>) -> ApiError {
        ApiError::of_client(StatusCode::BAD_REQUEST, message)
    }

    /// 400 because of one field.
    pub(super) fn invalid(param: &'static str, message: impl Into<String>) -> ApiError {
        ApiError {
            param: Some(param),
            code: Some("invalid_value"),
            ..ApiError::bad_request(message)
        }
    }

    /// 400: a field of OpenAI's that would change the answer and is not supported.
    pub(super) fn unsupported(param: &'static str, message: impl Into<String>) -> ApiError {
        ApiError {
            code: Some("unsupported_parameter"),
            ..ApiError::invalid(param, message)
        }
    }

    /// 400: there must be room for at least one generated token.
    pub(super) fn context_length_exceeded(
        param: &'static str,
        context: usize,
        prompt_tokens: usize,
    ) -> ApiError {
        ApiError {
            code: Some("context_length_exceeded"),
            ..ApiError::invalid(
                param,
                format!(
                    "the context holds {context} tokens and the prompt has {prompt_tokens}, which leaves no room for an \
                     answer; shorten the prompt, or start the server with a larger --context"
                ),
            )
        }
    }

    /// A text that is too long whatever its tokens are, so that nobody has to count them.
    pub(super) fn text_exceeds_context(
        param: &'static str,
        context: usize,
        bytes: usize,
        tokens_min: usize,
    ) -> ApiError {
        ApiError {
            code: Some("context_length_exceeded"),
            ..ApiError::invalid(
                param,
                format!(
                    "the context holds {context} tokens and the prompt, a text of {bytes} bytes, has at least {tokens_min}; \
                     shorten the prompt, or start the server with a larger --context"
                ),
            )
        }
    }

    pub(super) fn unauthorized() -> ApiError {
        ApiError {
            code: Some("invalid_api_key"),
            ..ApiError::of_client(
                StatusCode::UNAUTHORIZED,
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
            )
        }
    }

    pub(super) fn forbidden(message: &str) -> ApiError {
        ApiError::of_client(StatusCode::FORBIDDEN, message)
    }

    pub(super) fn no_such_path(path: &str) -> ApiError {
        ApiError::of_client(
            StatusCode::NOT_FOUND,
            format!("there is nothing at {path}; the API is under /v1"),
        )
    }

    pub(super) fn no_such_model(name: &str, served: &str) -> ApiError {
        ApiError {
            param: Some("model"),
            code: Some("model_not_found"),
            ..ApiError::of_client(
                StatusCode::NOT_FOUND,
                format!("there is no model `{name}`; this server has `{served}`"),
            )
        }
    }

    pub(super) fn method_not_allowed(method: &str, path: &str) -> ApiError {
        ApiError::of_client(
            StatusCode::METHOD_NOT_ALLOWED,
            format!("{method} is not allowed at {path}"),
        )
    }

    pub(super) fn body_too_slow() -> ApiError {
        ApiError::of_client(
            StatusCode::REQUEST_TIMEOUT,
            "the request's body did not arrive in time",
        )
    }

    pub(super) fn body_too_large(limit_bytes: usize) -> ApiError {
        ApiError::of_client(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("the request's body is larger than {limit_bytes} bytes"),
        )
    }

    pub(super) fn not_json(content_type: &str) -> ApiError {
        ApiError::of_client(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            format!("`{content_type}` is not supported; send `Content-Type: application/json`"),
        )
    }

    pub(super) fn loading(progress: f32) -> ApiError {
        ApiError {
            code: Some("model_loading"),
            retry_after: Some(RETRY_AFTER_LOADING),
            ..ApiError::unavailable(format!(
                "the model is loading ({:.0} %); try again later",
                progress * 100.0
            ))
        }
    }

    /// 503: what this takes is bounded, and others have it.
    pub(super) fn busy(message: impl Into<String>) -> ApiError {
        ApiError {
            code: Some("busy"),
            retry_after: Some(RETRY_AFTER_BUSY),
            ..ApiError::unavailable(message)
        }
    }

    fn unavailable(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
    }

    pub(super) fn internal(message: impl Into<String>) -> ApiError {
        ApiError {
            code: Some("internal_error"),
            ..ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
        }
    }

    pub(super) fn status(&self) -> StatusCode {
        self.status
    }

    /// The envelope.
    pub(super) fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> ApiError {
        let message = error.to_string();
        match error {
            SubmitError::QueueFull { .. } => ApiError {
                code: Some("queue_full"),
                retry_after: Some(RETRY_AFTER_QUEUE_FULL),
                ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
            },
            SubmitError::Loading => ApiError {
                code: Some("model_loading"),
                retry_after: Some(RETRY_AFTER_LOADING),
                ..ApiError::unavailable(message)
            },
            SubmitError::ShuttingDown => ApiError {
                code: Some("shutting_down"),
                retry_after: Some(RETRY_AFTER_LOADING),
                ..ApiError::unavailable(message)
            },
            SubmitError::EngineStopped => ApiError {
                code: Some("engine_stopped"),
                ..ApiError::unavailable(message)
            },
        }
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> ApiError {
        match failure {
            Failure::Refused(sentence) => ApiError::bad_request(sentence),
            Failure::ShuttingDown => SubmitError::ShuttingDown.into(),
            Failure::Weights | Failure::Numeric | Failure::NotNumbers | Failure::Internal => {
                ApiError::internal(failure.to_string())
            }
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_of_the_engine_has_the_status_of_its_kind_whatever_the_engine_does_by_then() {
        for (failure, status, code) in [
            (Failure::Refused("no room".to_owned()), 400, Value::Null),
            (Failure::Weights, 500, json!("internal_error")),
            (Failure::Numeric, 500, json!("internal_error")),
            (Failure::NotNumbers, 500, json!("internal_error")),
            (Failure::Internal, 500, json!("internal_error")),
            (Failure::ShuttingDown, 503, json!("shutting_down")),
        ] {
            let sentence = failure.to_string();
            let error = ApiError::from(failure);
            assert_eq!(error.status().as_u16(), status, "{sentence}");
            assert_eq!(error.body()["error"]["message"], sentence);
            assert_eq!(error.body()["error"]["code"], code, "{sentence}");
        }
    }
}

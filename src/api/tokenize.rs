//! `/tokenize` and `/detokenize`, as llama-server has them.

use super::Api;
use super::body::{off_thread, receive};
use super::bounded::TokenIds;
use super::error::ApiError;
use crate::tokenizer::Special;
use axum::Json;
use axum::extract::{Request, State};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Deserialize)]
struct TokenizeFields {
    content: String,
    /// Begin with the beginning-of-sequence token, where the model wants one.
    #[serde(default)]
    add_special: bool,
    /// Control tokens in the text stand for themselves.
    #[serde(default = "yes")]
    parse_special: bool,
    #[serde(default)]
    with_pieces: bool,
}

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
struct DetokenizeFields {
    tokens: TokenIds,
}

pub(super) async fn tokenize(
    State(api): State<Arc<Api>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let body = receive(&api, request).await?;
    let shared = Arc::clone(&api);
    off_thread(&api, move || {
        let fields: TokenizeFields = body.json()?;
        let tokenizer = &shared.tokenizer;
        let special = if fields.parse_special {
            Special::Parse
        } else {
            Special::Text
        };
        let mut tokens = tokenizer.encode(&fields.content, special);
        if fields.add_special
            && tokenizer.add_bos()
            && let Some(bos) = tokenizer.bos()
            && tokens.first() != Some(&bos)
        {
            tokens.insert(0, bos);
        }
        if !fields.with_pieces {
            return Ok(Json(json!({"tokens": tokens})));
        }
        let pieces: Vec<Value> = tokens
            .iter()
            .map(|&id| {
                let bytes = tokenizer.piece_bytes_with_control(id);
                // Part of a character is no string of JSON.
                let piece = str::from_utf8(bytes).map_or_else(|_| json!(bytes), |text| json!(text));
                json!({"id": id, "piece": piece})
            })
            .collect();
        Ok(Json(json!({"tokens": pieces})))
    })
    .await
}

pub(super) async fn detokenize(
    State(api): State<Arc<Api>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let body = receive(&api, request).await?;
    let shared = Arc::clone(&api);
    off_thread(&api, move || {
        let fields: DetokenizeFields = body.json()?;
        let tokens = shared.known_tokens("tokens", &fields.tokens)?;
        Ok(Json(json!({"content": shared.tokenizer.decode(&tokens)})))
    })
    .await
}

//! The way of a request that generates: body, prompt, admission, answer. Nothing is sent before the engine has taken
//! every sequence, so that what is refused has its own status, streamed or not.

use super::answer::{Answer, Choice, Shape, usage};
use super::body::{off_thread, receive};
use super::error::ApiError;
use super::record::{Endpoint, Outcome, RequestRecord};
use super::sequence::{Delta, EVENTS_MAX, Sequence, Update};
use super::sse::EventStream;
use super::wire::Parameters;
use super::{Api, chat, completions};
use crate::engine::{self, Failure, FinishReason};
use crate::tokenizer::{Detokenizer, SequenceText};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use std::task::Poll;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc;

/// What a request asks for, parsed and tokenised.
pub(super) struct Job {
    pub(super) prompts: Vec<Prompt>,
    /// The field to blame for a prompt that is too long.
    pub(super) prompt_field: &'static str,
    pub(super) parameters: Parameters,
    pub(super) top_logprobs: Option<usize>,
    /// The answer continues the prompt's text, rather than being a text of its own.
    pub(super) continues: bool,
    pub(super) shape: Shape,
}

pub(super) struct Prompt {
    pub(super) tokens: Arc<[u32]>,
    /// Sent before the answer.
    pub(super) echo: String,
}

/// A job that the engine has taken.
pub(super) struct Running {
    pub(super) sequences: Vec<(Sequence, Choice)>,
    pub(super) prompt_tokens: usize,
    pub(super) answer: Answer,
}

pub(super) async fn chat_completions(api: State<Arc<Api>>, request: Request) -> Response {
    respond(api.0, Endpoint::Chat, request).await
}

pub(super) async fn text_completions(api: State<Arc<Api>>, request: Request) -> Response {
    respond(api.0, Endpoint::Completions, request).await
}

async fn respond(api: Arc<Api>, endpoint: Endpoint, request: Request) -> Response {
    let mut record = RequestRecord::start(&api.metrics, endpoint);
    match begin(&api, endpoint, request).await {
        Ok((running, parameters)) if parameters.stream => {
            EventStream::new(api, running, parameters.include_usage, record).into_response()
        }
        Ok((running, _)) => match collect(&api, running).await {
            Ok((body, outcome)) => {
                record.set(outcome);
                Json(body).into_response()
            }
            Err(error) => {
                record.set(Outcome::of(&error));
                error.into_response()
            }
        },
        Err(error) => {
            record.set(Outcome::of(&error));
            error.into_response()
        }
    }
}

async fn begin(
    api: &Arc<Api>,
    endpoint: Endpoint,
    request: Request,
) -> Result<(Running, Parameters), ApiError> {
    let body = receive(api, request).await?;
    api.check_ready()?;
    let shared = Arc::clone(api);
    let job = off_thread(api, move || match endpoint {
        Endpoint::Chat => chat::prepare(&shared, &body),
        Endpoint::Completions => completions::prepare(&shared, &body),
    })
    .await?;
    start(api, job)
}

/// Hands every sequence of the job to the engine. If one is refused, those before it are dropped, which cancels them.
fn start(api: &Api, job: Job) -> Result<(Running, Parameters), ApiError> {
    let parameters = job.parameters;
    if job.prompts.is_empty() {
        return Err(ApiError::invalid(job.prompt_field, "there is no prompt"));
    }
    for prompt in &job.prompts {
        let tokens = prompt.tokens.len();
        if tokens == 0 {
            return Err(ApiError::invalid(
                job.prompt_field,
                "the prompt has no tokens",
            ));
        }
        if tokens >= api.context {
            return Err(ApiError::context_length_exceeded(
                job.prompt_field,
                api.context,
                tokens,
            ));
        }
    }
    let mut sequences = Vec::new();
    for prompt in &job.prompts {
        for i in 0..parameters.choices {
            let (sender, events) = mpsc::channel(EVENTS_MAX);
            let room = api.context - prompt.tokens.len();
            let mut sampling = parameters.sampling.clone();
            sampling.seed = sampling.seed.wrapping_add(i as u64);
            api.engine.submit(engine::Request {
                prompt: Arc::clone(&prompt.tokens),
                sampling,
                max_tokens: parameters
                    .max_tokens
                    .map_or(room, |tokens| tokens.min(room)),
                top_logprobs: job.top_logprobs,
                events: sender,
            })?;
            let tokenizer = Arc::clone(&api.tokenizer);
            let detokenizer = if job.continues {
                Detokenizer::continuing(tokenizer)
            } else {
                Detokenizer::new(tokenizer)
            };
            let text = SequenceText::new(detokenizer, parameters.stop.iter().cloned());
            let sequence = Sequence::new(events, text, job.top_logprobs.is_some());
            let choice = Choice {
                index: sequences.len(),
                echo: prompt.echo.clone(),
                ..Choice::default()
            };
            sequences.push((sequence, choice));
        }
    }
    let prefix = match job.shape {
        Shape::Chat { .. } => "chatcmpl",
        Shape::Completion { .. } => "cmpl",
    };
    let running = Running {
        sequences,
        prompt_tokens: job.prompts.iter().map(|prompt| prompt.tokens.len()).sum(),
        answer: Answer {
            id: format!("{prefix}-{:016x}{:08x}", api.random(), api.random() as u32),
            created: unix_seconds(),
            model: Arc::clone(&api.model_name),
            tokenizer: Arc::clone(&api.tokenizer),
            shape: job.shape,
        },
    };
    Ok((running, parameters))
}

pub(super) fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_secs())
}

/// The whole answer. One failed sequence fails it.
async fn collect(api: &Api, running: Running) -> Result<(serde_json::Value, Outcome), ApiError> {
    let Running {
        mut sequences,
        prompt_tokens,
        answer,
    } = running;
    let wholes = gather(&mut sequences)
        .await
        .map_err(|failed| match failed {
            Failed::With(failure) => failure.into(),
            Failed::GivenUp => api.given_up(),
        })?;
    let mut choices = Vec::new();
    let mut completion_tokens = 0;
    let mut outcome = Outcome::Stop;
    for ((sequence, choice), whole) in sequences.iter_mut().zip(&wholes) {
        completion_tokens += sequence.completion_tokens();
        outcome = outcome_of(outcome, whole.finish);
        choices.push(answer.whole_choice(choice, whole));
    }
    let usage = usage(prompt_tokens, completion_tokens);
    Ok((answer.whole(choices, usage), outcome))
}

enum Failed {
    With(Failure),
    GivenUp,
}

/// Reads all sequences side by side: one that is not read is parked, and given up in the end.
async fn gather(sequences: &mut [(Sequence, Choice)]) -> Result<Vec<Delta>, Failed> {
    let mut wholes: Vec<Delta> = sequences.iter().map(|_| Delta::default()).collect();
    std::future::poll_fn(|context| {
        let mut open = false;
        for ((sequence, _), whole) in sequences.iter_mut().zip(&mut wholes) {
            loop {
                match sequence.poll_update(context) {
                    Poll::Ready(Some(Update::Delta(delta))) => {
                        whole.text.push_str(&delta.text);
                        whole.tokens.extend(delta.tokens);
                        whole.finish = delta.finish;
                    }
                    Poll::Ready(Some(Update::Failed(failure))) => {
                        return Poll::Ready(Err(Failed::With(failure)));
                    }
                    Poll::Ready(Some(Update::GivenUp)) => {
                        return Poll::Ready(Err(Failed::GivenUp));
                    }
                    Poll::Ready(None) => break,
                    Poll::Pending => {
                        open = true;
                        break;
                    }
                }
            }
        }
        if open {
            Poll::Pending
        } else {
            Poll::Ready(Ok(()))
        }
    })
    .await?;
    Ok(wholes)
}

/// Of several sequences: `length` if one of them was cut off.
pub(super) fn outcome_of(so_far: Outcome, finish: Option<FinishReason>) -> Outcome {
    match finish {
        Some(FinishReason::Length) => Outcome::Length,
        _ => so_far,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Event, GeneratedToken};
    use crate::gguf::{Array, Metadata, Value};
    use crate::tokenizer::Tokenizer;
    use std::time::Duration;

    fn tokenizer() -> Arc<Tokenizer> {
        let mut metadata = Metadata::new();
        let tokens = Array::String(vec!["<unk>".to_owned(), "a".to_owned()]);
        metadata.insert("tokenizer.ggml.model", Value::String("llama".to_owned()));
        metadata.insert("tokenizer.ggml.tokens", Value::Array(tokens));
        Arc::new(Tokenizer::from_gguf(&metadata).unwrap())
    }

    #[test]
    fn sequences_are_read_side_by_side() {
        let tokenizer = tokenizer();
        let (senders, mut sequences): (Vec<_>, Vec<_>) = (0..2)
            .map(|_| {
                let (sender, events) = mpsc::channel(1);
                let detokenizer = Detokenizer::new(Arc::clone(&tokenizer));
                let text = SequenceText::new(detokenizer, []);
                let sequence = Sequence::new(events, text, false);
                (sender, (sequence, Choice::default()))
            })
            .unzip();
        // The second has more to say than its channel holds before the first says anything.
        let producer = std::thread::spawn(move || {
            for sender in senders.iter().rev() {
                for _ in 0..3 {
                    let token = GeneratedToken {
                        id: 1,
                        logprob: None,
                        top: Vec::new(),
                    };
                    // Fails only where the reader has given up, which is what the test is about.
                    let _ = sender.blocking_send(Event::Token(token));
                }
                let _ = sender.blocking_send(Event::Finished(FinishReason::Length));
            }
        });
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let gathered = runtime.block_on(async {
            let bound = Duration::from_secs(60);
            tokio::time::timeout(bound, gather(&mut sequences)).await
        });
        drop(sequences);
        producer.join().unwrap();
        let wholes = gathered.expect("nobody waits for the other").ok().unwrap();
        for whole in wholes {
            assert_eq!(whole.text, "aaa");
            assert_eq!(whole.finish, Some(FinishReason::Length));
        }
    }
}

//! The loop by hand: steps are counted, time is an argument.

use super::scripted::SPOILT;
use super::*;
use crate::engine::shared::Shared;
use crate::engine::step_loop::{StepLoop, Turn};
use crate::model::StepError;
use std::sync::Mutex;
use std::time::Instant;

struct Bench {
    step_loop: StepLoop,
    shared: Arc<Shared>,
    control: Control,
    metrics: Metrics,
    now: Instant,
}

impl Bench {
    fn new(settings: EngineSettings) -> Bench {
        let metrics = Metrics::new();
        let control = Control::default();
        let capacity = settings.parallel + settings.queue_max;
        let shared = Arc::new(Shared::new(capacity, metrics.clone()));
        shared.set_ready();
        Bench {
            step_loop: StepLoop::new(control.model(), settings, Arc::clone(&shared)),
            shared,
            control,
            metrics,
            now: Instant::now(),
        }
    }

    fn submit(&self, prompt: &[u32], max_tokens: usize) -> Receiver<Event> {
        self.submit_with_room(prompt, max_tokens, 1000)
    }

    fn submit_with_room(&self, prompt: &[u32], max_tokens: usize, room: usize) -> Receiver<Event> {
        let (request, receiver) = request_with_room(prompt, max_tokens, room);
        self.shared.submit(request).unwrap();
        receiver
    }

    fn turn(&mut self) -> Turn {
        self.step_loop.turn(self.now)
    }

    fn turns(&mut self, count: usize) {
        for _ in 0..count {
            self.turn();
        }
    }

    /// Until nothing can move without a client.
    fn run(&mut self) -> Turn {
        for _ in 0..10_000 {
            match self.turn() {
                Turn::Stepped => {}
                rest => return rest,
            }
        }
        panic!("the loop never rests");
    }

    fn steps(&self) -> Vec<Vec<scripted::Seen>> {
        self.control.script().steps.clone()
    }

    fn assert_empty(&mut self) {
        assert_eq!(gauges(&self.metrics), (0, 0, 0));
        assert_eq!(self.turn(), Turn::Idle);
    }
}

fn greedy_after(prompt: &[u32], count: usize) -> Vec<u32> {
    expected_tokens(prompt, &SamplingParameters::greedy(), count)
}

fn finished(reason: FinishReason) -> Option<Event> {
    Some(Event::Finished(reason))
}

#[test]
fn company_width_and_chunking_change_no_token() {
    for (parallel, step_width) in [(1, 1), (1, 5), (2, 3), (4, 16), (8, 3), (8, 1), (8, 500)] {
        let mut bench = Bench::new(EngineSettings {
            parallel,
            step_width,
            kv_pages: parallel as u32 * 64 / PAGE_TOKENS,
            queue_max: 20,
            ..settings()
        });
        let mut clients = Vec::new();
        for seed in 0..12 {
            let prompt = prompt(seed, 1 + seed as usize * 4);
            let sampling = SamplingParameters {
                temperature: (seed % 3) as f32 * 0.7,
                top_k: (seed % 2) as usize * 20,
                seed: seed.into(),
                ..SamplingParameters::greedy()
            };
            let (mut request, receiver) = request(&prompt, 9);
            request.sampling = sampling.clone();
            bench.shared.submit(request).unwrap();
            clients.push((prompt, sampling, receiver));
            // They come while others are in the middle.
            bench.turns(seed as usize % 3);
        }
        assert_eq!(bench.run(), Turn::Idle);
        for (prompt, sampling, mut receiver) in clients {
            let heard = hear(&mut receiver);
            let expected = expected_tokens(&prompt, &sampling, 9);
            assert_eq!(
                heard.tokens, expected,
                "{parallel} at once, {step_width} wide"
            );
            assert_eq!(heard.last, finished(FinishReason::Length));
            assert!(heard.closed);
        }
        bench.assert_empty();
        let widest = bench
            .steps()
            .iter()
            .map(|step| step.iter().map(|run| run.1).sum::<usize>())
            .max();
        assert!(widest <= Some(step_width), "{widest:?} of {step_width}");
    }
}

/// Embeddings are often padded to a round number of rows.
#[test]
fn rows_of_logits_beyond_the_vocabulary_stand_for_no_token() {
    const TOKENS: u32 = 7;
    for temperature in [0.0, 2.0] {
        let mut bench = Bench::new(EngineSettings {
            tokens: TOKENS as usize,
            ..settings()
        });
        let (mut wanted, mut receiver) = request(&[1, TOKENS - 1], 40);
        wanted.sampling.temperature = temperature;
        wanted.top_logprobs = Some(20);
        bench.shared.submit(wanted).unwrap();
        let (refused, mut refusal) = request(&[1, TOKENS], 1);
        bench.shared.submit(refused).unwrap();
        assert_eq!(bench.run(), Turn::Idle);
        let mut chosen = 0;
        while let Ok(event) = receiver.try_recv() {
            if let Event::Token(token) = event {
                chosen += 1;
                let top = token.top.iter().map(|(id, _)| *id);
                assert!(top.chain([token.id]).all(|id| id < TOKENS), "{token:?}");
                let all: f32 = token.top.iter().map(|(_, logprob)| logprob.exp()).sum();
                assert!((all - 1.0).abs() < 1e-5, "{all}");
            }
        }
        assert_eq!(chosen, 40);
        assert!(matches!(
            refusal.try_recv(),
            Ok(Event::Failed(Failure::Refused(_)))
        ));
    }
}

#[test]
fn a_long_prompt_is_cut_to_what_decoding_leaves() {
    let mut bench = Bench::new(EngineSettings {
        step_width: 8,
        ..settings()
    });
    let _first = bench.submit(&prompt(1, 3), 20);
    bench.turns(2);
    let _second = bench.submit(&prompt(2, 20), 20);
    let _third = bench.submit(&prompt(3, 2), 20);
    bench.turns(4);
    let steps = bench.steps();
    assert_eq!(steps[0], [(0, 3, true)]);
    assert_eq!(steps[1], [(3, 1, true)]);
    assert_eq!(steps[2], [(4, 1, true), (0, 7, false)]);
    assert_eq!(steps[3], [(5, 1, true), (7, 7, false)]);
    // The end of one prompt and the whole of the next share what is left.
    assert_eq!(steps[4], [(6, 1, true), (14, 6, true), (0, 1, false)]);
    assert_eq!(steps[5], [(7, 1, true), (20, 1, true), (1, 1, true)]);
}

#[test]
fn requests_start_in_the_order_of_arrival() {
    let mut bench = Bench::new(EngineSettings {
        parallel: 1,
        ..settings()
    });
    let mut long = bench.submit(&prompt(1, 30), 10);
    let mut short: Vec<_> = (2..5)
        .map(|seed| bench.submit(&prompt(seed, 1), 1))
        .collect();
    let mut order = Vec::new();
    while bench.turn() == Turn::Stepped {
        for (name, receiver) in [&mut long].into_iter().chain(&mut short).enumerate() {
            if hear(receiver).last.is_some() {
                order.push(name);
            }
        }
    }
    assert_eq!(order, [0, 1, 2, 3]);
}

#[test]
fn a_step_narrower_than_the_company_starves_nobody() {
    let mut bench = Bench::new(EngineSettings {
        step_width: 2,
        ..settings()
    });
    let mut clients: Vec<_> = (0..4)
        .map(|seed| bench.submit(&prompt(seed, 2), 40))
        .collect();
    // The prompts, one after the other, while the first ones talk already.
    bench.turns(8);
    for client in &mut clients {
        assert!(!hear(client).tokens.is_empty());
    }
    bench.turns(20);
    for client in &mut clients {
        assert_eq!(hear(client).tokens.len(), 10);
    }
}

#[test]
fn a_client_that_does_not_read_sits_out_and_slows_nobody() {
    let mut bench = Bench::new(settings());
    let (slow_prompt, quick_prompt) = (prompt(1, 5), prompt(2, 5));
    let mut slow = bench.submit_with_room(&slow_prompt, 20, 2);
    let mut quick = bench.submit(&quick_prompt, 20);
    let mut quick_tokens = Vec::new();
    for _ in 0..20 {
        bench.turn();
        let heard = hear(&mut quick);
        assert_eq!(heard.tokens.len(), 1, "one token in every step");
        quick_tokens.extend(heard.tokens);
    }
    assert_eq!(quick_tokens, greedy_after(&quick_prompt, 20));
    // Two in the channel (progress and the first token), one kept back: after three steps it takes no part.
    assert!(bench.steps()[3..].iter().all(|step| step.len() == 1));
    assert_eq!(bench.turn(), Turn::AllParked);
    assert_eq!(gauges(&bench.metrics).0, 1);

    // It loses nothing by that.
    let mut tokens = Vec::new();
    let last = loop {
        let heard = hear(&mut slow);
        tokens.extend(heard.tokens);
        if heard.last.is_some() {
            break heard.last;
        }
        bench.turn();
    };
    assert_eq!(tokens, greedy_after(&slow_prompt, 20));
    assert_eq!(last, finished(FinishReason::Length));
    bench.assert_empty();
}

#[test]
fn a_client_that_never_reads_is_given_up_in_time() {
    let mut bench = Bench::new(settings());
    let mut client = bench.submit_with_room(&prompt(1, 5), 20, 1);
    assert_eq!(bench.run(), Turn::AllParked);
    let parked = bench.now;
    bench.now = parked + Duration::from_secs(29);
    assert_eq!(bench.turn(), Turn::AllParked);
    assert_eq!(gauges(&bench.metrics).0, 1);
    bench.now = parked + Duration::from_secs(31);
    assert_eq!(bench.turn(), Turn::Idle);
    bench.assert_empty();
    let heard = hear(&mut client);
    assert_eq!(heard.tokens.len(), 1);
    assert_eq!((heard.last, heard.closed), (None, true));
}

#[test]
fn a_client_that_reads_slowly_is_not_given_up() {
    let mut bench = Bench::new(settings());
    let mut client = bench.submit_with_room(&prompt(1, 5), 10, 1);
    let mut tokens = Vec::new();
    while tokens.len() < 10 {
        bench.run();
        bench.now += Duration::from_secs(20);
        tokens.extend(hear(&mut client).tokens);
    }
    assert_eq!(tokens, greedy_after(&prompt(1, 5), 10));
    bench.run();
    assert_eq!(hear(&mut client).last, finished(FinishReason::Length));
    bench.assert_empty();
}

#[test]
fn a_finished_request_holds_neither_slot_nor_pages_while_its_client_is_behind() {
    let mut bench = Bench::new(EngineSettings {
        parallel: 1,
        ..settings()
    });
    let mut behind = bench.submit_with_room(&prompt(1, 5), 1, 1);
    let mut next = bench.submit(&prompt(2, 5), 1);
    bench.turn();
    // The token fills the channel, the last event waits.
    assert_eq!(gauges(&bench.metrics), (1, 1, 0));
    bench.turn();
    assert_eq!(hear(&mut next).last, finished(FinishReason::Length));
    assert_eq!(bench.turn(), Turn::AllParked);
    assert_eq!(hear(&mut behind).tokens.len(), 1);
    bench.turn();
    assert_eq!(hear(&mut behind).last, finished(FinishReason::Length));
    bench.assert_empty();
}

#[test]
fn a_dropped_request_frees_everything_within_one_step() {
    // (turns before the drop, prompt, room)
    for (name, turns, length, room) in [
        ("in the queue", 0, 5, 100),
        ("in the middle of its prompt", 1, 40, 100),
        ("decoding", 5, 5, 100),
        ("parked", 8, 5, 1),
    ] {
        let mut bench = Bench::new(settings());
        let client = bench.submit_with_room(&prompt(1, length), 20, room);
        bench.turns(turns);
        drop(client);
        assert_eq!(bench.turn(), Turn::Idle, "{name}");
        assert_eq!(gauges(&bench.metrics), (0, 0, 0), "{name}");
    }
}

#[test]
fn a_request_dropped_behind_others_leaves_the_queue_within_one_step() {
    let mut bench = Bench::new(EngineSettings {
        parallel: 1,
        ..settings()
    });
    let _running = bench.submit(&prompt(1, 5), 50);
    let waiting = bench.submit(&prompt(2, 5), 50);
    bench.turn();
    assert_eq!(gauges(&bench.metrics).1, 1);
    drop(waiting);
    bench.turn();
    assert_eq!(gauges(&bench.metrics).1, 0);
}

#[test]
fn a_step_that_nobody_wants_any_more_knows_it() {
    let mut bench = Bench::new(settings());
    let clients: Vec<_> = (0..2)
        .map(|seed| bench.submit(&prompt(seed, 5), 20))
        .collect();
    bench.turn();
    let clients = Mutex::new(clients);
    let answers = Arc::new(Mutex::new(Vec::new()));
    bench.control.on_step({
        let answers = Arc::clone(&answers);
        move |cancelled| {
            let mut answers = answers.lock().unwrap();
            answers.push(cancelled());
            while clients.lock().unwrap().pop().is_some() {
                answers.push(cancelled());
            }
            Err(StepError::Cancelled)
        }
    });
    assert_eq!(bench.turn(), Turn::Stepped);
    assert_eq!(*answers.lock().unwrap(), [false, false, true]);
    // Gone in the very step in which it was dropped.
    assert_eq!(gauges(&bench.metrics), (0, 0, 0));
}

#[test]
fn the_queue_is_bounded_and_forgets_those_who_left() {
    let mut bench = Bench::new(EngineSettings {
        parallel: 1,
        queue_max: 2,
        ..settings()
    });
    let mut clients: Vec<_> = (0..3)
        .map(|seed| bench.submit(&prompt(seed, 5), 2))
        .collect();
    let (refused, _receiver) = request(&prompt(9, 5), 2);
    assert_eq!(
        bench.shared.submit(refused),
        Err(SubmitError::QueueFull { waiting: 3 })
    );
    bench.turn();
    let (refused, _receiver) = request(&prompt(9, 5), 2);
    assert_eq!(
        bench.shared.submit(refused),
        Err(SubmitError::QueueFull { waiting: 2 })
    );
    // No turn is needed to see that one has gone.
    drop(clients.remove(1));
    clients.push(bench.submit(&prompt(9, 5), 2));
    bench.run();
    for client in &mut clients {
        assert_eq!(hear(client).last, finished(FinishReason::Length));
    }
    bench.assert_empty();
}

#[test]
fn a_failed_step_fails_those_in_it_and_nobody_else() {
    let mut bench = Bench::new(settings());
    let parked_prompt = prompt(3, 5);
    let mut parked = bench.submit_with_room(&parked_prompt, 4, 1);
    bench.turns(3);
    let mut decoding = bench.submit(&prompt(1, 5), 20);
    bench.turn();
    let mut in_prompt = bench.submit(&prompt(2, 40), 20);
    bench.control.on_step(|_| {
        Err(StepError::Weights(
            "read /models/secret.gguf at 4096, group 3: input/output error".into(),
        ))
    });
    bench.turn();
    for client in [&mut decoding, &mut in_prompt] {
        let heard = hear(client);
        assert_eq!(
            heard.failure(),
            "the model's weights could not be read; the server's log has the details"
        );
        assert!(heard.closed);
    }
    assert_eq!(gauges(&bench.metrics).0, 1);

    bench.control.on_step(|_| Ok(()));
    let after_prompt = prompt(1, 9);
    let mut after = bench.submit(&after_prompt, 3);
    bench.run();
    assert_eq!(hear(&mut after).tokens, greedy_after(&after_prompt, 3));
    let mut tokens = Vec::new();
    while tokens.len() < 4 {
        tokens.extend(hear(&mut parked).tokens);
        bench.turn();
    }
    assert_eq!(tokens, greedy_after(&parked_prompt, 4));
    bench.turn();
    bench.assert_empty();
}

#[test]
fn logits_that_are_not_numbers_fail_one_request_only() {
    let mut bench = Bench::new(settings());
    let mut good = bench.submit(&prompt(1, 5), 5);
    let mut spoilt = bench.submit(&[SPOILT, 1, 2], 5);
    bench.run();
    assert!(hear(&mut spoilt).failure().contains("not numbers"));
    let heard = hear(&mut good);
    assert_eq!(heard.tokens, greedy_after(&prompt(1, 5), 5));
    assert_eq!(heard.last, finished(FinishReason::Length));
    bench.assert_empty();
}

#[test]
fn prompt_and_answer_together_fill_the_context_and_no_more() {
    for (length, tokens) in [(1, 63), (60, 4), (62, 2), (63, 1)] {
        let mut bench = Bench::new(settings());
        let mut client = bench.submit(&prompt(1, length), usize::MAX);
        bench.run();
        let heard = hear(&mut client);
        assert_eq!(heard.tokens, greedy_after(&prompt(1, length), tokens));
        assert_eq!(heard.last, finished(FinishReason::Length));
        bench.assert_empty();
    }
}

#[test]
fn what_cannot_run_is_answered_without_a_step() {
    let check = |change: &dyn Fn(&mut Request), expected: &str| {
        let mut bench = Bench::new(settings());
        let (mut request, mut client) = request(&prompt(1, 5), 5);
        change(&mut request);
        bench.shared.submit(request).unwrap();
        assert_eq!(bench.turn(), Turn::Idle);
        assert!(bench.steps().is_empty());
        let heard = hear(&mut client);
        assert!(heard.closed);
        match heard.last {
            Some(Event::Failed(Failure::Refused(sentence))) => {
                assert!(sentence.contains(expected), "{sentence}");
            }
            last => assert_eq!(format!("{last:?}"), expected),
        }
        bench.assert_empty();
    };
    check(&|r| r.prompt = Arc::new([]), "the prompt is empty");
    for length in [64, 65, 5000] {
        let numbers = format!("has {length} tokens, and the context of 64");
        check(&move |r| r.prompt = prompt(1, length).into(), &numbers);
    }
    check(&|r| r.prompt = Arc::new([1, 50]), "token 50");
    check(&|r| r.prompt = Arc::new([u32::MAX]), "token 4294967295");
    check(&|r| r.sampling.temperature = f32::NAN, "`temperature`");
    check(&|r| r.max_tokens = 0, "Some(Finished(Length))");
}

#[test]
fn an_end_token_stops_and_is_not_sent() {
    let prompt = prompt(1, 5);
    let tokens = greedy_after(&prompt, 8);
    let end = tokens[5];
    let before = tokens.iter().position(|id| *id == end).unwrap();
    let mut bench = Bench::new(EngineSettings {
        end_of_generation: Arc::new(HashSet::from([end])),
        ..settings()
    });
    let mut client = bench.submit(&prompt, 20);
    bench.run();
    let heard = hear(&mut client);
    assert_eq!(heard.tokens, tokens[..before]);
    assert_eq!(heard.last, finished(FinishReason::Stop));
    assert_eq!(
        bench.metrics.generated_tokens_total.get(),
        before as u64 + 1
    );
    bench.assert_empty();
}

#[test]
fn log_probabilities_come_when_asked_for() {
    let mut bench = Bench::new(settings());
    let prompt = prompt(1, 5);
    for (asked, tops) in [
        (None, 0),
        (Some(0), 0),
        (Some(3), 3),
        (Some(9999), VOCABULARY),
    ] {
        let (mut request, mut client) = request(&prompt, 1);
        request.top_logprobs = asked;
        bench.shared.submit(request).unwrap();
        bench.run();
        let token = std::iter::from_fn(|| client.try_recv().ok())
            .find_map(|event| match event {
                Event::Token(token) => Some(token),
                _ => None,
            })
            .unwrap();
        assert_eq!(token.logprob.is_some(), asked.is_some());
        assert_eq!(token.top.len(), tops);
        // Greedy: the chosen one is the first of the top.
        if let Some(first) = token.top.first() {
            assert_eq!((first.0, Some(first.1)), (token.id, token.logprob));
        }
    }
}

#[test]
fn progress_of_the_prompt_is_told_and_never_takes_the_last_place() {
    for (room, progress) in [(1000, vec![16, 32, 40]), (2, vec![16]), (1, vec![])] {
        let mut bench = Bench::new(settings());
        let mut client = bench.submit_with_room(&prompt(1, 40), 1, room);
        bench.turns(3);
        let heard = hear(&mut client);
        assert_eq!(heard.progress, progress, "{room} places");
        assert_eq!(heard.tokens, greedy_after(&prompt(1, 40), 1));
    }
}

#[test]
fn a_request_waits_until_its_longest_sequence_has_pages() {
    let mut bench = Bench::new(EngineSettings {
        kv_pages: 5,
        ..settings()
    });
    // 12 and 9 positions at most: 3 pages each.
    let mut first = bench.submit(&prompt(1, 5), 8);
    let mut second = bench.submit(&prompt(2, 5), 5);
    let mut third = bench.submit(&prompt(3, 1), 1);
    let mut too_long = bench.submit(&prompt(4, 5), 17);
    bench.turn();
    // First come, first served: the third would fit and does not overtake.
    assert_eq!(gauges(&bench.metrics), (1, 3, 2));
    assert_eq!(bench.run(), Turn::Idle);
    assert_eq!(hear(&mut first).tokens, greedy_after(&prompt(1, 5), 8));
    assert_eq!(hear(&mut second).tokens, greedy_after(&prompt(2, 5), 5));
    assert_eq!(hear(&mut third).tokens, greedy_after(&prompt(3, 1), 1));
    assert!(hear(&mut too_long).failure().contains("room for 20"));
    bench.assert_empty();
}

#[test]
fn metrics_agree_with_what_was_done() {
    let mut bench = Bench::new(settings());
    let lengths = [3_usize, 20, 33];
    let mut clients: Vec<_> = lengths
        .iter()
        .zip(1..)
        .map(|(length, seed)| bench.submit(&prompt(seed, *length), 4))
        .collect();
    bench.run();
    let tokens: usize = clients.iter_mut().map(|c| hear(c).tokens.len()).sum();
    let metrics = &bench.metrics;
    let computed: usize = bench.steps().iter().flatten().map(|run| run.1).sum();
    assert_eq!(tokens, 12);
    assert_eq!(metrics.generated_tokens_total.get(), 12);
    assert_eq!(metrics.prompt_tokens_total.get(), 56);
    assert_eq!(metrics.step_width.get_sample_sum(), computed as f64);
    let steps = bench.steps().len() as u64;
    assert_eq!(metrics.step_width.get_sample_count(), steps);
    assert_eq!(metrics.step_seconds.get_sample_count(), steps);
    assert_eq!(metrics.queue_seconds.get_sample_count(), 3);
    assert_eq!(metrics.time_to_first_token_seconds.get_sample_count(), 3);
    assert_eq!(metrics.time_per_output_token_seconds.get_sample_count(), 9);
    assert_eq!(gauges(metrics), (0, 0, 0));
    let free = metrics.kv_pages.with_label_values(&["host", "free"]).get();
    assert_eq!(free, 64);
}

#[test]
fn a_shutdown_turns_the_queue_away_and_lets_the_running_end() {
    let mut bench = Bench::new(EngineSettings {
        parallel: 1,
        ..settings()
    });
    let mut running = bench.submit(&prompt(1, 5), 5);
    let mut waiting = bench.submit(&prompt(2, 5), 5);
    bench.turn();
    bench.shared.shut_down(bench.now + Duration::from_secs(60));
    assert_eq!(hear(&mut waiting).failure(), "the server is shutting down");
    let (late, _receiver) = request(&prompt(3, 5), 5);
    assert_eq!(bench.shared.submit(late), Err(SubmitError::ShuttingDown));
    bench.run();
    assert_eq!(hear(&mut running).last, finished(FinishReason::Length));
    bench.assert_empty();
}

#[test]
fn the_end_of_the_grace_ends_what_still_runs() {
    let mut bench = Bench::new(settings());
    let mut running = bench.submit(&prompt(1, 5), 50);
    bench.turns(3);
    let grace = Duration::from_secs(60);
    bench.shared.shut_down(bench.now + grace);
    assert_eq!(bench.turn(), Turn::Stepped);
    bench.now += grace;
    assert_eq!(bench.turn(), Turn::Idle);
    assert_eq!(hear(&mut running).failure(), "the server is shutting down");
    bench.assert_empty();
}

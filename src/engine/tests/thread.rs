//! The real thread: its start, its sleep, its end, and its death. Every wait here ends by an event, not by a clock.

use super::*;
use crate::model::StepError;
use std::sync::mpsc as std_mpsc;

fn start(control: &Control, metrics: &Metrics) -> EngineHandle {
    let control = control.clone();
    let engine = Engine::start(
        move |_| Ok::<_, String>(control.model()),
        settings(),
        metrics,
    )
    .unwrap();
    assert_eq!(engine.wait_until_loaded(), EngineStatus::Ready);
    engine
}

/// Everything up to the end of the channel.
fn hear_all(mut receiver: Receiver<Event>) -> (Vec<u32>, Option<Event>) {
    let (mut tokens, mut last) = (Vec::new(), None);
    while let Some(event) = receiver.blocking_recv() {
        match event {
            Event::Token(token) => tokens.push(token.id),
            Event::Prompt { .. } => {}
            event => last = Some(event),
        }
    }
    (tokens, last)
}

fn failed(failure: Failure) -> Option<Event> {
    Some(Event::Failed(failure))
}

#[test]
fn requests_are_refused_while_the_model_loads_and_served_afterwards() {
    let metrics = Metrics::new();
    let control = Control::default();
    let (go, wait) = std_mpsc::channel::<()>();
    let (said, heard) = std_mpsc::channel();
    let engine = Engine::start(
        {
            let control = control.clone();
            move |progress| {
                progress.set(0.25);
                said.send(()).unwrap();
                wait.recv().unwrap();
                Ok::<_, String>(control.model())
            }
        },
        settings(),
        &metrics,
    )
    .unwrap();
    heard.recv().unwrap();
    assert_eq!(engine.status(), EngineStatus::Loading { progress: 0.25 });
    assert_eq!(metrics.load_progress_ratio.get(), 0.25);
    let (early, receiver) = request(&prompt(1, 5), 5);
    assert_eq!(engine.submit(early), Err(SubmitError::Loading));
    assert_eq!(hear_all(receiver), (vec![], None));

    go.send(()).unwrap();
    assert_eq!(engine.wait_until_loaded(), EngineStatus::Ready);
    assert_eq!(metrics.load_progress_ratio.get(), 1.0);
    // Twice: the second finds the thread asleep, or on its way there.
    for _ in 0..2 {
        let (request, receiver) = request(&prompt(1, 5), 5);
        engine.submit(request).unwrap();
        let (tokens, last) = hear_all(receiver);
        let expected = expected_tokens(&prompt(1, 5), &SamplingParameters::greedy(), 5);
        assert_eq!(tokens, expected);
        assert_eq!(last, Some(Event::Finished(FinishReason::Length)));
        // The books are closed before the last event.
        assert_eq!(gauges(&metrics), (0, 0, 0));
    }

    engine.shutdown(Duration::ZERO);
    engine.join();
    assert_eq!(engine.status(), EngineStatus::ShuttingDown);
    let (late, _receiver) = request(&prompt(1, 5), 5);
    assert_eq!(engine.submit(late), Err(SubmitError::ShuttingDown));
}

#[test]
fn a_parked_client_is_served_when_it_reads_again() {
    let control = Control::default();
    let engine = start(&control, &Metrics::new());
    let (request, receiver) = request_with_room(&prompt(1, 5), 30, 1);
    engine.submit(request).unwrap();
    let expected = expected_tokens(&prompt(1, 5), &SamplingParameters::greedy(), 30);
    assert_eq!(hear_all(receiver).0, expected);
}

#[test]
fn a_model_that_does_not_load_is_a_failure_with_its_cause() {
    type Make = fn(&Progress) -> anyhow::Result<Box<dyn crate::model::Model>>;
    let error: Make = |_| Err(anyhow::anyhow!("no such tensor").context("load weights"));
    let panic: Make = |_| panic!("a bug in loading");
    for (make, cause) in [
        (error, "load weights: no such tensor"),
        (panic, "loading the model panicked: a bug in loading"),
    ] {
        let engine = Engine::start(make, settings(), &Metrics::new()).unwrap();
        let failed = EngineStatus::Failed(cause.into());
        assert_eq!(engine.wait_until_loaded(), failed);
        let (request, _receiver) = request(&prompt(1, 5), 5);
        assert_eq!(engine.submit(request), Err(SubmitError::EngineStopped));
        engine.join();
        engine.shutdown(Duration::ZERO);
        assert_eq!(engine.status(), failed);
    }
}

#[test]
fn a_panic_in_a_step_fails_every_request_and_the_health_for_ever() {
    let metrics = Metrics::new();
    let control = Control::default();
    let engine = start(&control, &metrics);
    let (go, wait) = std_mpsc::channel::<()>();
    control.on_step(move |_| {
        wait.recv().unwrap();
        panic!("a bug in the model");
    });
    // Four run, one waits.
    let receivers: Vec<_> = (0..5)
        .map(|seed| {
            let (request, receiver) = request(&prompt(seed, 5), 5);
            engine.submit(request).unwrap();
            receiver
        })
        .collect();
    go.send(()).unwrap();
    for receiver in receivers {
        assert_eq!(hear_all(receiver), (vec![], failed(Failure::Internal)));
        let EngineStatus::Failed(cause) = engine.status() else {
            panic!("{:?} after a panic", engine.status());
        };
        assert!(cause.ends_with("a bug in the model"), "{cause}");
    }
    engine.join();
    assert_eq!(gauges(&metrics), (0, 0, 0));
    let (request, _receiver) = request(&prompt(1, 5), 5);
    assert_eq!(engine.submit(request), Err(SubmitError::EngineStopped));
    engine.shutdown(Duration::ZERO);
    assert!(matches!(engine.status(), EngineStatus::Failed(_)));
}

#[test]
fn a_shutdown_without_grace_interrupts_the_step_under_way() {
    let control = Control::default();
    let engine = start(&control, &Metrics::new());
    let (began, beginning) = std_mpsc::channel();
    control.on_step(move |cancelled| {
        let _ = began.send(());
        while !cancelled() {
            std::thread::yield_now();
        }
        Err(StepError::Cancelled)
    });
    let (request, receiver) = request(&prompt(1, 5), 5);
    engine.submit(request).unwrap();
    beginning.recv().unwrap();
    // An hour first, then at once: who is asked twice may not wait.
    engine.shutdown(Duration::from_secs(3600));
    engine.shutdown(Duration::ZERO);
    let expected = (vec![], failed(Failure::ShuttingDown));
    assert_eq!(hear_all(receiver), expected);
    engine.join();
}

#[test]
fn a_shutdown_with_grace_lets_requests_end() {
    let control = Control::default();
    let engine = start(&control, &Metrics::new());
    let (began, beginning) = std_mpsc::channel();
    control.on_step(move |_| {
        let _ = began.send(());
        Ok(())
    });
    let (request, receiver) = request(&prompt(1, 5), 50);
    engine.submit(request).unwrap();
    beginning.recv().unwrap();
    engine.shutdown(Duration::MAX);
    engine.join();
    let (tokens, last) = hear_all(receiver);
    assert_eq!(tokens.len(), 50);
    assert_eq!(last, Some(Event::Finished(FinishReason::Length)));
}

#[test]
fn a_shutdown_while_loading_ends_the_loading() {
    let engine = Engine::start(
        |progress| {
            while !progress.is_cancelled() {
                std::thread::yield_now();
            }
            Err("cancelled")
        },
        settings(),
        &Metrics::new(),
    )
    .unwrap();
    engine.shutdown(Duration::ZERO);
    engine.join();
    assert_eq!(engine.status(), EngineStatus::ShuttingDown);
}

#[test]
fn the_thread_ends_when_nobody_holds_a_handle() {
    let (alive, ended) = std_mpsc::channel::<()>();
    let control = Control::default();
    let engine = start(&control, &Metrics::new());
    // The sender lives in the model.
    control.on_step(move |_| {
        let _ = &alive;
        Ok(())
    });
    drop(engine.clone());
    assert_eq!(engine.status(), EngineStatus::Ready);
    drop(engine);
    drop(control);
    assert!(ended.recv().is_err());
}

#[test]
fn data_parallel_code_runs_on_the_engine_thread_alone() {
    use rayon::prelude::*;
    let control = Control::default();
    let engine = start(&control, &Metrics::new());
    let (said, heard) = std_mpsc::channel();
    control.on_step(move |_| {
        let here = std::thread::current().id();
        let elsewhere = (0..1000_u32)
            .into_par_iter()
            .filter(|_| std::thread::current().id() != here)
            .count();
        let _ = said.send((rayon::current_num_threads(), elsewhere));
        Ok(())
    });
    let (request, _receiver) = request(&prompt(1, 5), 1);
    engine.submit(request).unwrap();
    assert_eq!(heard.recv().unwrap(), (1, 0));
}

use std::collections::HashSet;

use super::super::operation::HostSource;
use super::*;

fn wait(queue: &mut Queue, slot: usize, behind: Option<&Recording>) -> Recording {
    let mut known = Clock::default();
    let step = queue.enqueue(slot, What::Wait, behind, |_, clock, _| {
        known = clock.clone();
        Work::Wait
    });
    Recording {
        step,
        clock: known,
        over: Default::default(),
    }
}

fn streams(seed: u64, kinds: &[StreamKind]) -> Queue {
    let mut queue = Queue::new(seed, None);
    for (index, kind) in kinds.iter().enumerate() {
        queue.create_stream(16 + index, *kind, 0);
    }
    queue
}

/// Runs what is released, checks that each operation comes after what it needs, and returns the order of their numbers.
fn drain(queue: &mut Queue, over: &mut HashSet<(usize, u64)>) -> Vec<u64> {
    let mut order = Vec::new();
    while let Next::Run(operation) = queue.take(Instant::now()) {
        for step in &operation.after {
            assert!(
                over.contains(&(step.actor, step.time)),
                "{step:?} before {:?}",
                operation.step
            );
        }
        let Step { actor, time } = operation.step;
        assert!(time == 1 || over.contains(&(actor, time - 1)));
        over.insert((actor, time));
        order.push(operation.label.number);
        queue.finish(operation.step);
    }
    order
}

#[test]
fn every_order_respects_streams_events_and_the_null_stream() {
    let mut orders = HashSet::new();
    for seed in 0..300 {
        use StreamKind::{Blocking, NonBlocking};
        let mut queue = streams(seed, &[Blocking, NonBlocking, NonBlocking, Blocking]);
        let mut over = HashSet::new();
        let mut recordings: Vec<Recording> = Vec::new();
        let mut order = Vec::new();
        for call in 0..60_usize {
            let slot = call * 7 % 5;
            let behind = (call % 3 == 0).then(|| call * 5 % (recordings.len() + 1));
            let behind = behind.and_then(|index| recordings.get(index));
            let recording = wait(&mut queue, slot, behind);
            recordings.push(recording);
            if call % 11 == 10 {
                let step = recordings[call / 2].step;
                queue.release_until(step);
                order.extend(drain(&mut queue, &mut over));
                assert!(queue.is_over(step));
            }
        }
        queue.release_all();
        order.extend(drain(&mut queue, &mut over));
        assert_eq!(order.len(), 60);
        if seed == 0 {
            assert!(order.is_sorted());
        }
        orders.insert(order);
    }
    assert!(orders.len() > 290, "{} orders", orders.len());
}

#[test]
fn the_same_seed_and_calls_give_the_same_order() {
    let run = |seed| {
        let mut queue = streams(seed, &[StreamKind::NonBlocking; 3]);
        for call in 0..50 {
            wait(&mut queue, call % 4, None);
        }
        queue.release_all();
        drain(&mut queue, &mut HashSet::new())
    };
    for seed in 0..20 {
        assert_eq!(run(seed), run(seed));
    }
}

#[test]
fn clocks_follow_streams_events_and_the_host() {
    let mut queue = streams(0, &[StreamKind::NonBlocking; 2]);
    let first = wait(&mut queue, 1, None);
    let unordered = wait(&mut queue, 2, None);
    assert!(!first.step.is_before(&unordered.clock));
    let ordered = wait(&mut queue, 2, Some(&first));
    assert!(first.step.is_before(&ordered.clock));
    assert!(unordered.step.is_before(&ordered.clock));
    let before = wait(&mut queue, 1, None);
    assert!(!ordered.step.is_before(&before.clock));
    queue.join_host(&ordered.clock);
    let after = wait(&mut queue, 1, None);
    assert!(ordered.step.is_before(&after.clock));
}

#[test]
fn a_place_is_had_again_only_when_the_host_knows_of_its_work() {
    let mut queue = streams(0, &[StreamKind::NonBlocking]);
    let last = wait(&mut queue, 1, None);
    drain(&mut queue, &mut HashSet::new());
    assert!(queue.destroy_stream(16));
    assert!(!queue.destroy_stream(16));
    queue.create_stream(32, StreamKind::NonBlocking, 0);
    assert_eq!(queue.slot(32), Some(2));
    queue.join_host(&last.clock);
    queue.create_stream(48, StreamKind::NonBlocking, 0);
    assert_eq!(queue.slot(48), Some(1));
    assert_eq!(queue.stream(1).name, StreamName(3));
    let next = wait(&mut queue, 1, None);
    assert_eq!(next.step.time, 2);
    assert!(last.step.is_before(&next.clock));
}

#[test]
fn what_is_settled_is_known_to_all_that_still_comes() {
    let mut queue = streams(4, &[StreamKind::NonBlocking; 2]);
    let first = wait(&mut queue, 1, None);
    queue.release_all();
    drain(&mut queue, &mut HashSet::new());
    let unaware = wait(&mut queue, 2, None);
    queue.join_host(&first.clock);
    assert!(
        !first.step.is_before(&queue.settled()),
        "the held operation does not know of it"
    );
    queue.release_until(unaware.step);
    let Next::Run(running) = queue.take(Instant::now()) else {
        panic!("a step was released");
    };
    assert!(
        !first.step.is_before(&queue.settled()),
        "nor does the running one"
    );
    queue.finish(running.step);
    assert!(first.step.is_before(&queue.settled()));
}

fn copy(queue: &mut Queue, slot: usize, bytes: u64) -> Recording {
    let mut known = Clock::default();
    let what = What::ToDevice {
        bytes,
        staged: false,
    };
    let step = queue.enqueue(slot, what, None, |_, clock, _| {
        known = clock.clone();
        Work::ToDevice {
            destination: 0,
            source: HostSource::Staged(Box::new([])),
            bytes,
        }
    });
    Recording {
        step,
        clock: known,
        over: Default::default(),
    }
}

/// What can run by then, and when there is more.
fn run_until(queue: &mut Queue, now: Instant) -> (Vec<Step>, Option<Instant>) {
    let mut ran = Vec::new();
    loop {
        match queue.take(now) {
            Next::Run(operation) => {
                ran.push(operation.step);
                queue.finish(operation.step);
            }
            Next::Until(due) => return (ran, Some(due)),
            Next::Nothing => return (ran, None),
        }
    }
}

#[test]
fn copies_over_a_link_with_a_rate_take_their_time_one_after_another() {
    let mut queue = streams(0, &[StreamKind::NonBlocking; 3]);
    queue.set_link_rate(Some(1000.0));
    let (begin, second) = (Instant::now(), Duration::from_secs(1));
    let first = copy(&mut queue, 1, 2000);
    let behind_it = wait(&mut queue, 1, None);
    let waits_for_it = wait(&mut queue, 2, Some(&first));
    let other_copy = copy(&mut queue, 3, 1000);
    let free = wait(&mut queue, 0, None);
    let (ran, due) = run_until(&mut queue, begin);
    assert_eq!(ran, [free.step], "what waits for nothing");
    assert_eq!(due, Some(begin + 2 * second));
    let (ran, due) = run_until(&mut queue, begin + second);
    assert_eq!((ran.len(), due), (0, Some(begin + 2 * second)));
    let (ran, due) = run_until(&mut queue, begin + 2 * second);
    assert_eq!(ran, [first.step, behind_it.step, waits_for_it.step]);
    assert_eq!(due, Some(begin + 3 * second));
    let (ran, due) = run_until(&mut queue, begin + 3 * second);
    assert_eq!((ran, due), (vec![other_copy.step], None));
    // The link was idle meanwhile, which is not made up for.
    let last = copy(&mut queue, 1, 500);
    let (ran, due) = run_until(&mut queue, begin + 9 * second);
    assert_eq!((ran.len(), due), (0, Some(begin + 9 * second + second / 2)));
    queue.set_link_rate(None);
    let (ran, due) = run_until(&mut queue, begin + 9 * second);
    assert_eq!((ran, due), (vec![last.step], None));
}

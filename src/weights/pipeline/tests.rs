//! The pipeline on a virtual clock, and under orders of landing of the tests' choice.

use super::*;
use std::collections::BTreeSet;

fn order(count: u32, home: Tier, executor: Executor) -> Vec<Streamed> {
    (0..count)
        .map(|group| Streamed {
            group: GroupId(group),
            home,
            executor,
        })
        .collect()
}

/// A clock that jumps from event to event. One storage server and one link, each serving in order of arrival;
/// reads take `read`, copies `copy`, and computing with a group takes `compute`.
struct VirtualClock {
    read: u64,
    copy: u64,
    compute: u64,
    storage_free: u64,
    link_free: u64,
    /// (time, position, is a copy)
    events: BTreeSet<(u64, u64, bool)>,
}

impl VirtualClock {
    fn perform(&mut self, now: u64, pipeline: &mut Pipeline) {
        let mut actions = Vec::new();
        pipeline.pump(&mut actions);
        for action in actions {
            match action {
                Action::Read { position, .. } => {
                    self.storage_free = self.storage_free.max(now) + self.read;
                    self.events.insert((self.storage_free, position, false));
                }
                Action::Copy(StartCopy { position, .. }) => {
                    self.link_free = self.link_free.max(now) + self.copy;
                    self.events.insert((self.link_free, position, true));
                }
            }
        }
    }

    /// Handles events up to `until`.
    fn advance(&mut self, until: u64, pipeline: &mut Pipeline) {
        while let Some(&(time, position, is_copy)) = self.events.first() {
            if time > until {
                return;
            }
            self.events.pop_first();
            if is_copy {
                let _ = pipeline.copy_done(position);
            } else {
                let _ = pipeline.read_done(position, true);
            }
            self.perform(time, pipeline);
        }
    }

    /// Time that `steps` steps take, one after the other.
    fn run(&mut self, pipeline: &mut Pipeline, steps: u64) -> u64 {
        let mut now = 0;
        self.perform(now, pipeline);
        for _ in 0..steps * pipeline.order.len() as u64 {
            pipeline.demand();
            self.perform(now, pipeline);
            while pipeline.poll() == Poll::Pending {
                let next = self.events.first().expect("something is in flight").0;
                self.advance(next, pipeline);
                now = now.max(next);
            }
            let position = pipeline.lease();
            self.advance(now + self.compute, pipeline);
            now += self.compute;
            pipeline.release(position);
            self.perform(now, pipeline);
        }
        now
    }
}

fn seconds(order: Vec<Streamed>, entries: (usize, usize), lookahead: Lookahead, steps: u64) -> u64 {
    let mut pipeline = Pipeline::new(order, entries.0, entries.1, lookahead);
    let mut clock = VirtualClock {
        read: 10,
        copy: 10,
        compute: 10,
        storage_free: 0,
        link_free: 0,
        events: BTreeSet::new(),
    };
    clock.run(&mut pipeline, steps)
}

#[test]
fn a_step_of_n_groups_takes_at_most_n_plus_ring_entries_delays() {
    for executor in [Executor::Host, Executor::Device] {
        for home in [Tier::Storage, Tier::Host] {
            if (home, executor) == (Tier::Host, Executor::Host) {
                continue;
            }
            for entries in 2..5 {
                for count in [1_u32, 2, 3, 10, 50] {
                    let order = order(count, home, executor);
                    let took = seconds(order, (entries, entries), Lookahead::Ring, 1);
                    let bound = (u64::from(count) + entries as u64) * 10;
                    assert!(
                        took <= bound,
                        "{count} groups from {home}, {entries} entries, {executor:?}: {took} > {bound}"
                    );
                }
            }
        }
    }
}

#[test]
fn prefetch_runs_across_the_end_of_a_step() {
    let took = seconds(
        order(10, Tier::Storage, Executor::Device),
        (3, 3),
        Lookahead::Ring,
        20,
    );
    // The pipeline fills once, not at every step.
    assert!(took <= (20 * 10 + 6) * 10, "{took}");
}

#[test]
fn without_lookahead_nothing_overlaps() {
    let took = seconds(
        order(10, Tier::Storage, Executor::Device),
        (3, 3),
        Lookahead::None,
        2,
    );
    assert_eq!(took, 2 * 10 * 30);
    let took = seconds(
        order(10, Tier::Storage, Executor::Host),
        (3, 3),
        Lookahead::None,
        2,
    );
    assert_eq!(took, 2 * 10 * 20);
}

#[test]
fn reads_that_complete_in_any_order_are_lent_in_plan_order_and_no_entry_is_used_twice() {
    for seed in 0..200_u64 {
        let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = move |bound: usize| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random % bound as u64) as usize
        };
        let kinds = [
            (Tier::Storage, Executor::Host),
            (Tier::Storage, Executor::Device),
            (Tier::Host, Executor::Device),
        ];
        let order: Vec<_> = (0..7)
            .map(|group| {
                let (home, executor) = kinds[next(3)];
                Streamed {
                    group: GroupId(group),
                    home,
                    executor,
                }
            })
            .collect();
        let mut pipeline = Pipeline::new(order.clone(), 2 + next(3), 2 + next(2), Lookahead::Ring);
        let mut flying: Vec<Action> = Vec::new();
        let mut held = BTreeSet::new();
        for position in 0..100_u64 {
            loop {
                let mut actions = Vec::new();
                pipeline.pump(&mut actions);
                for action in &actions {
                    let entry = match *action {
                        Action::Read { host_entry, .. } => (false, host_entry),
                        Action::Copy(StartCopy { device_entry, .. }) => (true, device_entry),
                    };
                    assert!(
                        held.insert(entry),
                        "entry {entry:?} is in use (seed {seed})"
                    );
                }
                flying.extend(actions);
                if let Poll::Ready(_) = pipeline.poll() {
                    break;
                }
                assert!(!flying.is_empty(), "deadlock at {position} (seed {seed})");
                match flying.swap_remove(next(flying.len())) {
                    Action::Read { position, .. } => {
                        pipeline.read_done(position, true);
                    }
                    Action::Copy(StartCopy {
                        position,
                        host_entry,
                        ..
                    }) => {
                        pipeline.copy_done(position);
                        if let Some(entry) = host_entry {
                            held.remove(&(false, entry));
                        }
                    }
                }
            }
            let Poll::Ready(entry) = pipeline.poll() else {
                unreachable!()
            };
            assert_eq!(pipeline.lease(), position);
            assert_eq!(
                pipeline.streamed(position).group,
                order[position as usize % order.len()].group
            );
            pipeline.release(position);
            held.remove(&match entry {
                Entry::Host(entry) => (false, entry),
                Entry::Device(entry) => (true, entry),
            });
        }
    }
}

/// A device that orders its own work lends at once what it copies: computation runs ahead as far as there are device
/// entries, and a host entry is read into again only when the copy from it is over.
#[test]
fn an_ordered_copy_is_lent_at_once_and_its_source_is_kept_until_it_is_over() {
    let order = order(8, Tier::Storage, Executor::Device);
    let mut pipeline = Pipeline::new(order, 2, 2, Lookahead::Ring);
    let mut copies = VecDeque::new();
    let mut reading = BTreeSet::new();
    for position in 0..40_u64 {
        let mut started = true;
        while started {
            let mut actions = Vec::new();
            pipeline.pump(&mut actions);
            started = !actions.is_empty();
            for action in actions {
                match action {
                    Action::Read {
                        position,
                        host_entry,
                        ..
                    } => {
                        let copied_from = copies.iter().any(|&(_, entry)| entry == host_entry);
                        assert!(!copied_from, "entry {host_entry} is refilled too early");
                        reading.insert(position);
                    }
                    Action::Copy(StartCopy {
                        position,
                        host_entry,
                        device_entry,
                        ..
                    }) => {
                        copies.push_back((position, host_entry.expect("read from storage")));
                        assert!(copies.len() <= 2, "more copies than device entries");
                        assert_eq!(pipeline.copy_ordered(position), device_entry);
                    }
                }
            }
            if let Some(first) = reading.pop_first() {
                pipeline.read_done(first, true);
                started = true;
            } else if !matches!(pipeline.poll(), Poll::Ready(_)) {
                // Only now: copies end as late as the ring allows.
                let (first, entry) = copies.pop_front().expect("something is under way");
                assert_eq!(pipeline.copy_left(first), Some(entry));
                started = true;
            }
        }
        assert!(matches!(pipeline.poll(), Poll::Ready(Entry::Device(_))));
        assert_eq!(pipeline.lease(), position);
        pipeline.release(position);
    }
    assert!(!copies.is_empty(), "computation ran ahead of copies");
    pipeline.stop();
    let leaving = copies.len();
    assert_eq!(pipeline.in_flight(), leaving, "what reads must end first");
    for (position, _) in copies {
        pipeline.copy_left(position);
    }
    assert_eq!(pipeline.in_flight(), 0);
    pipeline.restart();
}

#[test]
fn a_failed_read_fails_its_lease_and_a_restart_begins_at_the_first_group() {
    let mut pipeline = Pipeline::new(
        order(4, Tier::Storage, Executor::Host),
        2,
        0,
        Lookahead::Ring,
    );
    let mut actions = Vec::new();
    pipeline.pump(&mut actions);
    pipeline.read_done(0, true);
    pipeline.read_done(1, false);
    let position = pipeline.lease();
    assert_eq!(pipeline.poll(), Poll::Failed);
    pipeline.release(position);
    pipeline.pump(&mut actions);
    pipeline.stop();
    // The freed entry was taken for position 2: it has to land before the memory is used again.
    assert_eq!(pipeline.in_flight(), 1);
    pipeline.read_done(2, true);
    pipeline.restart();
    pipeline.resume();
    assert_eq!(pipeline.streamed(pipeline.consumer()).group, GroupId(0));
    actions.clear();
    pipeline.pump(&mut actions);
    assert_eq!(actions.len(), 2, "both entries are free again");
}

#[test]
fn between_two_steps_another_order_begins_at_its_first_group() {
    let to_device = order(5, Tier::Host, Executor::Device);
    let mut pipeline = Pipeline::new(to_device.clone(), 2, 2, Lookahead::Ring);
    let mut clock = VirtualClock {
        read: 10,
        copy: 10,
        compute: 10,
        storage_free: 0,
        link_free: 0,
        events: BTreeSet::new(),
    };
    let on_host = order(3, Tier::Storage, Executor::Host);
    for next in [on_host, Vec::new(), to_device] {
        clock.run(&mut pipeline, 2);
        // The next step's groups are on their way: they land, and are forgotten.
        pipeline.stop();
        clock.advance(u64::MAX, &mut pipeline);
        assert_eq!(pipeline.in_flight(), 0);
        pipeline.restart();
        pipeline.reorder(next.clone());
        pipeline.resume();
        assert!(pipeline.at_border());
        if let Some(first) = next.first() {
            assert_eq!(pipeline.streamed(pipeline.consumer()), *first);
        }
    }
    clock.run(&mut pipeline, 2);
}

#[test]
fn what_failed_before_a_step_is_read_again_once() {
    let order = order(4, Tier::Storage, Executor::Host);
    let mut pipeline = Pipeline::new(order, 2, 0, Lookahead::Ring);
    let mut actions = Vec::new();
    pipeline.pump(&mut actions);
    assert_eq!(actions.len(), 2);
    // One failure has come when the step begins, the other comes after.
    assert!(pipeline.read_done(0, false).1);
    pipeline.resume();
    assert!(!pipeline.read_done(1, false).1);
    actions.clear();
    pipeline.pump(&mut actions);
    assert_eq!(actions.len(), 2, "{actions:?}");
    pipeline.read_done(0, true);
    assert!(matches!(pipeline.poll(), Poll::Ready(_)));
    let position = pipeline.lease();
    pipeline.release(position);
    // Failing in the step itself is final.
    assert!(pipeline.read_done(1, false).1);
    assert_eq!(pipeline.poll(), Poll::Failed);
}

//! Reads a trace and checks what is true of every one.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test crate uses a part of this module, and a test fails by panicking"
)]

use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Times in nanoseconds.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) category: String,
    pub(super) name: String,
    pub(super) lane: String,
    pub(super) began: u64,
    pub(super) ended: u64,
    pub(super) arguments: Value,
}

impl Span {
    pub(super) fn group(&self) -> u64 {
        self.arguments["group"].as_u64().unwrap()
    }
}

pub(super) struct Trace {
    pub(super) spans: Vec<Span>,
    /// Names of lanes.
    pub(super) lanes: Vec<String>,
}

/// What stands in the file, closed or cut off.
pub(super) fn parse(text: &str) -> Trace {
    let events: Vec<Value> = serde_json::from_str(text).unwrap_or_else(|error| {
        let whole = text.rfind("\n").unwrap_or(0);
        let closed = format!("{}]", text[..whole].trim_end().trim_end_matches(','));
        serde_json::from_str(&closed).unwrap_or_else(|_| panic!("{error}: {text}"))
    });
    let mut lanes = HashMap::new();
    for event in events.iter().filter(|event| event["name"] == "thread_name") {
        let name = event["args"]["name"].as_str().unwrap().to_owned();
        lanes.insert(event["tid"].as_u64().unwrap(), name);
    }
    let nanoseconds = |value: &Value| {
        let microseconds = value.as_f64().unwrap();
        assert!(microseconds >= 0.0, "{value}");
        (microseconds * 1000.0).round() as u64
    };
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let spans = events.iter().filter(|event| event["ph"] == "X");
    Trace {
        spans: spans
            .map(|event| Span {
                category: text(&event["cat"]),
                name: text(&event["name"]),
                lane: lanes[&event["tid"].as_u64().unwrap()].clone(),
                began: nanoseconds(&event["ts"]),
                ended: nanoseconds(&event["ts"]) + nanoseconds(&event["dur"]),
                arguments: event["args"].clone(),
            })
            .collect(),
        lanes: lanes.into_values().collect(),
    }
}

pub(super) fn read_complete(path: &Path) -> Trace {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.ends_with("\n]\n"), "not closed: {text}");
    assert!(text.contains("\"dropped\":0"), "spans were dropped");
    parse(&text)
}

/// What a plan does with a group in each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Read, copied, computed on the device.
    ReadAndCopied,
    Copied,
    Read,
    Resident,
}

impl Trace {
    pub(super) fn of(&self, category: &str) -> Vec<&Span> {
        let mut spans: Vec<&Span> = self
            .spans
            .iter()
            .filter(|span| span.category == category)
            .collect();
        spans.sort_by_key(|span| (span.began, span.ended));
        spans
    }

    /// Checks lanes, and that each group is computed with in each step, after what brought it there. Returns how many groups go
    /// each way. `clocks_differ_by`: nanoseconds between the clock of a device and the host's.
    #[track_caller]
    pub(super) fn check(&self, clocks_differ_by: u64) -> Ways {
        for lane in ["storage 1", "link", "device", "CPU", "steps and waits"] {
            assert!(self.lanes.iter().any(|name| name == lane), "no lane {lane}");
        }
        let mut lanes: BTreeMap<&str, Vec<&Span>> = BTreeMap::new();
        for span in &self.spans {
            let lane = &span.lane;
            match span.category.as_str() {
                "read" => assert!(lane.starts_with("storage"), "{span:?}"),
                "copy" => assert_eq!(lane, "link", "{span:?}"),
                "computation" => assert!(lane == "device" || lane == "CPU", "{span:?}"),
                "step" => assert_eq!(lane, "steps and waits", "{span:?}"),
                "wait" => assert!(lane == "device" || lane == "steps and waits", "{span:?}"),
                _ => panic!("{span:?}"),
            }
            if !matches!(span.category.as_str(), "step" | "wait") {
                assert!(span.arguments["bytes"].as_u64().unwrap() > 0, "{span:?}");
            }
            // Steps have their waits in their lane.
            let lane = match (lane.as_str(), span.category.as_str()) {
                ("steps and waits", category) => category,
                (lane, _) => lane,
            };
            lanes.entry(lane).or_default().push(span);
        }
        for (lane, mut spans) in lanes {
            spans.sort_by_key(|span| (span.began, span.ended));
            for pair in spans.windows(2) {
                assert!(
                    pair[0].ended <= pair[1].began,
                    "{lane}: {:?} overlaps {:?}",
                    pair[0],
                    pair[1]
                );
            }
        }
        let steps = self.of("step");
        for (span, number) in steps.iter().zip(1u64..) {
            assert_eq!(span.arguments["number"], number, "{span:?}");
            assert_eq!(span.arguments["failed"], false, "{span:?}");
            assert!(span.arguments["width"].as_u64().unwrap() > 0, "{span:?}");
        }
        for wait in self.of("wait") {
            let differ_by = match wait.lane.as_str() {
                "device" => clocks_differ_by,
                _ => 0,
            };
            let is_within = |step: &&Span| {
                step.began <= wait.began + differ_by && wait.ended <= step.ended + differ_by
            };
            assert!(steps.iter().any(is_within), "{wait:?}");
        }

        let mut groups: BTreeMap<u64, [Vec<&Span>; 3]> = BTreeMap::new();
        for (category, index) in [("read", 0), ("copy", 1), ("computation", 2)] {
            for span in self.of(category) {
                if span.lane != "storage, embedding rows" {
                    groups.entry(span.group()).or_default()[index].push(span);
                }
            }
        }
        let mut ways = Ways::default();
        for (group, [reads, copies, computations]) in groups {
            // A host beside a CUDA device multiplies by the matrices of a group one by one.
            let per_step = computations.len() / steps.len();
            assert!(
                per_step > 0 && computations.len() == per_step * steps.len(),
                "group {group}: {} computations in {} steps",
                computations.len(),
                steps.len()
            );
            let way = match (reads.is_empty(), copies.is_empty()) {
                (false, false) => Way::ReadAndCopied,
                (true, false) => Way::Copied,
                (false, true) => Way::Read,
                (true, true) => Way::Resident,
            };
            ways.0.push((computations[0].lane.clone(), way));
            let first = computations.into_iter().step_by(per_step).collect();
            for (number, step) in steps.iter().enumerate() {
                let mut before: Option<&Span> = None;
                for spans in [&reads, &copies, &first] {
                    let Some(span) = spans.get(number) else {
                        assert!(spans.is_empty(), "group {group}, step {number}");
                        continue;
                    };
                    if let Some(before) = before {
                        assert!(
                            before.ended <= span.began + clocks_differ_by,
                            "{before:?} and then {span:?}"
                        );
                    }
                    before = Some(span);
                }
                let computed = before.unwrap();
                assert!(
                    step.began <= computed.began + clocks_differ_by
                        && computed.ended <= step.ended + clocks_differ_by,
                    "{computed:?} in {step:?}"
                );
            }
        }
        ways
    }
}

/// Of each group: the lane of its computation, and its way there.
#[derive(Debug, Default)]
pub(super) struct Ways(Vec<(String, Way)>);

impl Ways {
    pub(super) fn count(&self, lane: &str, way: Way) -> usize {
        let is_it = |found: &&(String, Way)| found.0 == lane && found.1 == way;
        self.0.iter().filter(is_it).count()
    }
}

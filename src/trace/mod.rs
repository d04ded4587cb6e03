//! Where the time of a step goes: spans of reads, copies, computation, waits and steps, written to a file in Chrome's
//! trace event format, which chrome://tracing and Perfetto open.
//!
//! <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>
//!
//! A `TraceFile` owns the file and the one thread that writes it; `Trace` is the handle that the places in between
//! report to, from any thread. They never block and do no I/O: a span goes into a channel of `SPANS_QUEUED_MAX`, and where
//! that is full it is counted instead. A handle that is off holds nothing and asks no clock.
//!
//! Times are those of the host's monotonic clock: microseconds with three decimals since the file was begun, whose time of
//! day stands in its first events.

mod writer;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use writer::Writer;

/// Spans that wait for the writer, some tens of steps of a large model: a disk that is busy for a moment loses none. They
/// take a megabyte.
pub const SPANS_QUEUED_MAX: usize = 16_384;

/// Why there is no trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("cannot write the trace {path}: {source}")]
    Write {
        path: String,
        #[source]
        source: std::io::Error,
    },
    #[error("{path} is there already and is not a trace; choose another name for the trace")]
    NotATrace { path: String },
}

/// The file and its writer. Dropping it, when all that is traced has ended, completes the file.
#[derive(Debug, Default)]
pub struct TraceFile {
    trace: Trace,
    writer: Option<JoinHandle<()>>,
}

impl TraceFile {
    /// Nothing is traced.
    pub fn none() -> TraceFile {
        TraceFile::default()
    }

    /// Begins a file. A trace that is there is replaced, anything else is not.
    pub fn create(path: &Path) -> Result<TraceFile, TraceError> {
        let name = path.display().to_string();
        let failed = |source| TraceError::Write {
            path: name.clone(),
            source,
        };
        let Some(file) = writer::open(path).map_err(failed)? else {
            return Err(TraceError::NotATrace { path: name });
        };
        TraceFile::start(file, &name).map_err(failed)
    }

    fn start(
        file: impl std::io::Write + Send + 'static,
        name: &str,
    ) -> Result<TraceFile, std::io::Error> {
        let (messages, received) = sync_channel(SPANS_QUEUED_MAX);
        let sink = Arc::new(Sink {
            messages,
            counts: Arc::default(),
        });
        let writer = Writer::begin(file, name.to_owned(), Arc::clone(&sink.counts))?;
        let writer = std::thread::Builder::new()
            .name("strata-trace".to_owned())
            .spawn(move || writer.run(&received))?;
        Ok(TraceFile {
            trace: Trace(Some(sink)),
            writer: Some(writer),
        })
    }

    pub fn handle(&self) -> Trace {
        self.trace.clone()
    }
}

impl Drop for TraceFile {
    fn drop(&mut self) {
        let Trace(Some(sink)) = &self.trace else {
            return;
        };
        // A writer that gave up has said so.
        drop(sink.messages.send(Message::End));
        if let Some(writer) = self.writer.take() {
            drop(writer.join());
        }
    }
}

/// What spans are reported to; clones report to the same file. By default it is off.
#[derive(Clone, Debug, Default)]
pub struct Trace(Option<Arc<Sink>>);

#[derive(Debug)]
struct Sink {
    messages: SyncSender<Message>,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    /// Steps that began.
    steps: AtomicU64,
    /// Spans that found the channel full.
    dropped: AtomicU64,
}

#[derive(Debug)]
enum Message {
    Groups(Vec<GroupLabel>),
    Span(Span),
    End,
}

/// What is told of a group, which spans name by its number.
#[derive(Clone, Debug)]
pub struct GroupLabel {
    /// "layer 3 feed-forward"
    pub name: String,
    /// Which rows of it, where it is cut.
    pub rows: String,
    /// What a read brings, alignment included.
    pub read_bytes: u64,
    /// What a copy moves.
    pub copied_bytes: u64,
    /// The weights alone.
    pub weight_bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Span {
    what: What,
    began: Instant,
    ended: Instant,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Read {
        group: u32,
        place: usize,
        failed: bool,
    },
    Rows {
        bytes: u64,
    },
    Copy {
        group: u32,
    },
    Computation {
        group: u32,
        by: Computer,
    },
    Step {
        number: u64,
        width: usize,
        failed: bool,
    },
    /// Of the host.
    Wait {
        group: Option<u32>,
        home: &'static str,
    },
    DeviceWait {
        group: u32,
        home: &'static str,
    },
}

/// The lane of a computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Computer {
    Device,
    Cpu,
}

impl Trace {
    pub const fn off() -> Trace {
        Trace(None)
    }

    pub const fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// The time, where someone wants to know.
    pub fn now(&self) -> Option<Instant> {
        self.is_on().then(Instant::now)
    }

    /// What the groups are, by number; before the first span that has one.
    pub fn name_groups(&self, groups: Vec<GroupLabel>) {
        if let Some(sink) = &self.0 {
            // Nothing is queued yet, so that this does not block; a writer that gave up has said so.
            drop(sink.messages.send(Message::Groups(groups)));
        }
    }

    /// Reads under way, for the one who starts them.
    pub fn reads(&self) -> Reads {
        Reads {
            trace: self.clone(),
            places: Vec::new(),
        }
    }

    /// A group went over the link.
    pub fn copied(&self, group: u32, began: Instant, ended: Instant) {
        self.span(What::Copy { group }, began, ended);
    }

    /// A group was computed with.
    pub fn computed(&self, by: Computer, group: u32, began: Instant, ended: Instant) {
        self.span(What::Computation { group, by }, began, ended);
    }

    /// The host waited for a group until now; without one, for what was under way to the wrong executor.
    pub fn waited(&self, group: Option<u32>, home: &'static str, time: Duration) {
        if let Some(now) = self.now() {
            self.span(What::Wait { group, home }, before(now, time), now);
        }
    }

    /// The stream of a device that orders its own work had nothing to do before this group was there.
    pub fn device_waited(&self, group: u32, home: &'static str, began: Instant, ended: Instant) {
        self.span(What::DeviceWait { group, home }, began, ended);
    }

    /// The host waited for embedding rows, of this group, that were read from storage until now.
    pub fn rows_read(&self, group: u32, bytes: u64, time: Duration) {
        if let Some(now) = self.now() {
            let (began, home, group) = (before(now, time), "storage", Some(group));
            self.span(What::Rows { bytes }, began, now);
            self.span(What::Wait { group, home }, began, now);
        }
    }

    /// A step begins; it ends when the span is dropped.
    pub fn step(&self, width: usize) -> StepSpan {
        let begin = |sink: &Arc<Sink>| BegunStep {
            number: sink.counts.steps.fetch_add(1, Ordering::Relaxed) + 1,
            width,
            began: Instant::now(),
        };
        StepSpan {
            begun: self.0.as_ref().map(begin),
            trace: self.clone(),
            succeeded: false,
        }
    }

    fn span(&self, what: What, began: Instant, ended: Instant) {
        let Some(sink) = &self.0 else { return };
        let span = Span { what, began, ended };
        if let Err(TrySendError::Full(_)) = sink.messages.try_send(Message::Span(span)) {
            sink.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn before(now: Instant, time: Duration) -> Instant {
    now.checked_sub(time).unwrap_or(now)
}

/// The reads under way, from when the reader was given them. Each has a place of its own, the lowest that is free, and so
/// a lane in which it overlaps no other: there are never more than entries of the ring that they fill.
#[derive(Debug, Default)]
pub struct Reads {
    trace: Trace,
    /// By place: the ticket, and when it was given.
    places: Vec<Option<(u64, Instant)>>,
}

impl Reads {
    /// The reader is about to be given a read.
    pub fn given(&mut self, ticket: u64) {
        let Some(now) = self.trace.now() else { return };
        let read = Some((ticket, now));
        match self.places.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = read,
            None => self.places.push(read),
        }
    }

    /// The bytes of a read are there, or never will be.
    pub fn ended(&mut self, ticket: u64, group: u32, failed: bool) {
        let Some(now) = self.trace.now() else { return };
        let is_it = |read: &Option<(u64, Instant)>| read.is_some_and(|(given, _)| given == ticket);
        let Some(place) = self.places.iter().position(is_it) else {
            return;
        };
        if let Some((_, began)) = self.places[place].take() {
            let what = What::Read {
                group,
                place,
                failed,
            };
            self.trace.span(what, began, now);
        }
    }
}

/// A step under way.
#[derive(Debug)]
pub struct StepSpan {
    trace: Trace,
    begun: Option<BegunStep>,
    succeeded: bool,
}

#[derive(Clone, Copy, Debug)]
struct BegunStep {
    number: u64,
    width: usize,
    began: Instant,
}

impl StepSpan {
    /// Its results are there. A step that is dropped without has failed, or was cancelled.
    pub fn succeed(mut self) {
        self.succeeded = true;
    }
}

impl Drop for StepSpan {
    fn drop(&mut self) {
        let Some(BegunStep {
            number,
            width,
            began,
        }) = self.begun
        else {
            return;
        };
        let what = What::Step {
            number,
            width,
            failed: !self.succeeded,
        };
        self.trace.span(what, began, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::io::{self, Write};
    use std::sync::{Condvar, Mutex};

    /// A file in memory: it may wait before it takes bytes, and be full.
    #[derive(Clone, Default)]
    struct Memory(Arc<(Mutex<Content>, Condvar)>);

    #[derive(Default)]
    struct Content {
        bytes: Vec<u8>,
        held: bool,
        full_at: Option<usize>,
    }

    impl Memory {
        fn change(&self, change: impl FnOnce(&mut Content)) {
            change(&mut self.0.0.lock().unwrap());
            self.0.1.notify_all();
        }

        fn text(&self) -> String {
            String::from_utf8(self.0.0.lock().unwrap().bytes.clone()).unwrap()
        }
    }

    impl Write for Memory {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut content = self.0.0.lock().unwrap();
            while content.held {
                content = self.0.1.wait(content).unwrap();
            }
            if let Some(room) = content.full_at
                && content.bytes.len() + bytes.len() > room
            {
                return Err(io::ErrorKind::StorageFull.into());
            }
            content.bytes.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn label(name: &str) -> GroupLabel {
        GroupLabel {
            name: name.to_owned(),
            rows: "rows 0 to 7".to_owned(),
            read_bytes: 8192,
            copied_bytes: 4096,
            weight_bytes: 4000,
        }
    }

    fn events(text: &str) -> Vec<Value> {
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    fn named<'e>(events: &'e [Value], name: &str, phase: &str) -> Vec<&'e Value> {
        events
            .iter()
            .filter(|event| event["name"] == name && event["ph"] == phase)
            .collect()
    }

    #[test]
    fn what_is_off_holds_nothing() {
        let trace = TraceFile::none().handle();
        assert!(!trace.is_on() && trace.now().is_none());
        let mut reads = trace.reads();
        reads.given(1);
        reads.ended(1, 0, false);
        assert_eq!(reads.places.capacity(), 0);
        trace.name_groups(vec![label("a")]);
        trace.step(3).succeed();
    }

    #[test]
    fn a_trace_that_ended_is_valid_json_with_names_bytes_and_times() {
        let memory = Memory::default();
        let file = TraceFile::start(memory.clone(), "memory").unwrap();
        let trace = file.handle();
        let strange = "layer 3 \"feed\\forward\"\n\u{1}";
        trace.name_groups(vec![label("layer 3 attention"), label(strange)]);
        let step = trace.step(17);
        let mut reads = trace.reads();
        reads.given(10);
        reads.given(11);
        reads.ended(10, 0, false);
        reads.given(12);
        reads.ended(12, 0, true);
        reads.ended(11, 1, false);
        let now = Instant::now();
        let later = now + Duration::from_nanos(1_234_567);
        trace.copied(1, now, later);
        trace.computed(Computer::Device, 1, now, later);
        trace.computed(Computer::Cpu, 0, now, later);
        trace.waited(None, "host", Duration::from_micros(5));
        trace.waited(Some(1), "storage", Duration::from_micros(5));
        trace.device_waited(0, "host", now, later);
        trace.rows_read(0, 512, Duration::from_micros(5));
        step.succeed();
        drop(trace.step(1));
        drop(file);
        trace.copied(0, now, later);

        let events = events(&memory.text());
        for event in &events {
            assert!(event["pid"].is_u64() && event["ph"].is_string(), "{event}");
        }
        let of = |name: &str, category: &str| {
            let mut found = named(&events, name, "X");
            found.retain(|event| event["cat"] == category);
            found
        };
        let copy = of(strange, "copy");
        assert_eq!(copy.len(), 1);
        assert_eq!(copy[0]["dur"].to_string(), "1234.567");
        assert_eq!(copy[0]["args"]["bytes"], 4096);
        assert_eq!(copy[0]["args"]["rows"], "rows 0 to 7");
        let reads = of("layer 3 attention", "read");
        assert_eq!(reads.len(), 2);
        // The third took the place of the first, while the second was under way.
        assert_eq!(reads[0]["tid"], reads[1]["tid"]);
        assert_ne!(reads[0]["tid"], of(strange, "read")[0]["tid"]);
        assert_eq!(reads[0]["args"]["bytes"], 8192);
        assert_eq!(reads[0]["args"]["failed"], false);
        assert_eq!(reads[1]["args"]["failed"], true);
        assert_eq!(of(strange, "computation")[0]["args"]["bytes"], 4000);
        let wait = of(&format!("wait for {strange}"), "wait");
        assert_eq!(wait[0]["args"]["home"], "storage");
        let of_device = of("wait for layer 3 attention", "wait");
        assert_eq!(of_device[0]["args"]["home"], "host");
        let computed = of(strange, "computation");
        assert_eq!(of_device[0]["tid"], computed[0]["tid"], "a lane");
        assert_ne!(of_device[0]["tid"], wait[0]["tid"], "the host's lane");
        assert_eq!(of("embedding rows", "read")[0]["args"]["bytes"], 512);
        let step = of("step", "step");
        assert_eq!(step[0]["args"]["width"], 17);
        assert_eq!(step[0]["args"]["number"], 1);
        assert_eq!(step[0]["args"]["failed"], false);
        assert_eq!(step[1]["args"]["number"], 2);
        assert_eq!(step[1]["args"]["failed"], true);
        let lanes: Vec<&str> = named(&events, "thread_name", "M")
            .iter()
            .filter_map(|event| event["args"]["name"].as_str())
            .collect();
        for lane in ["steps and waits", "CPU", "device", "link", "storage 2"] {
            assert!(lanes.contains(&lane), "{lane} in {lanes:?}");
        }
        let end = named(&events, "end of the trace", "i");
        assert_eq!(end[0]["args"]["dropped"], 0);
        assert_eq!(end[0]["args"]["spans"], 13);
    }

    #[test]
    fn a_trace_that_was_cut_off_lacks_its_bracket_only() {
        let memory = Memory::default();
        let file = TraceFile::start(memory.clone(), "memory").unwrap();
        let trace = file.handle();
        trace.name_groups(vec![label("a")]);
        let began = Instant::now();
        trace.copied(0, began, began);
        // Without an end: the writer gives the file what it has after a moment.
        while !memory.text().contains("\"copy\"") {
            assert!(began.elapsed() < Duration::from_secs(60), "never flushed");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!events(&format!("{}]", memory.text())).is_empty());
    }

    #[test]
    fn what_a_full_channel_does_not_take_is_counted() {
        let memory = Memory::default();
        let file = TraceFile::start(memory.clone(), "memory").unwrap();
        let trace = file.handle();
        trace.name_groups(vec![label("a")]);
        memory.change(|content| content.held = true);
        let now = Instant::now();
        let sent = 3 * SPANS_QUEUED_MAX as u64;
        for _ in 0..sent {
            trace.copied(0, now, now);
        }
        memory.change(|content| content.held = false);
        drop(file);
        let events = events(&memory.text());
        let end = &named(&events, "end of the trace", "i")[0]["args"];
        let (spans, dropped) = (
            end["spans"].as_u64().unwrap(),
            end["dropped"].as_u64().unwrap(),
        );
        assert!(dropped > 0);
        assert_eq!(spans + dropped, sent);
        assert_eq!(named(&events, "a", "X").len() as u64, spans);
    }

    #[test]
    fn a_full_disk_ends_the_trace_and_nothing_else() {
        let memory = Memory::default();
        let file = TraceFile::start(memory.clone(), "memory").unwrap();
        let head = memory.text().len();
        memory.change(|content| content.full_at = Some(head));
        let trace = file.handle();
        trace.name_groups(vec![label("a")]);
        let now = Instant::now();
        for _ in 0..2 * SPANS_QUEUED_MAX {
            trace.copied(0, now, now);
        }
        drop(file);
        trace.copied(0, now, now);
        assert_eq!(memory.text().len(), head);
    }

    #[test]
    fn only_a_trace_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace.json");
        for _ in 0..2 {
            drop(TraceFile::create(&path).unwrap());
            assert!(!events(&std::fs::read_to_string(&path).unwrap()).is_empty());
        }
        std::fs::write(&path, "").unwrap();
        drop(TraceFile::create(&path).unwrap());
        std::fs::write(&path, "[1, 2, 3]").unwrap();
        let refused = TraceFile::create(&path).unwrap_err();
        assert!(
            matches!(refused, TraceError::NotATrace { .. }),
            "{refused:?}"
        );
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "[1, 2, 3]");
        for path in [directory.path(), &path.join("below"), "/dev/full".as_ref()] {
            let refused = TraceFile::create(path).unwrap_err().to_string();
            assert!(refused.starts_with("cannot write the trace "), "{refused}");
        }
    }
}

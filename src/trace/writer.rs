//! The thread that writes the file: it alone knows the format. The file is complete up to the last flush whenever the
//! process ends: events are written whole, and the format asks for no closing bracket.

use super::{Computer, Counts, GroupLabel, Message, Span, What};
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant, SystemTime};

/// The file gets what there is when so much is there, or so long after it happened.
const BUFFER_BYTES: usize = 64 << 10;
const FLUSH_INTERVAL: Duration = Duration::from_millis(500);

/// What a trace begins with.
const HEAD: &str = "[\n{\"name\":\"process_name\"";

// Lanes, in the order in which viewers show them; reads of groups take as many as overlap, from the last on.
const STEPS: usize = 1;
const CPU: usize = 2;
const DEVICE: usize = 3;
const LINK: usize = 4;
const ROWS: usize = 5;
const STORAGE: usize = 6;

/// Opens a file to write a trace to; `None` where something else is in it.
pub(super) fn open(path: &Path) -> io::Result<Option<File>> {
    // A pipe that nobody reads must not hold up the start.
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_file() && metadata.len() > 0 {
        let mut head = Vec::new();
        (&mut file).take(HEAD.len() as u64).read_to_end(&mut head)?;
        if head != HEAD.as_bytes() {
            return Ok(None);
        }
        file.set_len(0)?;
        io::Seek::rewind(&mut file)?;
    }
    Ok(Some(file))
}

pub(super) struct Writer<F> {
    file: F,
    /// For messages.
    name: String,
    counts: Arc<Counts>,
    /// Time 0.
    origin: Instant,
    groups: Vec<GroupLabel>,
    /// Lanes of reads that have a name already.
    places: usize,
    spans: u64,
    buffer: String,
    flushed: Instant,
}

impl<F: Write> Writer<F> {
    /// Writes the head: a file that takes none is found at the start.
    pub(super) fn begin(file: F, name: String, counts: Arc<Counts>) -> io::Result<Writer<F>> {
        let origin = Instant::now();
        let mut writer = Writer {
            file,
            name,
            counts,
            origin,
            groups: Vec::new(),
            places: 0,
            spans: 0,
            buffer: String::new(),
            flushed: origin,
        };
        let since_1970 = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let pid = std::process::id();
        let version = env!("CARGO_PKG_VERSION");
        writer.put(format_args!(
            "{HEAD},\"ph\":\"M\",\"pid\":{pid},\"args\":{{\"name\":\"strata {version}\"}}}}"
        ));
        writer.put(format_args!(
            ",\n{{\"name\":\"start of the trace\",\"ph\":\"i\",\"s\":\"g\",\"ts\":0,\"pid\":{pid},\"tid\":{STEPS},\
             \"args\":{{\"seconds since 1970\":{:.6}}}}}",
            since_1970.as_secs_f64()
        ));
        for (lane, name) in [
            (STEPS, "steps and waits"),
            (CPU, "CPU"),
            (DEVICE, "device"),
            (LINK, "link"),
            (ROWS, "storage, embedding rows"),
        ] {
            writer.put_lane(lane, format_args!("{name}"));
        }
        writer.name_places(1);
        writer.flush()?;
        Ok(writer)
    }

    /// The life of the thread: ends with the trace, or when the file takes no more.
    pub(super) fn run(mut self, messages: &Receiver<Message>) {
        if let Err(error) = self.write_all(messages) {
            tracing::warn!(
                "cannot write the trace {}: {error}; tracing stops",
                self.name
            );
            return;
        }
        let dropped = self.counts.dropped.load(Ordering::Relaxed);
        if dropped > 0 {
            tracing::warn!(
                "{dropped} spans are not in the trace {}, beside {} that are: they came faster than the file took them",
                self.name,
                self.spans
            );
        } else {
            tracing::info!("{} spans are in the trace {}", self.spans, self.name);
        }
    }

    fn write_all(&mut self, messages: &Receiver<Message>) -> io::Result<()> {
        loop {
            match messages.recv_timeout(FLUSH_INTERVAL) {
                Ok(Message::Span(span)) => self.put_span(&span),
                Ok(Message::Groups(groups)) => self.groups = groups,
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Message::End) | Err(RecvTimeoutError::Disconnected) => break,
            }
            if self.buffer.len() >= BUFFER_BYTES || self.flushed.elapsed() >= FLUSH_INTERVAL {
                self.flush()?;
            }
        }
        let now = Microseconds(self.origin.elapsed());
        let spans = self.spans;
        let dropped = self.counts.dropped.load(Ordering::Relaxed);
        self.put(format_args!(
            ",\n{{\"name\":\"end of the trace\",\"ph\":\"i\",\"s\":\"g\",\"ts\":{now},\"pid\":{},\"tid\":{STEPS},\
             \"args\":{{\"spans\":{spans},\"dropped\":{dropped}}}}}\n]\n",
            std::process::id()
        ));
        self.flush()
    }

    fn flush(&mut self) -> io::Result<()> {
        self.flushed = Instant::now();
        let written = self.file.write_all(self.buffer.as_bytes());
        self.buffer.clear();
        written
    }

    fn put(&mut self, text: std::fmt::Arguments<'_>) {
        // A string takes everything.
        let _ = self.buffer.write_fmt(text);
    }

    fn put_lane(&mut self, lane: usize, name: std::fmt::Arguments<'_>) {
        let pid = std::process::id();
        self.put(format_args!(
            ",\n{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":{pid},\"tid\":{lane},\"args\":{{\"name\":\"{name}\"}}}}\
             ,\n{{\"name\":\"thread_sort_index\",\"ph\":\"M\",\"pid\":{pid},\"tid\":{lane},\
             \"args\":{{\"sort_index\":{lane}}}}}"
        ));
    }

    /// Gives lanes of reads their names, as many as are needed.
    fn name_places(&mut self, needed: usize) {
        while self.places < needed {
            self.places += 1;
            let (lane, number) = (STORAGE + self.places - 1, self.places);
            self.put_lane(lane, format_args!("storage {number}"));
        }
    }

    fn put_span(&mut self, span: &Span) {
        if let What::Read { place, .. } = span.what {
            self.name_places(place + 1);
        }
        self.spans += 1;
        let (category, lane) = match span.what {
            What::Read { place, .. } => ("read", STORAGE + place),
            What::Rows { .. } => ("read", ROWS),
            What::Copy { .. } => ("copy", LINK),
            What::Computation { by, .. } => match by {
                Computer::Device => ("computation", DEVICE),
                Computer::Cpu => ("computation", CPU),
            },
            What::Step { .. } => ("step", STEPS),
            What::Wait { .. } => ("wait", STEPS),
            // Between the computations that it parts.
            What::DeviceWait { .. } => ("wait", DEVICE),
        };
        let (name, arguments) = self.description(span.what);
        let began = span.began.saturating_duration_since(self.origin);
        let time = span.ended.saturating_duration_since(span.began);
        self.put(format_args!(
            ",\n{{\"name\":{name},\"cat\":\"{category}\",\"ph\":\"X\",\"ts\":{},\"dur\":{},\"pid\":{},\"tid\":{lane},\
             \"args\":{{{arguments}}}}}",
            Microseconds(began),
            Microseconds(time),
            std::process::id()
        ));
    }

    /// Name and arguments of a span, as JSON.
    fn description(&self, what: What) -> (String, String) {
        let of_group =
            |group: u32, bytes: fn(&GroupLabel) -> u64| match self.groups.get(group as usize) {
                Some(label) => (
                    string(&label.name),
                    format!(
                        "\"group\":{group},\"rows\":{},\"bytes\":{}",
                        string(&label.rows),
                        bytes(label)
                    ),
                ),
                None => (string("a group"), format!("\"group\":{group}")),
            };
        match what {
            What::Read { group, failed, .. } => {
                let (name, arguments) = of_group(group, |label| label.read_bytes);
                (name, format!("{arguments},\"failed\":{failed}"))
            }
            What::Rows { bytes } => (string("embedding rows"), format!("\"bytes\":{bytes}")),
            What::Copy { group } => of_group(group, |label| label.copied_bytes),
            What::Computation { group, .. } => of_group(group, |label| label.weight_bytes),
            What::Step {
                number,
                width,
                failed,
            } => (
                string("step"),
                format!("\"number\":{number},\"width\":{width},\"failed\":{failed}"),
            ),
            What::Wait { group: None, home } => (
                string("wait for another executor's groups"),
                format!("\"home\":\"{home}\""),
            ),
            What::Wait {
                group: Some(group),
                home,
            }
            | What::DeviceWait { group, home } => {
                let label = self.groups.get(group as usize);
                let name = label.map_or("a group", |label| label.name.as_str());
                (
                    string(&format!("wait for {name}")),
                    format!("\"group\":{group},\"home\":\"{home}\""),
                )
            }
        }
    }
}

/// Names of tensors come from a file.
fn string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Written with three decimals, which are all that the clock has.
struct Microseconds(Duration);

impl std::fmt::Display for Microseconds {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let nanoseconds = self.0.as_nanos();
        write!(
            formatter,
            "{}.{:03}",
            nanoseconds / 1000,
            nanoseconds % 1000
        )
    }
}

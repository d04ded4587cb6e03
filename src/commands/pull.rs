//! `strata pull`: a model file into a folder. What is said goes to standard error, the names of the files to standard
//! output, one a line, so that a script can take them.

use super::files::print;
use super::progress::Progress;
use super::{Usage, say};
use anyhow::Context;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use strata::api::on_signal;
use strata::cli::PullArguments;
use strata::config::format_bytes;
use strata::pull::{
    self, Event, HubSettings, Limits, Order, Proxies, PullError, Sha256, has_bytes,
};

pub(crate) fn pull(arguments: &PullArguments) -> anyhow::Result<()> {
    let variable = |name: &str| std::env::var(name).ok();
    let sha256 = match &arguments.sha256 {
        Some(text) => Some(Sha256::from_hex(text).ok_or_else(|| {
            Usage(format!(
                "--sha256 {text}: a SHA-256 has 64 hexadecimal digits"
            ))
        })?),
        None => None,
    };
    let order = Order {
        name: &arguments.name,
        output: &arguments.output,
        sha256,
        force: arguments.force,
        limits: Limits {
            stall: arguments.stall_timeout,
            tries: arguments.tries,
            pause: arguments.retry_pause,
        },
        hub: HubSettings::resolve(variable).map_err(of_usage)?,
        certificates: variable("SSL_CERT_FILE").filter(|path| !path.is_empty()),
        proxies: Proxies::resolve(variable),
    };
    let mut display = Display::default();
    watch_signals(Arc::clone(&display.reached)).context("watch signals")?;
    let pulled = pull::pull(&order, &mut |event| display.hear(event)).map_err(of_usage)?;
    drop(display);
    let mut names = String::new();
    for file in &pulled {
        let path = file.path.display();
        say(format_args!(
            "strata: {path} {} ({}, SHA-256 {})",
            if file.was_there {
                "is there already"
            } else {
                "is fetched"
            },
            format_bytes(file.bytes),
            file.sha256
        ));
        names += &format!("{path}\n");
    }
    print(&names)
}

fn of_usage(error: PullError) -> anyhow::Error {
    match error {
        PullError::Usage(text) => Usage(text).into(),
        error => error.into(),
    }
}

/// How far it is, for who interrupts it.
#[derive(Default)]
struct Reached {
    /// The file that grows now, which a signal leaves behind.
    part: Option<PathBuf>,
    /// Whether it is not the first, and those before it are whole.
    later: bool,
}

/// What is on standard error meanwhile.
#[derive(Default)]
struct Display {
    reached: Arc<Mutex<Reached>>,
    progress: Option<(Doing, Progress)>,
}

#[derive(Clone, Copy, PartialEq)]
enum Doing {
    Checking,
    Fetching,
}

impl Display {
    fn hear(&mut self, event: Event<'_>) {
        match event {
            Event::Said(line) => {
                let shown: String = line
                    .chars()
                    .map(|c| if c.is_control() { ' ' } else { c })
                    .collect();
                say(format_args!("strata: {shown}"));
                // What follows goes on from elsewhere, after a pause perhaps.
                self.progress = None;
            }
            Event::Part(path) => {
                let mut reached = self.reached.lock().unwrap_or_else(PoisonError::into_inner);
                reached.later = reached.part.replace(path.to_owned()).is_some();
                drop(reached);
                self.progress = None;
            }
            Event::Checking { done, bytes } => self.show(Doing::Checking, done, bytes),
            Event::Receiving { done, bytes } => {
                self.show(Doing::Fetching, done, bytes.unwrap_or(0));
            }
        }
    }

    fn show(&mut self, doing: Doing, done: u64, total: u64) {
        let verb = match doing {
            Doing::Checking => "checking",
            Doing::Fetching => "fetching",
        };
        let same = matches!(&self.progress, Some((before, _)) if *before == doing);
        if !same {
            // The one before takes its bar away first.
            self.progress = None;
        }
        let (_, progress) = self
            .progress
            .get_or_insert_with(|| (doing, Progress::after(verb, done)));
        progress.show(done, total, |line| say(format_args!("{line}")));
    }
}

/// From here on SIGINT and SIGTERM end the process with a word about how to go on. All that has come is in the part
/// already, so there is nothing to finish first, and no state that the process could be in matters.
fn watch_signals(reached: Arc<Mutex<Reached>>) -> std::io::Result<()> {
    on_signal(move |_, code| {
        let reached = reached.lock().unwrap_or_else(PoisonError::into_inner);
        match reached.part.as_deref().filter(|part| has_bytes(part)) {
            Some(part) => say(format_args!(
                "strata: interrupted; what has come is kept in {}: run the same command again to go on",
                part.display()
            )),
            None if reached.later => say(format_args!(
                "strata: interrupted; the files before this one are whole: run the same command again to go on"
            )),
            None => say(format_args!("strata: interrupted; nothing has come")),
        }
        std::process::exit(code);
    })
}

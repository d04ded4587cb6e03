//! What the process is doing, for whoever has to say why memory ran out: the allocator when the heap is refused, the
//! driver's errors, the memory watch. One phase at a time, kept in an atomic: the loader and the model set it, any
//! thread may ask.

use std::fmt::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What memory is needed for. The number is the width of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Index, vocabulary, chat template, plan.
    Starting,
    /// Arenas are taken and weights come home.
    Loading,
    /// Every buffer of a step is used for the first time.
    FirstStep(u32),
    /// A step in which a sequence has more than one token: activations grow with the width.
    Prompt(u32),
    /// A step of one token for each sequence.
    Decoding(u32),
    /// Between two steps.
    Serving,
}

/// Above the width: which phase it is.
const KIND_SHIFT: u32 = 32;

/// `Phase::Starting` at first.
static PHASE: AtomicU64 = AtomicU64::new(0);
/// Whether the model that was loaded last has computed a step to its end.
static HAS_STEPPED: AtomicBool = AtomicBool::new(false);

impl Phase {
    pub fn now() -> Phase {
        Phase::of_bits(PHASE.load(Ordering::Relaxed))
    }

    /// A model is loaded from now on.
    pub fn begin_loading() {
        HAS_STEPPED.store(false, Ordering::Relaxed);
        Phase::Loading.begin();
    }

    /// The model is loaded.
    pub fn end_loading() {
        Phase::Serving.begin();
    }

    /// A step of `width` tokens is computed until the scope is dropped.
    pub fn begin_step(width: usize, has_prompt: bool) -> StepScope {
        let width = u32::try_from(width).unwrap_or(u32::MAX);
        let phase = match (HAS_STEPPED.load(Ordering::Relaxed), has_prompt) {
            (false, _) => Phase::FirstStep(width),
            (true, true) => Phase::Prompt(width),
            (true, false) => Phase::Decoding(width),
        };
        phase.begin();
        StepScope(())
    }

    /// Orders nothing: who asks meanwhile may hear of the phase before.
    fn begin(self) {
        PHASE.store(self.bits(), Ordering::Relaxed);
    }

    const fn bits(self) -> u64 {
        let (kind, width) = match self {
            Phase::Starting => (0, 0),
            Phase::Loading => (1, 0),
            Phase::FirstStep(width) => (2, width),
            Phase::Prompt(width) => (3, width),
            Phase::Decoding(width) => (4, width),
            Phase::Serving => (5, 0),
        };
        kind << KIND_SHIFT | width as u64
    }

    const fn of_bits(bits: u64) -> Phase {
        let width = bits as u32;
        match bits >> KIND_SHIFT {
            0 => Phase::Starting,
            1 => Phase::Loading,
            2 => Phase::FirstStep(width),
            3 => Phase::Prompt(width),
            4 => Phase::Decoding(width),
            _ => Phase::Serving,
        }
    }

    /// Why memory most likely runs out in this phase.
    pub const fn likeliest_cause(self) -> &'static str {
        match self {
            Phase::Starting => {
                "the limit on this process leaves no room for the file's index and vocabulary"
            }
            Phase::Loading => {
                "the budgets are larger than what this machine or the control group has free"
            }
            Phase::FirstStep(_) => {
                "the budgets leave no reserve for what a step takes outside the arenas"
            }
            Phase::Prompt(_) => "the activations of a step this wide",
            Phase::Decoding(_) | Phase::Serving => {
                "growth over time: another program on the machine or in the control group, or many clients at once"
            }
        }
    }

    /// What to try first; goes on after "first ".
    pub const fn first_action(self) -> &'static str {
        match self {
            Phase::Starting => {
                "raise that limit (the control group's, `ulimit -v`), or stop what else runs in it"
            }
            Phase::Loading => {
                "give a smaller --host-memory (of an emulated device, --device-memory), --context or --parallel"
            }
            Phase::FirstStep(_) => {
                "give a smaller --host-memory, which leaves more of a reserve, or a smaller --step-width"
            }
            Phase::Prompt(_) => "give a smaller --step-width",
            Phase::Decoding(_) | Phase::Serving => {
                "see what else has grown (`ps aux --sort=-rss`), then give a smaller --host-memory, which leaves more of a reserve"
            }
        }
    }
}

/// Goes on after "while".
impl fmt::Display for Phase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Phase::Starting => formatter.write_str("starting"),
            Phase::Loading => formatter.write_str("loading the model"),
            Phase::FirstStep(width) => {
                write!(formatter, "computing the first step, {width} tokens wide")
            }
            Phase::Prompt(width) => {
                write!(formatter, "computing a prompt's step, {width} tokens wide")
            }
            Phase::Decoding(width) => write!(formatter, "decoding, {width} tokens at once"),
            Phase::Serving => formatter.write_str("serving, between two steps"),
        }
    }
}

/// See [`Phase::begin_step`].
#[must_use]
pub struct StepScope(());

impl StepScope {
    /// The step was computed to its end: every buffer of a step has been used. One that failed or was given up may have
    /// used none.
    pub fn succeed(self) {
        HAS_STEPPED.store(true, Ordering::Relaxed);
    }
}

impl Drop for StepScope {
    fn drop(&mut self) {
        Phase::Serving.begin();
    }
}

/// Longer than any line that is written into one.
const LINE_BYTES_MAX: usize = 1024;

/// A line that grows in place: what is said when the heap is refused takes nothing from the heap.
struct Line {
    bytes: [u8; LINE_BYTES_MAX],
    length: usize,
}

impl Write for Line {
    /// What does not fit is left out.
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for &byte in text.as_bytes() {
            if let Some(place) = self.bytes.get_mut(self.length) {
                *place = byte;
                self.length += 1;
            }
        }
        Ok(())
    }
}

/// The phase of the last refusal that was told; no phase at first.
static TOLD: AtomicU64 = AtomicU64::new(u64::MAX);

/// Says on standard error that the system's allocator has refused `bytes` bytes: once in each phase, for the panic that
/// follows is refused memory too. Allocates nothing, takes no lock. The caller most likely ends the process.
#[cold]
pub(super) fn tell_that_the_heap_is_refused(bytes: usize) {
    let phase = Phase::now();
    if TOLD.swap(phase.bits(), Ordering::Relaxed) == phase.bits() {
        return;
    }
    let mut line = Line {
        bytes: [0; LINE_BYTES_MAX],
        length: 0,
    };
    // A `Line` takes everything.
    let _ = writeln!(
        line,
        "strata: out of memory while {phase}: the system refused {bytes} bytes; most likely {}; first {}",
        phase.likeliest_cause(),
        phase.first_action()
    );
    if let Some(text) = line.bytes.get(..line.length) {
        // Not through `Write`, which takes a lock that this thread may hold.
        let _ = rustix::io::write(std::io::stderr(), text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDE: u32 = u32::MAX;
    const ALL: [Phase; 6] = [
        Phase::Starting,
        Phase::Loading,
        Phase::FirstStep(512),
        Phase::Prompt(WIDE),
        Phase::Decoding(4),
        Phase::Serving,
    ];

    #[test]
    fn a_phase_survives_its_bits_and_every_one_has_advice() {
        for phase in ALL {
            assert_eq!(Phase::of_bits(phase.bits()), phase);
            for text in [
                phase.to_string().as_str(),
                phase.likeliest_cause(),
                phase.first_action(),
            ] {
                assert!(!text.is_empty() && !text.ends_with('.'), "{text}");
            }
        }
        assert_eq!(Phase::of_bits(0), Phase::Starting);
    }

    #[test]
    fn every_line_fits() {
        for phase in ALL {
            let mut line = Line {
                bytes: [0; LINE_BYTES_MAX],
                length: 0,
            };
            write!(
                line,
                "{phase}{}{}",
                phase.likeliest_cause(),
                phase.first_action()
            )
            .unwrap();
            // The words around them, and the longest number.
            assert!(
                line.length + 200 < LINE_BYTES_MAX,
                "{phase}: {}",
                line.length
            );
        }
        let mut line = Line {
            bytes: [0; LINE_BYTES_MAX],
            length: LINE_BYTES_MAX - 2,
        };
        write!(line, "three").unwrap();
        assert_eq!(
            (line.length, &line.bytes[LINE_BYTES_MAX - 2..]),
            (1024, &b"th"[..])
        );
    }
}

//! What a seed decides: which stream goes on next, and when.

/// How eagerly work is released after a call; a seed chooses one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Habit {
    /// At once, in the order of the calls: seed 0.
    InOrder,
    /// Some streams at once, the others only when somebody waits for what they do.
    Favourites,
    /// One operation after every second call.
    NowAndThen,
    /// Nothing for some calls, then many.
    Bursts,
    /// Only when somebody synchronises.
    OnDemand,
}

pub(super) struct Schedule {
    habit: Habit,
    /// A bit for each stream that [`Habit::Favourites`] favours.
    favourites: u64,
    random: Random,
}

impl Schedule {
    pub(super) fn new(seed: u64) -> Schedule {
        let habit = match seed {
            0 => Habit::InOrder,
            _ => [
                Habit::OnDemand,
                Habit::NowAndThen,
                Habit::Bursts,
                Habit::Favourites,
            ][(seed % 4) as usize],
        };
        let mut random = Random(seed);
        Schedule {
            habit,
            favourites: random.next(),
            random,
        }
    }

    pub(super) fn is_in_order(&self) -> bool {
        self.habit == Habit::InOrder
    }

    pub(super) fn block_order_seed(&mut self) -> Option<u64> {
        (!self.is_in_order()).then(|| self.random.next())
    }

    /// How many operations may be released after a call.
    pub(super) fn releases_after_call(&mut self) -> usize {
        match self.habit {
            Habit::InOrder | Habit::Favourites => usize::MAX,
            Habit::NowAndThen => self.choose(2),
            Habit::Bursts => match self.choose(4) {
                0 => self.choose(8),
                _ => 0,
            },
            Habit::OnDemand => 0,
        }
    }

    /// Whether a stream's work may be released after a call.
    pub(super) fn goes_early(&self, slot: usize) -> bool {
        self.habit != Habit::Favourites || self.favourites >> (slot % 64) & 1 == 1
    }

    /// Whether, on the way to a step that somebody waits for, anything may go first.
    pub(super) fn wanders(&mut self) -> bool {
        match self.habit {
            Habit::InOrder | Habit::Favourites => false,
            Habit::NowAndThen | Habit::Bursts | Habit::OnDemand => self.choose(2) == 0,
        }
    }

    /// One of `count` places.
    pub(super) fn choose(&mut self, count: usize) -> usize {
        match count {
            1 => 0,
            _ => (self.random.next() % count as u64) as usize,
        }
    }
}

/// SplitMix64, <https://prng.di.unimi.it/splitmix64.c>.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }
}

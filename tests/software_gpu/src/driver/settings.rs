//! What the environment says about the device; read once, at the first call.

/// The device that a program meets.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Settings {
    /// `SOFTWARE_GPU_MEMORY`: bytes of device memory; 1 GiB where it is not set.
    pub(super) memory_bytes: u64,
    /// `SOFTWARE_GPU_DEVICES`: 1, or 0 for a driver without a device; 1 where it is not set.
    pub(super) devices: u64,
    /// `SOFTWARE_GPU_PINNED_MEMORY`: bytes of host memory that may be page-locked; no limit where it is not set.
    pub(super) page_locked_bytes_max: Option<u64>,
    /// `SOFTWARE_GPU_SEED`: the order of work; 0 (the default) is the order of the calls.
    pub(super) seed: u64,
    /// `SOFTWARE_GPU_LINK_RATE`: bytes per second of copies to the device; they take no time of their own where it is not set.
    pub(super) link_rate: Option<f64>,
    /// `SOFTWARE_GPU_REFUSED_LAUNCH`: the launch with this number, counted from 1, finds no memory; none where it is not set.
    pub(super) refused_launch: u64,
    /// `SOFTWARE_GPU_ABORT=1`: the first report ends the process.
    pub(super) abort: bool,
    /// `SOFTWARE_GPU_UNWRITTEN`: which reads of memory that was never written are reported.
    pub(super) unwritten: Unwritten,
}

/// How exactly reads of memory that nothing has written since its allocation are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unwritten {
    /// Each word of 4 bytes; the default.
    Word,
    /// Only where all 256 bytes of a granule were never written: for kernels that load more than they use.
    Granule,
    /// Not at all.
    Off,
}

impl Settings {
    /// Reads the variables through `variable`; a value that makes no sense is an error that names it.
    pub(super) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Settings, String> {
        let bytes = |name: &str| match variable(name) {
            None => Ok(None),
            Some(text) => {
                let bytes = parse_bytes(&text);
                bytes
                    .map(Some)
                    .ok_or_else(|| format!("{name}={text} is not a size such as 65536 or 64MiB"))
            }
        };
        let number = |name: &str| {
            let text = variable(name).unwrap_or_else(|| "0".to_owned());
            let number = text.trim().parse::<u64>();
            number.map_err(|_| format!("{name}={text} is not a number"))
        };
        let memory_bytes = bytes("SOFTWARE_GPU_MEMORY")?.unwrap_or(1 << 30);
        if !(1 << 16..=1 << 40).contains(&memory_bytes) {
            return Err(format!(
                "SOFTWARE_GPU_MEMORY of {memory_bytes} bytes is not between 64 KiB and 1 TiB"
            ));
        }
        let link_rate = bytes("SOFTWARE_GPU_LINK_RATE")?;
        if link_rate == Some(0) {
            return Err(
                "SOFTWARE_GPU_LINK_RATE=0 moves nothing; leave it out for no limit".to_owned(),
            );
        }
        let devices = match variable("SOFTWARE_GPU_DEVICES") {
            None => 1,
            Some(_) => number("SOFTWARE_GPU_DEVICES")?,
        };
        if devices > 1 {
            return Err(format!("SOFTWARE_GPU_DEVICES={devices} is not 0 or 1"));
        }
        Ok(Settings {
            devices,
            memory_bytes,
            link_rate: link_rate.map(|rate| rate as f64),
            page_locked_bytes_max: bytes("SOFTWARE_GPU_PINNED_MEMORY")?,
            seed: number("SOFTWARE_GPU_SEED")?,
            refused_launch: number("SOFTWARE_GPU_REFUSED_LAUNCH")?,
            abort: variable("SOFTWARE_GPU_ABORT").is_some_and(|text| text == "1"),
            unwritten: match variable("SOFTWARE_GPU_UNWRITTEN").as_deref() {
                None | Some("word") => Unwritten::Word,
                Some("granule") => Unwritten::Granule,
                Some("off") => Unwritten::Off,
                Some(text) => {
                    return Err(format!(
                        "SOFTWARE_GPU_UNWRITTEN={text} is not word, granule or off"
                    ));
                }
            },
        })
    }
}

/// A number of bytes, with or without KiB, MiB or GiB behind it.
fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30)];
    let (digits, shift) = units
        .iter()
        .find_map(|(unit, shift)| text.strip_suffix(unit).map(|digits| (digits, *shift)))
        .unwrap_or((text, 0));
    digits.trim().parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Settings, String> {
        Settings::read(|name| {
            variables
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn an_empty_environment_gives_the_defaults() {
        let settings = read(&[]).unwrap();
        assert_eq!((settings.devices, settings.memory_bytes), (1, 1 << 30));
        assert_eq!(settings.page_locked_bytes_max, None);
        assert_eq!((settings.link_rate, settings.refused_launch), (None, 0));
        assert_eq!(
            (settings.seed, settings.abort, settings.unwritten),
            (0, false, Unwritten::Word)
        );
    }

    #[test]
    fn sizes_may_have_units() {
        let settings = read(&[
            ("SOFTWARE_GPU_MEMORY", "64MiB"),
            ("SOFTWARE_GPU_PINNED_MEMORY", "4096"),
            ("SOFTWARE_GPU_LINK_RATE", "2MiB"),
            ("SOFTWARE_GPU_REFUSED_LAUNCH", "70"),
        ])
        .unwrap();
        assert_eq!(settings.memory_bytes, 64 << 20);
        assert_eq!(settings.page_locked_bytes_max, Some(4096));
        assert_eq!(settings.link_rate, Some(2097152.0));
        assert_eq!(settings.refused_launch, 70);
    }

    #[test]
    fn nonsense_is_an_error_that_names_the_variable() {
        for variable in [
            ("SOFTWARE_GPU_MEMORY", "much"),
            ("SOFTWARE_GPU_SEED", "-1"),
            ("SOFTWARE_GPU_DEVICES", "2"),
            ("SOFTWARE_GPU_UNWRITTEN", "x"),
            ("SOFTWARE_GPU_LINK_RATE", "0"),
            ("SOFTWARE_GPU_REFUSED_LAUNCH", "second"),
        ] {
            let error = read(&[variable]).unwrap_err();
            assert!(error.contains(variable.0), "{error}");
        }
    }
}

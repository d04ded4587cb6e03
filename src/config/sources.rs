//! Where settings come from, and in which order they win.

use super::{Config, KEYS, Key};
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Names the file when `--config` does not.
const CONFIG_VARIABLE: &str = "STRATA_CONFIG";
const PREFIX: &str = "STRATA_";
/// No configuration is near this long; more is some other file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// What was given, before any of it is checked.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// `--config`.
    pub file: Option<PathBuf>,
    /// All variables of the environment; the others are ignored.
    pub environment: Vec<(String, String)>,
    /// (key, value) of each flag that was given.
    pub flags: Vec<(String, String)>,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("read the configuration {}: {error}; give another file with --config", path.display())]
    Read {
        path: PathBuf,
        error: std::io::Error,
    },
    #[error("{}: {message}", path.display())]
    Syntax { path: PathBuf, message: String },
    #[error("{origin}: unknown key `{key}`{hint}")]
    UnknownKey {
        origin: String,
        key: String,
        hint: String,
    },
    #[error("{origin}: {message}")]
    Value { origin: String, message: String },
}

impl Sources {
    pub(super) fn resolve(&self) -> Result<Config, ConfigError> {
        let mut config = Config::default();
        let named = self
            .environment
            .iter()
            .find(|(name, _)| name == CONFIG_VARIABLE)
            .map(|(_, path)| PathBuf::from(path));
        if let Some(path) = self.file.clone().or(named) {
            let text = read_text_file(&path).map_err(|error| ConfigError::Read {
                path: path.clone(),
                error,
            })?;
            apply_file(&mut config, &path, &text)?;
        }
        apply_environment(&mut config, &self.environment)?;
        for (name, value) in &self.flags {
            let origin = format!("--{name}");
            let Some(key) = Key::find(name) else {
                return Err(unknown(origin, name, None));
            };
            (key.set)(&mut config, value)
                .map_err(|message| ConfigError::Value { origin, message })?;
        }
        Ok(config)
    }
}

/// The text of a regular file of settings, at most 1 MiB of it. A pipe without a writer would block, and a device would
/// have no end.
pub fn read_text_file(path: &Path) -> std::io::Result<String> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    let attributes = file.metadata()?;
    if !attributes.is_file() {
        return Err(std::io::Error::other("it is not a regular file"));
    }
    if attributes.len() > FILE_BYTES_MAX {
        return Err(std::io::Error::other(format!(
            "it has {} bytes; at most {FILE_BYTES_MAX} are read",
            attributes.len()
        )));
    }
    std::io::read_to_string(file.take(FILE_BYTES_MAX))
}

fn apply_file(config: &mut Config, path: &Path, text: &str) -> Result<(), ConfigError> {
    let table: toml::Table = toml::from_str(text).map_err(|error| {
        let line = error
            .span()
            .and_then(|span| text.get(..span.start))
            .map_or(1, |before| before.matches('\n').count() + 1);
        ConfigError::Syntax {
            path: path.to_owned(),
            message: format!("line {line}: {}", error.message().replace('\n', ": ")),
        }
    })?;
    let mut seen = Vec::new();
    for (written, value) in &table {
        let name = written.replace('_', "-");
        let origin = path.display().to_string();
        let Some(key) = Key::find(&name) else {
            return Err(unknown(
                origin,
                written,
                nearest(&name).map(|key| key.name.to_owned()),
            ));
        };
        let origin = format!("{origin}: {written}");
        let text = match value {
            toml::Value::String(text) => text.clone(),
            toml::Value::Integer(number) => number.to_string(),
            toml::Value::Float(number) => number.to_string(),
            toml::Value::Boolean(value) => value.to_string(),
            _ => {
                let message = "give a string, a number, true or false".to_owned();
                return Err(ConfigError::Value { origin, message });
            }
        };
        if seen.contains(&key.name) {
            let message = "it is given twice, once with `_` and once with `-`; keep one".to_owned();
            return Err(ConfigError::Value { origin, message });
        }
        seen.push(key.name);
        (key.set)(config, &text).map_err(|message| ConfigError::Value { origin, message })?;
    }
    Ok(())
}

fn apply_environment(
    config: &mut Config,
    environment: &[(String, String)],
) -> Result<(), ConfigError> {
    for (variable, value) in environment {
        let Some(name) = variable.strip_prefix(PREFIX) else {
            continue;
        };
        if variable == CONFIG_VARIABLE || is_service_link(name) {
            continue;
        }
        let origin = "environment".to_owned();
        let key = KEYS.iter().find(|key| key.variable() == *variable);
        let Some(key) = key else {
            let near = nearest(&name.to_lowercase().replace('_', "-"));
            return Err(unknown(origin, variable, near.map(Key::variable)));
        };
        (key.set)(config, value).map_err(|message| ConfigError::Value {
            origin: variable.clone(),
            message,
        })?;
    }
    Ok(())
}

/// Kubernetes puts the address of a service called `strata` into every pod of its namespace:
/// <https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables>.
fn is_service_link(name: &str) -> bool {
    name == "SERVICE_HOST"
        || name == "PORT"
        || name.starts_with("SERVICE_PORT")
        || name
            .strip_prefix("PORT_")
            .is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
}

fn unknown(origin: String, key: &str, near: Option<String>) -> ConfigError {
    let hint = match near {
        Some(near) => format!("; did you mean `{near}`?"),
        None => "; `strata serve --help` lists the keys".to_owned(),
    };
    ConfigError::UnknownKey {
        origin,
        key: key.to_owned(),
        hint,
    }
}

/// The known key that is nearest to `name`, if one is near enough to be meant.
fn nearest(name: &str) -> Option<&'static Key> {
    KEYS.iter()
        .map(|key| (edits(name, key.name), key))
        .min_by_key(|(edits, _)| *edits)
        .filter(|(edits, key)| *edits <= key.name.len().div_ceil(3))
        .map(|(_, key)| key)
}

/// Levenshtein distance in bytes.
fn edits(from: &str, to: &str) -> usize {
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.bytes().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        for (b, above) in to.bytes().zip(row.iter_mut().skip(1)) {
            let cost = (diagonal + usize::from(a != b))
                .min(left + 1)
                .min(*above + 1);
            diagonal = std::mem::replace(above, cost);
            left = cost;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{DeviceSetting, MemorySetting};

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter()
            .map(|(a, b)| ((*a).to_owned(), (*b).to_owned()))
            .collect()
    }

    fn resolve(
        file: Option<&str>,
        environment: &[(&str, &str)],
        flags: &[(&str, &str)],
    ) -> Result<Config, String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("strata.toml");
        if let Some(text) = file {
            std::fs::write(&path, text).unwrap();
        }
        let sources = Sources {
            file: file.map(|_| path),
            environment: pairs(environment),
            flags: pairs(flags),
        };
        Config::resolve(&sources).map_err(|error| error.to_string())
    }

    #[test]
    fn flags_win_over_environment_over_file_over_defaults() {
        let file = "context = 1000\nparallel = 2\nqueue = 3\n";
        let environment = [("STRATA_CONTEXT", "2000"), ("STRATA_PARALLEL", "5")];
        let config = resolve(Some(file), &environment, &[("context", "3000")]).unwrap();
        assert_eq!(config.context, Some(3000));
        assert_eq!(config.parallel, 5);
        assert_eq!(config.queue, 3);
        assert_eq!(config.listen, "127.0.0.1:8080");
    }

    #[test]
    fn the_shipped_file_has_every_key_and_is_the_defaults() {
        let text = include_str!("../../config/strata.toml");
        let readme = include_str!("../../README.md");
        let mut config = Config::default();
        apply_file(&mut config, Path::new("config/strata.toml"), text).unwrap();
        assert_eq!(config, Config::default());
        for key in KEYS {
            let line = match key.default {
                Some(default) => {
                    let quoted = format!("\n{} = \"{default}\"\n", key.name);
                    let bare = format!("\n{} = {default}\n", key.name);
                    text.contains(&quoted) || text.contains(&bare)
                }
                None => text.contains(&format!("\n# {} = ", key.name)),
            };
            assert!(line, "config/strata.toml lacks `{}`", key.name);
            // The model is an argument there.
            let row = key.name == "model"
                || readme.contains(&format!("\n| `--{} ", key.name))
                || readme.contains(&format!("\n| `--{}` ", key.name));
            assert!(row, "README.md has no row for `--{}`", key.name);
            let mut config = Config::default();
            if let Some(default) = key.default {
                (key.set)(&mut config, default).unwrap();
            }
            assert_eq!(config, Config::default(), "default of {}", key.name);
        }
    }

    #[test]
    fn the_file_may_be_named_by_the_environment() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.toml");
        std::fs::write(&path, "device_memory = \"1.5GiB\"\ndevice = \"emulated\"").unwrap();
        let environment = [("STRATA_CONFIG", path.to_str().unwrap())];
        let config = resolve(None, &environment, &[]).unwrap();
        assert_eq!(config.device_memory, MemorySetting::Bytes(3 << 29));
        assert_eq!(config.device, DeviceSetting::Emulated);
    }

    #[test]
    fn mistakes_are_named_with_what_to_do() {
        let check = |file: Option<&str>,
                     environment: &[(&str, &str)],
                     flags: &[(&str, &str)],
                     parts: &[&str]| {
            let error = resolve(file, environment, flags).unwrap_err();
            for part in parts {
                assert!(error.contains(part), "{error:?} lacks {part:?}");
            }
            assert!(!error.contains('\n'), "{error:?} is one line");
        };
        check(
            Some("contxt = 5"),
            &[],
            &[],
            &["strata.toml", "`contxt`", "`context`"],
        );
        check(Some("zzzzzzzz = 5"), &[], &[], &["`zzzzzzzz`", "--help"]);
        check(Some("[server]\nlisten = \"a:1\""), &[], &[], &["`server`"]);
        check(Some("a = 1\nb = = 2"), &[], &[], &["line 2"]);
        check(Some("queue = [1]"), &[], &[], &["queue", "give a string"]);
        check(
            Some("device_memory = 1048576\ndevice-memory = 1048576"),
            &[],
            &[],
            &["twice"],
        );
        check(
            None,
            &[("STRATA_DEVICE_MEMROY", "1GiB")],
            &[],
            &["STRATA_DEVICE_MEMROY", "STRATA_DEVICE_MEMORY"],
        );
        check(
            None,
            &[("STRATA_CONTEXT", "-5")],
            &[],
            &["STRATA_CONTEXT", "`-5`", "from 2 to"],
        );
        check(
            None,
            &[("STRATA_CONFIG", "/nonexistent/strata.toml")],
            &[],
            &["/nonexistent/strata.toml", "--config"],
        );
        for (key, value, part) in [
            ("context", "0", "from 2 to"),
            ("context", "99999999999", "from 2 to"),
            ("parallel", "0", "from 1 to 1024"),
            ("parallel", "x", "from 1 to 1024"),
            ("threads", "100000", "from 1 to 1024"),
            ("device", "cuda:x", "cuda:0"),
            ("device", "cuda", "cuda:0"),
            ("device", "tpu", "auto, cpu, emulated or cuda:0"),
            ("device-memory", "24G", "24GiB"),
            ("device-memory", "24", "too little"),
            ("host-memory", "-1GiB", "write it like"),
            ("link-rate", "0GB/s", "above 0"),
            ("listen", "8080", "127.0.0.1:8080"),
            ("listen", ":8080", "0.0.0.0:8080"),
            ("listen", "localhost:99999", "with a port"),
            ("grace", "-1", "from 0 to"),
            ("grace", "nan", "from 0 to"),
            ("stall-timeout", "0", "from 0.001"),
            ("keep-alive", "inf", "from 0 to"),
            ("api-key", "", "empty"),
            ("api-key", "a\nb", "one line"),
            ("log", "loud", "off, error, warn"),
            ("copy", "yes", "true or false"),
            ("slice", "1KiB", "64KiB to 4GiB"),
            ("ring-entries", "1", "from 2 to"),
            ("reader", "mmap", "io-uring"),
            ("verify-reads", "1.1", "from 0 to 1"),
            ("verify-reads", "-0.1", "from 0 to 1"),
            ("verify-reads", "nan", "from 0 to 1"),
            ("verify-reads", "all", "from 0 to 1"),
            ("checksum-directory", "", "a directory, auto or none"),
            ("executor", "gpu", "device, host or"),
            ("executor", "0", "from 1 to 8192"),
        ] {
            check(None, &[], &[(key, value)], &[&format!("--{key}: "), part]);
        }
    }

    #[test]
    fn addresses_that_kubernetes_injects_are_not_keys() {
        let environment = [
            ("STRATA_PORT", "tcp://10.0.0.1:80"),
            ("STRATA_PORT_80_TCP_ADDR", "10.0.0.1"),
            ("STRATA_SERVICE_HOST", "10.0.0.1"),
            ("STRATA_SERVICE_PORT_HTTP", "80"),
            ("OTHER_THING", "1"),
        ];
        assert_eq!(resolve(None, &environment, &[]), Ok(Config::default()));
    }

    #[test]
    fn the_key_is_not_printed() {
        let config = resolve(None, &[("STRATA_API_KEY", "hunter2")], &[]).unwrap();
        assert_eq!(config.api_key.as_ref().unwrap().expose(), "hunter2");
        assert!(!format!("{config:?}").contains("hunter2"));
    }
}

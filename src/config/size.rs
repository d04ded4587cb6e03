//! Sizes and rates as people write them: `24GiB`, `1.5GiB`, `500MB`, `4096`, `4GB/s`.

/// Longest unit first, so that `MiB` is not read as `B`.
const UNITS: [(&str, u64); 9] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("b", 1),
];

/// More than any machine that this is for.
const SIZE_MAX: u64 = 1 << 50;

/// Bytes of `24GiB`, `48MiB`, `1.5GiB`, `500MB` or `4096`. A bare `24G` is refused: it means either.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let lower = text.to_ascii_lowercase();
    let (digits, unit) = UNITS
        .iter()
        .find_map(|(unit, bytes)| lower.strip_suffix(unit).map(|digits| (digits, *bytes)))
        .unwrap_or((&lower, 1));
    let digits = digits.trim_end();
    if let Some(digits) = digits.strip_suffix(['k', 'm', 'g', 't'])
        && digits.parse::<f64>().is_ok()
    {
        return Err(format!(
            "`{text}` is ambiguous; write `{text}iB` or `{text}B`"
        ));
    }
    let wrong = || format!("`{text}` is not a size; write it like 24GiB, 48MiB or 500MB");
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        return Err(wrong());
    }
    let bytes = if digits.contains('.') {
        let number: f64 = digits.parse().map_err(|_| wrong())?;
        number * unit as f64
    } else {
        match digits.parse::<u64>() {
            Ok(number) => match number.checked_mul(unit) {
                Some(bytes) if bytes <= SIZE_MAX => return Ok(bytes),
                _ => f64::INFINITY,
            },
            Err(_) => f64::INFINITY,
        }
    };
    if bytes > SIZE_MAX as f64 {
        return Err(format!(
            "`{text}` is more than any machine has; give a size up to 1024TiB"
        ));
    }
    Ok(bytes as u64)
}

/// Bytes per second of `4GB/s` or `500MiB/s`.
pub fn parse_rate(text: &str) -> Result<f64, String> {
    let wrong = || format!("`{text}` is not a rate; write it like 4GB/s or 500MB/s");
    let size = text.trim().strip_suffix("/s").ok_or_else(wrong)?;
    let bytes = parse_size(size).map_err(|_| wrong())?;
    if bytes == 0 {
        return Err(format!(
            "`{text}` would move nothing; give a rate above 0, like 4GB/s"
        ));
    }
    Ok(bytes as f64)
}

/// For people: `1.50 GiB`, `512 B`.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [(&str, u64); 4] = [
        ("TiB", 1 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
    ];
    match UNITS.iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => format!("{:.2} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_as_people_write_them() {
        for (text, bytes) in [
            ("4096", 4096),
            ("24GiB", 24 << 30),
            ("24 GiB", 24 << 30),
            ("24gib", 24 << 30),
            ("1.5GiB", 3 << 29),
            ("48MiB", 48 << 20),
            ("500MB", 500_000_000),
            ("12KiB", 12288),
            ("7B", 7),
            ("0.5KiB", 512),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn sizes_that_make_no_sense_are_refused_with_what_to_do() {
        for (text, part) in [
            ("", "write it like"),
            ("GiB", "write it like"),
            ("-1GiB", "write it like"),
            ("nan", "write it like"),
            ("inf", "write it like"),
            ("1e9", "write it like"),
            ("1.2.3GiB", "write it like"),
            ("24G", "write `24GiB` or `24GB`"),
            ("99999999999999999999GiB", "up to 1024TiB"),
            ("5000TiB", "up to 1024TiB"),
            ("99999999999999999999999999.9TiB", "up to 1024TiB"),
        ] {
            let error = parse_size(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn rates() {
        assert_eq!(parse_rate("4GB/s"), Ok(4e9));
        assert_eq!(parse_rate("500 MiB/s"), Ok(500.0 * 1048576.0));
        for text in ["4GB", "0GB/s", "fast", "-4GB/s", "4GB/h"] {
            assert!(parse_rate(text).is_err(), "{text}");
        }
    }
}

//! What a body may become in memory. JSON can be forty times as large parsed as it was written (`[0,0,..]` as
//! values), so values and token ids are counted while they are parsed, and what nobody reads is not kept.
//!
//! The maxima make the figure: parsing a body takes at most its own size again for texts, and `VALUES_MAX` times half a
//! KiB, which is 32 MiB, or `TOKENS_MAX` times 24 bytes while a list grows, for the rest.

use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_json::{Map, Value};
use std::fmt::Formatter;

/// Values in `messages` or `chat_template_kwargs`, all levels together: some twenty thousand messages.
pub(super) const VALUES_MAX: usize = 1 << 16;
/// Token ids of a request that are kept; others are counted.
pub(super) const TOKENS_MAX: usize = 1 << 20;
/// Values that are kept of a field that is only looked at to see whether it asks for something.
const OUTLINE_VALUES_MAX: usize = 8;

/// Parses one value, and counts it and all in it.
struct Counted<'c> {
    left: &'c mut usize,
    /// Past the maximum: an error, or no longer kept.
    strict: bool,
}

impl Counted<'_> {
    fn inner(&mut self) -> Counted<'_> {
        Counted {
            left: self.left,
            strict: self.strict,
        }
    }

    /// Whether the maximum is reached; what follows is then skipped.
    fn is_full(&self) -> bool {
        *self.left == 0
    }

    fn check_skipped<E: Error>(&self, skipped: bool) -> Result<(), E> {
        if skipped && self.strict {
            return Err(E::custom(format!(
                "it has more than {VALUES_MAX} values; send fewer"
            )));
        }
        Ok(())
    }

    fn items<'de, A: SeqAccess<'de>>(&mut self, mut sequence: A) -> Result<Vec<Value>, A::Error> {
        let mut items = Vec::new();
        while !self.is_full() {
            match sequence.next_element_seed(self.inner())? {
                Some(item) => items.push(item),
                None => return Ok(items),
            }
        }
        while let Some(IgnoredAny) = sequence.next_element()? {
            self.check_skipped(true)?;
        }
        Ok(items)
    }

    fn fields<'de, A: MapAccess<'de>>(
        &mut self,
        mut map: A,
    ) -> Result<Map<String, Value>, A::Error> {
        let mut fields = Map::new();
        while !self.is_full() {
            match map.next_key::<String>()? {
                Some(key) => {
                    let value = map.next_value_seed(self.inner())?;
                    fields.insert(key, value);
                }
                None => return Ok(fields),
            }
        }
        while let Some((IgnoredAny, IgnoredAny)) = map.next_entry()? {
            self.check_skipped(true)?;
        }
        Ok(fields)
    }
}

impl<'de> DeserializeSeed<'de> for Counted<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        *self.left = self.left.saturating_sub(1);
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Counted<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str("a value of JSON")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(Value::String(text.to_owned()))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, sequence: A) -> Result<Value, A::Error> {
        self.items(sequence).map(Value::Array)
    }

    fn visit_map<A: MapAccess<'de>>(mut self, map: A) -> Result<Value, A::Error> {
        self.fields(map).map(Value::Object)
    }
}

/// An array of at most `VALUES_MAX` values.
#[derive(Debug)]
pub(super) struct Values(pub(super) Vec<Value>);

impl<'de> Deserialize<'de> for Values {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Values, D::Error> {
        struct Array;
        impl<'de> Visitor<'de> for Array {
            type Value = Values;

            fn expecting(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
                f.write_str("an array")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, sequence: A) -> Result<Values, A::Error> {
                let mut counted = Counted {
                    left: &mut { VALUES_MAX },
                    strict: true,
                };
                counted.items(sequence).map(Values)
            }
        }
        deserializer.deserialize_seq(Array)
    }
}

/// An object of at most `VALUES_MAX` values.
#[derive(Debug, Default)]
pub(super) struct Fields(pub(super) Map<String, Value>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Fields, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Fields;

            fn expecting(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Fields, A::Error> {
                let mut counted = Counted {
                    left: &mut { VALUES_MAX },
                    strict: true,
                };
                counted.fields(map).map(Fields)
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// The first few values of a field: enough to see whether it asks for something.
#[derive(Debug)]
pub(super) struct Outline(pub(super) Value);

impl<'de> Deserialize<'de> for Outline {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Outline, D::Error> {
        let counted = Counted {
            left: &mut { OUTLINE_VALUES_MAX },
            strict: false,
        };
        counted.deserialize(deserializer).map(Outline)
    }
}

/// Token ids, as far as they are kept, and how many came.
#[derive(Debug, Default, PartialEq)]
pub(super) struct TokenIds {
    pub(super) ids: Vec<u64>,
    pub(super) count: usize,
}

impl TokenIds {
    /// `left` of `TOKENS_MAX` may still be kept.
    pub(super) fn take<'de, A: SeqAccess<'de>>(
        &mut self,
        mut sequence: A,
        left: &mut usize,
    ) -> Result<(), A::Error> {
        while let Some(id) = sequence.next_element()? {
            self.push(id, left);
        }
        Ok(())
    }

    pub(super) fn push(&mut self, id: u64, left: &mut usize) {
        self.count += 1;
        if *left > 0 {
            *left -= 1;
            self.ids.push(id);
        }
    }

    /// Whether all ids that came are here.
    pub(super) fn is_whole(&self) -> bool {
        self.ids.len() == self.count
    }
}

impl<'de> Deserialize<'de> for TokenIds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<TokenIds, D::Error> {
        struct Ids;
        impl<'de> Visitor<'de> for Ids {
            type Value = TokenIds;

            fn expecting(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
                f.write_str("an array of token ids")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, sequence: A) -> Result<TokenIds, A::Error> {
                let mut tokens = TokenIds::default();
                tokens.take(sequence, &mut { TOKENS_MAX })?;
                Ok(tokens)
            }
        }
        deserializer.deserialize_seq(Ids)
    }
}

/// Strings, of which the first `max` are kept, and how many came. One string alone is taken for a list of it.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Strings<const MAX: usize> {
    pub(super) strings: Vec<String>,
    pub(super) count: usize,
}

impl<'de, const MAX: usize> Deserialize<'de> for Strings<MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Strings<MAX>, D::Error> {
        struct OneOrSeveral<const MAX: usize>;
        impl<'de, const MAX: usize> Visitor<'de> for OneOrSeveral<MAX> {
            type Value = Strings<MAX>;

            fn expecting(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
                f.write_str("a string or an array of strings")
            }

            fn visit_str<E>(self, text: &str) -> Result<Strings<MAX>, E> {
                Ok(Strings {
                    strings: vec![text.to_owned()],
                    count: 1,
                })
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut sequence: A,
            ) -> Result<Strings<MAX>, A::Error> {
                let mut found = Strings::default();
                while found.count < MAX {
                    match sequence.next_element()? {
                        Some(text) => found.strings.push(text),
                        None => return Ok(found),
                    }
                    found.count += 1;
                }
                while let Some(IgnoredAny) = sequence.next_element()? {
                    found.count += 1;
                }
                Ok(found)
            }
        }
        deserializer.deserialize_any(OneOrSeveral)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse<T: for<'de> Deserialize<'de>>(text: &str) -> Result<T, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn values_are_what_they_are_everywhere_else_up_to_the_maximum() {
        let text = r#"[{"a":[1,-1,1.5,"x",null,true,{}],"b":{"c":[]}},[],"é"]"#;
        let values: Values = parse(text).unwrap();
        assert_eq!(Value::Array(values.0), parse::<Value>(text).unwrap());

        let zeros = |count: usize| format!("[{}]", vec!["0"; count].join(","));
        assert_eq!(
            parse::<Values>(&zeros(VALUES_MAX)).unwrap().0.len(),
            VALUES_MAX
        );
        for text in [
            zeros(VALUES_MAX + 1),
            format!("[{}]", zeros(VALUES_MAX)),
            format!("[{}]", vec!["{\"a\":[]}"; VALUES_MAX / 2 + 1].join(",")),
        ] {
            let error = parse::<Values>(&text).unwrap_err();
            assert!(error.contains("more than 65536 values"), "{error}");
        }
        assert!(parse::<Fields>(&format!("{{\"a\":{}}}", zeros(VALUES_MAX))).is_err());
    }

    #[test]
    fn an_outline_keeps_a_few_values_and_reads_on() {
        let Outline(value) = parse("[1,2,3,4,5,6,7,8,9,[10],{\"a\":1}]").unwrap();
        assert_eq!(value, serde_json::json!([1, 2, 3, 4, 5, 6, 7]));
        assert!(parse::<Outline>("[1,2,3,4,5,6,7,8,9,oops]").is_err());
        let Outline(value) = parse("{\"type\":\"text\"}").unwrap();
        assert_eq!(value, serde_json::json!({"type": "text"}));
    }

    #[test]
    fn token_ids_and_strings_past_the_maximum_are_counted() {
        let text = format!("[{}0]", "0,".repeat(TOKENS_MAX));
        let tokens: TokenIds = parse(&text).unwrap();
        assert_eq!(
            (tokens.ids.len(), tokens.count),
            (TOKENS_MAX, TOKENS_MAX + 1)
        );
        assert!(!tokens.is_whole());
        let strings: Strings<2> = parse(r#"["a","b","c"]"#).unwrap();
        assert_eq!((strings.strings.len(), strings.count), (2, 3));
        let strings: Strings<2> = parse(r#""a""#).unwrap();
        assert_eq!((strings.strings.len(), strings.count), (1, 1));
        assert!(parse::<Strings<2>>("[1]").is_err());
    }
}

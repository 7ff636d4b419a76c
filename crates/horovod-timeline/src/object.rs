//! The writer of JSON objects, field by field, straight into the bytes that go into the file.

use super::report::Nanos;

/// The fields of an object that is being written.
pub(super) struct Object<'a> {
    out: &'a mut Vec<u8>,
}

impl<'a> Object<'a> {
    /// Appends an object with the fields that `fields` adds.
    pub(super) fn write(out: &'a mut Vec<u8>, fields: impl FnOnce(&mut Object<'_>)) {
        out.push(b'{');
        fields(&mut Object { out });
        out.push(b'}');
    }

    /// Fields without an object around them, for [`Self::fields`].
    pub(super) fn part(fields: impl FnOnce(&mut Object<'_>)) -> Vec<u8> {
        let mut out = Vec::new();
        fields(&mut Object { out: &mut out });
        out
    }

    fn key(&mut self, key: &str) {
        if self.out.last().is_some_and(|last| *last != b'{') {
            self.out.push(b',');
        }
        self.out.push(b'"');
        self.out.extend_from_slice(key.as_bytes());
        self.out.extend_from_slice(b"\":");
    }

    pub(super) fn text(&mut self, key: &str, text: &str) -> &mut Self {
        self.key(key);
        push_string(self.out, text);
        self
    }

    pub(super) fn number(&mut self, key: &str, n: u64) -> &mut Self {
        self.key(key);
        push_number(self.out, n);
        self
    }

    /// A number as text.
    pub(super) fn decimal(&mut self, key: &str, n: u64) -> &mut Self {
        self.key(key);
        self.out.push(b'"');
        push_number(self.out, n);
        self.out.push(b'"');
        self
    }

    pub(super) fn signed(&mut self, key: &str, n: i64) -> &mut Self {
        self.key(key);
        let mut digits = itoa::Buffer::new();
        self.out.extend_from_slice(digits.format(n).as_bytes());
        self
    }

    /// Nanoseconds as microseconds with three decimals, the unit of the format.
    pub(super) fn micros(&mut self, key: &str, ns: Nanos) -> &mut Self {
        self.key(key);
        push_micros(self.out, ns);
        self
    }

    /// A field that is an object itself.
    pub(super) fn object(&mut self, key: &str, fields: impl FnOnce(&mut Object<'_>)) -> &mut Self {
        self.key(key);
        Object::write(self.out, fields);
        self
    }

    /// Fields that were made before; the first of an object.
    pub(super) fn fields(&mut self, part: &[u8]) -> &mut Self {
        debug_assert!(self.out.ends_with(b"{"), "these come first");
        self.out.extend_from_slice(part);
        self
    }
}

/// Appends text as a JSON string, quotes included.
fn push_string(out: &mut Vec<u8>, text: &str) {
    let special = |b: u8| b < 0x20 || b == b'"' || b == b'\\';
    out.push(b'"');
    // All bytes, without a way out: so the compiler looks at many at a time.
    if !text.bytes().fold(false, |any, b| any | special(b)) {
        out.extend_from_slice(text.as_bytes());
        out.push(b'"');
        return;
    }
    for b in text.bytes() {
        match b {
            b'"' | b'\\' => out.extend_from_slice(&[b'\\', b]),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\t' => out.extend_from_slice(b"\\t"),
            _ if special(b) => {
                const HEX: &[u8; 16] = b"0123456789abcdef";
                out.extend_from_slice(b"\\u00");
                out.push(HEX[usize::from(b >> 4)]);
                out.push(HEX[usize::from(b & 15)]);
            }
            _ => out.push(b),
        }
    }
    out.push(b'"');
}

/// Appends a whole number.
fn push_number(out: &mut Vec<u8>, n: u64) {
    out.extend_from_slice(itoa::Buffer::new().format(n).as_bytes());
}

fn push_micros(out: &mut Vec<u8>, ns: Nanos) {
    push_number(out, ns / 1000);
    let digit = |n: u64| b'0' + (n % 10) as u8;
    out.extend_from_slice(&[b'.', digit(ns / 100), digit(ns / 10), digit(ns)]);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn read(out: &[u8]) -> Value {
        serde_json::from_slice(out).unwrap_or_else(|e| panic!("{e}: {}", out.escape_ascii()))
    }

    #[test]
    fn an_object_has_its_fields_in_their_order() {
        let part = Object::part(|o| {
            o.text("ph", "B").micros("ts", 1_234_056);
        });
        let mut out = Vec::new();
        Object::write(&mut out, |o| {
            o.fields(&part).signed("shift", -5);
            o.object("args", |o| {
                o.number("n", 7);
            });
            o.object("none", |_| {});
        });
        let text = r#"{"ph":"B","ts":1234.056,"shift":-5,"args":{"n":7},"none":{}}"#;
        assert_eq!(String::from_utf8(out).unwrap(), text);
    }

    proptest! {
        #[test]
        fn any_content_is_read_back_as_it_was(text in any::<String>(), n in any::<u64>(), i in any::<i64>(), ns in 0..1u64 << 50) {
            let mut out = Vec::new();
            Object::write(&mut out, |o| {
                o.text("text", &text).number("n", n).signed("i", i).micros("ns", ns);
            });
            let read = read(&out);
            prop_assert_eq!(&read["text"], &json!(text));
            prop_assert_eq!(&read["n"], &json!(n));
            prop_assert_eq!(&read["i"], &json!(i));
            let back = (read["ns"].as_f64().unwrap() * 1000.0).round() as u64;
            prop_assert_eq!(back, ns);
        }

        #[test]
        fn numbers_of_any_length(digits in 0..20u32, n in any::<u64>()) {
            let n = n % 10u64.saturating_pow(digits);
            let mut out = Vec::new();
            push_number(&mut out, n);
            prop_assert_eq!(out, n.to_string().into_bytes());
        }
    }
}

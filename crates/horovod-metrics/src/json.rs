//! A writer of JSON, for documents whose keys are known here.

use std::fmt::Write;

/// A document in the making. Names of hosts and messages are escaped.
#[derive(Debug, Default)]
pub(crate) struct Json {
    text: String,
    needs_comma: bool,
}

impl Json {
    pub(crate) fn finish(self) -> String {
        self.text
    }

    /// An object, with what `body` writes.
    pub(crate) fn object(&mut self, body: impl FnOnce(&mut Self)) {
        self.nest('{', '}', body);
    }

    /// A list, with what `body` writes.
    pub(crate) fn list(&mut self, body: impl FnOnce(&mut Self)) {
        self.nest('[', ']', body);
    }

    fn nest(&mut self, open: char, close: char, body: impl FnOnce(&mut Self)) {
        self.separate();
        self.text.push(open);
        self.needs_comma = false;
        body(self);
        self.text.push(close);
        self.needs_comma = true;
    }

    /// The key of the value that follows.
    pub(crate) fn key(&mut self, key: &str) -> &mut Self {
        self.string(key);
        self.text.push(':');
        self.needs_comma = false;
        self
    }

    pub(crate) fn string(&mut self, value: &str) {
        self.separate();
        self.text.push('"');
        for c in value.chars() {
            match c {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                c if c < ' ' => self.fmt(format_args!("\\u{:04x}", c as u32)),
                c => self.text.push(c),
            }
        }
        self.text.push('"');
    }

    pub(crate) fn whole(&mut self, value: u64) {
        self.separate();
        self.fmt(format_args!("{value}"));
    }

    /// Finite numbers only.
    pub(crate) fn number(&mut self, value: f64) {
        self.separate();
        self.fmt(format_args!("{value}"));
    }

    fn separate(&mut self) {
        if self.needs_comma {
            self.text.push(',');
        }
        self.needs_comma = true;
    }

    fn fmt(&mut self, arguments: std::fmt::Arguments<'_>) {
        // A String takes everything.
        let _ = self.text.write_fmt(arguments);
    }
}

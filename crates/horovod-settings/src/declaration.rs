//! One setting: what it is called, what it accepts and what it means.

use crate::environment::{Environment, text_of};
use crate::kinds::{Accepts, Kind};

/// Whose value counts where ranks hold different ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Each rank follows its own.
    Each,
    /// All ranks follow rank 0's.
    Rank0,
}

/// One setting of the kind `K`.
#[derive(Debug)]
pub struct Declaration<K> {
    /// Environment variable.
    pub name: &'static str,
    /// Kind of its values, with the default.
    pub kind: K,
    /// Whose value counts.
    pub whose: Whose,
    /// Effect of the setting, units included; without accepted values and without whose value counts.
    pub(crate) doc: &'static str,
}

/// A value that is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}={found}: expected {expected}")]
pub struct Refused {
    /// Environment variable.
    pub name: &'static str,
    /// The value: a number as it was understood, anything else in quotes.
    pub found: String,
    /// The accepted values.
    pub expected: String,
}

impl<K: Kind> Declaration<K> {
    /// The value that the text stands for.
    pub fn parse(&self, text: &str) -> Result<K::Value, Refused> {
        self.kind.parse(text).map_err(|found| Refused {
            name: self.name,
            found,
            expected: self.kind.accepts().to_string(),
        })
    }

    /// The value in the environment, else the default.
    pub fn read(&self, env: &dyn Environment) -> Result<K::Value, Refused> {
        match text_of(env, self.name) {
            None => Ok(self.kind.default()),
            Some(text) => self.parse(&text),
        }
    }

    /// The same where nobody can be told of a mistake: then the default.
    pub fn read_or_default(&self, env: &dyn Environment) -> K::Value {
        self.read(env).unwrap_or_else(|_| self.kind.default())
    }

    /// Whether the environment says anything.
    pub fn is_set(&self, env: &dyn Environment) -> bool {
        text_of(env, self.name).is_some()
    }
}

/// Queries of a setting of any kind.
pub trait Declared: Sync {
    /// Environment variable.
    fn name(&self) -> &'static str;
    /// Effect of the setting, units included; without accepted values and without whose value counts.
    fn doc(&self) -> &'static str;
    /// Whose value counts.
    fn whose(&self) -> Whose;
    /// The default as shown to users.
    fn default_text(&self) -> String;
    /// Whether the default is a value that could be set, not the absence of one.
    fn has_default(&self) -> bool;
    /// The accepted values.
    fn accepts(&self) -> Accepts;
    /// Whether the text is accepted.
    fn check(&self, text: &str) -> Result<(), Refused>;
    /// Whether the text means the same as no text at all.
    fn is_default(&self, text: &str) -> bool;

    /// Effect of the setting, accepted values, and whose value counts.
    fn description(&self) -> String {
        let mut text = self.doc().to_owned();
        if let Some(limits) = self.accepts().limits() {
            text = format!("{text}; {limits}");
        }
        if self.whose() == Whose::Rank0 {
            text.push_str("; rank 0's value counts");
        }
        text
    }
}

impl<K: Kind + Sync> Declared for Declaration<K> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn doc(&self) -> &'static str {
        self.doc.trim_start()
    }

    fn whose(&self) -> Whose {
        self.whose
    }

    fn default_text(&self) -> String {
        self.kind.default_text()
    }

    fn has_default(&self) -> bool {
        self.kind.has_default()
    }

    fn accepts(&self) -> Accepts {
        self.kind.accepts()
    }

    fn check(&self, text: &str) -> Result<(), Refused> {
        self.parse(text).map(drop)
    }

    fn is_default(&self, text: &str) -> bool {
        self.kind
            .parse(text)
            .is_ok_and(|value| value == self.kind.default())
    }
}

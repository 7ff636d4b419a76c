//! The kinds of settings: flags, whole numbers, decimals, words, lists, text.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

/// Most of a number that is not whole, unless less is said: fits a `Duration`.
pub const NUMBER_MAX: f64 = 1e9;

/// Kind of a setting's values, and their notation.
pub trait Kind {
    /// Type of a parsed value.
    type Value: PartialEq;
    /// The value if nothing is set.
    fn default(&self) -> Self::Value;
    /// The default as shown to users.
    fn default_text(&self) -> String;
    /// Whether the default is a value that could be set, not the absence of one.
    fn has_default(&self) -> bool {
        true
    }
    /// The value of a text; the error is the text as it was understood.
    fn parse(&self, text: &str) -> Result<Self::Value, String>;
    /// Texts that have a value.
    fn accepts(&self) -> Accepts;
}

/// Accepted values of a setting; as text, the part of an error after "expected".
#[derive(Clone, Debug, PartialEq)]
pub enum Accepts {
    /// 1 or 0, and words for them.
    Flag,
    /// A whole number.
    Whole {
        /// Least that is accepted.
        least: u64,
        /// Most that is accepted; `None`: whatever fits.
        most: Option<u64>,
    },
    /// Any number.
    Decimal {
        /// Least that is accepted.
        least: f64,
        /// Most that is accepted.
        most: f64,
        /// Meaning of 0, if 0 is accepted although it is below the least.
        zero: Option<&'static str>,
    },
    /// One of these words, in capitals or not.
    Words(Vec<&'static str>),
    /// A comma list of `ip:port`.
    Addresses,
    /// Two ports with a dash between them.
    PortRange,
    /// Anything.
    Text,
}

impl Accepts {
    /// Limits that the description must name beside the effect; `None` for none.
    pub fn limits(&self) -> Option<String> {
        match self {
            Self::Flag | Self::Text | Self::Addresses | Self::PortRange => None,
            Self::Whole {
                least: 0,
                most: None,
            } => None,
            Self::Decimal {
                least, most, zero, ..
            } => {
                let is_limited = *least > 0.0 || *most < NUMBER_MAX;
                is_limited.then(|| between(*least, *most, *zero))
            }
            Self::Whole { .. } | Self::Words(_) => Some(self.to_string()),
        }
    }
}

fn between(least: f64, most: f64, zero: Option<&str>) -> String {
    let most = match most {
        NUMBER_MAX => "1e9".to_owned(),
        most => most.to_string(),
    };
    match zero {
        Some(meaning) => format!("{least} to {most}, or 0 for {meaning}"),
        None => format!("{least} to {most}"),
    }
}

impl fmt::Display for Accepts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("1 or 0"),
            Self::Whole {
                least: 0,
                most: None,
            } => f.write_str("a number of at least 0"),
            Self::Whole { least, most: None } => write!(f, "at least {least}"),
            Self::Whole {
                least,
                most: Some(most),
            } => write!(f, "{least} to {most}"),
            Self::Decimal {
                least,
                most,
                zero: None,
            } => write!(f, "a number from {}", between(*least, *most, None)),
            Self::Decimal { least, most, zero } => f.write_str(&between(*least, *most, *zero)),
            Self::Words(words) => match words.split_last() {
                Some((last, [])) => f.write_str(last),
                Some((last, others)) => write!(f, "{} or {last}", others.join(", ")),
                None => f.write_str("nothing"),
            },
            Self::PortRange => {
                f.write_str("a range of ports from 1024 to 65535, such as 29000-29100")
            }
            Self::Addresses => f.write_str("addresses of the form ip:port"),
            Self::Text => f.write_str("text"),
        }
    }
}

/// Something that is on or off.
#[derive(Debug)]
pub struct Flag(
    /// The value if nothing is set.
    pub bool,
);

impl Kind for Flag {
    type Value = bool;

    fn default(&self) -> bool {
        self.0
    }

    fn default_text(&self) -> String {
        u8::from(self.0).to_string()
    }

    /// A number (true if above 0) or a word; `true` is a number of 0 to the original, which nobody meant.
    fn parse(&self, text: &str) -> Result<bool, String> {
        match text.trim().to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" => Ok(true),
            "false" | "no" | "off" => Ok(false),
            number => match number.parse::<i64>() {
                Ok(n) => Ok(n > 0),
                Err(_) => Err(format!("{text:?}")),
            },
        }
    }

    fn accepts(&self) -> Accepts {
        Accepts::Flag
    }
}

/// A type of whole numbers.
pub trait Number: Copy + PartialOrd + FromStr + fmt::Display + TryInto<u64> {
    /// The least.
    const ZERO: Self;
    /// The largest.
    const MAX: Self;
}

/// A whole number between two others.
#[derive(Debug)]
pub struct Whole<T> {
    /// The value if nothing is set.
    pub default: T,
    /// Least that is accepted.
    pub least: T,
    /// Most that is accepted.
    pub most: T,
}

impl<T: Number> Whole<T> {
    /// With no limits but those of the type.
    pub const fn any(default: T) -> Self {
        Self::within(default, T::ZERO, T::MAX)
    }

    /// With nothing below this.
    pub const fn from(default: T, least: T) -> Self {
        Self::within(default, least, T::MAX)
    }

    /// With these limits.
    pub const fn within(default: T, least: T, most: T) -> Self {
        Self {
            default,
            least,
            most,
        }
    }
}

macro_rules! whole {
    ($($number:ty),*) => {$(
        impl Number for $number {
            const ZERO: Self = 0;
            const MAX: Self = <$number>::MAX;
        }
    )*};
}
whole!(u8, u16, u32, u64, usize);

impl<T: Number> Kind for Whole<T> {
    type Value = T;

    fn default(&self) -> T {
        self.default
    }

    fn default_text(&self) -> String {
        self.default.to_string()
    }

    fn parse(&self, text: &str) -> Result<T, String> {
        match text.trim().parse::<T>() {
            Ok(number) if (self.least..=self.most).contains(&number) => Ok(number),
            Ok(number) => Err(number.to_string()),
            Err(_) => Err(format!("{text:?}")),
        }
    }

    fn accepts(&self) -> Accepts {
        let is_limited = self.most < T::MAX;
        Accepts::Whole {
            least: self.least.try_into().unwrap_or(0),
            most: is_limited.then(|| self.most.try_into().unwrap_or(u64::MAX)),
        }
    }
}

/// A number between two others.
#[derive(Debug)]
pub struct Decimal {
    /// The value if nothing is set.
    pub default: f64,
    /// Least that is accepted.
    pub least: f64,
    /// Most that is accepted, at most [`NUMBER_MAX`].
    pub most: f64,
    /// Meaning of 0, if 0 is accepted although it is below the least.
    pub zero: Option<&'static str>,
}

impl Decimal {
    /// Anything from 0 on.
    pub const fn any(default: f64) -> Self {
        Self {
            default,
            least: 0.0,
            most: NUMBER_MAX,
            zero: None,
        }
    }
}

impl Kind for Decimal {
    type Value = f64;

    fn default(&self) -> f64 {
        self.default
    }

    fn default_text(&self) -> String {
        self.default.to_string()
    }

    fn parse(&self, text: &str) -> Result<f64, String> {
        match text.trim().parse::<f64>() {
            // Not a number is in no range.
            Ok(number) if (self.least..=self.most).contains(&number) => Ok(number),
            Ok(0.0) if self.zero.is_some() => Ok(0.0),
            Ok(number) => Err(number.to_string()),
            Err(_) => Err(format!("{text:?}")),
        }
    }

    fn accepts(&self) -> Accepts {
        Accepts::Decimal {
            least: self.least,
            most: self.most,
            zero: self.zero,
        }
    }
}

/// One of a few words, in capitals or not.
#[derive(Debug)]
pub struct Words<T: 'static> {
    /// The value if nothing is set.
    pub default: T,
    /// The words and what they mean.
    pub words: &'static [(&'static str, T)],
}

impl<T: Copy + PartialEq> Words<T> {
    /// The word for this value.
    pub fn word(&self, value: T) -> &'static str {
        let found = self.words.iter().find(|(_, meaning)| *meaning == value);
        found.map_or("", |(word, _)| word)
    }
}

impl<T: Copy + PartialEq> Kind for Words<T> {
    type Value = T;

    fn default(&self) -> T {
        self.default
    }

    fn default_text(&self) -> String {
        self.word(self.default).to_owned()
    }

    fn parse(&self, text: &str) -> Result<T, String> {
        let found = self
            .words
            .iter()
            .find(|(word, _)| word.eq_ignore_ascii_case(text.trim()));
        found
            .map(|(_, meaning)| *meaning)
            .ok_or_else(|| format!("{text:?}"))
    }

    fn accepts(&self) -> Accepts {
        Accepts::Words(self.words.iter().map(|(word, _)| *word).collect())
    }
}

/// Any text, with a meaning of its own.
#[derive(Debug)]
pub struct Text(
    /// The value if nothing is set.
    pub &'static str,
);

impl Kind for Text {
    type Value = String;

    fn default(&self) -> String {
        self.0.to_owned()
    }

    fn default_text(&self) -> String {
        self.0.to_owned()
    }

    fn parse(&self, text: &str) -> Result<String, String> {
        Ok(text.to_owned())
    }

    fn accepts(&self) -> Accepts {
        Accepts::Text
    }
}

/// A comma list, empty when nothing is set.
#[derive(Debug)]
pub struct List {
    /// Meaning of an empty list.
    pub empty: &'static str,
}

fn items(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|s| !s.is_empty())
}

impl Kind for List {
    type Value = Vec<String>;

    fn default(&self) -> Vec<String> {
        Vec::new()
    }

    fn default_text(&self) -> String {
        self.empty.to_owned()
    }

    fn has_default(&self) -> bool {
        false
    }

    fn parse(&self, text: &str) -> Result<Vec<String>, String> {
        Ok(items(text).map(Into::into).collect())
    }

    fn accepts(&self) -> Accepts {
        Accepts::Text
    }
}

/// A comma list of `ip:port`, empty when nothing is set.
#[derive(Debug)]
pub struct Addresses;

impl Kind for Addresses {
    type Value = Vec<SocketAddr>;

    fn default(&self) -> Vec<SocketAddr> {
        Vec::new()
    }

    fn default_text(&self) -> String {
        "none".to_owned()
    }

    fn has_default(&self) -> bool {
        false
    }

    fn parse(&self, text: &str) -> Result<Vec<SocketAddr>, String> {
        let parse = |item: &str| item.parse().map_err(|_| format!("{item:?}"));
        items(text).map(parse).collect()
    }

    fn accepts(&self) -> Accepts {
        Accepts::Addresses
    }
}

/// The first and the last of a range of ports, those of services of the system excepted.
#[derive(Debug)]
pub struct PortRange;

impl Kind for PortRange {
    type Value = (u16, u16);

    fn default(&self) -> (u16, u16) {
        (1024, u16::MAX)
    }

    fn default_text(&self) -> String {
        "1024-65535".to_owned()
    }

    fn parse(&self, text: &str) -> Result<(u16, u16), String> {
        let port = |text: &str| text.trim().parse().ok().filter(|port| *port >= 1024);
        let range = text.split_once('-').or_else(|| text.split_once(':'));
        let range = range.and_then(|(first, last)| Some((port(first)?, port(last)?)));
        range
            .filter(|(first, last)| first <= last)
            .ok_or_else(|| format!("{text:?}"))
    }

    fn accepts(&self) -> Accepts {
        Accepts::PortRange
    }
}

/// A setting without a value unless one is set.
#[derive(Debug)]
pub struct Optional<K> {
    /// Kind of a value that is set; its default is not used.
    pub kind: K,
    /// Behaviour if nothing is set.
    pub unset: &'static str,
}

impl Optional<Text> {
    /// Text or none.
    pub const fn text(unset: &'static str) -> Self {
        let kind = Text("");
        Self { kind, unset }
    }
}

impl<K: Kind> Kind for Optional<K> {
    type Value = Option<K::Value>;

    fn default(&self) -> Option<K::Value> {
        None
    }

    fn default_text(&self) -> String {
        self.unset.to_owned()
    }

    fn has_default(&self) -> bool {
        false
    }

    fn parse(&self, text: &str) -> Result<Option<K::Value>, String> {
        self.kind.parse(text).map(Some)
    }

    fn accepts(&self) -> Accepts {
        self.kind.accepts()
    }
}

//! Reads one value of a variable; errors name the variable, the value and what is accepted.

use std::net::SocketAddr;

use super::Environment;
use crate::error::Error;

pub(super) struct Reader<'a> {
    pub(super) env: &'a dyn Environment,
}

impl Reader<'_> {
    pub(super) fn text(&self, name: &str) -> Option<String> {
        self.env.get(name).filter(|v| !v.trim().is_empty())
    }

    pub(super) fn number<T: std::str::FromStr>(&self, name: &str, default: T) -> Result<T, Error> {
        match self.text(name) {
            None => Ok(default),
            Some(v) => v
                .trim()
                .parse()
                .map_err(|_| Error::Init(format!("{name}={v:?}: expected a number of at least 0"))),
        }
    }

    pub(super) fn not_negative(&self, name: &str, default: f64) -> Result<f64, Error> {
        let v: f64 = self.number(name, default)?;
        // Bounded so that it fits a Duration.
        if v.is_finite() && (0.0..=1e9).contains(&v) {
            Ok(v)
        } else {
            Err(Error::Init(format!(
                "{name}={v}: expected a number from 0 to 1e9"
            )))
        }
    }

    /// A number (true if above 0) or a word; `true` is a number of 0 to the original, which nobody meant.
    pub(super) fn flag(&self, name: &str, default: bool) -> Result<bool, Error> {
        let Some(text) = self.text(name) else {
            return Ok(default);
        };
        match text.trim().to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" => Ok(true),
            "false" | "no" | "off" => Ok(false),
            number => match number.parse::<i64>() {
                Ok(n) => Ok(n > 0),
                Err(_) => Err(Error::Init(format!("{name}={text:?}: expected 1 or 0"))),
            },
        }
    }

    pub(super) fn list(&self, name: &str) -> Vec<String> {
        self.text(name)
            .map(|v| {
                v.split(',')
                    .map(str::trim)
                    .filter(|s| !s.is_empty())
                    .map(Into::into)
                    .collect()
            })
            .unwrap_or_default()
    }

    pub(super) fn addresses(&self, name: &str) -> Result<Vec<SocketAddr>, Error> {
        self.list(name)
            .iter()
            .map(|a| {
                a.parse().map_err(|_| {
                    Error::Init(format!(
                        "{name}: {a:?} is not an address of the form ip:port"
                    ))
                })
            })
            .collect()
    }
}

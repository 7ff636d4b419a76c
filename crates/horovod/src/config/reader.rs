//! Reads variables that are none of ours, such as a scheduler's; errors name the variable, the value and what is
//! accepted.

use super::Environment;
use crate::error::Error;

pub(super) struct Reader<'a> {
    pub(super) env: &'a dyn Environment,
}

impl Reader<'_> {
    pub(super) fn text(&self, name: &str) -> Option<String> {
        horovod_settings::text_of(self.env, name)
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
}

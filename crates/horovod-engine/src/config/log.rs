//! Settings of the log.

use horovod_settings::{self as settings, LogLevel};

use super::Environment;

/// Settings of the log; read when the bindings are loaded, before any init.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogSettings {
    /// Least severe level that is shown.
    pub level: tracing::Level,
    /// Leave the time out.
    pub hide_time: bool,
}

impl LogSettings {
    /// An unknown level means warning, as in the original.
    pub fn from_environment(env: &dyn Environment) -> Self {
        // The log itself has nobody to complain to.
        let level = match settings::LOG_LEVEL.read_or_default(env) {
            LogLevel::Trace => tracing::Level::TRACE,
            LogLevel::Debug => tracing::Level::DEBUG,
            LogLevel::Info => tracing::Level::INFO,
            LogLevel::Warning => tracing::Level::WARN,
            LogLevel::Error | LogLevel::Fatal => tracing::Level::ERROR,
        };
        Self {
            level,
            hide_time: settings::LOG_HIDE_TIME.read_or_default(env),
        }
    }
}

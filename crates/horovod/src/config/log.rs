//! Settings of the log.

use super::{Environment, Reader};

/// What the log shows; read when the bindings are loaded, before any init.
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
        let r = Reader { env };
        let level = match r
            .text("HOROVOD_LOG_LEVEL")
            .map(|v| v.trim().to_ascii_lowercase())
        {
            Some(v) if v == "trace" => tracing::Level::TRACE,
            Some(v) if v == "debug" => tracing::Level::DEBUG,
            Some(v) if v == "info" => tracing::Level::INFO,
            Some(v) if v == "error" || v == "fatal" => tracing::Level::ERROR,
            _ => tracing::Level::WARN,
        };
        Self {
            level,
            // The log itself has nobody to complain to.
            hide_time: r.flag("HOROVOD_LOG_HIDE_TIME", false).unwrap_or(false),
        }
    }
}

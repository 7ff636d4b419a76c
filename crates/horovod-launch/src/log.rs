//! The launcher's log: what its rendezvous warns of, on standard error like everything else that the launcher says.
//!
//! The threads that warn only leave a line here and notify; the launcher's own thread says it, so that a console that
//! takes nothing holds up no rendezvous. How often there is something to say about strangers is limited where they are met
//! (`crates/horovod-transport/src/tcp/listener.rs`); whatever else there may be, is bounded here.

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use horovod_settings::{self as settings, LogLevel};

use crate::environment;
use crate::options::Options;

/// Lines that may wait to be said; what comes then is only counted.
const LINES_MAX: usize = 64;
/// Bytes of one line.
const LINE_BYTES_MAX: usize = 1000;

#[derive(Debug, Default)]
struct WaitingLines {
    lines: Vec<String>,
    left_out: u64,
}

/// Lines that wait to be said.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log(Arc<Mutex<WaitingLines>>);

impl Log {
    /// Collects from now on what this process logs at the level of these options; `ring` wakes the launcher.
    pub(crate) fn install(options: &Options, ring: UnixStream) -> Self {
        let is_level = |(name, _): &&(&str, String)| *name == settings::LOG_LEVEL.name;
        let setting = options.knobs.iter().rev().find(is_level);
        let word = setting.map(|(_, value)| value.clone());
        let collector = Collector {
            level: level_of(&word.unwrap_or_else(environment::log_level)),
            log: Self::default(),
            ring,
        };
        let log = collector.log.clone();
        // Fails only if this process has a log already: then that one is used.
        let _ = tracing::subscriber::set_global_default(collector);
        log
    }

    fn lock(&self) -> MutexGuard<'_, WaitingLines> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, line: String) {
        let mut waiting = self.lock();
        if waiting.lines.len() < LINES_MAX {
            waiting.lines.push(line);
        } else {
            waiting.left_out += 1;
        }
    }

    /// Lines since the last call.
    pub(crate) fn take(&self) -> Vec<String> {
        let mut waiting = self.lock();
        let mut lines = std::mem::take(&mut waiting.lines);
        if waiting.left_out > 0 {
            lines.push(format!(
                "horovodrun: {} lines of the log were left out",
                std::mem::take(&mut waiting.left_out)
            ));
        }
        lines
    }
}

/// As the ranks read it: an unknown word means warnings.
fn level_of(word: &str) -> Level {
    let level = settings::LOG_LEVEL.parse(word);
    match level.unwrap_or(settings::LOG_LEVEL.kind.default) {
        LogLevel::Trace => Level::TRACE,
        LogLevel::Debug => Level::DEBUG,
        LogLevel::Info => Level::INFO,
        LogLevel::Warning => Level::WARN,
        LogLevel::Error | LogLevel::Fatal => Level::ERROR,
    }
}

struct Collector {
    level: Level,
    log: Log,
    ring: UnixStream,
}

impl Subscriber for Collector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level
    }

    fn max_level_hint(&self) -> Option<tracing::level_filters::LevelFilter> {
        Some(self.level.into())
    }

    fn event(&self, event: &Event<'_>) {
        self.log.add(line(event));
        // Full: then it is notified already.
        let _ = (&self.ring).write(&[1]);
    }

    // Nothing here has spans.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

fn line(event: &Event<'_>) -> String {
    let level = match *event.metadata().level() {
        Level::ERROR => "error",
        Level::WARN => "warning",
        Level::INFO => "info",
        Level::DEBUG => "debug",
        Level::TRACE => "trace",
    };
    let mut fields = Fields::default();
    event.record(&mut fields);
    let detail = match fields.others.is_empty() {
        true => String::new(),
        false => format!(" ({})", fields.others),
    };
    let text = format!("horovodrun: {level}: {}{detail}", fields.message);
    // One line, whatever is in it.
    let text = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut line = String::new();
    for c in text {
        if line.len() + c.len_utf8() > LINE_BYTES_MAX {
            break;
        }
        line.push(c);
    }
    line
}

#[derive(Default)]
struct Fields {
    message: String,
    others: String,
}

impl Fields {
    fn add(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        if field.name() == "message" {
            let _ = self.message.write_fmt(value);
            return;
        }
        let comma = if self.others.is_empty() { "" } else { ", " };
        let _ = write!(self.others, "{comma}{}={value}", field.name());
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format_args!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, format_args!("{value}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collect(level: Level, log: impl FnOnce()) -> Vec<String> {
        let (ring, _reader) = UnixStream::pair().expect("sockets");
        ring.set_nonblocking(true).expect("a socket");
        let collector = Collector {
            level,
            log: Log::default(),
            ring,
        };
        let lines = collector.log.clone();
        tracing::subscriber::with_default(collector, log);
        lines.take()
    }

    #[test]
    fn one_line_with_level_and_fields_for_each_event_of_the_level() {
        let lines = collect(Level::WARN, || {
            let why = std::io::Error::other("two\nlines");
            tracing::warn!(from = "10.0.0.9:1", %why, count = 3, "closed it");
            tracing::error!("bad");
            tracing::info!("not shown");
        });
        assert_eq!(
            lines,
            [
                "horovodrun: warning: closed it (from=10.0.0.9:1, why=two lines, count=3)",
                "horovodrun: error: bad",
            ]
        );
    }

    #[test]
    fn a_flood_is_counted_and_a_long_line_cut() {
        let mut lines = collect(Level::INFO, || {
            for _ in 0..LINES_MAX + 5 {
                tracing::info!("{}", "x".repeat(10_000));
            }
        });
        let last = lines.pop();
        assert_eq!(
            last.as_deref(),
            Some("horovodrun: 5 lines of the log were left out")
        );
        assert_eq!(lines.len(), LINES_MAX);
        assert!(lines.iter().all(|line| line.len() == LINE_BYTES_MAX));
    }

    #[test]
    fn words_of_levels_are_those_of_the_ranks() {
        for (word, level) in [
            ("TRACE", Level::TRACE),
            (" debug ", Level::DEBUG),
            ("Info", Level::INFO),
            ("warning", Level::WARN),
            ("ERROR", Level::ERROR),
            ("fatal", Level::ERROR),
            ("", Level::WARN),
            ("loud", Level::WARN),
        ] {
            assert_eq!(level_of(word), level, "{word}");
        }
    }
}

//! Log lines as users of Horovod know them: `[time: W source] [rank]: message`, warnings and above on stderr.

use std::fmt;
use std::io;

use horovod_engine::config::{LogSettings, ProcessEnvironment};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

/// Install the subscriber of this process; a second call does nothing.
pub(crate) fn install() {
    let settings = LogSettings::from_environment(&ProcessEnvironment);
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(settings.level)
        .event_format(Line {
            hide_time: settings.hide_time,
        })
        .with_writer(BySeverity)
        .finish();
    // Fails only if something else in this process has installed one: then that one is used.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

struct Line {
    hide_time: bool,
}

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let meta = event.metadata();
        write!(writer, "[")?;
        if !self.hide_time {
            SystemTime.format_time(&mut writer)?;
            write!(writer, ": ")?;
        }
        let initial = match *meta.level() {
            Level::TRACE => 'T',
            Level::DEBUG => 'D',
            Level::INFO => 'I',
            Level::WARN => 'W',
            Level::ERROR => 'E',
        };
        write!(writer, "{initial} {}] ", meta.target())?;
        if let Some(engine) = horovod_engine::try_engine() {
            write!(writer, "[{}]: ", engine.topology().rank.0)?;
        }
        let mut fields = String::new();
        ctx.field_format()
            .format_fields(Writer::new(&mut fields), event)?;
        writeln!(writer, "{}", horovod_engine::printable(&fields))
    }
}

struct BySeverity;

impl<'a> MakeWriter<'a> for BySeverity {
    type Writer = Box<dyn io::Write>;

    fn make_writer(&'a self) -> Self::Writer {
        Box::new(io::stderr())
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Self::Writer {
        if *meta.level() <= Level::WARN {
            Box::new(io::stderr())
        } else {
            Box::new(io::stdout())
        }
    }
}

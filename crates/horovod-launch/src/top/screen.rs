//! The terminal: raw input, the alternate screen, and a way back from both, also after SIGINT, SIGTERM and SIGHUP.
//!
//! A few control sequences that every terminal of today knows take the place of a library for terminals: the view is
//! lines of text, and nothing here needs what such a library adds to the wheel.

use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use super::view::{Line, Paint};
use crate::signals::Signals;

/// Alternate screen, cursor hidden.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
/// The reverse.
const LEAVE: &str = "\x1b[0m\x1b[?25h\x1b[?1049l";
const HOME: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";
const PLAIN: &str = "\x1b[0m";
/// The size of a terminal that does not know its own.
const USUAL_SIZE: (usize, usize) = (80, 24);

/// The reason why a wait has ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wake {
    Time,
    Signal,
    /// The terminal has sent these bytes; none: it is gone.
    Bytes(Vec<u8>),
}

/// Whether a view can be shown.
pub(super) fn is_terminal() -> bool {
    let is_dumb = crate::environment::is_dumb_terminal();
    io::stdin().is_terminal() && io::stdout().is_terminal() && !is_dumb
}

/// The terminal while it shows the view.
pub(super) struct Screen {
    before: Termios,
    is_coloured: bool,
}

impl Screen {
    pub(super) fn open() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        // Made first: it gives everything back, also if a later step fails.
        let screen = Self {
            before,
            is_coloured: crate::environment::wants_colours(),
        };
        tcsetattr(io::stdin(), OptionalActions::Flush, &raw)?;
        put(ENTER)?;
        Ok(screen)
    }

    /// Columns and rows.
    #[expect(clippy::unused_self, reason = "only an open screen has a size")]
    pub(super) fn size(&self) -> (usize, usize) {
        match tcgetwinsize(io::stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
                (size.ws_col.into(), size.ws_row.into())
            }
            _ => USUAL_SIZE,
        }
    }

    /// Replaces the frame by these lines.
    pub(super) fn draw(&self, lines: &[Line]) -> io::Result<()> {
        put(&drawn(lines, self.is_coloured))
    }

    /// Waits for a key, a signal or this time.
    pub(super) fn wait(&self, signals: &Signals, until: Instant) -> io::Result<Wake> {
        let stdin = io::stdin();
        let mut fds = [
            PollFd::from_borrowed_fd(stdin.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
        ];
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut fds, Some(&left)) {
            Ok(0) => Ok(Wake::Time),
            Err(rustix::io::Errno::INTR) => Ok(Wake::Signal),
            Err(error) => Err(error.into()),
            Ok(_) if !fds[1].revents().is_empty() => Ok(Wake::Signal),
            Ok(_) => {
                let mut buffer = [0; 256];
                let n = rustix::io::read(stdin.as_fd(), &mut buffer)?;
                Ok(Wake::Bytes(buffer[..n].to_vec()))
            }
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that is gone needs no way back.
        let _ = put(LEAVE);
        let _ = tcsetattr(io::stdin(), OptionalActions::Flush, &self.before);
    }
}

/// The text that draws these lines. Each line is cleared before it is written: after the last column the cursor stays on
/// that column, and would clear it.
fn drawn(lines: &[Line], is_coloured: bool) -> String {
    let mut text = HOME.to_owned();
    for (at, line) in lines.iter().enumerate() {
        if at > 0 {
            text.push_str("\r\n");
        }
        let is_last = at + 1 == lines.len();
        text.push_str(if is_last { CLEAR_BELOW } else { CLEAR_LINE });
        for (paint, piece) in &line.0 {
            match colour(*paint).filter(|_| is_coloured) {
                Some(colour) => text.extend([colour, piece, PLAIN]),
                None => text.push_str(piece),
            }
        }
    }
    text.push_str(PLAIN);
    text
}

fn put(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

fn colour(paint: Paint) -> Option<&'static str> {
    Some(match paint {
        Paint::Plain => return None,
        Paint::Title => "\x1b[1m",
        Paint::Soft => "\x1b[2m",
        Paint::Alarm => "\x1b[1;31m",
        Paint::Computing => "\x1b[32m",
        Paint::Communicating => "\x1b[34m",
        Paint::Waiting => "\x1b[33m",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_cleared_after_the_text_of_a_line() {
        let lines = ["12345", "678"].map(|text| Line(vec![(Paint::Title, text.into())]));
        assert_eq!(
            drawn(&lines, false),
            "\x1b[H\x1b[K12345\r\n\x1b[J678\x1b[0m"
        );
        assert!(drawn(&lines, true).ends_with("\x1b[J\x1b[1m678\x1b[0m\x1b[0m"));
    }
}

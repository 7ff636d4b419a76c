//! `horovodrun --top`: a live view of one running job in the terminal.
//!
//! The text is made by `view`, without a terminal. This file owns the terminal, the clock and the question to rank 0.

mod document;
mod keys;
mod screen;
mod view;

use std::io;
use std::time::{Duration, Instant};

use horovod_metrics::status::jobs;

use self::document::{Document, History};
use self::keys::{Key, keys};
use self::screen::{Screen, Wake};
use self::view::{Choice, Shown, frame};
use crate::options::Wanted;
use crate::signals::Signals;
use crate::status::{self, ChoiceError};

/// Time between two questions to rank 0, which has new figures once a second.
const PERIOD: Duration = Duration::from_secs(1);

/// Time for its answer, in which keys wait.
const ANSWER_LIMIT: Duration = Duration::from_millis(500);

/// Why there is no view.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TopError {
    #[error(
        "--top needs a terminal for its input and output, of a type other than `dumb`; --status prints the figures once, \
         also into a file or a pipe"
    )]
    NoTerminal,
    #[error("--top: {0}")]
    Choice(#[from] ChoiceError),
    #[error("--top: the terminal: {0}")]
    Terminal(#[from] io::Error),
}

/// Shows the job until the user quits.
pub(crate) fn run(wanted: Wanted) -> Result<(), TopError> {
    if !screen::is_terminal() {
        return Err(TopError::NoTerminal);
    }
    let job = status::choose(wanted, "--top=JOB")?;
    let mut signals = Signals::watch()?;
    let screen = Screen::open()?;
    let mut watch = Watch::new(job.pid);
    loop {
        watch.ask();
        let next = Instant::now() + PERIOD;
        loop {
            screen.draw(&watch.frame(screen.size()))?;
            match screen.wait(&signals, next)? {
                Wake::Time => break,
                Wake::Signal => {
                    if !signals.take().is_empty() {
                        return Ok(());
                    }
                }
                // The terminal is gone.
                Wake::Bytes(bytes) if bytes.is_empty() => return Ok(()),
                Wake::Bytes(bytes) => {
                    for key in keys(&bytes) {
                        if key == Key::Quit {
                            return Ok(());
                        }
                        watch.choice.take(key);
                    }
                }
            }
        }
    }
}

/// The job under watch.
struct Watch {
    /// The process of rank 0. Each `hvd.init()` there has a socket of its own.
    job: u32,
    history: History,
    lost: Option<String>,
    choice: Choice,
}

impl Watch {
    fn new(job: u32) -> Self {
        Self {
            job,
            history: History::default(),
            lost: None,
            choice: Choice::default(),
        }
    }

    /// Asks rank 0 for its figures. Where it does not answer, the last ones stay.
    fn ask(&mut self) {
        match self.answer() {
            Ok(document) => {
                self.history.add(Instant::now(), document);
                self.lost = None;
            }
            Err(why) => self.lost = Some(why),
        }
    }

    fn answer(&self) -> Result<Document, String> {
        let all = jobs().map_err(|e| format!("the system does not list local sockets: {e}"))?;
        let job = all.iter().find(|job| job.pid == self.job);
        let job = job.ok_or("the job has ended, or begins again; these are its last figures")?;
        let text = job.ask_within("stats.json", ANSWER_LIMIT);
        let text = text.map_err(|e| format!("rank 0 does not answer: {e}; the figures are old"))?;
        serde_json::from_str(&text)
            .map_err(|e| format!("rank 0 answers what cannot be read, is it the same version? {e}"))
    }

    fn frame(&mut self, size: (usize, usize)) -> Vec<view::Line> {
        let nothing = Document::default();
        let shown = Shown {
            job: self.job,
            document: self.history.latest().unwrap_or(&nothing),
            rows: self.history.rows(),
            lost: self.lost.clone(),
        };
        frame(shown, &mut self.choice, size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_terminal_the_text_names_the_other_option() {
        let text = TopError::NoTerminal.to_string();
        assert!(text.contains("--status"), "{text}");
    }
}

//! The agent in an examination: carries questions and answers until the launcher hangs up.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use horovod_doctor::{AgentEnvironment, Answer, Examiner, Question};

use crate::frames::{FrameBuffer, FromAgent, ToAgent};
use crate::io::{Got, Interest, Outbox, read_some, wait};
use crate::signals::Signals;
use crate::{environment, platform};

/// An agent that is asked.
pub(crate) struct Examined {
    stdin: File,
    stdout: File,
    signals: Signals,
    inbox: FrameBuffer,
    outbox: Outbox,
    examiner: Examiner,
}

impl Examined {
    pub(crate) fn new(
        stdin: File,
        stdout: File,
        signals: Signals,
        inbox: FrameBuffer,
        outbox: Outbox,
    ) -> io::Result<Self> {
        let place = AgentEnvironment {
            hostname: environment::hostname(),
            path: environment::path(),
            lay_over_own: environment::lay_over_own,
        };
        Ok(Self {
            stdin,
            stdout,
            signals,
            inbox,
            outbox,
            examiner: Examiner::new(place)?,
        })
    }

    /// Answers these and all further questions; returns when the launcher is gone.
    pub(crate) fn run(mut self, first: Vec<Question>) -> io::Result<()> {
        for question in first {
            self.answer(question)?;
        }
        let mut buffer = vec![0; 64 << 10];
        while self.signals.take().is_empty() {
            while let Some(answer) = self.examiner.next_answer() {
                self.send(answer);
            }
            if self.outbox.flush(&mut self.stdout).is_err() {
                break;
            }
            match read_some(&mut self.stdin, &mut buffer) {
                Got::Bytes(count) => {
                    self.inbox.push(&buffer[..count]);
                    if !self.answer_all()? {
                        break;
                    }
                    continue;
                }
                Got::Nothing => {}
                Got::End => break,
            }
            let mut interests = vec![
                Interest::read(self.signals.as_fd()),
                Interest::read(self.stdin.as_fd()),
                Interest::read(self.examiner.as_fd()),
            ];
            if self.outbox.len() > 0 {
                interests.push(Interest::write(self.stdout.as_fd()));
            }
            wait(&interests, None)?;
            self.examiner.woken();
        }
        // A program that was asked and has not answered yet.
        for pid in platform::descendants() {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        Ok(())
    }

    fn send(&mut self, answer: Answer) {
        FromAgent::Found(answer).encode(self.outbox.buffer());
    }

    /// False when what came is not from a launcher.
    fn answer_all(&mut self) -> io::Result<bool> {
        loop {
            let message = match self.inbox.next_frame() {
                Ok(Some(frame)) => ToAgent::decode(frame),
                Ok(None) => return Ok(true),
                Err(_) => return Ok(false),
            };
            match message {
                Ok(ToAgent::Examine(question)) => self.answer(question)?,
                Ok(_) => {}
                Err(_) => return Ok(false),
            }
        }
    }

    fn answer(&mut self, question: Question) -> io::Result<()> {
        let Some(answer) = self.examiner.answer(question)? else {
            return Ok(());
        };
        let is_the_time = matches!(answer, Answer::Clock(..));
        self.send(answer);
        // The launcher measures how long this one takes.
        if is_the_time {
            self.outbox.flush(&mut self.stdout)?;
        }
        Ok(())
    }
}

//! The host agent: starts the ranks of one host, carries their output and exit statuses to the launcher, and
//! leaves no process behind, whatever happens to the launcher or to the connection.
//!
//! One thread, one poll. The agent watches the launcher's end of stdin: when it closes, the ranks end.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use horovod_doctor::{check_command, check_timeline};
use horovod_transport::unreached::post::Post;

use crate::dialing::{Failure, status};
use crate::doctor::agent::Examined;
use crate::frames::{
    DialedTask, ExitStatus, FrameBuffer, FromAgent, JobSpec, MAGIC, Question, RankSpec, Stop,
    Stream, ToAgent, Variables,
};
use crate::io::{Got, Interest, Outbox, earlier, read_some, set_nonblocking, wait};
use crate::out_of_memory::MemoryKills;
use crate::ranks::{Living, Ranks, killed};
use crate::signals::Signals;
use crate::single_endings::SingleEndings;
use crate::threads::{self, Share, Threads};
use crate::{dialing, environment};

/// Name of the hidden subcommand.
pub(crate) const SUBCOMMAND: &str = "__agent";
/// Output of ranks that may wait for the launcher; beyond it the ranks wait in their pipes.
const OUTBOX_BYTES_MAX: usize = 1 << 20;
/// From SIGINT to SIGTERM.
pub(crate) const INTERRUPT_GRACE: Duration = Duration::from_secs(3);
/// Time for processes left running to end by themselves after the last rank.
pub(crate) const LEFTOVER_GRACE: Duration = Duration::from_secs(1);
/// Time after SIGKILL; processes that still cannot die (a hanging disk) are then given up.
const KILL_GRACE: Duration = Duration::from_secs(2);
/// Time for the launcher to receive the agent's last message.
const HANG_UP_LIMIT: Duration = Duration::from_secs(10);
/// Time between two searches for remaining processes.
const RECHECK: Duration = Duration::from_millis(50);

/// Runs until the job is over and returns the exit status.
pub(crate) fn run(words: &[OsString]) -> Result<u8, Failure> {
    let dialed = match words {
        [option] if option == dialing::OPTION => Some(dialing::start()?),
        [option] if option == dialing::STARTED_BY_MPI => Some(dialing::start_from_mpi()?),
        _ => None,
    };
    match dialed {
        Some(dialed) => {
            let (stdin, stdout) = (dialed.file()?, dialed.file()?);
            let (task, python) = (dialed.task.clone(), dialed.python.clone());
            let result = run_on(stdin, stdout, Some(task), python);
            if dialed.is_of_mpi && result.is_ok() {
                dialed.await_hang_up()?;
            }
            dialed.connection.close(HANG_UP_LIMIT);
            let status = result?;
            Ok(if dialed.is_of_mpi { 0 } else { status })
        }
        None => {
            // Duplicates without a buffer or lock of the standard library in between.
            let stdin = File::from(io::stdin().as_fd().try_clone_to_owned()?);
            let stdout = File::from(io::stdout().as_fd().try_clone_to_owned()?);
            run_on(stdin, stdout, None, OsString::new())?;
            Ok(0)
        }
    }
}

fn run_on(stdin: File, stdout: File, task: Option<DialedTask>, python: OsString) -> io::Result<u8> {
    crate::platform::adopt_orphans();
    let signals = Signals::watch()?;
    set_nonblocking(&stdin)?;
    set_nonblocking(&stdout)?;
    let mut agent = Agent {
        stdin: Some(stdin),
        stdout,
        signals,
        inbox: FrameBuffer::default(),
        outbox: Outbox::default(),
        job: None,
        ranks: Ranks::default(),
        started: false,
        is_open: false,
        has_failed: false,
        exit_status: None,
        single_endings: SingleEndings::default(),
        ending: None,
        leftovers_since: None,
        last_received: Instant::now(),
        done: false,
        threads: None,
        questions: Vec::new(),
        memory_kills: MemoryKills::watch(),
        post: None,
        python,
    };
    agent.outbox.buffer().extend_from_slice(MAGIC);
    agent.send(&FromAgent::Hello {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        hostname: environment::hostname(),
        task,
    });
    while !agent.is_over() {
        agent.step()?;
        if !agent.questions.is_empty() {
            agent.examine()?;
            return Ok(0);
        }
    }
    Ok(agent.status())
}

/// How far the end of the ranks has come, and when it gets harder.
#[derive(Clone, Copy, Debug)]
struct Ending {
    how: Stop,
    harder_at: Instant,
}

struct Agent {
    /// `None` once the launcher is gone.
    stdin: Option<File>,
    stdout: File,
    signals: Signals,
    inbox: FrameBuffer,
    outbox: Outbox,
    job: Option<JobSpec>,
    ranks: Ranks,
    started: bool,
    /// Ranks may still come.
    is_open: bool,
    /// A rank of a job of fixed size has failed.
    has_failed: bool,
    /// Exit status once the job is over here: all ranks have ended, or the launcher has said so.
    exit_status: Option<u8>,
    single_endings: SingleEndings,
    ending: Option<Ending>,
    leftovers_since: Option<Instant>,
    last_received: Instant,
    done: bool,
    /// How many threads ranks were told to use, and whether the user knows.
    threads: Option<Threads>,
    /// The doctor's questions; an agent with questions runs no job.
    questions: Vec<Question>,
    memory_kills: MemoryKills,
    /// Where ranks tell that they cannot reach the launcher; `None` before there is a job, and where there cannot be.
    post: Option<Post>,
    /// Interpreter for a command that names no program.
    python: OsString,
}

impl Agent {
    /// From here on there are only questions.
    fn examine(self) -> io::Result<()> {
        let Some(stdin) = self.stdin else {
            return Ok(());
        };
        Examined::new(stdin, self.stdout, self.signals, self.inbox, self.outbox)?
            .run(self.questions)
    }

    fn send(&mut self, message: &FromAgent) {
        if self.stdin.is_some() {
            message.encode(self.outbox.buffer());
        }
    }

    /// Exit status of an agent that has dialed: its starter may have to start it again.
    fn status(&self) -> u8 {
        self.exit_status.unwrap_or(status::LOST)
    }

    fn is_over(&self) -> bool {
        let nothing_runs = !self.started || self.done;
        nothing_runs && (self.stdin.is_none() || (self.done && self.outbox.len() == 0))
    }

    fn step(&mut self) -> io::Result<()> {
        if self.outbox.len() > 0 && self.outbox.flush(&mut self.stdout).is_err() {
            self.lose_launcher();
        }
        self.sleep()?;
        // Before reaping: a child that ends in between must wake it again.
        let asked_to_end = !self.signals.take().is_empty();
        self.reap();
        let now = Instant::now();
        self.receive();
        if asked_to_end {
            self.stop(Stop::Terminate, now);
        }
        self.collect_output();
        let report = self.post.as_mut().map(|post| post.take(now));
        for report in report.into_iter().flatten() {
            self.send(&FromAgent::Unreached(report));
        }
        self.get_harder(now);
        self.finish(now);
        Ok(())
    }

    fn sleep(&self) -> io::Result<()> {
        let mut interests = vec![Interest::read(self.signals.as_fd())];
        if let Some(stdin) = &self.stdin {
            interests.push(Interest::read(stdin.as_fd()));
        }
        if self.outbox.len() > 0 {
            interests.push(Interest::write(self.stdout.as_fd()));
        }
        if self.has_room() {
            interests.extend(self.ranks.pipes().map(Interest::read));
        }
        let post = self.post.iter().flat_map(Post::fds);
        interests.extend(post.map(Interest::read));
        wait(&interests, self.deadline())
    }

    fn deadline(&self) -> Option<Instant> {
        let harder = self
            .ending
            .filter(|e| e.how < Stop::Kill)
            .map(|e| e.harder_at);
        let may_start = self.is_open && self.ending.is_none();
        let looking = self.started && !may_start && !self.done && self.ranks.all_ended();
        let harder = earlier(harder, self.single_endings.deadline());
        let killing = self.ending.is_some_and(|e| e.how == Stop::Kill) && !self.done;
        let recheck = (looking || killing).then(|| Instant::now() + RECHECK);
        let silence = self.silence_max().map(|limit| self.last_received + limit);
        let post = self.post.as_ref().and_then(Post::deadline);
        earlier(earlier(earlier(harder, recheck), silence), post)
    }

    fn silence_max(&self) -> Option<Duration> {
        let limit = self.job.as_ref().map_or(0, |job| job.silence_max_s);
        (limit > 0 && self.stdin.is_some()).then(|| Duration::from_secs(limit.into()))
    }

    fn has_room(&self) -> bool {
        self.stdin.is_none() || self.outbox.len() < OUTBOX_BYTES_MAX
    }

    /// Nobody listens any more: end the ranks, throw their output away.
    fn lose_launcher(&mut self) {
        self.stdin = None;
        self.outbox.clear();
        self.stop(Stop::Terminate, Instant::now());
    }

    fn receive(&mut self) {
        let mut buffer = [0; 64 << 10];
        while let Some(stdin) = &mut self.stdin {
            match read_some(stdin, &mut buffer) {
                Got::Bytes(count) => {
                    self.last_received = Instant::now();
                    self.inbox.push(&buffer[..count]);
                    if !self.obey_all() {
                        self.lose_launcher();
                    }
                }
                Got::Nothing => break,
                Got::End => self.lose_launcher(),
            }
        }
        if self
            .silence_max()
            .is_some_and(|limit| self.last_received.elapsed() > limit)
        {
            self.lose_launcher();
        }
    }

    /// False when what came is not from a launcher.
    fn obey_all(&mut self) -> bool {
        loop {
            let message = match self.inbox.next_frame() {
                Ok(Some(frame)) => ToAgent::decode(frame),
                Ok(None) => return true,
                Err(_) => return false,
            };
            match message {
                Ok(message) => self.obey(message),
                Err(_) => return false,
            }
        }
    }

    fn obey(&mut self, message: ToAgent) {
        match message {
            ToAgent::Job(job) => self.prepare(job),
            ToAgent::Start => self.start(),
            ToAgent::Stop(how) => {
                self.exit_status = Some(status::STOPPED);
                self.stop(how, Instant::now());
            }
            ToAgent::Ping => {}
            ToAgent::Spawn(spec) => self.spawn(spec),
            ToAgent::End(rank) => {
                self.ranks.signal_rank(rank, Stop::Terminate);
                let kill_at = Instant::now() + self.terminate_timeout();
                self.single_endings.add(rank, kill_at);
            }
            ToAgent::CheckStopped { rank, pid } => {
                let is_stopped = self.ranks.is_stopped(rank, pid);
                self.send(&FromAgent::StoppedState { rank, is_stopped });
            }
            ToAgent::Close => {
                self.exit_status.get_or_insert(0);
                self.is_open = false;
            }
            ToAgent::Cause(text) => {
                if let Some(post) = &mut self.post {
                    post.answer(&text);
                }
            }
            ToAgent::Examine(question) => self.questions.push(question),
        }
    }

    fn prepare(&mut self, mut job: JobSpec) {
        let here = std::env::current_dir().unwrap_or_else(|_| "/".into());
        if job.stays {
            job.env = environment::lay_own_over(job.env);
            job.cwd.clone_from(&here);
        } else if job.inherit_env {
            job.env = environment::lay_over_own(&job.env);
        }
        job.env.append(&mut job.on_top);
        if let Some(program) = job.command.first_mut().filter(|word| word.is_empty()) {
            program.clone_from(&self.python);
        }
        if !job.cwd.is_dir() {
            // As Horovod does: a job may use only absolute paths.
            self.send(&FromAgent::Note(format!(
                "the working directory {} does not exist here, using {}",
                job.cwd.display(),
                here.display()
            )));
            job.cwd = here;
        }
        // A worker of an elastic job tries on, and the others go on without it meanwhile.
        self.post = (!job.is_open).then(Post::open).and_then(Result::ok);
        for spec in &mut job.ranks {
            self.limit_threads(&job.env, spec);
            let post = self
                .post
                .as_ref()
                .map(|post| environment::of_post(post.name()));
            spec.env.extend(post);
        }
        let value = |wanted: &str| {
            let found = job.env.iter().rev().find(|(name, _)| name == wanted);
            found.map(|(_, value)| value.as_os_str())
        };
        // Rank 0 writes the timeline. In an elastic job it may be anywhere.
        let timeline = job.ranks.iter().any(|spec| spec.rank == 0 && !job.is_open);
        let timeline = timeline.then(|| value("HOROVOD_TIMELINE")).flatten();
        let checked = check_command(&job.command, &job.cwd, value("PATH"))
            .and_then(|()| check_timeline(timeline, &job.cwd));
        let answer = match checked {
            Ok(()) => FromAgent::Ready,
            Err(missing) => FromAgent::Refused {
                code: missing.code,
                why: missing.why,
            },
        };
        self.send(&answer);
        self.job = Some(job);
    }

    /// Tells a rank's libraries how many threads they may use, where the user has not.
    fn limit_threads(&mut self, env: &Variables, spec: &mut RankSpec) {
        let (share, ranks) = (Share::of_this_process(), threads::ranks_beside(spec));
        let names = threads::to_set(env);
        let Some(count) = share.per_rank(ranks).filter(|_| !names.is_empty()) else {
            return;
        };
        let threads = Threads {
            threads: count,
            cores: share.usable,
            ranks,
            is_openmp: names.contains(&threads::OPENMP),
        };
        let value = || count.to_string().into();
        spec.env
            .extend(names.into_iter().map(|name| (name.into(), value())));
        if self.threads.as_ref() != Some(&threads) {
            self.send(&FromAgent::Threads(threads.clone()));
            self.threads = Some(threads);
        }
    }

    /// One more rank. If it cannot be started it counts as ended at once, as with a shell.
    fn spawn(&mut self, mut spec: RankSpec) {
        let Some(job) = self.job.take_if(|_| self.started) else {
            return;
        };
        self.limit_threads(&job.env, &mut spec);
        self.spawn_limited(&job, &spec);
        self.job = Some(job);
    }

    fn spawn_limited(&mut self, job: &JobSpec, spec: &RankSpec) {
        let rank = spec.rank;
        if self.ending.is_some() {
            let status = ExitStatus::Signal(libc::SIGTERM);
            return self.send(&FromAgent::Exited { rank, status });
        }
        match self.ranks.spawn(job, spec) {
            Ok(pid) => self.send(&FromAgent::Started { rank, pid }),
            Err(error) => {
                self.send(&FromAgent::Note(format!(
                    "a process could not be started: {error}"
                )));
                let status = ExitStatus::Code(126);
                self.send(&FromAgent::Exited { rank, status });
            }
        }
    }

    fn start(&mut self) {
        let Some(job) = &self.job else { return };
        if std::mem::replace(&mut self.started, true) {
            return;
        }
        self.is_open = job.is_open;
        for spec in &job.ranks {
            match self.ranks.spawn(job, spec) {
                Ok(pid) => {
                    FromAgent::Started {
                        rank: spec.rank,
                        pid,
                    }
                    .encode(self.outbox.buffer());
                }
                Err(error) => {
                    let why = format!("rank {} could not be started: {error}", spec.rank);
                    self.send(&FromAgent::Refused { code: 1, why });
                    self.stop(Stop::Terminate, Instant::now());
                    return;
                }
            }
        }
    }

    /// Never gets softer: a second, weaker request changes nothing.
    fn stop(&mut self, how: Stop, now: Instant) {
        if self.ending.is_some_and(|ending| ending.how >= how) {
            return;
        }
        let grace = match how {
            Stop::Interrupt => INTERRUPT_GRACE,
            Stop::Terminate => self.terminate_timeout(),
            Stop::Kill => KILL_GRACE,
        };
        self.ending = Some(Ending {
            how,
            harder_at: now + grace,
        });
        self.ranks.signal(how);
    }

    fn get_harder(&mut self, now: Instant) {
        match self.ending {
            Some(Ending {
                how: Stop::Interrupt,
                harder_at,
            }) if now >= harder_at => {
                self.stop(Stop::Terminate, now);
            }
            Some(Ending {
                how: Stop::Terminate,
                harder_at,
            }) if now >= harder_at => {
                let living = self.ranks.living();
                self.note_killed(&living);
                self.stop(Stop::Kill, now);
            }
            // Again and again: a process may fork while its parent is being killed.
            Some(Ending {
                how: Stop::Kill, ..
            }) => self.ranks.signal(Stop::Kill),
            _ => {}
        }
        for (rank, is_first) in self.single_endings.due(now) {
            if is_first {
                self.note_killed(&self.ranks.living_of(rank));
            }
            self.ranks.signal_rank(rank, Stop::Kill);
            self.ranks.forget_ended();
            if self.ranks.living_of(rank).is_empty() {
                self.single_endings.remove(rank);
            }
        }
    }

    fn terminate_timeout(&self) -> Duration {
        let seconds = self.job.as_ref().map_or(0, |job| job.terminate_timeout_s);
        Duration::from_secs(seconds.into())
    }

    /// Reports what did not end after SIGTERM.
    fn note_killed(&mut self, living: &[Living]) {
        if !living.is_empty() {
            let text = killed(living, self.terminate_timeout());
            self.send(&FromAgent::Note(text));
        }
    }

    fn reap(&mut self) {
        for (rank, status) in self.ranks.reap() {
            // Once the job is being ended, SIGKILL comes from this agent.
            let was_killed = status.is_kill() && self.ending.is_none();
            let status = match was_killed && self.memory_kills.is_any_new() {
                true => ExitStatus::OutOfMemory,
                false => status,
            };
            // Output from before the end comes first, so that the launcher has the last lines when it handles the end.
            let last = self.ranks.drain(rank);
            for (stream, bytes) in last {
                self.carry(rank, stream, bytes);
            }
            // A failed rank of an elastic job may be replaced.
            self.has_failed |= !self.is_open && status != ExitStatus::Code(0);
            self.send(&FromAgent::Exited { rank, status });
            if self.is_open {
                self.end_rest_of(rank);
            }
        }
    }

    /// Ends what a rank of an elastic job has left: another may start in its place, with the same devices.
    fn end_rest_of(&mut self, rank: u32) {
        self.ranks.signal_rank(rank, Stop::Terminate);
        self.ranks.forget_ended();
        if self.ranks.living_of(rank).is_empty() {
            self.single_endings.remove(rank);
        } else {
            let kill_at = Instant::now() + self.terminate_timeout();
            self.single_endings.add(rank, kill_at);
        }
    }

    fn carry(&mut self, rank: u32, stream: Stream, bytes: Vec<u8>) {
        self.send(&FromAgent::Output {
            rank,
            stream,
            bytes,
        });
    }

    fn collect_output(&mut self) {
        if !self.has_room() {
            return;
        }
        for (rank, stream, bytes) in self.ranks.read() {
            self.carry(rank, stream, bytes);
        }
    }

    /// After the last rank: whatever they left running ends too.
    fn finish(&mut self, now: Instant) {
        let may_start = self.is_open && self.ending.is_none();
        if !self.started || may_start || self.done || !self.ranks.all_ended() {
            return;
        }
        let gave_up = self
            .ending
            .is_some_and(|e| e.how == Stop::Kill && now >= e.harder_at);
        if gave_up || !self.ranks.has_leftovers() {
            self.done = true;
            if self.stdin.is_some() {
                let status = if self.has_failed { status::STOPPED } else { 0 };
                self.exit_status.get_or_insert(status);
            }
            self.collect_output();
            self.send(&FromAgent::Done);
            return;
        }
        let since = *self.leftovers_since.get_or_insert(now);
        if self
            .ending
            .is_none_or(|ending| ending.how == Stop::Interrupt)
            && now >= since + LEFTOVER_GRACE
        {
            self.stop(Stop::Terminate, now);
        } else if self
            .ending
            .is_some_and(|ending| ending.how == Stop::Terminate)
            && since == now
        {
            // They were not in a rank's group, or they ignored the first SIGTERM.
            self.ranks.signal(Stop::Terminate);
        }
    }
}

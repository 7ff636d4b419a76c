//! Runs the real `horovodrun` under a hard time limit and looks at what it prints and leaves behind.

// Finds processes in /proc.
#![cfg(target_os = "linux")]

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// No test may take longer.
const LIMIT: Duration = Duration::from_secs(240);
/// For this long a process without arguments counts as being in `execve`. Processes of others may have none for ever.
const EXEC_TIMEOUT: Duration = Duration::from_secs(2);
/// In the environment of every process of one run, so that all of them can be found.
const MARK: &str = "LAUNCH_TEST_RUN";

/// A folder that goes with the test.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("horovodrun-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).expect("a scratch folder");
        Self(path)
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes an executable script.
    pub(crate) fn program(&self, name: &str, text: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = self.file(name);
        fs::write(&path, text).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A `horovodrun` under way.
pub(crate) struct Run {
    child: Child,
    mark: String,
    out: Arc<Mutex<Vec<u8>>>,
    err: Arc<Mutex<Vec<u8>>>,
    readers: Vec<JoinHandle<()>>,
    started: Instant,
}

/// How a run ended.
pub(crate) struct Ended {
    /// As a shell would say: 128 and the signal's number for signals.
    pub(crate) code: i32,
    pub(crate) out: Vec<u8>,
    pub(crate) err: String,
}

impl Ended {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.out).into_owned()
    }

    /// Lines of stdout in a fixed order: ranks print at the same time.
    pub(crate) fn sorted(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.text().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }
}

/// A command that runs `horovodrun` with these words.
pub(crate) fn horovodrun<W: AsRef<OsStr>>(words: impl IntoIterator<Item = W>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_horovodrun"));
    // Else there is a line about it.
    command.env("OMP_NUM_THREADS", "1");
    // A loaded machine may take long to start what comes up at once elsewhere.
    command.env("HOROVOD_START_TIMEOUT", LIMIT.as_secs().to_string());
    // The batch job and the settings of the user that runs the tests.
    for name in [
        "SLURM_JOB_ID",
        "SLURM_JOBID",
        "LSB_JOBID",
        "PBS_NODEFILE",
        "PE_HOSTFILE",
        "OAR_NODEFILE",
    ] {
        command.env_remove(name);
    }
    command.env("XDG_CONFIG_HOME", "/nonexistent");
    command.args(words);
    command
}

/// `horovodrun -np COUNT sh -c SCRIPT`.
pub(crate) fn shell(count: u32, script: &str) -> Command {
    horovodrun(["-np", &count.to_string(), "sh", "-c", script])
}

/// Waits for a condition, not for a time.
#[track_caller]
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}: not within {LIMIT:?}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

impl Run {
    pub(crate) fn start(command: Command) -> Self {
        Self::start_with(command, Stdio::null())
    }

    /// With this as its standard input.
    pub(crate) fn start_with(mut command: Command, stdin: Stdio) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let mark = format!(
            "{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        command
            .env(MARK, &mark)
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("horovodrun starts");
        let (out, err) = (Arc::default(), Arc::default());
        let readers = vec![
            collect(child.stdout.take().expect("piped"), Arc::clone(&out)),
            collect(child.stderr.take().expect("piped"), Arc::clone(&err)),
        ];
        Self {
            child,
            mark,
            out,
            err,
            readers,
            started: Instant::now(),
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything printed so far, both streams.
    pub(crate) fn printed(&self) -> String {
        let out = self.out.lock().expect("no panic").clone();
        let err = self.err.lock().expect("no panic").clone();
        format!(
            "{}{}",
            String::from_utf8_lossy(&out),
            String::from_utf8_lossy(&err)
        )
    }

    /// Waits until each of these texts was printed.
    #[track_caller]
    pub(crate) fn wait_for(&self, texts: &[&str]) {
        until(&format!("{texts:?} printed"), || {
            let printed = self.printed();
            texts.iter().all(|text| printed.contains(text))
        });
    }

    /// The text after `text` up to the end of the line where it was printed.
    #[track_caller]
    pub(crate) fn after(&self, text: &str) -> String {
        let mut found = String::new();
        until(text, || {
            let printed = self.printed();
            let rest = printed.split_once(text).map(|(_, rest)| rest.to_owned());
            found = rest
                .and_then(|r| r.split_once('\n').map(|(l, _)| l.to_owned()))
                .unwrap_or_default();
            !found.is_empty()
        });
        found
    }

    pub(crate) fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    /// Processes of this run, launcher and agents included.
    pub(crate) fn members(&self) -> Vec<(u32, String)> {
        let want = format!("{MARK}={}", self.mark);
        processes()
            .filter(|pid| {
                environment(*pid)
                    .split(|byte| *byte == 0)
                    .any(|entry| entry == want.as_bytes())
            })
            .map(|pid| (pid, command_line(pid)))
            .collect()
    }

    /// Waits for the end, which must come in time, and checks that no process is left.
    #[track_caller]
    pub(crate) fn end(mut self) -> Ended {
        let mut status = None;
        while status.is_none() {
            status = self.child.try_wait().expect("waitable");
            if self.started.elapsed() > LIMIT {
                let printed = self.printed();
                let members = self.members();
                self.kill_all();
                panic!(
                    "still running after {LIMIT:?}; printed:\n{printed}\nprocesses: {members:?}"
                );
            }
            std::thread::park_timeout(Duration::from_millis(5));
        }
        until("all processes of the run end", || self.members().is_empty());
        for reader in self.readers.drain(..) {
            reader.join().expect("reads to the end");
        }
        let status = status.expect("ended");
        let code = status
            .code()
            .or_else(|| status.signal().map(|signal| 128 + signal));
        let out = self.out.lock().expect("no panic").clone();
        let err = String::from_utf8_lossy(&self.err.lock().expect("no panic")).into_owned();
        Ended {
            code: code.expect("ended"),
            out,
            err,
        }
    }

    fn kill_all(&mut self) {
        let _ = self.child.kill();
        for (pid, _) in self.members() {
            signal(pid, "KILL");
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // A failed test leaves nothing either.
        self.kill_all();
        let _ = self.child.wait();
    }
}

pub(crate) fn run(command: Command) -> Ended {
    Run::start(command).end()
}

fn collect(from: impl std::io::Read + Send + 'static, to: Arc<Mutex<Vec<u8>>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut from = BufReader::with_capacity(1 << 16, from);
        while let Ok(bytes) = from.fill_buf() {
            if bytes.is_empty() {
                break;
            }
            let count = bytes.len();
            to.lock().expect("no panic").extend_from_slice(bytes);
            from.consume(count);
        }
    })
}

pub(crate) fn signal(pid: u32, name: &str) {
    let status = Command::new("kill")
        .args([&format!("-{name}"), &pid.to_string()])
        .stderr(Stdio::null())
        .status();
    assert!(status.is_ok(), "kill can be run");
}

pub(crate) fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").expect("/proc").flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

pub(crate) fn command_line(pid: u32) -> String {
    String::from_utf8_lossy(&entry(pid, "cmdline")).replace('\0', " ")
}

/// The environment of a process of ours; empty for others and for one that has ended.
fn environment(pid: u32) -> Vec<u8> {
    let deadline = Instant::now() + EXEC_TIMEOUT;
    loop {
        let environment = entry(pid, "environ");
        if !environment.is_empty() || !is_in_exec(pid) || Instant::now() > deadline {
            return environment;
        }
        std::thread::yield_now();
    }
}

/// Whether a process is amid `execve`: for a moment it has a program, but neither arguments nor environment. Zombies and
/// threads of the kernel have no program either.
fn is_in_exec(pid: u32) -> bool {
    fs::read_link(format!("/proc/{pid}/exe")).is_ok() && entry(pid, "cmdline").is_empty()
}

fn entry(pid: u32, name: &str) -> Vec<u8> {
    fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default()
}

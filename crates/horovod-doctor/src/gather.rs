//! The examination of one host: everything that an agent can find out alone, by a deadline.

use std::ffi::{OsStr, OsString};
use std::io;
use std::net::{IpAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit};

use super::facts::{HostFacts, Limits, Python, Space};
use super::talk::Scene;
use super::{check_build, preflight};

/// Variables of an environment.
pub type Variables = Vec<(OsString, OsString)>;

/// An agent's facts about its own process.
#[derive(Clone, Debug)]
pub struct AgentEnvironment {
    /// This machine's own name.
    pub hostname: String,
    /// Where programs are searched.
    pub path: OsString,
    /// The agent's own environment, overlaid with the launcher's.
    pub lay_over_own: fn(&Variables) -> Variables,
}

/// Prints what this package and PyTorch are there; only this package is imported. Goes behind
/// [`check_build::INSTALLATION`].
const PROGRAM: &str = r#"
import platform, sys
def say(name, value):
    print(name, " ".join(str(value).split()), sep="|", flush=True)
say("program", sys.executable)
say("version", platform.python_version())
say("libc", " ".join(platform.libc_ver()))
try:
    say("torch", importlib.metadata.version("torch"))
except importlib.metadata.PackageNotFoundError:
    pass
wrong = findings()
if wrong:
    say("mixed", "; ".join(wrong))
try:
    import horovod, horovod._core
    say("horovod", horovod.__version__)
    from horovod.common._gpu_libraries import found
    for name, library in found().items():
        say(*((f"no-{name}", library) if isinstance(library, str) else (name, " ".join(library))))
except BaseException as error:
    say("problem", f"{type(error).__name__}: {error}")
"#;

/// Time limit of `nvidia-smi`; a broken driver makes it hang.
const GPU_TIME: Duration = Duration::from_secs(3);

/// Looks at this host in place of a rank.
pub(crate) fn facts(scene: &Scene, place: &AgentEnvironment) -> HostFacts {
    let deadline = Instant::now() + Duration::from_millis(scene.within_ms.into());
    let env = match scene.inherit_env {
        true => (place.lay_over_own)(&scene.env),
        false => scene.env.clone(),
    };
    let has_cwd = scene.cwd.is_dir();
    let cwd = match has_cwd {
        true => scene.cwd.clone(),
        false => std::env::current_dir().unwrap_or_else(|_| "/".into()),
    };
    // Checks that may hang run at the same time, in threads that are abandoned if they do.
    let python = in_thread({
        let (env, cwd) = (env.clone(), cwd.clone());
        let (command, path) = (scene.command.clone(), place.path.clone());
        move || ask_python(&python_of(&command, &path), &env, &cwd, deadline)
    });
    let gpus = in_thread({
        let (path, deadline) = (
            value(&env, "PATH").unwrap_or(&place.path).to_owned(),
            deadline.min(Instant::now() + GPU_TIME),
        );
        move || ask_gpus(&path, deadline)
    });
    let tmp_folder: PathBuf = value(&env, "TMPDIR")
        .filter(|folder| !folder.is_empty())
        .map_or_else(|| "/tmp".into(), Into::into);
    let disk = in_thread({
        let folder = tmp_folder.clone();
        move || space(&folder)
    });
    let hostname = place.hostname.clone();
    let mut wanted = vec![hostname.clone()];
    wanted.extend(
        scene
            .names
            .iter()
            .filter(|name| **name != hostname)
            .cloned(),
    );
    let names = resolve(wanted, deadline);
    let command_problem = match scene.command.as_slice() {
        [] => None,
        command => preflight::check_command(command, &cwd, value(&env, "PATH"))
            .err()
            .map(|missing| missing.why),
    };
    let (found, gpu_problem) = match await_from(&gpus, deadline) {
        Some(Ok(found)) => (found, None),
        Some(Err(problem)) => (Default::default(), Some(problem)),
        None => (
            Default::default(),
            Some("nvidia-smi does not answer".into()),
        ),
    };
    let (gpus, gpus_apart) = found;
    let uname = rustix::system::uname();
    HostFacts {
        os: os_name(&read("/etc/os-release")),
        kernel: format!(
            "{} {}",
            uname.sysname().to_string_lossy(),
            uname.release().to_string_lossy()
        ),
        cpus: std::thread::available_parallelism()
            .ok()
            .and_then(|count| u32::try_from(count.get()).ok())
            .unwrap_or(1),
        load: read("/proc/loadavg")
            .split(' ')
            .next()
            .and_then(|text| text.parse().ok()),
        memory: memory(&read("/proc/meminfo")),
        memory_limit: memory_limit(),
        shm: space(Path::new("/dev/shm")).ok(),
        memfd_problem: shared_memory().err(),
        tmp_folder: tmp_folder.to_string_lossy().into_owned(),
        tmp: await_from(&disk, deadline).unwrap_or_else(|| Err("it does not answer".into())),
        limits: limits(),
        ports: ports(&read("/proc/sys/net/ipv4/ip_local_port_range")),
        omp_threads: value(&env, "OMP_NUM_THREADS").map(|v| v.to_string_lossy().into_owned()),
        // Last: it takes longest.
        python: await_from(&python, deadline).unwrap_or_else(|| Err("it does not answer".into())),
        gpus,
        gpu_problem,
        gpus_apart,
        hostname,
        names,
        has_cwd,
        command_problem,
    }
}

fn in_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> mpsc::Receiver<T> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let _ = sender.send(work());
    });
    receiver
}

fn await_from<T>(receiver: &mpsc::Receiver<T>, deadline: Instant) -> Option<T> {
    let left = deadline.saturating_duration_since(Instant::now());
    receiver.recv_timeout(left).ok()
}

fn value<'a>(env: &'a Variables, wanted: &str) -> Option<&'a OsStr> {
    let mut found = env.iter().rev().filter(|(name, _)| name == wanted);
    found.next().map(|(_, value)| value.as_os_str())
}

fn read(file: &str) -> String {
    std::fs::read_to_string(file).unwrap_or_default()
}

/// The command's own interpreter, else the one that this program is installed for.
fn python_of(command: &[OsString], path: &OsStr) -> PathBuf {
    let first = command.first().map(PathBuf::from);
    let is_python = |program: &PathBuf| {
        let name = program
            .file_name()
            .map(|n| n.to_string_lossy().into_owned());
        name.is_some_and(|name| name.starts_with("python") || name.starts_with("pypy"))
    };
    first
        .filter(is_python)
        .unwrap_or_else(|| check_build::python(path))
}

/// Runs a program to its end, or kills it at the deadline; whether it ended well, and what it printed.
pub fn output_of(mut command: Command, deadline: Instant) -> io::Result<(bool, String, String)> {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let pid = rustix::process::Pid::from_child(&child);
    let ended = in_thread(move || child.wait_with_output());
    match await_from(&ended, deadline) {
        Some(Ok(output)) => Ok((
            output.status.success(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )),
        Some(Err(error)) => Err(error),
        None => {
            // Not reaped, for its thread still waits: the number is still its own.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in time"))
        }
    }
}

fn ask_python(
    program: &Path,
    env: &Variables,
    cwd: &Path,
    deadline: Instant,
) -> Result<Python, String> {
    let mut command = Command::new(program);
    let code = format!("{}{PROGRAM}", check_build::INSTALLATION);
    command.args(["-c", &code]).current_dir(cwd).env_clear();
    command.envs(env.iter().map(|(name, value)| (name, value)));
    let shown = program.display();
    let (_, printed, complaint) =
        output_of(command, deadline).map_err(|why| format!("{shown}: {why}"))?;
    python_from(&printed).ok_or_else(|| format!("{shown}: {}", last_line(&complaint)))
}

fn last_line(text: &str) -> &str {
    let line = text.lines().rev().find(|line| !line.trim().is_empty());
    line.unwrap_or("it said nothing")
}

fn python_from(text: &str) -> Option<Python> {
    let field = |name: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once('|'));
        lines
            .find(|(key, _)| *key == name)
            .map(|(_, value)| value.to_owned())
    };
    let problem = || {
        field("problem").unwrap_or_else(|| "the interpreter ended while importing it".to_owned())
    };
    let library = |name: &str| match field(name) {
        Some(value) => Ok(value
            .split_once(' ')
            .map_or_else(Default::default, |(version, file)| {
                (version.to_owned(), file.to_owned())
            })),
        None => Err(field(&format!("no-{name}")).unwrap_or_else(|| "it was not asked for".into())),
    };
    Some(Python {
        program: field("program")?,
        version: field("version")?,
        libc: field("libc")?,
        torch: field("torch"),
        mixed: field("mixed"),
        cuda: library("cuda"),
        rocm: library("rocm").ok(),
        nccl: library("nccl"),
        horovod: field("horovod").ok_or_else(problem),
    })
}

/// One line per GPU, and the pairs of them that cannot read each other's memory; nothing where there is no
/// `nvidia-smi`.
fn ask_gpus(path: &OsStr, deadline: Instant) -> Result<(Vec<String>, Vec<String>), String> {
    let tool = std::env::split_paths(path)
        .map(|place| place.join("nvidia-smi"))
        .find(|file| file.is_file());
    let Some(tool) = tool else {
        return Ok(Default::default());
    };
    let query = [
        "--query-gpu=name,memory.total,driver_version",
        "--format=csv,noheader",
    ];
    let gpus = ask_tool(&tool, &query, deadline)?;
    let gpus: Vec<String> = gpus.lines().map(|line| line.trim().to_owned()).collect();
    let apart = match gpus.len() {
        0 | 1 => Vec::new(),
        // Older tools do not know the question.
        _ => ask_tool(&tool, &["topo", "-p2p", "r"], deadline)
            .map_or_else(|_| Vec::new(), |table| pairs_apart(&table)),
    };
    Ok((gpus, apart))
}

/// Of a table with a line and a column per GPU: the pairs for which it does not say that all is well.
fn pairs_apart(table: &str) -> Vec<String> {
    let is_gpu = |word: &str| {
        let number = word.strip_prefix("GPU");
        number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    let mut columns: Vec<&str> = Vec::new();
    let mut found = Vec::new();
    for line in table.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if columns.is_empty() && words.iter().all(|word| is_gpu(word)) {
            columns = words;
            continue;
        }
        let Some((gpu, cells)) = words.split_first() else {
            continue;
        };
        let Some(own) = columns.iter().position(|column| column == gpu) else {
            continue;
        };
        let later = columns.iter().zip(cells).skip(own + 1);
        let apart = later.filter(|(_, cell)| !matches!(**cell, "OK" | "X"));
        found.extend(apart.map(|(other, cell)| format!("{gpu} and {other} ({cell})")));
    }
    found
}

fn ask_tool(tool: &Path, words: &[&str], deadline: Instant) -> Result<String, String> {
    let mut command = Command::new(tool);
    command.args(words);
    let (is_well, printed, complaint) =
        output_of(command, deadline).map_err(|why| why.to_string())?;
    if !is_well {
        let words = if complaint.trim().is_empty() {
            &printed
        } else {
            &complaint
        };
        return Err(last_line(words).trim().to_owned());
    }
    Ok(printed)
}

type Resolved = (String, Result<Vec<IpAddr>, String>);

fn resolve(names: Vec<String>, deadline: Instant) -> Vec<Resolved> {
    let asked: Vec<_> = names
        .into_iter()
        .map(|name| {
            let wanted = name.clone();
            let answer = in_thread(move || {
                let found = (wanted.as_str(), 0).to_socket_addrs();
                let found = found.map_err(|error| error.to_string())?;
                let mut addresses: Vec<IpAddr> = found.map(|at| at.ip()).collect();
                addresses.dedup();
                Ok(addresses)
            });
            (name, answer)
        })
        .collect();
    let answers = asked.into_iter().map(|(name, answer)| {
        let found = await_from(&answer, deadline);
        let late = || Err("the name server does not answer".to_owned());
        (name, found.unwrap_or_else(late))
    });
    answers.collect()
}

fn space(folder: &Path) -> Result<Space, String> {
    let found = rustix::fs::statvfs(folder).map_err(|error| error.to_string())?;
    Ok(Space {
        size: found.f_blocks.saturating_mul(found.f_frsize),
        free: found.f_bavail.saturating_mul(found.f_frsize),
    })
}

#[cfg(target_os = "linux")]
fn shared_memory() -> Result<(), String> {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    let wrong = |error: rustix::io::Errno| error.to_string();
    let fd = memfd_create("horovod-doctor", MemfdFlags::CLOEXEC).map_err(wrong)?;
    ftruncate(&fd, 1 << 16).map_err(wrong)?;
    rustix::io::pwrite(&fd, &[1; 4096], 0).map_err(wrong)?;
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn shared_memory() -> Result<(), String> {
    Ok(())
}

fn limits() -> Limits {
    let soft = |which| getrlimit(which).current;
    Limits {
        nofile: soft(Resource::Nofile),
        nofile_hard: getrlimit(Resource::Nofile).maximum,
        memlock: soft(Resource::Memlock),
        nproc: soft(Resource::Nproc),
        core: soft(Resource::Core),
    }
}

fn os_name(release: &str) -> String {
    let line = release
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="));
    line.map_or_else(
        || "unknown system".to_owned(),
        |name| name.trim_matches('"').to_owned(),
    )
}

fn memory(meminfo: &str) -> Option<Space> {
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
        Some(kib * 1024)
    };
    Some(Space {
        size: field("MemTotal:")?,
        free: field("MemAvailable:")?,
    })
}

/// The tightest limit of the control groups that this process is in.
fn memory_limit() -> Option<Space> {
    let groups = read("/proc/self/cgroup");
    let mut folders: Vec<(PathBuf, &str, &str)> = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let (root, limit, used) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max", "memory.current"),
            c if c.split(',').any(|name| name == "memory") => (
                "/sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            ),
            _ => continue,
        };
        let whole = Path::new(root).join(path.trim_start_matches('/'));
        let up = whole
            .ancestors()
            .take_while(|folder| folder.starts_with(root));
        folders.extend(up.map(|folder| (folder.to_owned(), limit, used)));
    }
    let number =
        |file: PathBuf| -> Option<u64> { std::fs::read_to_string(file).ok()?.trim().parse().ok() };
    folders
        .into_iter()
        .filter_map(|(folder, limit, used)| {
            let size = number(folder.join(limit)).filter(|size| *size < NO_LIMIT)?;
            let used = number(folder.join(used)).unwrap_or(0);
            let free = size.saturating_sub(used);
            Some(Space { size, free })
        })
        .min_by_key(|space| space.free)
}

/// Version 1 of control groups has a number for "no limit", of about this size.
const NO_LIMIT: u64 = 1 << 60;

fn ports(range: &str) -> Option<(u32, u32)> {
    let mut numbers = range.split_whitespace().map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_system_writes() {
        assert_eq!(
            os_name("ID=debian\nPRETTY_NAME=\"Debian 12\"\n"),
            "Debian 12"
        );
        assert_eq!(os_name(""), "unknown system");
        let info = "MemTotal:       2048 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n";
        let (size, free) = (2 << 20, 1 << 20);
        assert_eq!(memory(info), Some(Space { size, free }));
        assert_eq!(memory(""), None);
        assert_eq!(ports("32768\t60999\n"), Some((32768, 60999)));
        assert_eq!(ports(""), None);
    }

    #[test]
    fn reads_what_python_prints() {
        let printed =
            "noise\nprogram|/p\nversion|3.11.2\nlibc|glibc 2.36\nproblem|ImportError: x\n";
        let python = python_from(printed).expect("complete");
        assert_eq!(python.horovod, Err("ImportError: x".into()));
        assert_eq!(python.torch, None);
        let well = format!("{printed}horovod|0.1.0\ntorch|2.9\n");
        let python = python_from(&well).expect("complete");
        assert_eq!(python.horovod, Ok("0.1.0".into()));
        assert_eq!(python.torch, Some("2.9".into()));
        assert_eq!(python.nccl, Err("it was not asked for".into()));
        let libraries = format!("{well}nccl|2.30.7 /a b/libnccl.so.2\nno-cuda|it is not found\n");
        let python = python_from(&libraries).expect("complete");
        let nccl = ("2.30.7".to_owned(), "/a b/libnccl.so.2".to_owned());
        assert_eq!(python.nccl, Ok(nccl));
        assert_eq!(python.cuda, Err("it is not found".into()));
        assert_eq!(python_from("Traceback"), None);
    }

    #[test]
    fn reads_which_gpus_cannot_reach_each_other() {
        let table = " \tGPU0\tGPU1\tGPU2\t\n GPU0\tX\tOK\tNS\t\n GPU1\tOK\tX\tCNS\t\n \
                     GPU2\tNS\tCNS\tX\t\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n";
        assert_eq!(
            pairs_apart(table),
            ["GPU0 and GPU2 (NS)", "GPU1 and GPU2 (CNS)"]
        );
        assert!(pairs_apart("").is_empty());
        assert!(pairs_apart("Invalid option: topo\n").is_empty());
    }

    #[test]
    fn a_program_that_hangs_is_killed_and_one_that_is_missing_named() {
        let mut hangs = Command::new("sh");
        hangs.args(["-c", "exec sleep 1000"]);
        let soon = Instant::now() + Duration::from_millis(50);
        let late = output_of(hangs, soon).unwrap_err();
        assert_eq!(late.to_string(), "no answer in time");
        let later = Instant::now() + Duration::from_secs(240);
        let missing = ask_python(Path::new("/no/python"), &Vec::new(), Path::new("/"), later);
        let error = missing.expect_err("not there");
        assert!(error.contains("/no/python: No such file"), "{error}");
        let mut prints = Command::new("sh");
        prints.args(["-c", "echo a; echo b >&2; exit 3"]);
        assert_eq!(
            output_of(prints, later).map_err(|why| why.kind()),
            Ok((false, "a\n".into(), "b\n".into()))
        );
    }

    #[test]
    fn chooses_the_interpreter_of_the_command() {
        let words = |line: &str| -> Vec<OsString> { line.split(' ').map(Into::into).collect() };
        let path = OsStr::new("/bin");
        assert_eq!(
            python_of(&words("/x/python3.12 train.py"), path),
            Path::new("/x/python3.12")
        );
        assert_ne!(python_of(&words("bash run.sh"), path), Path::new("bash"));
    }

    #[test]
    fn examines_this_host() {
        let place = AgentEnvironment {
            hostname: "localhost".into(),
            path: "/bin".into(),
            lay_over_own: Variables::clone,
        };
        let scene = Scene {
            inherit_env: false,
            env: vec![
                ("TMPDIR".into(), "/no/such".into()),
                ("OMP_NUM_THREADS".into(), "3".into()),
            ],
            cwd: "/no/such".into(),
            command: vec!["no-such-program".into()],
            names: vec!["localhost".into(), "no-such-host.invalid".into()],
            within_ms: 20_000,
        };
        let facts = facts(&scene, &place);
        assert!(facts.cpus > 0 && facts.memory.is_some_and(|memory| memory.free > 0));
        assert!(facts.tmp.is_err() && !facts.has_cwd);
        assert_eq!(facts.omp_threads.as_deref(), Some("3"));
        assert!(
            facts
                .command_problem
                .is_some_and(|why| why.contains("no-such-program"))
        );
        let found = |name: &str| facts.names.iter().find(|(n, _)| n == name).map(|(_, r)| r);
        assert!(matches!(found("localhost"), Some(Ok(found)) if !found.is_empty()));
        assert!(matches!(found("no-such-host.invalid"), Some(Err(_))));
        assert_eq!(facts.memfd_problem, None);
    }
}

//! Where rank 0 shows the job's figures: a port for browsers and Prometheus, a file for node_exporter, and a local socket
//! for commands of the same user.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use horovod_transport::{LocalConnection, LocalServer};

use crate::http::{self, Resource};
use crate::openmetrics::{OPENMETRICS_TYPE, openmetrics, prometheus};
use crate::periodic::Periodic;
use crate::status::{LOCAL_TOKEN, random_hex, socket_name};
use crate::trace::{Tracer, Traces};
use crate::{Metrics, lock};

/// Time that one program has for its request and the answer.
const EXCHANGE_LIMIT: Duration = Duration::from_secs(5);
/// Time between two writings of the file.
const FILE_PERIOD: Duration = Duration::from_secs(5);

/// Where to show the figures, beside the local socket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PublishSettings {
    /// Address of the page and the text for Prometheus; `None`: nowhere.
    pub address: Option<SocketAddr>,
    /// The secret in the path; `None`: a random one.
    pub token: Option<String>,
    /// File for node_exporter.
    pub textfile: Option<PathBuf>,
}

/// Shows the figures until it is dropped.
#[derive(Debug)]
pub struct Publisher {
    url: Option<String>,
    #[cfg(test)]
    local_name: Option<String>,
    _servers: Vec<Server>,
    traces: Arc<Traces>,
    file: Option<(Arc<Metrics>, PathBuf, Option<Periodic>)>,
}

/// The random secret of this process: an address stays from one job, or one round of an elastic job, to the next.
static SECRET: Mutex<Option<String>> = Mutex::new(None);

impl Publisher {
    /// Shows the figures of rank 0 from now on, and traces by `tracer`. Where something cannot be shown, the log says so
    /// and the job goes on.
    #[must_use]
    pub fn start(
        settings: &PublishSettings,
        metrics: &Arc<Metrics>,
        tracer: Arc<dyn Tracer>,
    ) -> Self {
        let traces = Arc::new(Traces::new(tracer));
        let source = Source {
            metrics: metrics.clone(),
            traces: traces.clone(),
        };
        let mut servers = Vec::new();
        let name = socket_name(std::process::id());
        #[cfg(test)]
        let local_name = name.as_ref().ok().cloned();
        let local = name.and_then(|name| LocalServer::unix(&name));
        let local = local.and_then(|server| Server::start(server, LOCAL_TOKEN, &source));
        match local {
            Ok(server) => servers.push(server),
            Err(e) => tracing::warn!("horovodrun --status will not find this job: {e}"),
        }
        let mut url = None;
        if let Some(address) = settings.address {
            match serve(address, settings.token.as_deref(), &source) {
                Ok((server, at)) => {
                    servers.push(server);
                    announce(&at, settings.token.as_deref());
                    url = Some(at);
                }
                Err(e) => tracing::error!(
                    "HOROVOD_METRICS_PORT: cannot show the metrics at {address}: {e}. The job goes on without. Choose \
                     another port, or 0 for any."
                ),
            }
        }
        let file = settings.textfile.clone().map(|path| {
            let (to, from) = (path.clone(), metrics.clone());
            let thread = Periodic::start("hvd-metrics-file", FILE_PERIOD, move || {
                write_file(&to, &from);
            });
            let thread = thread.inspect_err(|e| {
                tracing::error!("HOROVOD_METRICS_TEXTFILE: cannot start a thread: {e}");
            });
            (metrics.clone(), path, thread.ok())
        });
        Self {
            url,
            #[cfg(test)]
            local_name,
            _servers: servers,
            traces,
            file,
        }
    }

    /// The address of the page, with its secret.
    #[must_use]
    pub fn url(&self) -> Option<&str> {
        self.url.as_deref()
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        // A program that waits for a trace gets what there is, before its connection ends with the server.
        self.traces.end();
        // The file keeps the job's last figures.
        if let Some((metrics, path, thread)) = self.file.take() {
            drop(thread);
            write_file(&path, &metrics);
        }
    }
}

fn serve(
    address: SocketAddr,
    token: Option<&str>,
    source: &Source,
) -> io::Result<(Server, String)> {
    let token = match token {
        Some(token) => token.to_owned(),
        None => random_secret()?,
    };
    let (server, bound) = LocalServer::tcp(address)?;
    let server = Server::start(server, &token, source)?;
    Ok((server, format!("http://{bound}/{token}/")))
}

/// The user has asked for the page and cannot guess its address: this does not depend on the level of the log.
fn announce(url: &str, token: Option<&str>) {
    use std::io::Write;
    let _ = writeln!(io::stderr(), "{}", announcement(url, token));
}

/// The line with the address. A secret of the user's own is not for the terminal, whose text may be kept and passed on.
fn announcement(url: &str, token: Option<&str>) -> String {
    let shown = token.map_or_else(
        || url.to_owned(),
        |token| url.replace(token, "<HOROVOD_METRICS_TOKEN>"),
    );
    format!("horovod: the job's figures are at {shown}")
}

fn random_secret() -> io::Result<String> {
    let mut secret = lock(&SECRET);
    if secret.is_none() {
        *secret = Some(random_hex::<16>()?);
    }
    Ok(secret.clone().unwrap_or_default())
}

/// Writes beside the file and renames, so that no reader sees half of it.
fn write_file(path: &Path, metrics: &Metrics) {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}", std::process::id()));
    let beside = PathBuf::from(name);
    let text = prometheus(metrics.snapshot());
    // In a folder of others the name may stand for a link: it is removed, never followed.
    let _ = std::fs::remove_file(&beside);
    let file = std::fs::File::create_new(&beside);
    let written = file.and_then(|mut file| io::Write::write_all(&mut file, text.as_bytes()));
    let written = written.and_then(|()| std::fs::rename(&beside, path));
    if let Err(e) = written {
        let _ = std::fs::remove_file(&beside);
        tracing::error!(
            "HOROVOD_METRICS_TEXTFILE={}: cannot be written: {e}",
            path.display()
        );
    }
}

/// The contents of all answers.
#[derive(Clone, Debug)]
struct Source {
    metrics: Arc<Metrics>,
    traces: Arc<Traces>,
}

/// A thread that answers, one program after the other.
#[derive(Debug)]
struct Server {
    listener: Arc<LocalServer>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(listener: LocalServer, token: &str, source: &Source) -> io::Result<Self> {
        let listener = Arc::new(listener);
        let thread = std::thread::Builder::new()
            .name("hvd-metrics".into())
            .spawn({
                let (listener, token, source) =
                    (listener.clone(), token.to_owned(), source.clone());
                move || {
                    while let Some(connection) = listener.next(EXCHANGE_LIMIT) {
                        if let Err(e) = exchange(connection, &token, &source) {
                            tracing::debug!("metrics: a program did not take its answer: {e}");
                        }
                    }
                }
            })?;
        Ok(Self {
            listener,
            thread: Some(thread),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.listener.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that shows the metrics ended by a panic");
        }
    }
}

fn exchange(mut with: LocalConnection, token: &str, source: &Source) -> io::Result<()> {
    let metrics = &source.metrics;
    let path = http::read_path(&mut with)?;
    let to = &mut with;
    match path.and_then(|path| http::resource(&path, token)) {
        Some(Resource::Page) => http::answer_page(to),
        Some(Resource::Stats) => {
            let document = metrics.snapshot().to_json();
            http::answer(to, "200 OK", "application/json", &document)
        }
        Some(Resource::Metrics) => {
            let text = openmetrics(metrics.snapshot());
            http::answer(to, "200 OK", OPENMETRICS_TYPE, &text)
        }
        Some(Resource::Status) => {
            let text = metrics.snapshot().to_text();
            http::answer(to, "200 OK", "text/plain; charset=utf-8", &text)
        }
        Some(Resource::Trace(lasting)) => source.traces.answer(with, lasting),
        None => http::answer_not_found(to),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, TcpStream};
    use std::time::Instant;

    use horovod_transport::testing::Cluster;

    use super::*;
    use crate::status;

    fn metrics() -> Arc<Metrics> {
        let mesh = Cluster::new(1).build().remove(0);
        Arc::new(Metrics::new(&mesh.topology, Instant::now()))
    }

    /// Writes an empty trace when it is stopped, unless it is to fail.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    enum FakeTracer {
        #[default]
        Works,
        IsBusy,
        DiskIsFull,
    }

    impl Tracer for FakeTracer {
        fn start(&self, path: &Path) -> Result<(), String> {
            match self {
                Self::IsBusy => Err("busy".into()),
                _ => std::fs::write(path, "[").map_err(|e| e.to_string()),
            }
        }

        fn stop(&self, path: &Path) -> Result<(), String> {
            match self {
                Self::DiskIsFull => Err("no space left".into()),
                _ => std::fs::write(path, "[]").map_err(|e| e.to_string()),
            }
        }
    }

    fn tracer() -> Arc<dyn Tracer> {
        Arc::new(FakeTracer::default())
    }

    fn get(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).expect("it listens");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers");
        answer
    }

    #[test]
    fn a_port_shows_page_document_and_text_to_who_has_the_token() {
        let settings = PublishSettings {
            address: Some((Ipv4Addr::LOCALHOST, 0).into()),
            ..PublishSettings::default()
        };
        let publisher = Publisher::start(&settings, &metrics(), tracer());
        let url = publisher.url().expect("it listens");
        let (address, token) = url
            .strip_prefix("http://")
            .and_then(|rest| rest.trim_end_matches('/').split_once('/'))
            .expect("an address and a token");
        let address: SocketAddr = address.parse().expect("an address");
        assert_eq!(token.len(), 32, "{url}");
        let page = get(address, &format!("/{token}/"));
        assert!(
            page.starts_with("HTTP/1.1 200 OK\r\n") && page.contains("<!doctype html>"),
            "{page}"
        );
        let text = get(address, &format!("/{token}/metrics"));
        assert!(
            text.contains("application/openmetrics-text") && text.ends_with("# EOF\n"),
            "{text}"
        );
        let document = get(address, &format!("/{token}/stats.json"));
        let body = document.split_once("\r\n\r\n").expect("a body").1;
        let body: serde_json::Value = serde_json::from_str(body).expect("JSON");
        assert_eq!(body["size"], 1);
        for path in ["/", "/metrics", "/0123456789abcdef0123456789abcdef/metrics"] {
            let refused = get(address, path);
            assert!(refused.starts_with("HTTP/1.1 404 "), "{path}: {refused}");
            assert!(!refused.contains("horovod"), "{path}: {refused}");
        }
    }

    #[test]
    fn a_port_in_use_leaves_the_job_alone() {
        let taken = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let settings = PublishSettings {
            address: taken.local_addr().ok(),
            ..PublishSettings::default()
        };
        assert_eq!(
            Publisher::start(&settings, &metrics(), tracer()).url(),
            None
        );
    }

    #[test]
    fn the_file_holds_the_last_figures_when_the_job_has_ended() {
        let folder = std::env::temp_dir().join(format!("horovod-metrics-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join("job.prom");
        let settings = PublishSettings {
            textfile: Some(path.clone()),
            ..PublishSettings::default()
        };
        let metrics = metrics();
        let publisher = Publisher::start(&settings, &metrics, tracer());
        metrics.counters.step_ends();
        drop(publisher);
        let text = std::fs::read_to_string(&path).expect("a file");
        assert!(
            text.lines()
                .any(|l| l.starts_with("horovod_steps_total{") && l.ends_with(" 1.0")),
            "{text}"
        );
        let left = std::fs::read_dir(&folder).expect("a folder").count();
        std::fs::remove_dir_all(&folder).expect("it is ours");
        assert_eq!(left, 1, "no other file is left");
    }

    #[test]
    fn a_command_of_this_user_finds_the_job() {
        let publisher = Publisher::start(&PublishSettings::default(), &metrics(), tracer());
        let jobs = status::jobs().expect("the system lists sockets");
        let own: Vec<_> = jobs
            .iter()
            .filter(|job| job.pid == std::process::id())
            .collect();
        assert!(!own.is_empty());
        let document = own
            .iter()
            .find_map(|job| job.ask("stats.json").ok())
            .expect("an answer");
        let document: serde_json::Value = serde_json::from_str(&document).expect("JSON");
        assert_eq!(document["size"], 1);
        drop(publisher);
    }

    /// The job of this publisher: other tests of the process may have theirs.
    fn own_job(publisher: &Publisher) -> status::Job {
        let jobs = status::jobs().expect("the system lists sockets");
        let mut own = jobs.into_iter().filter(|job| job.pid == std::process::id());
        own.find(|job| Some(job.name()) == publisher.local_name.as_deref())
            .expect("the publisher listens")
    }

    /// Waits until a trace is being recorded, or none is.
    fn wait_for_recording(publisher: &Publisher, wanted: bool) {
        // Only a hang reaches it. It is less than the time of the longest trace.
        let deadline = Instant::now() + crate::TRACE_MAX / 2;
        while publisher.traces.is_recording() != wanted {
            assert!(Instant::now() < deadline, "is recorded: {}", !wanted);
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_program_gets_a_trace_of_the_next_milliseconds() {
        let publisher = Publisher::start(&PublishSettings::default(), &metrics(), tracer());
        let mut trace = Vec::new();
        for _ in 0..20 {
            // Each at once after the former: what was sent is not being recorded any more.
            trace.clear();
            let length = own_job(&publisher).trace(Duration::from_millis(1), &mut trace);
            assert_eq!((length.expect("a trace"), &trace[..]), (2, &b"[]"[..]));
        }
        drop(publisher);
    }

    #[test]
    fn a_program_that_hangs_up_ends_its_trace() {
        let publisher = Publisher::start(&PublishSettings::default(), &metrics(), tracer());
        let name = publisher.local_name.as_deref().expect("it listens");
        let mut program = LocalConnection::unix(name, EXCHANGE_LIMIT).expect("it listens");
        let most = crate::TRACE_MAX.as_millis();
        write!(program, "GET /{LOCAL_TOKEN}/trace/{most} HTTP/1.1\r\n\r\n").expect("sent");
        wait_for_recording(&publisher, true);
        drop(program);
        wait_for_recording(&publisher, false);
        drop(publisher);
    }

    #[test]
    fn the_end_of_the_job_ends_a_trace_which_is_sent_all_the_same() {
        let publisher = Publisher::start(&PublishSettings::default(), &metrics(), tracer());
        let job = own_job(&publisher);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let mut trace = Vec::new();
                job.trace(crate::TRACE_MAX, &mut trace).map(|_| trace)
            });
            wait_for_recording(&publisher, true);
            drop(publisher);
            let trace = waiting.join().expect("no panic").expect("a trace");
            assert_eq!(trace, b"[]");
        });
    }

    #[test]
    fn a_trace_that_cannot_be_recorded_is_refused_with_the_reason() {
        for (tracer, why) in [
            (FakeTracer::IsBusy, "busy"),
            (
                FakeTracer::DiskIsFull,
                "the trace is not whole: no space left",
            ),
        ] {
            let settings = PublishSettings::default();
            let publisher = Publisher::start(&settings, &metrics(), Arc::new(tracer));
            let job = own_job(&publisher);
            let refused = job.trace(Duration::from_millis(1), &mut Vec::new());
            assert_eq!(refused.expect_err("refused").to_string(), why);
            drop(publisher);
        }
    }

    fn at_any_port() -> PublishSettings {
        PublishSettings {
            address: Some((Ipv4Addr::LOCALHOST, 0).into()),
            ..PublishSettings::default()
        }
    }

    #[test]
    fn the_random_secret_stays_from_one_job_to_the_next() {
        let secret = || {
            let publisher = Publisher::start(&at_any_port(), &metrics(), tracer());
            let url = publisher.url().expect("it listens").to_owned();
            url.rsplit('/').nth(1).expect("a secret").to_owned()
        };
        assert_eq!(secret(), secret());
    }

    #[test]
    fn a_secret_of_the_users_own_is_not_printed() {
        let token = "a-secret-of-the-user";
        let url = format!("http://127.0.0.1:9400/{token}/");
        let line = announcement(&url, Some(token));
        assert!(!line.contains(token), "{line}");
        assert!(
            line.contains("http://127.0.0.1:9400/<HOROVOD_METRICS_TOKEN>/"),
            "{line}"
        );
        assert!(announcement(&url, None).contains(token));
    }
}

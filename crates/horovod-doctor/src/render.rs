//! A chart and its findings as text for people and as JSON for programs.

use serde_json::{Map, Value, json};

use super::chart::{Chart, Patient};
use super::facts::HostFacts;
use super::findings::{self, Finding, Severity, bytes};

/// Width of the text.
const WIDTH: usize = 110;
/// Pairs that were left out, of which so many are named.
const PAIRS_SHOWN: usize = 8;

/// How to show what was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// Result of an examination.
#[derive(Debug)]
pub struct Report {
    /// As it is shown.
    pub text: String,
    /// Whether something would stop a job.
    pub would_stop: bool,
}

impl Chart {
    /// Concludes what is wrong, and shows it with everything else.
    pub fn report(&self, form: Form) -> Report {
        let findings = findings::of(self);
        let text = match form {
            Form::Text => text(self, &findings),
            Form::Json => json(self, &findings),
        };
        Report {
            text,
            would_stop: findings::would_stop(&findings),
        }
    }
}

/// For people.
pub(crate) fn text(chart: &Chart, findings: &[Finding]) -> String {
    let mut out = String::new();
    for host in &chart.hosts {
        out.push_str(&title(chart, host));
        for line in describe(host) {
            fold(&mut out, "    ", "      ", &line);
        }
    }
    out.push_str(&routes(chart));
    out.push('\n');
    for (number, finding) in findings.iter().enumerate() {
        let places = finding.hosts.join(", ");
        let head = format!(
            "{:>3}. {}: {places}: {}",
            number + 1,
            finding.severity.name(),
            finding.what
        );
        fold(&mut out, "", "     ", &head);
        fold(&mut out, "     fix: ", "          ", &finding.fix);
    }
    out.push_str(&verdict(chart, findings));
    out
}

fn title(chart: &Chart, host: &Patient) -> String {
    let mut notes = Vec::new();
    if host.is_local {
        notes.push("this host".to_owned());
    }
    match host.slots {
        0 => notes.push("the launcher only".to_owned()),
        1 => notes.push("1 rank".to_owned()),
        slots => notes.push(format!("{slots} ranks")),
    }
    let own_name = host.facts.as_ref().map(|facts| &facts.hostname);
    if let Some(own) = own_name.filter(|own| **own != host.name) {
        notes.push(format!("calls itself {own}"));
    }
    if let Some(skew) = host.skew.filter(|_| !host.is_local) {
        let sign = if skew.ahead_ns < 0 { '-' } else { '+' };
        let ahead = time(skew.ahead_ns.unsigned_abs());
        let uncertain = time(skew.uncertain_ns);
        notes.push(format!("clock {sign}{ahead}, give or take {uncertain}"));
    }
    if host.absent.is_some() {
        notes.push("NOT REACHED".to_owned());
    } else if host.facts.is_some() {
        notes.push(format!("horovod-rs {}", chart.plan.version));
    }
    format!("{} ({})\n", host.name, notes.join(", "))
}

/// A time for people.
fn time(nanoseconds: u64) -> String {
    match nanoseconds {
        0..1_000_000 => format!("{:.0} µs", nanoseconds as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", nanoseconds as f64 / 1e6),
        _ => format!("{:.1} s", nanoseconds as f64 / 1e9),
    }
}

fn describe(host: &Patient) -> Vec<String> {
    let Some(facts) = &host.facts else {
        return Vec::new();
    };
    vec![
        system(facts),
        software(facts),
        room(facts),
        limits(facts),
        addresses(host),
    ]
}

fn system(facts: &HostFacts) -> String {
    let mut parts = vec![
        facts.os.clone(),
        facts.kernel.clone(),
        format!("{} processors", facts.cpus),
    ];
    parts.extend(facts.load.map(|load| format!("load {load:.1}")));
    parts.push(match &facts.omp_threads {
        Some(value) => format!("OMP_NUM_THREADS={value}"),
        None => "OMP_NUM_THREADS not set".to_owned(),
    });
    parts.join(", ")
}

fn software(facts: &HostFacts) -> String {
    let mut parts = Vec::new();
    match &facts.python {
        Ok(python) => {
            parts.push(format!("Python {}", python.version));
            parts.push(match &python.torch {
                Some(version) => format!("PyTorch {version}"),
                None => "no PyTorch".to_owned(),
            });
            parts.push(python.libc.clone());
            parts.push(python.program.clone());
        }
        Err(_) => parts.push("no Python".to_owned()),
    }
    let rocm = facts.python.as_ref().ok().and_then(|p| p.rocm.as_ref());
    parts.push(match (facts.gpus.len(), rocm) {
        (0, None) => "no GPU".to_owned(),
        // Nobody is asked for a list of AMD's.
        (0, Some((version, _))) => format!("ROCm {version}"),
        (count, _) => format!("{count} GPUs: {}", facts.gpus.join("; ")),
    });
    if let Ok(python) = &facts.python
        && facts.has_gpus()
    {
        parts.extend(python.cuda.iter().map(|(v, _)| format!("CUDA {v}")));
        parts.extend(python.nccl.iter().map(|(v, _)| format!("NCCL {v}")));
    }
    parts.join(", ")
}

fn room(facts: &HostFacts) -> String {
    let of = |name: &str, space: &super::facts::Space| {
        format!("{name} {} free of {}", bytes(space.free), bytes(space.size))
    };
    let mut parts = Vec::new();
    parts.extend(facts.memory.iter().map(|space| of("memory", space)));
    match &facts.memory_limit {
        Some(limit) => parts.push(of("of its control group", limit)),
        None => parts.push("no control group's limit".to_owned()),
    }
    parts.extend(facts.shm.iter().map(|space| of("/dev/shm", space)));
    parts.extend(facts.tmp.iter().map(|space| of(&facts.tmp_folder, space)));
    parts.join("; ")
}

fn limits(facts: &HostFacts) -> String {
    let shown = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |n| n.to_string());
    let size = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), bytes);
    let limits = &facts.limits;
    let mut text = format!(
        "limits: {} open files (up to {}), {} processes, {} locked memory, {} core files",
        shown(limits.nofile),
        shown(limits.nofile_hard),
        shown(limits.nproc),
        size(limits.memlock),
        size(limits.core)
    );
    if let Some((first, last)) = facts.ports {
        text.push_str(&format!("; ports {first} to {last}"));
    }
    text
}

fn addresses(host: &Patient) -> String {
    let listens = host.listens.iter().flatten().flatten();
    let known: Vec<String> = listens
        .map(|(interface, at)| format!("{interface} {}", at.ip()))
        .collect();
    let facts = host.facts.as_ref();
    let names = facts.map(|facts| facts.names.as_slice());
    let resolved: Vec<String> = names
        .unwrap_or_default()
        .iter()
        .map(|(name, result)| match result {
            Ok(found) => {
                let found: Vec<String> = found.iter().map(ToString::to_string).collect();
                format!("{name} is {}", found.join(" "))
            }
            Err(why) => format!("{name}: {why}"),
        })
        .collect();
    format!(
        "addresses: {}; names there: {}",
        known.join(", "),
        resolved.join(", ")
    )
}

/// The table of the ways between hosts.
fn routes(chart: &Chart) -> String {
    let mut rows = Vec::new();
    for (&(from, to), tried) in &chart.routes {
        if from == to {
            continue;
        }
        let (a, b) = (&chart.hosts[from].name, &chart.hosts[to].name);
        let (via, version) = match chart.chosen(from, to) {
            Some((at, interface)) => (
                format!("{} ({interface})", at.ip()),
                if at.is_ipv4() { "4" } else { "6" },
            ),
            None if tried.is_empty() => continue,
            None => ("BLOCKED".to_owned(), ""),
        };
        let rate = match chart.rate(from, to) {
            Some(rate) => format!("{:.2} GB/s", rate / 1e9),
            None => "-".to_owned(),
        };
        let trip = match chart.round_trip_ns(from, to) {
            Some(nanoseconds) => time(nanoseconds),
            None => "-".to_owned(),
        };
        rows.push([a.clone(), b.clone(), via, version.to_owned(), rate, trip]);
    }
    if rows.is_empty() {
        return String::new();
    }
    let head = [
        "from",
        "to",
        "address (interface)",
        "IP",
        "one connection",
        "there and back",
    ];
    let mut out = String::from("\n");
    let all: Vec<[String; 6]> = std::iter::once(head.map(str::to_owned))
        .chain(rows)
        .collect();
    let mut widths = [0; 6];
    for row in &all {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    for row in &all {
        let mut line = String::new();
        for (width, cell) in widths.iter().zip(row) {
            line.push_str(&format!("{cell:<width$}  ", width = *width));
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    let left_out = chart.left_out();
    if !left_out.is_empty() {
        let named: Vec<String> = left_out
            .iter()
            .take(PAIRS_SHOWN)
            .map(|&(a, b)| format!("{} and {}", chart.hosts[a].name, chart.hosts[b].name))
            .collect();
        let more = match left_out.len().saturating_sub(PAIRS_SHOWN) {
            0 => String::new(),
            more => format!(" and {more} pairs more"),
        };
        let line = format!("not measured for lack of time: {}{more}", named.join(", "));
        fold(&mut out, "", "  ", &line);
    }
    out
}

fn verdict(chart: &Chart, findings: &[Finding]) -> String {
    let count = |severity| findings.iter().filter(|f| f.severity == severity).count();
    let fatal = count(Severity::Fatal);
    let others = findings.len() - fatal;
    let hosts = match chart.hosts.len() {
        1 => "1 host".to_owned(),
        count => format!("{count} hosts"),
    };
    let ranks = match chart.plan.size {
        1 => "1 rank".to_owned(),
        size => format!("{size} ranks"),
    };
    let also = match others {
        0 => String::new(),
        1 => "; 1 thing worth a look".to_owned(),
        others => format!("; {others} things worth a look"),
    };
    let word = match fatal {
        0 => "nothing would stop a job".to_owned(),
        1 => "1 thing would stop a job".to_owned(),
        fatal => format!("{fatal} things would stop a job"),
    };
    let took = chart.took.as_secs_f64();
    format!("{hosts}, {ranks}: {word}{also} ({took:.1} s)\n")
}

/// Appends one paragraph, broken between words.
fn fold(out: &mut String, first: &str, further: &str, text: &str) {
    let mut line = first.to_owned();
    let mut is_empty = true;
    for word in text.split(' ') {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            out.push_str(line.trim_end());
            out.push('\n');
            line = further.to_owned();
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    out.push_str(&line);
    out.push('\n');
}

/// For programs.
pub(crate) fn json(chart: &Chart, findings: &[Finding]) -> String {
    let routes = chart.routes.iter().map(|(&(from, to), tried)| {
        let chosen = chart.chosen(from, to);
        let tried = tried.iter().map(|(at, result)| {
            json!({
                "address": at.ip(),
                "interface": chart.interface(to, at.ip()),
                "problem": result.as_ref().err().map(ToString::to_string),
            })
        });
        json!({
            "from": chart.hosts[from].name,
            "to": chart.hosts[to].name,
            "address": chosen.map(|(at, _)| at.ip()),
            "interface": chosen.map(|(_, name)| name),
            "bytes_per_second": chart.rate(from, to),
            "round_trip_ns": chart.round_trip_ns(from, to),
            "tried": tried.collect::<Value>(),
        })
    });
    let left_out = chart.left_out().into_iter();
    let left_out = left_out.map(|(a, b)| json!([chart.hosts[a].name, chart.hosts[b].name]));
    let findings_json = findings.iter().map(|finding| {
        json!({
            "severity": finding.severity.name(),
            "hosts": finding.hosts,
            "what": finding.what,
            "fix": finding.fix,
        })
    });
    let whole = json!({
        "version": chart.plan.version,
        "ranks": chart.plan.size,
        "seconds": chart.took.as_secs_f64(),
        "would_stop": super::findings::would_stop(findings),
        "findings": findings_json.collect::<Value>(),
        "hosts": chart.hosts.iter().map(host_json).collect::<Value>(),
        "ways": routes.collect::<Value>(),
        "not_measured": left_out.collect::<Value>(),
    });
    format!("{whole}\n")
}

fn host_json(host: &Patient) -> Value {
    let listens = host.listens.iter().flatten().flatten();
    let addresses = listens.map(|(name, at)| json!({"interface": name, "address": at.ip()}));
    let mut fields = json!({
        "name": host.name,
        "ranks": host.slots,
        "is_local": host.is_local,
        "problem": host.absent,
        "clock_ahead_ns": host.skew.map(|s| s.ahead_ns),
        "clock_uncertain_ns": host.skew.map(|s| s.uncertain_ns),
        "addresses": addresses.collect::<Value>(),
    });
    if let (Some(fields), Some(facts)) = (fields.as_object_mut(), &host.facts) {
        fields.extend(facts_json(facts));
    }
    fields
}

fn facts_json(facts: &HostFacts) -> Map<String, Value> {
    let python = facts.python.as_ref().ok();
    let names = facts.names.iter().map(|(name, result)| {
        json!({
            "name": name,
            "addresses": result.as_deref().unwrap_or_default(),
            "problem": result.as_ref().err(),
        })
    });
    let found = json!({
        "hostname": facts.hostname,
        "os": facts.os,
        "kernel": facts.kernel,
        "libc": python.map(|p| &p.libc),
        "cpus": facts.cpus,
        "load": facts.load,
        "python": python.map(|p| &p.version),
        "python_program": python.map(|p| &p.program),
        "horovod": python.and_then(|p| p.horovod.as_ref().ok()),
        "torch": python.and_then(|p| p.torch.as_ref()),
        "gpus": facts.gpus,
        "cuda": python.and_then(|p| Some(&p.cuda.as_ref().ok()?.0)),
        "rocm": python.and_then(|p| Some(&p.rocm.as_ref()?.0)),
        "nccl": python.and_then(|p| Some(&p.nccl.as_ref().ok()?.0)),
        "gpus_apart": facts.gpus_apart,
        "omp_num_threads": facts.omp_threads,
        "memory": facts.memory,
        "memory_limit": facts.memory_limit,
        "dev_shm": facts.shm,
        "memfd_problem": facts.memfd_problem,
        "tmp_folder": facts.tmp_folder,
        "tmp": facts.tmp.as_ref().ok(),
        "limits": facts.limits,
        "names": names.collect::<Value>(),
    });
    match found {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

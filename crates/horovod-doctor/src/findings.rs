//! Findings: what is wrong and what to do about it, concluded from a chart without a look at the world.

mod gpus;
mod hosts;
mod network;

use super::chart::Chart;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Severity {
    /// No job can run like this.
    Fatal,
    /// A job may fail or hang.
    Risk,
    /// A job runs slower than it could.
    Slow,
    /// Good to know.
    Note,
}

impl Severity {
    /// For people and programs.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Fatal => "stops the job",
            Self::Risk => "risk",
            Self::Slow => "slow",
            Self::Note => "note",
        }
    }
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) severity: Severity,
    /// Where; the same thing on several hosts is one finding.
    pub(crate) hosts: Vec<String>,
    pub(crate) what: String,
    pub(crate) fix: String,
}

/// Collects findings.
#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(
        &mut self,
        severity: Severity,
        host: &str,
        what: impl Into<String>,
        fix: impl Into<String>,
    ) {
        let (what, fix) = (what.into(), fix.into());
        let same = |f: &&mut Finding| f.severity == severity && f.what == what && f.fix == fix;
        if let Some(found) = self.0.iter_mut().find(same) {
            if !found.hosts.iter().any(|known| known == host) {
                found.hosts.push(host.to_owned());
            }
            return;
        }
        self.0.push(Finding {
            severity,
            hosts: vec![host.to_owned()],
            what,
            fix,
        });
    }
}

/// Everything that is wrong, the worst first.
pub(crate) fn of(chart: &Chart) -> Vec<Finding> {
    let mut findings = Findings::default();
    for host in &chart.hosts {
        hosts::judge(chart, host, &mut findings);
    }
    hosts::compare(chart, &mut findings);
    gpus::compare(chart, &mut findings);
    network::judge(chart, &mut findings);
    let mut found = findings.0;
    found.sort_by_key(|finding| finding.severity);
    found
}

/// Whether something would stop a job.
pub(crate) fn would_stop(findings: &[Finding]) -> bool {
    let mut severities = findings.iter().map(|finding| finding.severity);
    severities.any(|severity| severity == Severity::Fatal)
}

/// Bytes for people.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = usize::from(value < 10.0 && unit > 0);
    format!("{value:.digits$} {}", UNITS[unit])
}

#[cfg(test)]
mod tests;

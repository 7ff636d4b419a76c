//! A diagnosis as text: what waits, who does not come and where that rank stands, and what usually helps.

use std::fmt::Write;
use std::time::Duration;

use horovod_protocol::{EVEN_BATCHES, Rank, StalledRequest, Tree};

use super::verdict::{AbsenceKind, Culprit, Diagnosis, key};
use super::{Key, Standing, Unfinished};

/// Requests, culprits and names told; of more only the number.
pub(super) const SHOWN_MAX: usize = 8;
/// Work of a GPU for less than this is not reported.
const GPU_SHOWN_FROM_MS: u64 = 1000;
/// Ranks of a list told one by one.
const RANKS_SHOWN_MAX: usize = 12;

/// A report's facts about the job.
pub struct JobView<'a> {
    /// Where control links are.
    pub tree: &'a Tree,
    /// The name of a rank's host.
    pub host_of: &'a dyn Fn(Rank) -> String,
    /// How long a rank may be silent; `None`: for ever.
    pub heartbeat: Option<Duration>,
    /// Whether this round of an elastic job has ranks that do not hold the training state yet.
    pub has_newcomers: bool,
}

/// The whole report.
pub fn render(d: &Diagnosis, job: &JobView<'_>) -> String {
    let host_of = job.host_of;
    let mut out = String::new();
    let t = &mut out;
    line(t, format!("Horovod: {}.", headline(d, job)));
    line(t, "What waits:".into());
    for request in d.late.requests.iter().take(SHOWN_MAX) {
        line(t, format!("  {}", wait_of(request)));
    }
    more(t, d.late.requests.len(), "such operations");
    if let Some(running) = &d.late.running {
        let name = name_of(&key(running));
        line(
            t,
            format!("  {name}: on its way among all its ranks, but it does not end"),
        );
    }
    line(t, "Who does not come:".into());
    for culprit in d.culprits.iter().take(SHOWN_MAX) {
        let (rank, host) = (culprit.rank, host_of(culprit.rank));
        let pid = culprit
            .standing
            .as_ref()
            .map(|s| format!(", process {}", s.pid));
        let pid = pid.unwrap_or_default();
        let mut state = state_of(culprit);
        if culprit.kind == AbsenceKind::Silent {
            state += &outlook(d, job, rank);
        }
        line(t, format!("  {rank} on {host}{pid}: {state}"));
        if let Some(standing) = &culprit.standing {
            in_hand(t, standing);
            stacks(t, standing);
        }
    }
    more(t, d.culprits.len() + d.unasked, "such ranks");
    if let Some((rank, standing)) = &d.witness {
        line(
            t,
            format!("For comparison, {rank} on {}, which waits:", host_of(*rank)),
        );
        in_hand(t, standing);
        stacks(t, standing);
    }
    let mut kinds: Vec<AbsenceKind> = d.culprits.iter().map(|c| c.kind).collect();
    kinds.sort_unstable();
    kinds.dedup();
    for kind in kinds {
        line(t, advice(kind).into());
        if kind == AbsenceKind::Diverged {
            line(t, format!("{}.", cure_of_divergence()));
        }
        if kind == AbsenceKind::Diverged && job.has_newcomers {
            line(t, NEWCOMERS.into());
        }
        if kind == AbsenceKind::Elsewhere
            && d.culprits.iter().any(|c| c.kind == kind && has_stacks(c))
        {
            line(t, "Its stack above shows where.".into());
        }
    }
    out.truncate(out.trim_end().len());
    out
}

/// One line that says what a report is about, who does not come, and the cure of a deadlock; the errors of all ranks are
/// made of it.
pub fn summary(d: &Diagnosis, job: &JobView<'_>) -> String {
    let mut parts = vec![headline(d, job)];
    let who = |c: &Culprit| format!("{} on {} {}", c.rank, (job.host_of)(c.rank), state_of(c));
    parts.extend(d.culprits.iter().take(SHOWN_MAX).map(who));
    let text = parts.join("; ");
    if d.is_deadlock() {
        format!("{text}. {}", cure_of_divergence())
    } else {
        text
    }
}

fn cure_of_divergence() -> String {
    format!(
        "Let every rank make the same calls in the same order. If they have different numbers of batches, {EVEN_BATCHES}"
    )
}

/// Advice for a round that is formed while some ranks train and others begin their script.
const NEWCOMERS: &str = "This round has new workers, which begin their script while the others go on training. A new worker \
     that calls a collective (broadcast_parameters, allreduce, barrier) before hvd.elastic.run waits for it alone. Make no \
     such call before it: hvd.elastic.run sends the state to new workers.";

fn headline(d: &Diagnosis, job: &JobView<'_>) -> String {
    let size = job.tree.size();
    let waited_ns = d.late.all().map(|r| r.waited_ns).max().unwrap_or(0);
    let seconds = waited_ns / 1_000_000_000;
    let never = if d.deadlocked.is_empty() {
        ""
    } else {
        " and will never end: the ranks wait for each other in a circle"
    };
    format!("this job of {size} ranks has stood still for {seconds} s{never}")
}

fn has_stacks(culprit: &Culprit) -> bool {
    let standing = culprit.standing.as_ref();
    standing.is_some_and(|standing| !standing.threads.is_empty())
}

pub(super) fn line(out: &mut String, text: String) {
    let _ = writeln!(out, "{text}");
}

pub(super) fn more(out: &mut String, all: usize, what: &str) {
    if all > SHOWN_MAX {
        line(out, format!("  ... {} more {what}", all - SHOWN_MAX));
    }
}

pub(super) fn name_of((set, name): &Key) -> String {
    match set {
        0 => name.to_string(),
        _ => format!("{name} (process set {set})"),
    }
}

fn names_of(keys: &[Key]) -> String {
    let mut text: Vec<String> = keys.iter().take(SHOWN_MAX).map(name_of).collect();
    if keys.len() > SHOWN_MAX {
        text.push(format!("and {} more", keys.len() - SHOWN_MAX));
    }
    text.join(", ")
}

pub(super) fn ranks_of(ranks: &[Rank]) -> String {
    let shown = ranks.iter().take(RANKS_SHOWN_MAX);
    let mut text: Vec<String> = shown.map(|rank| rank.0.to_string()).collect();
    if ranks.len() > RANKS_SHOWN_MAX {
        text.push(format!("... ({} in all)", ranks.len()));
    }
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", text.join(", "))
}

fn wait_of(request: &StalledRequest) -> String {
    format!(
        "{}: asked for by {}, not by {}",
        name_of(&key(request)),
        ranks_of(&request.waiting),
        ranks_of(&request.missing)
    )
}

fn state_of(culprit: &Culprit) -> String {
    let lacks = match &*culprit.lacks {
        [] => "has not come".into(),
        lacks => format!("has not asked for {}", names_of(lacks)),
    };
    let waits = culprit.standing.as_ref().map(|s| names_of(&s.waits_for));
    let waits = waits.unwrap_or_default();
    let gpu = culprit.standing.as_ref().map(gpu_of).unwrap_or_default();
    match culprit.kind {
        AbsenceKind::Diverged => format!("{lacks}; it waits for {waits}{gpu}"),
        AbsenceKind::Elsewhere => format!("{lacks}; it waits for something else{gpu}"),
        AbsenceKind::Busy => format!("{lacks} yet; it is at work{gpu}"),
        AbsenceKind::Silent => format!("{lacks}, and does not answer"),
    }
}

/// The GPU's work if it takes long: a script that waits for its GPU waits for that work.
fn gpu_of(standing: &Standing) -> String {
    let device = standing.device.as_ref();
    let at = device.and_then(|device| device.at.as_ref());
    match at.filter(|at| at.ms >= GPU_SHOWN_FROM_MS) {
        Some(at) => format!(
            "; its GPU has been at {} for {} s",
            name_of(&at.key),
            at.ms / 1000
        ),
        None => String::new(),
    }
}

/// The expected end of a silent rank.
fn outlook(d: &Diagnosis, job: &JobView<'_>, rank: Rank) -> String {
    let is_silent = |rank: &Rank| {
        let mut culprits = d.culprits.iter();
        culprits.any(|c| c.rank == *rank && c.kind == AbsenceKind::Silent)
    };
    let above = std::iter::successors(job.tree.parent(rank), |above| job.tree.parent(*above));
    // The one nearest to rank 0 hides all the others.
    match (above.filter(is_silent).last(), job.heartbeat) {
        (Some(hides), _) => {
            format!("; but it is behind {hides}, which is silent: look there first")
        }
        (None, Some(time)) => format!(
            "; it is given up when its process has given no sign of life for {} s",
            time.as_secs_f64()
        ),
        (None, None) => String::new(),
    }
}

/// Operations that all ranks have agreed on and this rank has not completed. Its script is not why others wait for them.
fn in_hand(out: &mut String, standing: &Standing) {
    let Unfinished {
        count,
        names,
        callbacks,
    } = &standing.in_hand;
    let names = match &**names {
        [] => String::new(),
        names => format!(", among them {}", names_of(names)),
    };
    if *count > 0 {
        line(
            out,
            format!("      agreed on and not completed: {count}{names}"),
        );
    }
    if *callbacks > 0 {
        let text = format!("      callbacks that have not returned: {callbacks}");
        line(out, text);
    }
}

/// One thread a paragraph, its innermost frame first.
pub(super) fn stacks(out: &mut String, standing: &Standing) {
    if !standing.without_stacks.is_empty() {
        line(
            out,
            format!("      (no stacks: {})", standing.without_stacks),
        );
    }
    for thread in &standing.threads {
        line(out, format!("      thread {}:", thread.name));
        for frame in &thread.frames {
            let (file, at, function) = (&frame.file, frame.line, &frame.function);
            line(out, format!("        {file}:{at} in {function}"));
        }
    }
}

pub(super) fn advice(kind: AbsenceKind) -> &'static str {
    match kind {
        AbsenceKind::Diverged => {
            "Diverged: the ranks make different calls, or the same in a different order. Usual causes: a \
             collective inside a branch on the rank, an order taken from a set or an unordered directory listing, \
             models that differ between ranks, different numbers of batches."
        }
        AbsenceKind::Elsewhere => {
            "Missing call: a rank neither computes nor waits for an operation of Horovod. Usual causes: it skips a call that \
             the others make, its data loader or its storage hangs, it waits for a lock, for input or in another \
             library's barrier."
        }
        AbsenceKind::Busy => {
            "Slow rank: it is at work and will probably come. Usual causes: rank 0 alone evaluates or saves a \
             checkpoint, uneven data, other processes on its cores. If that is meant, nothing is to be done."
        }
        AbsenceKind::Silent => {
            "Silent rank: its process is stopped (Ctrl-Z, a debugger, SIGSTOP), its machine is out of memory or \
             cannot be reached. Look at the state of the process on its host with ps; fg or kill -CONT lets a stopped one go on."
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use horovod_protocol::ProcessSetId;

    use super::super::verdict::Late;
    use super::*;
    use crate::{DevicePhase, DeviceStanding, Frame, OnDevice, ThreadStack};

    fn diagnosis(kind: AbsenceKind) -> Diagnosis {
        let thread = ThreadStack {
            name: "MainThread".into(),
            frames: vec![Frame {
                file: "train.py".into(),
                line: 31,
                function: "evaluate".into(),
            }],
        };
        let standing = Standing {
            pid: 4711,
            blocked: true,
            waits_for: vec![(0, Arc::from("allreduce.b"))],
            threads: vec![thread],
            ..Standing::default()
        };
        Diagnosis {
            late: Late {
                running: None,
                requests: vec![StalledRequest {
                    set: ProcessSetId(2),
                    name: Arc::from("allreduce.a"),
                    waiting: vec![Rank(0)],
                    missing: (1..20).map(Rank).collect(),
                    waited_ns: 10_500_000_000,
                }],
            },
            culprits: vec![Culprit {
                rank: Rank(1),
                kind,
                lacks: vec![(2, Arc::from("allreduce.a"))],
                standing: Some(standing.clone()),
            }],
            unasked: 18,
            witness: Some((Rank(0), standing)),
            proven: Vec::new(),
            deadlocked: if kind == AbsenceKind::Diverged {
                vec![(2, Arc::from("allreduce.a"))]
            } else {
                Vec::new()
            },
        }
    }

    fn rendered(d: &Diagnosis, tree: &Tree, heartbeat: Option<Duration>) -> String {
        let job = JobView {
            tree,
            host_of: &|rank| format!("host{}", rank.0),
            heartbeat,
            has_newcomers: false,
        };
        render(d, &job)
    }

    #[test]
    fn of_a_silent_rank_is_said_whom_it_hides_and_how_long_it_is_waited_for() {
        let tree = Tree::new(&[0; 6], 2); // 1 and 2 below 0; 3 and 4 below 1; 5 below 2
        let mut d = diagnosis(AbsenceKind::Silent);
        let silent = |rank| Culprit {
            rank: Rank(rank),
            kind: AbsenceKind::Silent,
            lacks: Vec::new(),
            standing: None,
        };
        d.culprits = [1, 3, 5].map(silent).into();
        let text = rendered(&d, &tree, Some(Duration::from_secs(30)));
        let line = |start: &str| {
            let found = text
                .lines()
                .find(|line| line.trim_start().starts_with(start));
            found.unwrap_or_default().to_owned()
        };
        for rank in [1, 5] {
            let line = line(&format!("rank {rank} on"));
            assert!(line.contains("no sign of life for 30 s"), "{text}");
        }
        assert!(
            line("rank 3 on").contains("behind rank 1, which is silent"),
            "{text}"
        );
        assert!(!rendered(&d, &tree, None).contains("sign of life"));
    }

    #[test]
    fn a_report_names_tensor_ranks_host_process_line_cause_and_remedy() {
        let text = rendered(&diagnosis(AbsenceKind::Diverged), &Tree::star(20), None);
        for part in [
            "20 ranks has stood still for 10 s and will never end",
            "allreduce.a (process set 2): asked for by rank 0, not by ranks 1, 2, 3",
            "... (19 in all)",
            "rank 1 on host1, process 4711: has not asked for allreduce.a (process set 2); it waits for allreduce.b",
            "thread MainThread:",
            "train.py:31 in evaluate",
            "... 11 more such ranks",
            "rank 0 on host0, which waits",
            "Diverged:",
            "hvd.join()",
            "steps_per_epoch",
        ] {
            assert!(text.contains(part), "{part}\nis not in\n{text}");
        }
    }

    #[test]
    fn a_number_of_more_is_told_only_if_there_are_more() {
        let key = |i: usize| -> Key { (0, Arc::from(format!("t{i}"))) };
        let keys = |n: usize| names_of(&(0..n).map(key).collect::<Vec<_>>());
        assert!(keys(SHOWN_MAX).ends_with(", t7"), "{}", keys(SHOWN_MAX));
        assert!(keys(SHOWN_MAX + 1).ends_with(", t7, and 1 more"));
        let ranks = |n: usize| ranks_of(&(0..n as u32).map(Rank).collect::<Vec<_>>());
        assert!(ranks(RANKS_SHOWN_MAX).ends_with(", 11"));
        assert!(ranks(RANKS_SHOWN_MAX + 1).ends_with(", 11, ... (13 in all)"));
        let more = |all: usize| {
            let mut text = String::new();
            more(&mut text, all, "such ranks");
            text
        };
        assert_eq!(more(SHOWN_MAX), "");
        assert_eq!(more(SHOWN_MAX + 1), "  ... 1 more such ranks\n");
    }

    #[test]
    fn where_an_elastic_job_has_newcomers_the_report_says_what_they_must_not_call() {
        let tree = Tree::star(20);
        let report = |kind, has_newcomers| {
            let job = JobView {
                tree: &tree,
                host_of: &|rank| format!("host{}", rank.0),
                heartbeat: None,
                has_newcomers,
            };
            render(&diagnosis(kind), &job)
        };
        assert!(report(AbsenceKind::Diverged, true).contains("before hvd.elastic.run"));
        assert!(!report(AbsenceKind::Diverged, false).contains("elastic"));
        assert!(!report(AbsenceKind::Silent, true).contains("elastic"));
    }

    #[test]
    fn a_summary_is_one_line_that_names_who_does_not_come() {
        let d = diagnosis(AbsenceKind::Diverged);
        let tree = Tree::star(20);
        let job = JobView {
            tree: &tree,
            host_of: &|rank| format!("host{}", rank.0),
            heartbeat: None,
            has_newcomers: false,
        };
        assert_eq!(
            summary(&d, &job),
            "this job of 20 ranks has stood still for 10 s and will never end: the ranks wait for each other in a \
             circle; rank 1 on host1 has not asked for allreduce.a (process set 2); it waits for allreduce.b. Let every \
             rank make the same calls in the same order. If they have different numbers of batches, give all ranks the \
             same number of batches (in Keras: steps_per_epoch), or let every rank call hvd.join() after its last \
             batch (not in Keras)"
        );
    }

    #[test]
    fn what_a_gpu_has_been_at_for_long_is_told() {
        let mut d = diagnosis(AbsenceKind::Elsewhere);
        let shows = |d: &Diagnosis| rendered(d, &Tree::star(20), None).contains("its GPU has been");
        for (ms, is_shown) in [(999, false), (1000, true), (61_000, true)] {
            let at = OnDevice {
                seq: 3,
                key: (0, "grad.7".into()),
                phase: DevicePhase::Runs,
                ms,
            };
            d.culprits[0].standing.as_mut().unwrap().device = Some(DeviceStanding {
                given: Some(4),
                at: Some(at),
            });
            assert_eq!(shows(&d), is_shown);
        }
        let text = rendered(&d, &Tree::star(20), None);
        assert!(
            text.contains("something else; its GPU has been at grad.7 for 61 s"),
            "{text}"
        );
    }

    #[test]
    fn what_was_agreed_on_and_has_not_completed_is_told() {
        let mut d = diagnosis(AbsenceKind::Elsewhere);
        let lines = |d: &Diagnosis| rendered(d, &Tree::star(20), None);
        let text = lines(&d);
        assert!(!text.contains("agreed on") && !text.contains("callbacks"));
        let mut shows = |count, names: &[&str], callbacks| {
            let names = names.iter().map(|name| (0, Arc::from(*name))).collect();
            d.culprits[0].standing.as_mut().unwrap().in_hand = Unfinished {
                count,
                names,
                callbacks,
            };
            lines(&d)
        };
        let text = shows(3, &["grad.1", "grad.2"], 0);
        let line = "agreed on and not completed: 3, among them grad.1, grad.2\n";
        assert!(text.contains(line) && !text.contains("callbacks"), "{text}");
        let text = shows(1, &[], 2);
        assert!(text.contains("not completed: 1\n"), "{text}");
        assert!(
            text.contains("callbacks that have not returned: 2\n"),
            "{text}"
        );
    }

    #[test]
    fn a_stack_is_pointed_at_only_where_there_is_one() {
        let mut d = diagnosis(AbsenceKind::Elsewhere);
        let shows = |d: &Diagnosis| rendered(d, &Tree::star(20), None).contains("stack above");
        assert!(shows(&d));
        d.culprits[0].standing = None;
        assert!(!shows(&d));
    }

    #[test]
    fn every_kind_has_its_words() {
        for (kind, word) in [
            (AbsenceKind::Elsewhere, "Missing call:"),
            (AbsenceKind::Busy, "Slow rank:"),
            (AbsenceKind::Silent, "Silent rank:"),
        ] {
            let text = rendered(&diagnosis(kind), &Tree::star(20), None);
            assert!(text.contains(word) && !text.contains("never end"), "{text}");
        }
    }
}

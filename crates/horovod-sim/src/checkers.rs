//! Checkers of what must hold in every run, whatever the seed.

use crate::plan::{Ending, Expected, SimulationPlan};
use crate::trace::{Digest, End, Event, Trace};
use horovod_protocol::{Completion, EntryId, OpError, OpErrorKind, OperationTag, Rank, Seq};
use std::collections::BTreeMap;
use std::fmt;

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The seed that repeats it.
    pub seed: Option<u64>,
    /// The violated rule.
    pub what: String,
}

impl Failure {
    fn new(what: impl Into<String>) -> Self {
        Self {
            seed: None,
            what: what.into(),
        }
    }

    pub(crate) fn with_seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.seed {
            Some(seed) => write!(f, "seed {seed}: {}", self.what),
            None => f.write_str(&self.what),
        }
    }
}

/// Checks a trace against its plan.
///
/// # Errors
/// The first broken promise.
pub fn check(plan: &SimulationPlan, trace: &Trace) -> Result<(), Failure> {
    if let Some(Event::Accused(text)) = trace.events.iter().find(|e| matches!(e, Event::Accused(_)))
    {
        return Err(Failure::new(format!("an honest rank was accused: {text}")));
    }
    nobody_hangs(plan, trace)?;
    every_submission_ends_once_as_expected(plan, trace)?;
    executions_are_alike_and_in_order(trace)?;
    tunings_have_one_place_on_all_ranks(plan, trace)?;
    joins_agree_on_the_last(plan, trace)?;
    nobody_is_awaited_longer_than_the_run(plan, trace)?;
    stall_reports_name_only_the_missing(trace)
}

fn nobody_is_awaited_longer_than_the_run(
    plan: &SimulationPlan,
    trace: &Trace,
) -> Result<(), Failure> {
    let limit = if plan.counts_lateness { trace.end } else { 0 };
    match trace.awaited.iter().find(|(_, awaited)| *awaited > limit) {
        None => Ok(()),
        Some((rank, awaited)) => Err(Failure::new(format!(
            "{rank} was awaited for {awaited} ns of {limit}"
        ))),
    }
}

fn nobody_hangs(plan: &SimulationPlan, trace: &Trace) -> Result<(), Failure> {
    if !trace.stuck.is_empty() {
        return Err(Failure::new(format!(
            "hang: {:?} wait for ever",
            trace.stuck
        )));
    }
    if matches!(plan.ending, Ending::Shutdown { .. }) {
        let stopped = trace
            .events
            .iter()
            .filter(|e| matches!(e, Event::ShutDown(_)))
            .count();
        if stopped != plan.size as usize {
            return Err(Failure::new(format!(
                "{stopped} of {} ranks were shut down",
                plan.size
            )));
        }
    }
    Ok(())
}

fn every_submission_ends_once_as_expected(
    plan: &SimulationPlan,
    trace: &Trace,
) -> Result<(), Failure> {
    let mut open: BTreeMap<(Rank, EntryId), (usize, usize)> = BTreeMap::new();
    for event in &trace.events {
        match event {
            Event::Submitted { rank, entry, item } => {
                open.insert((*rank, *entry), *item);
            }
            Event::Ended { rank, entry, end } => {
                let Some(item) = open.remove(&(*rank, *entry)) else {
                    return Err(Failure::new(format!(
                        "{rank} ended {entry:?} twice or unasked"
                    )));
                };
                expect(plan, *rank, item, end)?;
            }
            Event::Refused { rank, item, error } => expect_refusal(plan, *rank, *item, error)?,
            _ => {}
        }
    }
    match open.keys().find(|(rank, _)| !trace.dead.contains(rank)) {
        None => Ok(()),
        Some((rank, entry)) => Err(Failure::new(format!("{rank} never ended {entry:?}"))),
    }
}

fn expect(
    plan: &SimulationPlan,
    rank: Rank,
    item: (usize, usize),
    end: &End,
) -> Result<(), Failure> {
    if let (Ending::Kill { .. }, End::Completed(Err(error))) = (&plan.ending, end)
        && error.kind() == OpErrorKind::PeerLost
    {
        return Ok(());
    }
    let expected = &plan.phases[item.0].expected[item.1];
    let fits = match (expected, end) {
        (Expected::Run { contributors }, End::Ran(_, found)) => contributors == found,
        (Expected::Fail { kind, text }, End::Completed(Err(error))) => {
            error.kind() == *kind && error.to_string().contains(text)
        }
        (Expected::Done, End::Completed(Ok(Completion::Done)))
        | (Expected::Joined, End::Completed(Ok(Completion::Joined { .. }))) => true,
        (Expected::SetAdded(id), End::Completed(Ok(Completion::SetAdded(found)))) => id == found,
        (Expected::SetRemoved(was), End::Completed(Ok(Completion::SetRemoved(found)))) => {
            was == found
        }
        _ => false,
    };
    if fits {
        return Ok(());
    }
    Err(Failure::new(format!(
        "{rank}, phase and item {item:?}: {end:?} instead of {expected:?}"
    )))
}

/// Refusals on the spot happen only where the reason may have come first.
fn expect_refusal(
    plan: &SimulationPlan,
    rank: Rank,
    item: (usize, usize),
    error: &OpError,
) -> Result<(), Failure> {
    let expected = &plan.phases[item.0].expected[item.1];
    let fits = match (expected, error.kind()) {
        (
            Expected::Fail {
                kind: OpErrorKind::Aborted,
                ..
            },
            OpErrorKind::InvalidArgument,
        ) => matches!(error, OpError::UnknownSet { .. }),
        (
            Expected::Fail {
                kind: OpErrorKind::Shutdown,
                text,
            },
            OpErrorKind::Shutdown,
        ) => error.to_string().contains(text),
        (_, OpErrorKind::PeerLost) => matches!(plan.ending, Ending::Kill { .. }),
        _ => false,
    };
    if fits {
        return Ok(());
    }
    Err(Failure::new(format!(
        "{rank}, phase and item {item:?}: refused with {error:?}"
    )))
}

fn executions_are_alike_and_in_order(trace: &Trace) -> Result<(), Failure> {
    let mut last: BTreeMap<Rank, Seq> = BTreeMap::new();
    let mut runs: BTreeMap<Seq, (Digest, Vec<Rank>, Vec<u32>)> = BTreeMap::new();
    let mut tags: BTreeMap<OperationTag, Seq> = BTreeMap::new();
    for event in &trace.events {
        let Event::Executed { rank, digest } = event else {
            continue;
        };
        if last
            .insert(*rank, digest.seq)
            .is_some_and(|before| before >= digest.seq)
        {
            return Err(Failure::new(format!(
                "{rank} ran {:?} out of order",
                digest.seq
            )));
        }
        if let Some(tag) = digest.tag {
            let item_tags = digest.items.iter().map(|item| item.tag);
            if item_tags.clone().any(|item| item != Some(tag)) {
                return Err(Failure::new(format!(
                    "{rank} ran {:?} with {tag:?}, and had been told {:?}",
                    digest.seq,
                    item_tags.collect::<Vec<_>>()
                )));
            }
            let first = *tags.entry(tag).or_insert(digest.seq);
            if first != digest.seq {
                return Err(Failure::new(format!(
                    "{tag:?} is of {first:?} and of {:?}",
                    digest.seq
                )));
            }
        }
        let mut common = digest.clone();
        common.items.iter_mut().for_each(|item| item.tag = None);
        let present: Vec<u32> = common
            .items
            .iter_mut()
            .map(|i| u32::from(std::mem::take(&mut i.present)))
            .collect();
        match runs.get_mut(&digest.seq) {
            None => {
                runs.insert(digest.seq, (common, vec![*rank], present));
            }
            Some((first, ranks, counts)) => {
                if *first != common {
                    return Err(Failure::new(format!(
                        "{} and {rank} ran different things:\n{first:?}\n{common:?}",
                        ranks[0]
                    )));
                }
                ranks.push(*rank);
                counts
                    .iter_mut()
                    .zip(present)
                    .for_each(|(count, more)| *count += more);
            }
        }
    }
    for (seq, (digest, mut ranks, counts)) in runs {
        ranks.sort_unstable();
        if ranks.iter().any(|r| !digest.members.contains(r)) {
            return Err(Failure::new(format!(
                "{seq:?} ran outside of its set: {ranks:?}"
            )));
        }
        // A death may keep the news from some; otherwise all members take part.
        if trace.dead.is_empty() {
            if ranks != digest.members {
                return Err(Failure::new(format!(
                    "{seq:?} ran only on {ranks:?}: {digest:?}"
                )));
            }
            if counts.iter().any(|count| *count != digest.contributors) {
                return Err(Failure::new(format!(
                    "{seq:?}: {counts:?} present: {digest:?}"
                )));
            }
        }
    }
    Ok(())
}

/// Between the same executions everywhere: their numbers are of the one order that grows on each rank.
fn tunings_have_one_place_on_all_ranks(
    plan: &SimulationPlan,
    trace: &Trace,
) -> Result<(), Failure> {
    let mut last: BTreeMap<Rank, Seq> = BTreeMap::new();
    let mut announced: BTreeMap<Seq, (&[u64], usize)> = BTreeMap::new();
    for event in &trace.events {
        let (rank, seq) = match event {
            Event::Executed { rank, digest } => (*rank, digest.seq),
            Event::Tuned { rank, seq, values } => {
                let (first, ranks) = announced.entry(*seq).or_insert((values, 0));
                if *first != values {
                    return Err(Failure::new(format!(
                        "{seq:?}: {rank} was told {values:?}, others {first:?}"
                    )));
                }
                *ranks += 1;
                (*rank, *seq)
            }
            _ => continue,
        };
        if last.insert(rank, seq).is_some_and(|before| before >= seq) {
            return Err(Failure::new(format!("{rank} was at {seq:?} out of order")));
        }
    }
    // Where nobody calls shutdown the run ends without waiting for what is on its way.
    match announced
        .iter()
        .find(|(_, (_, n))| *n != plan.size as usize)
    {
        Some((seq, (_, ranks))) if matches!(plan.ending, Ending::Shutdown { .. }) => {
            let size = plan.size;
            Err(Failure::new(format!(
                "{seq:?}: only {ranks} of {size} ranks were tuned"
            )))
        }
        _ => Ok(()),
    }
}

/// The latest arrival at the coordinator is last on every rank, also among those of one moment.
fn joins_agree_on_the_last(plan: &SimulationPlan, trace: &Trace) -> Result<(), Failure> {
    let mut arrivals = trace.events.iter().filter_map(|event| match event {
        Event::JoinArrived(rank) => Some(*rank),
        _ => None,
    });
    let mut rounds = Vec::new();
    loop {
        let round: Vec<_> = arrivals.by_ref().take(plan.size as usize).collect();
        match round.last() {
            Some(last) if round.len() == plan.size as usize => rounds.push(*last),
            _ => break,
        }
    }
    let mut next: BTreeMap<Rank, usize> = BTreeMap::new();
    for event in &trace.events {
        if let Event::Ended {
            rank,
            end: End::Completed(Ok(Completion::Joined { last })),
            ..
        } = event
        {
            let round = next.entry(*rank).or_default();
            if rounds.get(*round) != Some(last) {
                return Err(Failure::new(format!(
                    "{rank} was told that {last} joined last in round {round}, not {:?}",
                    rounds.get(*round)
                )));
            }
            *round += 1;
        }
    }
    Ok(())
}

fn stall_reports_name_only_the_missing(trace: &Trace) -> Result<(), Failure> {
    for event in &trace.events {
        let Event::Stalled(report) = event else {
            continue;
        };
        for request in &report.stalled {
            if request.missing.is_empty()
                || request.waiting.is_empty()
                || request.missing.iter().any(|r| request.waiting.contains(r))
            {
                return Err(Failure::new(format!(
                    "a stall report contradicts itself: {request:?}"
                )));
            }
        }
    }
    Ok(())
}

/// Checks that two runs of a plan ended alike for every rank and item, as far as the plan and not
/// the timing decides it.
///
/// # Errors
/// The first difference.
pub fn check_alike(plan: &SimulationPlan, one: &Trace, other: &Trace) -> Result<(), Failure> {
    if plan.stops_amid || matches!(plan.ending, Ending::Kill { .. }) {
        return Ok(());
    }
    let (mut one, mut other) = (outcomes(one), outcomes(other));
    // Work on a set that goes away is refused or aborted, whichever comes first.
    let decided = |(_, phase, item): &(Rank, usize, usize)| {
        let expected = &plan.phases[*phase].expected[*item];
        !matches!(expected, Expected::Fail { kind, .. } if *kind == OpErrorKind::Aborted)
    };
    one.retain(|key, _| decided(key));
    other.retain(|key, _| decided(key));
    match one.iter().zip(&other).find(|(a, b)| a != b) {
        Some((a, b)) => Err(Failure::new(format!(
            "{a:?} in one run, {b:?} in the other"
        ))),
        None if one.len() != other.len() => Err(Failure::new("one run ended more than the other")),
        None => Ok(()),
    }
}

/// How everything ended, by rank, phase and item.
fn outcomes(trace: &Trace) -> BTreeMap<(Rank, usize, usize), String> {
    let mut items: BTreeMap<(Rank, EntryId), (usize, usize)> = BTreeMap::new();
    let mut outcomes = BTreeMap::new();
    for event in &trace.events {
        match event {
            Event::Submitted { rank, entry, item } => {
                items.insert((*rank, *entry), *item);
            }
            Event::Ended { rank, entry, end } => {
                let outcome = match end {
                    // Numbers and who joined last depend on who was faster.
                    End::Ran(_, contributors) => format!("ran with {contributors}"),
                    End::Completed(Ok(Completion::Joined { .. })) => "joined".to_owned(),
                    End::Completed(result) => format!("{result:?}"),
                };
                if let Some((phase, item)) = items.get(&(*rank, *entry)) {
                    outcomes.insert((*rank, *phase, *item), outcome);
                }
            }
            _ => {}
        }
    }
    outcomes
}

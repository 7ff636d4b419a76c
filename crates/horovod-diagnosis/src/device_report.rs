//! A diagnosis of an operation that does not end on GPUs, as text: where every rank is with it, who holds up whom, and
//! where to look.

use std::collections::BTreeMap;

use horovod_protocol::Rank;

use super::device_facts::{DeviceDiagnosis, DevicePhase, DeviceProgress, RankPlace};
use super::report::{SHOWN_MAX, line, more, name_of, ranks_of, stacks};

/// How far an operation is, of one rank that speaks of itself.
pub(super) fn own_phase(phase: DevicePhase) -> &'static str {
    match phase {
        DevicePhase::Launching => "the call by which it is launched does not return",
        DevicePhase::AwaitsInputs => {
            "it is launched, but this GPU still computes what the script has put on it before"
        }
        DevicePhase::Runs => "it is launched and runs",
    }
}

fn of(place: &DeviceProgress) -> String {
    match place {
        DeviceProgress::Ended => "ended there".into(),
        DeviceProgress::OnHost => "the GPU has done its part, the host is at an operation".into(),
        DeviceProgress::Runs => "launched, runs".into(),
        DeviceProgress::AwaitsInputs => {
            "launched, but the GPU still computes what the script has put on it before".into()
        }
        DeviceProgress::Launching => "the call by which it is launched does not return".into(),
        DeviceProgress::Behind(key, phase) => {
            let before = match phase {
                DevicePhase::Launching => "is being launched",
                DevicePhase::AwaitsInputs => "waits for what the script has put on the GPU before",
                DevicePhase::Runs => "runs",
            };
            format!("waits for {} before it, which {before}", name_of(key))
        }
        DeviceProgress::NotLaunched => "not launched: the rank is at something else".into(),
        DeviceProgress::Silent => "does not answer".into(),
    }
}

/// The whole report.
pub fn render_device(d: &DeviceDiagnosis, host_of: &dyn Fn(Rank) -> String) -> String {
    let mut out = String::new();
    let t = &mut out;
    line(t, format!("Horovod: {}.", headline(d)));
    line(
        t,
        format!("Where its {} ranks are:", d.ranks.len() + d.unasked),
    );
    for (place, ranks) in by_place(d) {
        line(t, format!("  {}: {}", of(place), ranks_of(&ranks)));
    }
    if d.unasked > 0 {
        line(t, format!("  not asked: {} ranks", d.unasked));
    }
    let culprits: Vec<_> = d.culprits().collect();
    if !culprits.is_empty() {
        line(t, "Who holds up the others:".into());
    }
    for culprit in culprits.iter().take(SHOWN_MAX) {
        line(t, format!("  {}", at_length(culprit, host_of)));
        if let Some(standing) = &culprit.standing {
            stacks(t, standing);
        }
    }
    more(t, culprits.len(), "such ranks");
    for advice in advices(d) {
        line(t, advice.into());
    }
    if d.complaint.ends {
        line(
            t,
            "The job ends because of it (HOROVOD_GPU_TIMEOUT).".into(),
        );
    }
    out.truncate(out.trim_end().len());
    out
}

/// One line of it, of which the errors of all ranks are made.
pub fn summary_device(d: &DeviceDiagnosis, host_of: &dyn Fn(Rank) -> String) -> String {
    let mut parts = vec![format!("{} (HOROVOD_GPU_TIMEOUT)", headline(d))];
    let culprits: Vec<_> = d.culprits().collect();
    match &culprits[..] {
        [] => {
            let places = by_place(d).into_iter();
            parts.extend(
                places.map(|(place, ranks)| format!("{}: {}", of(place), ranks_of(&ranks))),
            );
        }
        all => {
            let shown = all.iter().take(SHOWN_MAX);
            parts.extend(shown.map(|culprit| at_length(culprit, host_of)));
        }
    }
    parts.join("; ")
}

fn headline(d: &DeviceDiagnosis) -> String {
    let name = name_of(&d.complaint.key);
    let seconds = d.complaint.ms / 1000;
    format!("{name} has been on GPUs for {seconds} s without an end")
}

fn at_length(rank: &RankPlace, host_of: &dyn Fn(Rank) -> String) -> String {
    let pid = rank
        .standing
        .as_ref()
        .map(|s| format!(", process {}", s.pid));
    let (who, host) = (rank.rank, host_of(rank.rank));
    format!(
        "{who} on {host}{}: {}",
        pid.unwrap_or_default(),
        of(&rank.place)
    )
}

/// Ranks by where they are, the largest crowd first.
fn by_place(d: &DeviceDiagnosis) -> Vec<(&DeviceProgress, Vec<Rank>)> {
    let mut places: BTreeMap<String, (&DeviceProgress, Vec<Rank>)> = BTreeMap::new();
    for RankPlace { rank, place, .. } in &d.ranks {
        let (_, ranks) = places.entry(of(place)).or_insert((place, Vec::new()));
        ranks.push(*rank);
    }
    let mut places: Vec<_> = places.into_values().collect();
    places.sort_by_key(|(_, ranks)| std::cmp::Reverse(ranks.len()));
    places
}

fn advices(d: &DeviceDiagnosis) -> Vec<&'static str> {
    let any = |is: fn(&DeviceProgress) -> bool| d.ranks.iter().any(|rank| is(&rank.place));
    let mut advices = Vec::new();
    if d.culprits().next().is_none() && d.unasked == 0 {
        advices.push(if any(|place| *place == DeviceProgress::Ended) {
            "Some GPUs have done their part, the others have not: look at those first (nvidia-smi, Xid errors in dmesg), then at \
             what connects them."
        } else {
            "All of its ranks have launched it: their GPUs wait for each other inside of NCCL. Usual causes: a link between \
             GPUs or hosts that carries nothing (NCCL_DEBUG=INFO says which are used; nvidia-smi nvlink -s, Xid errors in \
             dmesg), or another user of NCCL in the same processes, such as torch.distributed, in another order."
        });
    }
    if any(|place| {
        matches!(
            place,
            DeviceProgress::AwaitsInputs | DeviceProgress::Behind(_, DevicePhase::AwaitsInputs)
        )
    }) {
        advices.push(
            "Busy GPU: a kernel of the script's comes before the operation and does not end. Usual causes: a GPU that hangs \
             (nvidia-smi, Xid errors in dmesg), a kernel that loops or waits for another rank, another process on that GPU. If it is meant to compute for so long, nothing is \
             to be done.",
        );
    }
    if any(|place| {
        matches!(
            place,
            DeviceProgress::Launching | DeviceProgress::Behind(_, DevicePhase::Launching)
        )
    }) {
        advices.push(
            "Launch that does not return: NCCL connects the ranks in it (NCCL_DEBUG=INFO; NCCL_SOCKET_IFNAME where hosts \
             have several networks), or a call in another thread holds up CUDA in that process: its stack above, if any.",
        );
    }
    if any(|place| matches!(place, DeviceProgress::Behind(_, DevicePhase::Runs))) {
        advices.push(
            "Earlier operation: a GPU carries out operations one after the other; the one named above has to end first.",
        );
    }
    if any(|place| *place == DeviceProgress::NotLaunched) {
        advices.push(
            "Not launched: that rank has the order to run the operation, and waits for memory, for an operation of the host \
             before it, or for Python's interpreter lock.",
        );
    }
    if any(|place| *place == DeviceProgress::Silent) {
        advices.push(super::report::advice(super::verdict::AbsenceKind::Silent));
    }
    advices
}

#[cfg(test)]
mod tests {
    use super::super::device_facts::Complaint;
    use super::super::{Frame, Standing, ThreadStack};
    use super::*;

    fn diagnosis(places: &[DeviceProgress]) -> DeviceDiagnosis {
        let thread = ThreadStack {
            name: "MainThread".into(),
            frames: vec![Frame {
                file: "train.py".into(),
                line: 31,
                function: "step".into(),
            }],
        };
        let ranks = places.iter().enumerate().map(|(rank, place)| RankPlace {
            rank: Rank(rank as u32),
            place: place.clone(),
            standing: (*place != DeviceProgress::Silent).then(|| Standing {
                pid: 100 + rank as u32,
                threads: vec![thread.clone()],
                ..Standing::default()
            }),
        });
        DeviceDiagnosis {
            complaint: Complaint {
                seq: 7,
                key: (0, "grad.7 and 3 more".into()),
                ms: 61_500,
                ends: false,
            },
            ranks: ranks.collect(),
            unasked: 0,
        }
    }

    fn host_of(rank: Rank) -> String {
        format!("host{}", rank.0)
    }

    fn rendered(places: &[DeviceProgress]) -> String {
        render_device(&diagnosis(places), &host_of)
    }

    #[test]
    fn of_64_ranks_the_one_whose_gpu_hangs_is_named() {
        let mut places = vec![DeviceProgress::Runs; 64];
        places[37] = DeviceProgress::AwaitsInputs;
        let text = rendered(&places);
        for part in [
            "grad.7 and 3 more has been on GPUs for 61 s without an end",
            "Where its 64 ranks are",
            "launched, runs: ranks 0, 1, 2",
            "(63 in all)",
            "rank 37 on host37, process 137: launched, but the GPU still computes",
            "train.py:31 in step",
            "Busy GPU:",
        ] {
            assert!(text.contains(part), "{part}\nis not in\n{text}");
        }
        assert_eq!(text.matches("thread MainThread").count(), 1, "{text}");
        let summary = summary_device(&diagnosis(&places), &host_of);
        assert!(
            !summary.contains('\n') && summary.contains("rank 37 on host37"),
            "{summary}"
        );
        assert!(summary.contains("HOROVOD_GPU_TIMEOUT"), "{summary}");
    }

    #[test]
    fn where_all_run_they_wait_for_each_other_and_nobody_is_blamed() {
        let text = rendered(&[DeviceProgress::Runs, DeviceProgress::Runs]);
        assert!(text.contains("launched, runs: ranks 0, 1"), "{text}");
        assert!(
            text.contains("wait for each other inside of NCCL"),
            "{text}"
        );
        assert!(!text.contains("holds up the others"), "{text}");
        let summary = summary_device(
            &diagnosis(&[DeviceProgress::Runs, DeviceProgress::Runs]),
            &host_of,
        );
        assert!(summary.ends_with("launched, runs: ranks 0, 1"), "{summary}");
        let text = rendered(&[DeviceProgress::Ended, DeviceProgress::Runs]);
        assert!(text.contains("Some GPUs have done their part"), "{text}");
    }

    #[test]
    fn every_place_has_its_words_and_its_advice() {
        let inner = || (2, "inner".into());
        for (place, words, advice) in [
            (
                DeviceProgress::Launching,
                "does not return",
                "Launch that does not return:",
            ),
            (
                DeviceProgress::Behind(inner(), DevicePhase::Runs),
                "waits for inner (process set 2)",
                "Earlier",
            ),
            (
                DeviceProgress::Behind(inner(), DevicePhase::AwaitsInputs),
                "waits for what the script",
                "Busy GPU:",
            ),
            (
                DeviceProgress::Behind(inner(), DevicePhase::Launching),
                "is being launched",
                "Launch that",
            ),
            (DeviceProgress::NotLaunched, "not launched", "Not launched:"),
            (DeviceProgress::Silent, "does not answer", "Silent rank:"),
        ] {
            let text = rendered(&[DeviceProgress::Runs, place]);
            assert!(text.contains(words) && text.contains(advice), "{text}");
            assert!(text.contains("rank 1 on host1"), "{text}");
        }
    }

    #[test]
    fn an_end_and_those_not_asked_are_told() {
        let mut d = diagnosis(&[DeviceProgress::Runs]);
        d.complaint.ends = true;
        d.unasked = 900;
        let text = render_device(&d, &host_of);
        assert!(text.contains("Where its 901 ranks are"), "{text}");
        assert!(text.contains("not asked: 900 ranks"), "{text}");
        assert!(
            text.contains("ends because of it (HOROVOD_GPU_TIMEOUT)"),
            "{text}"
        );
    }
}

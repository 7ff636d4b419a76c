//! The report of a failed job: who is to blame, and how to say it.

use crate::frames::{ExitStatus, Stream};
use crate::platform::signal_name;

/// How a rank ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Its process ended.
    Exit(ExitStatus),
    /// Its host was lost; why.
    HostLost(String),
    /// It did not answer this rank, and had to be ended.
    Silent(u32, ExitStatus),
    /// Its process ended with code 0 while others waited for it in `hvd.init()`.
    Absent,
}

/// The end of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct End {
    /// Which rank.
    pub(crate) rank: u32,
    /// Where.
    pub(crate) host: String,
    /// How.
    pub(crate) cause: Cause,
    /// The launcher had asked it to end.
    pub(crate) was_asked: bool,
    /// Its last lines show that it only noticed another's failure.
    pub(crate) is_consequence: bool,
}

impl Cause {
    /// `exited with code 3`, `killed by signal 9 (SIGKILL)`: as other ranks are told.
    pub fn text(&self) -> String {
        match self {
            Self::Exit(ExitStatus::Code(code)) => format!("exited with code {code}"),
            Self::Exit(ExitStatus::Signal(signal)) => {
                format!("killed by signal {signal} ({})", signal_name(*signal))
            }
            Self::Exit(ExitStatus::OutOfMemory) => {
                "killed by signal 9 (SIGKILL) from the kernel, because the memory of its host or container had run out"
                    .to_owned()
            }
            Self::HostLost(why) => format!("lost: {why}"),
            Self::Absent => {
                "exited with code 0 without calling hvd.init(), in which other ranks waited for it: every rank has to \
                 call it"
                    .to_owned()
            }
            Self::Silent(by, status) => format!(
                "did not answer rank {by} any more, as if it was stopped or cut off, and had to be ended ({})",
                Self::Exit(*status).text()
            ),
        }
    }

    /// Whether this is a failure.
    pub fn is_failure(&self) -> bool {
        *self != Self::Exit(ExitStatus::Code(0))
    }

    /// Exit code as a shell gives it.
    pub fn code(&self) -> u8 {
        match self {
            Self::Exit(ExitStatus::Code(code)) => (*code & 0xff) as u8,
            Self::Exit(ExitStatus::Signal(signal)) => (128 + (*signal & 0x7f)) as u8,
            Self::Exit(ExitStatus::OutOfMemory) => 128 + 9,
            Self::HostLost(_) | Self::Absent => 1,
            Self::Silent(_, status) => Self::Exit(*status).code(),
        }
    }
}

/// Texts in the last lines of ranks that only noticed another's end. The runtime writes these.
pub(crate) const CONSEQUENCES: [&str; 3] = [
    "HorovodInternalError",
    "Horovod has been shut down",
    "Horovod lost a member of the job",
];

/// The rank that failed first by cause. `ends` is in order of their arrival.
///
/// A rank that says it lost the others is blamed only when no other can be: the one that set it off may still
/// have been cleaning up when this one had already ended.
pub(crate) fn culprit(ends: &[End]) -> Option<&End> {
    ends.iter()
        .enumerate()
        .filter(|(_, end)| end.cause.is_failure())
        .min_by_key(|(place, end)| (end.was_asked, end.is_consequence, *place))
        .map(|(_, end)| end)
}

/// The report in paragraphs: the culprit first, with its last lines, then the others in one line.
pub(crate) fn describe(
    culprit: &End,
    tail: Option<(Stream, Vec<String>)>,
    others: &[End],
) -> Vec<String> {
    let was = match culprit.cause {
        Cause::Exit(ExitStatus::Code(_)) | Cause::Silent(..) | Cause::Absent => "",
        Cause::Exit(ExitStatus::Signal(_) | ExitStatus::OutOfMemory) | Cause::HostLost(_) => "was ",
    };
    let mut text = format!(
        "rank {} on host {} {was}{}.",
        culprit.rank,
        culprit.host,
        culprit.cause.text()
    );
    match tail {
        Some((stream, lines)) => {
            text.push_str(&format!(" Last lines of its {}:", stream.name()));
            for line in lines {
                text.push_str("\n    ");
                text.push_str(&line);
            }
        }
        None => text.push_str(" It printed nothing."),
    }
    let mut paragraphs = vec![text];
    let summary = summary(culprit, others);
    if !summary.is_empty() {
        paragraphs.push(format!("the others: {summary}."));
    }
    paragraphs
}

/// Groups ranks that ended alike: `ranks 0-2, 5 exited with code 0; rank 4 ended by horovodrun`.
fn summary(culprit: &End, ends: &[End]) -> String {
    let mut groups: Vec<(String, Vec<u32>)> = Vec::new();
    for end in ends.iter().filter(|end| end.rank != culprit.rank) {
        let how = if end.was_asked && end.cause.is_failure() {
            format!("ended by horovodrun ({})", end.cause.text())
        } else {
            end.cause.text()
        };
        match groups.iter_mut().find(|(known, _)| *known == how) {
            Some((_, ranks)) => ranks.push(end.rank),
            None => groups.push((how, vec![end.rank])),
        }
    }
    let parts: Vec<String> = groups
        .into_iter()
        .map(|(how, mut ranks)| {
            ranks.sort_unstable();
            let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
            format!("{noun} {} {how}", ranges(&ranks))
        })
        .collect();
    parts.join("; ")
}

/// `0-2, 5` for ascending numbers.
fn ranges(numbers: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let texts: Vec<String> = runs
        .iter()
        .map(|(a, b)| {
            if a == b {
                a.to_string()
            } else {
                format!("{a}-{b}")
            }
        })
        .collect();
    texts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(rank: u32, status: ExitStatus) -> End {
        End {
            rank,
            host: "h".to_owned(),
            cause: Cause::Exit(status),
            was_asked: false,
            is_consequence: false,
        }
    }

    #[track_caller]
    fn blames(ends: &[End], rank: u32) {
        assert_eq!(culprit(ends).map(|end| end.rank), Some(rank));
    }

    #[test]
    fn blames_the_first_failure() {
        let ok = end(0, ExitStatus::Code(0));
        let first = end(2, ExitStatus::Code(3));
        let second = end(1, ExitStatus::Code(1));
        blames(&[ok.clone(), first.clone(), second.clone()], 2);
        assert_eq!(culprit(&[ok]), None);
    }

    #[test]
    fn does_not_blame_a_rank_that_only_lost_a_peer() {
        let victim = End {
            is_consequence: true,
            ..end(0, ExitStatus::Code(1))
        };
        blames(&[victim.clone(), end(1, ExitStatus::Signal(9))], 1);
        blames(&[victim], 0);
    }

    #[test]
    fn does_not_blame_what_horovodrun_ended() {
        let asked = End {
            was_asked: true,
            ..end(0, ExitStatus::Signal(15))
        };
        let victim = End {
            is_consequence: true,
            ..end(1, ExitStatus::Code(1))
        };
        blames(&[asked, victim], 1);
    }

    #[test]
    fn blames_who_did_not_answer_rather_than_those_that_noticed() {
        let victim = End {
            is_consequence: true,
            ..end(0, ExitStatus::Code(1))
        };
        let silent = End {
            cause: Cause::Silent(0, ExitStatus::Signal(9)),
            ..end(1, ExitStatus::Signal(9))
        };
        blames(&[victim.clone(), silent.clone()], 1);
        assert_eq!(
            describe(&silent, None, &[victim, silent.clone()]),
            [
                "rank 1 on host h did not answer rank 0 any more, as if it was stopped or cut off, and had to be ended \
                 (killed by signal 9 (SIGKILL)). It printed nothing.",
                "the others: rank 0 exited with code 1."
            ]
        );
    }

    #[test]
    fn gives_the_codes_of_a_shell() {
        let code = |status| Cause::Exit(status).code();
        assert_eq!(code(ExitStatus::Code(3)), 3);
        assert_eq!(code(ExitStatus::Signal(9)), 137);
        assert_eq!(code(ExitStatus::OutOfMemory), 137);
        assert_eq!(Cause::HostLost(String::new()).code(), 1);
    }

    #[test]
    fn names_the_culprit_first_and_the_others_in_one_line() {
        let ends = [
            end(1, ExitStatus::Signal(9)),
            end(0, ExitStatus::Code(1)),
            End {
                was_asked: true,
                ..end(3, ExitStatus::Signal(15))
            },
            end(2, ExitStatus::Code(1)),
        ];
        let tail = Some((Stream::Stderr, vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(
            describe(&ends[0], tail, &ends),
            [
                "rank 1 on host h was killed by signal 9 (SIGKILL). Last lines of its stderr:\n    a\n    b",
                "the others: ranks 0, 2 exited with code 1; rank 3 ended by horovodrun (killed by signal 15 (SIGTERM))."
            ]
        );
        let alone = describe(&ends[1], None, &ends[1..2]);
        assert_eq!(
            alone,
            ["rank 0 on host h exited with code 1. It printed nothing."]
        );
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
    }
}

//! A difference between replicas, as text: tensors, ranks, and how to make them equal.

use horovod_protocol::{ProcessSetId, Rank};

/// Parameters that are named; of more only the number.
const NAMED_MAX: usize = 4;

/// Ranks that hold the same, in ascending order.
pub(super) type Side = Vec<Rank>;

/// Replicas that differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub(super) set: ProcessSetId,
    /// How many parameters there are.
    pub(super) total: u64,
    /// Names of those that differ, and the ranks that hold the same, the most first.
    pub(super) differing: Vec<(String, Vec<Side>)>,
    /// Ranks that differ as well, but were not compared one by one.
    pub(super) others: Vec<Rank>,
    pub(super) advice: String,
}

impl Finding {
    /// The first rank that differs from the majority, or from rank 0's side.
    pub fn by(&self) -> Rank {
        let sides = (self.differing.iter()).flat_map(|(_, sides)| sides.iter().skip(1));
        let rank = sides.filter_map(|side| side.first()).min();
        rank.copied().unwrap_or(Rank(0))
    }

    /// All there is to say about it.
    pub fn text(&self) -> String {
        let of_set = match self.set {
            ProcessSetId::GLOBAL => String::new(),
            set => format!(" of process set {}", set.0),
        };
        let shown = self.differing.iter().take(NAMED_MAX);
        let mut named: Vec<String> = shown.map(|(name, sides)| difference(name, sides)).collect();
        if self.differing.len() > NAMED_MAX {
            named.push("and others".into());
        }
        if !self.others.is_empty() {
            let others = ranks(&self.others);
            named.push(format!("{others} differ as well, not compared one by one"));
        }
        format!(
            "The ranks{of_set} do not hold the same values as they begin to train: {}. {} of {} parameters differ. {} \
             Otherwise each rank trains a model of its own. HOROVOD_CHECK_REPLICAS=off switches this check off, =error \
             ends such a job.",
            named.join("; "),
            self.differing.len(),
            self.total,
            self.advice
        )
    }
}

/// The words of `Difference` in python/horovod/common/consistency.py, which compares later.
fn difference(name: &str, sides: &[Side]) -> String {
    let everybody: usize = sides.iter().map(Vec::len).sum();
    match sides {
        [most, rest @ ..] if 2 * most.len() > everybody => {
            let mut wrong = rest.concat();
            wrong.sort_unstable();
            let (wrong, most) = (ranks(&wrong), ranks(most));
            format!("'{name}' on {wrong} differs from {most} (the majority)")
        }
        sides => {
            let sides: Vec<String> = sides.iter().map(|side| ranks(side)).collect();
            format!(
                "'{name}' differs between {} (no majority)",
                sides.join(", ")
            )
        }
    }
}

/// Such as "rank 3" or "ranks 0-2, 4".
fn ranks(ranks: &[Rank]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for Rank(rank) in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *rank => *last = *rank,
            _ => runs.push((*rank, *rank)),
        }
    }
    let text = |(first, last): &(u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    let texts: Vec<String> = runs.iter().map(text).collect();
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", texts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(differing: &[(&str, &[&[u32]])]) -> Finding {
        let side = |side: &&[u32]| side.iter().copied().map(Rank).collect();
        let named = differing.iter().map(|(name, sides)| {
            let sides = sides.iter().map(side).collect();
            ((*name).to_owned(), sides)
        });
        Finding {
            set: ProcessSetId::GLOBAL,
            total: 9,
            differing: named.collect(),
            others: Vec::new(),
            advice: "Call hvd.broadcast_parameters(model.state_dict(), root_rank=0).".into(),
        }
    }

    #[test]
    fn tensors_ranks_and_the_advice_are_named() {
        let text = finding(&[("a", &[&[0, 1, 3], &[2]]), ("b", &[&[0], &[1]])]).text();
        for part in [
            "begin to train: 'a' on rank 2 differs from ranks 0-1, 3 (the majority); \
             'b' differs between rank 0, rank 1 (no majority). 2 of 9 parameters differ. Call hvd.broadcast_parameters",
            "HOROVOD_CHECK_REPLICAS=off",
        ] {
            assert!(text.contains(part), "{part}\nis not in\n{text}");
        }
    }

    #[test]
    fn of_many_the_first_are_named_and_the_set_is_said() {
        let sides: &[&[u32]] = &[&[1], &[2]];
        let names = ["a", "b", "c", "d", "e"].map(|name| (name, sides));
        let mut found = finding(&names);
        found.set = ProcessSetId(3);
        found.others = vec![Rank(7), Rank(8)];
        let text = found.text();
        assert!(text.starts_with("The ranks of process set 3 do"), "{text}");
        assert!(
            text.contains("; and others; ranks 7-8 differ as well"),
            "{text}"
        );
        assert!(!text.contains("'e'"), "{text}");
        assert_eq!(found.by(), Rank(2));
        let found = finding(&[("a", &[&[0, 1], &[3, 4], &[2]])]);
        assert_eq!(found.by(), Rank(2));
    }
}

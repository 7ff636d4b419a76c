//! The schedule of measurements between hosts: rounds in which every host has at most one partner.

/// Rounds in which each of `count` players meets each other once (the circle method). Every prefix of the rounds is a
/// fair sample: in each round everybody plays, but one where the number is odd.
pub(crate) fn rounds(count: usize) -> Vec<Vec<(usize, usize)>> {
    // An odd number gets a position that stays empty.
    let positions = count + count % 2;
    if count < 2 {
        return Vec::new();
    }
    let turning = positions - 1;
    let round = |number: usize| {
        let at = |position: usize| (number + position) % turning;
        let first = (at(0), turning);
        let others = (1..positions / 2).map(move |position| (at(position), at(turning - position)));
        std::iter::once(first)
            .chain(others)
            .filter(|(a, b)| *a < count && *b < count)
            .map(|(a, b)| (a.min(b), a.max(b)))
            .collect()
    };
    (0..turning).map(round).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn everybody_meets_everybody_once_and_nobody_plays_twice_at_a_time() {
        assert_eq!(rounds(0), Vec::<Vec<(usize, usize)>>::new());
        assert_eq!(rounds(1), Vec::<Vec<(usize, usize)>>::new());
        assert_eq!(rounds(2), [[(0, 1)]]);
        for count in 2..40 {
            let mut met = BTreeSet::new();
            for round in rounds(count) {
                assert_eq!(round.len(), count / 2, "{count}");
                let mut playing = BTreeSet::new();
                for (a, b) in round {
                    assert!(a < b && b < count);
                    assert!(playing.insert(a) && playing.insert(b), "{count}");
                    assert!(met.insert((a, b)), "{count}");
                }
            }
            assert_eq!(met.len(), count * (count - 1) / 2, "{count}");
        }
    }
}

//! A set of ranks as bits.

use crate::types::Rank;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RankSet {
    words: Vec<u64>,
    len: usize,
}

impl RankSet {
    /// `true` if the rank was not in the set.
    pub(crate) fn insert(&mut self, rank: Rank) -> bool {
        let (word, bit) = place(rank);
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        let new = self.words[word] & bit == 0;
        self.words[word] |= bit;
        self.len += usize::from(new);
        new
    }

    /// Adds all of `other`; `false` if some were in the set, which then is spoilt.
    pub(crate) fn unite(&mut self, other: &Self) -> bool {
        if other.words.len() > self.words.len() {
            self.words.resize(other.words.len(), 0);
        }
        let mut apart = true;
        for (word, more) in self.words.iter_mut().zip(&other.words) {
            apart &= *word & more == 0;
            self.len += (more & !*word).count_ones() as usize;
            *word |= more;
        }
        apart
    }

    /// The ranks in both.
    pub(crate) fn common(&self, other: &Self) -> Self {
        let words: Vec<u64> = self
            .words
            .iter()
            .zip(&other.words)
            .map(|(a, b)| a & b)
            .collect();
        let len = words.iter().map(|w| w.count_ones() as usize).sum();
        Self { words, len }
    }

    /// The rank in both, if it is one.
    pub(crate) fn only_common(&self, other: &Self) -> Option<Rank> {
        let mut both = self.iter().filter(|rank| other.contains(*rank));
        both.next().filter(|_| both.next().is_none())
    }

    pub(crate) fn meets(&self, other: &Self) -> bool {
        self.words.iter().zip(&other.words).any(|(a, b)| a & b != 0)
    }

    pub(crate) fn is_within(&self, other: &Self) -> bool {
        self.iter().all(|rank| other.contains(rank))
    }

    pub(crate) fn contains(&self, rank: Rank) -> bool {
        let (word, bit) = place(rank);
        self.words.get(word).is_some_and(|w| w & bit != 0)
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn clear(&mut self) {
        self.words.fill(0);
        self.len = 0;
    }

    /// Ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Rank> {
        self.words.iter().enumerate().flat_map(|(i, word)| {
            let mut rest = *word;
            std::iter::from_fn(move || {
                let bit = (rest != 0).then(|| rest.trailing_zeros())?;
                rest &= rest - 1;
                Some(Rank(i as u32 * 64 + bit))
            })
        })
    }
}

impl FromIterator<Rank> for RankSet {
    fn from_iter<I: IntoIterator<Item = Rank>>(ranks: I) -> Self {
        let mut set = Self::default();
        for rank in ranks {
            set.insert(rank);
        }
        set
    }
}

fn place(rank: Rank) -> (usize, u64) {
    (rank.index() / 64, 1 << (rank.0 % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_come_back_once_and_in_order() {
        let mut set: RankSet = [64, 3, 511, 3, 63].map(Rank).into_iter().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), [3, 63, 64, 511].map(Rank));
        assert_eq!(
            (set.len(), set.contains(Rank(64)), set.contains(Rank(65))),
            (4, true, false)
        );
        assert!(!set.insert(Rank(3)));
        let other: RankSet = [3, 64, 900].map(Rank).into_iter().collect();
        assert_eq!(set.only_common(&other), None);
        let one: RankSet = [64, 900].map(Rank).into_iter().collect();
        assert_eq!(set.only_common(&one), Some(Rank(64)));
        assert_eq!(
            set.common(&other).iter().collect::<Vec<_>>(),
            [3, 64].map(Rank)
        );
        assert!(set.common(&other).is_within(&set) && !other.is_within(&set));
        assert!(!set.clone().unite(&other));
        let mut both = set.clone();
        assert!(both.unite(&[Rank(900)].into_iter().collect()) && both.len() == 5);
        set.clear();
        assert!(set.is_empty() && !set.contains(Rank(511)) && !set.contains(Rank(60_000)));
    }
}

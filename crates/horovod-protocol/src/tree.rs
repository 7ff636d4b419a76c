//! The tree of the negotiation: ranks reach the coordinator directly in small jobs, through others in large ones.

use crate::rank_set::RankSet;
use crate::types::Rank;

/// The control links of a job. The same on every rank: made from the same facts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    /// By rank; rank 0 is its own parent.
    parents: Vec<Rank>,
    /// Children of rank `r`: `children[first[r]..first[r + 1]]`.
    first: Vec<usize>,
    children: Vec<Rank>,
}

impl Tree {
    /// Every rank speaks to rank 0 itself.
    pub fn star(size: u32) -> Self {
        Self::of(vec![Rank(0); size as usize])
    }

    /// A star as long as rank 0 has at most `fan_out` others to listen to. Else the ranks of a host
    /// speak through its first rank, and the first ranks through each other. Nobody listens to more
    /// than `fan_out` ranks of its host and `fan_out` of others; who is too many speaks through the
    /// earliest that has room. A parent is always lower than its children. `hosts[rank]` is any
    /// number that the ranks of one host share.
    pub fn new(hosts: &[u32], fan_out: u32) -> Self {
        let fan_out = (fan_out as usize).max(2);
        if hosts.len() <= fan_out + 1 {
            return Self::star(hosts.len() as u32);
        }
        let mut by_host: std::collections::BTreeMap<u32, Vec<Rank>> =
            std::collections::BTreeMap::new();
        for (rank, host) in (0..).map(Rank).zip(hosts) {
            by_host.entry(*host).or_default().push(rank);
        }
        let mut groups: Vec<Vec<Rank>> = by_host.into_values().collect();
        groups.sort_unstable_by_key(|ranks| ranks[0]);
        let mut parents = vec![Rank(0); hosts.len()];
        for (at, group) in groups.iter().enumerate() {
            for (local, rank) in group.iter().enumerate().skip(1) {
                parents[rank.index()] = group[(local - 1) / fan_out];
            }
            if at > 0 {
                parents[group[0].index()] = groups[(at - 1) / fan_out][0];
            }
        }
        Self::of(parents)
    }

    fn of(parents: Vec<Rank>) -> Self {
        let mut first = vec![0; parents.len() + 1];
        for parent in parents.iter().skip(1) {
            first[parent.index() + 1] += 1;
        }
        for at in 1..first.len() {
            first[at] += first[at - 1];
        }
        let mut next = first.clone();
        let mut children = vec![Rank(0); parents.len().saturating_sub(1)];
        for (rank, parent) in (0..).map(Rank).zip(&parents).skip(1) {
            children[next[parent.index()]] = rank;
            next[parent.index()] += 1;
        }
        Self {
            parents,
            first,
            children,
        }
    }

    /// Ranks of the job.
    pub fn size(&self) -> u32 {
        self.parents.len() as u32
    }

    /// To whom a rank speaks; `None` for rank 0.
    pub fn parent(&self, rank: Rank) -> Option<Rank> {
        (rank.0 != 0).then(|| self.parents[rank.index()])
    }

    /// Ranks connected directly below a rank, ascending.
    pub fn children(&self, rank: Rank) -> &[Rank] {
        &self.children[self.first[rank.index()]..self.first[rank.index() + 1]]
    }

    /// Whether a rank needs an [`crate::Aggregator`].
    pub fn aggregates(&self, rank: Rank) -> bool {
        rank.0 != 0 && !self.children(rank).is_empty()
    }

    /// The child of `node` through which `rank` speaks, or `rank` itself if it is that child; `None`
    /// for those who do not speak through `node`.
    pub fn child_towards(&self, node: Rank, rank: Rank) -> Option<Rank> {
        let mut rank = rank;
        loop {
            let parent = self.parent(rank)?;
            if parent == node {
                return Some(rank);
            }
            rank = parent;
        }
    }

    /// A rank and everybody who speaks through it.
    pub(crate) fn below(&self, rank: Rank) -> RankSet {
        let mut ranks = RankSet::default();
        let mut open = vec![rank];
        while let Some(rank) = open.pop() {
            ranks.insert(rank);
            open.extend(self.children(rank));
        }
        ranks
    }
}

/// The links of one node of the tree: to its own worker first, then to its children.
#[derive(Debug)]
pub(crate) struct Links {
    links: Vec<Link>,
}

#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) rank: Rank,
    /// Everybody who speaks through it; `None` if that is only the rank itself.
    pub(crate) below: Option<RankSet>,
}

impl Links {
    pub(crate) fn of(tree: &Tree, node: Rank) -> Self {
        let own = Link {
            rank: node,
            below: None,
        };
        let children = tree.children(node).iter().map(|rank| Link {
            rank: *rank,
            below: tree.aggregates(*rank).then(|| tree.below(*rank)),
        });
        Self {
            links: std::iter::once(own).chain(children).collect(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.links.len()
    }

    pub(crate) fn get(&self, link: usize) -> &Link {
        &self.links[link]
    }

    /// The link on which a rank speaks.
    pub(crate) fn find(&self, rank: Rank) -> Option<usize> {
        // In a star the link has the number of the rank.
        if self.links.get(rank.index()).is_some_and(|l| l.rank == rank) {
            return Some(rank.index());
        }
        match self.links.split_first()? {
            (own, _) if own.rank == rank => Some(0),
            (_, rest) => rest
                .binary_search_by_key(&rank, |l| l.rank)
                .ok()
                .map(|i| i + 1),
        }
    }

    /// Whether anybody speaks through somebody else.
    pub(crate) fn are_deep(&self) -> bool {
        self.links.iter().any(|link| link.below.is_some())
    }

    /// The links that lead to members of a set.
    pub(crate) fn to(&self, members: &RankSet) -> Vec<u32> {
        let leads = |link: &Link| match &link.below {
            None => members.contains(link.rank),
            Some(below) => below.meets(members),
        };
        (0..)
            .zip(&self.links)
            .filter(|(_, link)| leads(link))
            .map(|(number, _)| number)
            .collect()
    }
}

impl Link {
    pub(crate) fn leads_to(&self, rank: Rank) -> bool {
        match &self.below {
            None => self.rank == rank,
            Some(below) => below.contains(rank),
        }
    }
}

/// The place of a link among those that lead to a set, ascending.
pub(crate) fn position(to: &[u32], link: usize) -> Option<usize> {
    // All links lead to most sets.
    if to.get(link).is_some_and(|l| *l as usize == link) {
        return Some(link);
    }
    to.binary_search(&(link as u32)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parents(tree: &Tree) -> Vec<u32> {
        (1..tree.size())
            .map(|rank| tree.parent(Rank(rank)).unwrap().0)
            .collect()
    }

    #[test]
    fn small_jobs_are_stars_whatever_their_hosts() {
        let tree = Tree::new(&[0, 0, 1, 1, 2], 4);
        assert_eq!(tree, Tree::star(5));
        assert_eq!(parents(&tree), [0, 0, 0, 0]);
        assert!((0..5).all(|rank| !tree.aggregates(Rank(rank))));
    }

    #[test]
    fn ranks_of_a_host_speak_through_its_first_and_first_ranks_through_each_other() {
        // Five hosts of two ranks, dealt out in turn.
        let hosts: Vec<u32> = (0..10).map(|rank| 9 - rank % 5).collect();
        let tree = Tree::new(&hosts, 2);
        assert_eq!(parents(&tree), [0, 0, 1, 1, 0, 1, 2, 3, 4]);
        assert_eq!(tree.children(Rank(1)), [3, 4, 6].map(Rank));
        assert!(tree.aggregates(Rank(1)) && !tree.aggregates(Rank(0)) && !tree.aggregates(Rank(6)));
        let below: Vec<Rank> = tree.below(Rank(1)).iter().collect();
        assert_eq!(below, [1, 3, 4, 6, 8, 9].map(Rank));
    }

    #[test]
    fn many_ranks_of_one_host_speak_through_each_other_too() {
        let tree = Tree::new(&[0; 8], 2);
        assert_eq!(parents(&tree), [0, 0, 1, 1, 2, 2, 3]);
        let towards = |rank| tree.child_towards(Rank(1), Rank(rank));
        assert_eq!((towards(7), towards(4)), (Some(Rank(3)), Some(Rank(4))));
        assert_eq!((towards(1), towards(0), towards(6)), (None, None, None));
    }

    #[test]
    fn nobody_listens_to_more_than_its_share() {
        for (size, per_host) in [(1u32, 1u32), (64, 64), (70, 1), (1000, 100), (1001, 7)] {
            let hosts: Vec<u32> = (0..size).map(|rank| rank / per_host).collect();
            let tree = Tree::new(&hosts, 16);
            let mut reached = 0;
            for rank in (0..size).map(Rank) {
                assert!(tree.children(rank).len() <= 32, "{size} {per_host}");
                reached += tree.children(rank).len();
                let links = Links::of(&tree, rank);
                for child in tree.children(rank) {
                    assert!(*child > rank);
                    let link = links.find(*child).unwrap();
                    assert_eq!(links.get(link).rank, *child);
                }
                assert_eq!(links.find(rank), Some(0));
            }
            assert_eq!(reached as u32, size - 1);
            assert_eq!(tree.below(Rank(0)).len() as u32, size);
        }
    }
}

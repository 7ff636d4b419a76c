//! The aggregator's merging of requests: equal ones of one batch are passed on as one.

use crate::local::encoded_bytes;
use crate::message::{SetKey, Slot, Submission};
use crate::outbox::Outbox;
use crate::tree::Links;
use crate::types::Rank;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Where equal things of the open batch may be.
#[derive(Debug, Default)]
pub(super) struct Merge {
    at: BTreeMap<Key, Vec<(u64, usize)>>,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Name(SetKey, Arc<str>),
    Slot(Slot),
}

/// The links that lead to members of the set, among the links.
type All<'a> = Option<(&'a [u32], &'a Links)>;

impl Merge {
    /// Adds what these say; `all` are those whose validation needs no names.
    pub(super) fn push(
        &mut self,
        outbox: &mut Outbox,
        ranks: &[Rank],
        subtrees: &[Rank],
        item: Submission,
        all: All<'_>,
    ) {
        let key = match &item {
            Submission::New { set, name, .. } => Some(Key::Name(*set, Arc::clone(name))),
            Submission::GatherHit { slot, .. } => Some(Key::Slot(*slot)),
            Submission::Hits(run) => {
                if extended(outbox, ranks, subtrees, &item) {
                    return;
                }
                Some(Key::Slot(run.first))
            }
            // A rank's messages after its join must stay after the join.
            _ => {
                self.at.clear();
                None
            }
        };
        let bytes = 5 * (ranks.len() + subtrees.len());
        if let Some(key) = &key {
            for (batch, at) in self.at.get(key).into_iter().flatten() {
                let Some(there) = outbox.item_mut(*batch, *at) else {
                    continue;
                };
                if let Submission::Of {
                    ranks: mine,
                    subtrees: tops,
                    item: submission,
                } = there
                    && **submission == item
                    && apart(mine, ranks)
                    && apart(tops, subtrees)
                {
                    mine.extend_from_slice(ranks);
                    mine.sort_unstable();
                    tops.extend_from_slice(subtrees);
                    tops.sort_unstable();
                    if are_all(mine, tops, all) {
                        *there = item;
                    }
                    return outbox.grow(bytes);
                }
            }
        }
        let bytes = bytes + item_bytes(&item);
        let item = if are_all(ranks, subtrees, all) {
            item
        } else {
            Submission::Of {
                ranks: ranks.to_vec(),
                subtrees: subtrees.to_vec(),
                item: Box::new(item),
            }
        };
        let place = outbox.push(item, bytes);
        if let Some(key) = key {
            self.at.entry(key).or_default().push(place);
        }
    }

    pub(super) fn next_batch(&mut self) {
        self.at.clear();
    }
}

/// Whether the last thing said is the same of the slots before, by the same.
fn extended(outbox: &mut Outbox, ranks: &[Rank], subtrees: &[Rank], item: &Submission) -> bool {
    let (
        Submission::Hits(more),
        Some(Submission::Of {
            ranks: mine,
            subtrees: tops,
            item: submission,
        }),
    ) = (item, outbox.last_mut())
    else {
        return false;
    };
    let Submission::Hits(run) = &mut **submission else {
        return false;
    };
    mine == ranks && tops == subtrees && run.append(*more)
}

fn apart(a: &[Rank], b: &[Rank]) -> bool {
    b.iter().all(|rank| a.binary_search(rank).is_err())
}

/// Whether these are exactly all members below.
fn are_all(ranks: &[Rank], subtrees: &[Rank], all: All<'_>) -> bool {
    let Some((to, links)) = all else { return false };
    ranks.len() + subtrees.len() == to.len()
        && to.iter().all(|link| {
            let link = links.get(*link as usize);
            let among = if link.below.is_none() {
                ranks
            } else {
                subtrees
            };
            among.binary_search(&link.rank).is_ok()
        })
}

fn item_bytes(item: &Submission) -> usize {
    16 + match item {
        Submission::New {
            name, signature, ..
        } => {
            let ranks = match &signature.op {
                crate::Op::AddProcessSet { ranks } => 5 * ranks.len(),
                _ => 0,
            };
            encoded_bytes(name.len(), &signature.tensors) + ranks
        }
        Submission::GatherHit { first_dims, .. } => 10 * first_dims.len(),
        _ => 16,
    }
}

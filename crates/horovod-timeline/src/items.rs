//! The tensors of an execution on their way to the writer: a few bytes each.
//!
//! Where steps repeat, one number follows the other and one thread submits: then a tensor costs what its submission is
//! later than the one before.

use horovod_protocol::wire::{Reader, Writer};

use super::report::{Nanos, Stamp, ThreadId};

/// The number is not the next, or the thread not the last: both follow.
const ASTRAY: u64 = 1;
/// It was submitted here.
const SUBMITTED: u64 = 2;
/// Bits for these two.
const FLAGS: u32 = 2;
/// Latest time, far beyond any job's: so it has room beside the flags.
const LATEST: Nanos = 1 << 60;

/// Number and submission of each tensor or group; a submission is missing on a rank that had joined.
#[derive(Clone, Debug, Default)]
pub struct Items {
    bytes: Vec<u8>,
    count: usize,
    last: Last,
}

/// Reference values for the differences that encode the next item.
#[derive(Clone, Copy, Debug, Default)]
struct Last {
    next: u32,
    stamp: Stamp,
}

impl Items {
    /// Room for so many of the usual kind.
    pub(crate) fn with_capacity(count: usize) -> Self {
        Self {
            bytes: Vec::with_capacity(8 + 3 * count),
            ..Self::default()
        }
    }

    pub(crate) fn push(&mut self, number: u32, submitted: Option<Stamp>) {
        let Last { next, stamp: last } = self.last;
        let Stamp { at, thread } = submitted.unwrap_or(last);
        let at = at.min(LATEST);
        let astray = number != next || thread != last.thread;
        let later = at.wrapping_sub(last.at).cast_signed();
        // Small differences in either direction are small numbers.
        let later = ((later << 1) ^ (later >> 63)).cast_unsigned();
        let flags =
            if astray { ASTRAY } else { 0 } | if submitted.is_some() { SUBMITTED } else { 0 };
        let mut w = Writer::new(&mut self.bytes);
        w.varint(later << FLAGS | flags);
        if astray {
            w.varint(u64::from(number));
            w.varint(u64::from(thread));
        }
        self.count += 1;
        self.last = Last {
            next: number.wrapping_add(1),
            stamp: Stamp { at, thread },
        };
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Memory that they take, in bytes.
    pub(crate) fn size(&self) -> usize {
        self.bytes.capacity()
    }

    pub(crate) fn iter(&self) -> Iter<'_> {
        Iter {
            bytes: Reader::new(&self.bytes),
            last: Last::default(),
        }
    }
}

/// Reads them back.
pub(crate) struct Iter<'a> {
    bytes: Reader<'a>,
    last: Last,
}

impl Iterator for Iter<'_> {
    type Item = (u32, Option<Stamp>);

    fn next(&mut self) -> Option<Self::Item> {
        // They were written above: there is nothing that could not be read.
        let mut number = || self.bytes.varint("item").ok();
        let head = number()?;
        let Last { next, stamp: last } = self.last;
        let (next, thread): (u32, ThreadId) = if head & ASTRAY == 0 {
            (next, last.thread)
        } else {
            (number()? as u32, number()? as u32)
        };
        let later = head >> FLAGS;
        let later = (later >> 1) ^ (later & 1).wrapping_neg();
        let stamp = Stamp {
            at: last.at.wrapping_add(later),
            thread,
        };
        self.last = Last {
            next: next.wrapping_add(1),
            stamp,
        };
        Some((next, (head & SUBMITTED != 0).then_some(stamp)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn packed(items: &[(u32, Option<Stamp>)]) -> Items {
        let mut packed = Items::with_capacity(items.len());
        for (number, submitted) in items {
            packed.push(*number, *submitted);
        }
        packed
    }

    #[test]
    fn a_repeated_step_costs_little() {
        let stamp = |i: u64| Stamp {
            at: 5_000_000_000 + i * 900,
            thread: 4711,
        };
        let step: Vec<_> = (0..1000).map(|i| (i as u32, Some(stamp(i)))).collect();
        let packed = packed(&step);
        assert!(packed.iter().eq(step));
        assert!(packed.bytes.len() < 2020, "{}", packed.bytes.len());
        assert_eq!(packed.size(), 3008);
    }

    proptest! {
        #[test]
        fn any_items_come_back_as_they_were(
            items in proptest::collection::vec(
                (
                    prop_oneof![0..5u32, any::<u32>()],
                    proptest::option::of((0..=LATEST, prop_oneof![0..3u32, any::<u32>()])
                        .prop_map(|(at, thread)| Stamp { at, thread })),
                ),
                0..20,
            )
        ) {
            let packed = packed(&items);
            prop_assert_eq!(packed.len(), items.len());
            prop_assert_eq!(packed.iter().collect::<Vec<_>>(), items);
        }
    }
}

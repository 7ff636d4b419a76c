//! Numbers for tensors: the engine tells a name and a shape once, and from then on a number.
//!
//! Not to save memory: names are counted references that the engine takes and gives back all the time. If the writer, on
//! another processor, did so too, each would wait for the other's cache line, twice per tensor and operation.

use std::collections::HashMap;
use std::sync::Arc;

use horovod_protocol::{ExecItem, TensorMeta};

use super::report::{ReportedResult, Text, outcome};

/// Tensors and groups that have numbers; when there are more, all get new ones.
const NUMBERS_MAX: usize = 1 << 16;

/// The engine's side.
#[derive(Debug, Default)]
pub struct Catalog {
    /// The recording that has been told.
    session: u64,
    known: Vec<Description>,
    by_name: HashMap<Arc<str>, u32>,
    /// Steps repeat, so this comes next.
    next: usize,
}

/// Meaning of a number.
#[derive(Clone, Debug)]
pub(crate) struct Description {
    pub(super) name: Arc<str>,
    pub(super) tensors: Arc<[TensorMeta]>,
}

impl Catalog {
    /// Forgets what another recording was told.
    pub(crate) fn enter(&mut self, session: u64) {
        if self.session != session {
            *self = Self::default();
            self.session = session;
        }
    }

    /// The number of this item. A new item's meaning is passed to `tell`; `None` if `tell` fails.
    pub(crate) fn number(
        &mut self,
        item: &ExecItem,
        tell: impl FnOnce(u32, Description) -> bool,
    ) -> Option<u32> {
        let same = |known: &Description| {
            Arc::ptr_eq(&known.name, &item.name) && Arc::ptr_eq(&known.tensors, &item.tensors)
        };
        if self.known.get(self.next).is_some_and(same) {
            self.next += 1;
            return u32::try_from(self.next - 1).ok();
        }
        let described = Description {
            name: item.name.clone(),
            tensors: item.tensors.clone(),
        };
        if let Some(&number) = self.by_name.get(&item.name) {
            let known = &mut self.known[number as usize];
            if known.tensors[..] != item.tensors[..] && !tell(number, described.clone()) {
                return None;
            }
            *known = described;
            self.next = number as usize + 1;
            return Some(number);
        }
        if self.known.len() == NUMBERS_MAX {
            self.known.clear();
            self.by_name.clear();
        }
        let number = u32::try_from(self.known.len()).ok()?;
        if !tell(number, described.clone()) {
            return None;
        }
        self.by_name.insert(described.name.clone(), number);
        self.known.push(described);
        self.next = self.known.len();
        Some(number)
    }
}

/// The writer's side, with copies of its own.
#[derive(Debug, Default)]
pub(super) struct Directory {
    pub(super) session: u64,
    known: Vec<Entry>,
}

/// The writer's entry for a number.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: Text,
    pub(super) tensors: Vec<TensorMeta>,
    /// The outcome unless the operation has another.
    pub(super) outcome: ReportedResult,
}

impl Directory {
    pub(super) fn new(session: u64) -> Self {
        Self {
            session,
            known: Vec::new(),
        }
    }

    pub(super) fn learn(&mut self, session: u64, number: u32, description: &Description) {
        let index = number as usize;
        // The engine counts up, and tells all of a recording or nothing that comes later.
        if session != self.session || index > self.known.len() {
            return;
        }
        let tensors = description.tensors.to_vec();
        let entry = Entry {
            name: Text::Shared((*description.name).into()),
            outcome: outcome(&tensors, None),
            tensors,
        };
        match self.known.get_mut(index) {
            Some(known) => *known = entry,
            None => self.known.push(entry),
        }
    }

    pub(super) fn get(&self, number: u32) -> Option<&Entry> {
        self.known.get(number as usize)
    }
}

#[cfg(test)]
mod tests {
    use horovod_protocol::DType;

    use super::*;

    fn item(name: &str, rows: u64) -> ExecItem {
        let meta = TensorMeta::new(DType::F32, [rows, 3]);
        ExecItem {
            entry: None,
            name: name.into(),
            tensors: [meta].into(),
            reordered: false,
            first_dims: Vec::new(),
        }
    }

    /// Both sides, and how much was told.
    #[derive(Default)]
    struct Sides {
        catalog: Catalog,
        directory: Directory,
        written: usize,
    }

    impl Sides {
        fn number(&mut self, item: &ExecItem) -> u32 {
            let tell = |number, description: Description| {
                self.directory.learn(0, number, &description);
                self.written += 1;
                true
            };
            let number = self.catalog.number(item, tell).unwrap();
            let entry = self.directory.get(number).unwrap();
            assert_eq!(*entry.name, *item.name);
            assert_eq!(entry.tensors, item.tensors[..]);
            number
        }
    }

    #[test]
    fn a_tensor_is_described_once_whatever_the_order() {
        let mut sides = Sides::default();
        let items: Vec<ExecItem> = (0..10).map(|i| item(&format!("t{i}"), 2)).collect();
        let numbers: Vec<u32> = items.iter().map(|i| sides.number(i)).collect();
        for order in [[0, 1, 2], [9, 3, 4], [5, 5, 0]] {
            for i in order {
                // The same content elsewhere in memory, too.
                assert_eq!(sides.number(&items[i]), numbers[i]);
                assert_eq!(sides.number(&item(&format!("t{i}"), 2)), numbers[i]);
            }
        }
        assert_eq!(sides.written, 10);
    }

    #[test]
    fn another_shape_is_told_and_so_is_what_came_after_too_many() {
        let mut sides = Sides::default();
        let number = sides.number(&item("t", 2));
        assert_eq!(sides.number(&item("t", 5)), number);
        assert_eq!(sides.written, 2);
        for i in 0..NUMBERS_MAX {
            sides.number(&item(&format!("other {i}"), 1));
        }
        sides.number(&item("t", 5));
    }

    #[test]
    fn what_could_not_be_told_is_told_the_next_time() {
        let mut sides = Sides::default();
        assert_eq!(sides.catalog.number(&item("t", 2), |_, _| false), None);
        sides.number(&item("t", 2));
        assert_eq!(sides.catalog.number(&item("t", 3), |_, _| false), None);
        sides.number(&item("t", 3));
        assert_eq!(sides.written, 2);
    }

    #[test]
    fn another_recording_is_told_anew_and_hears_nothing_of_the_former() {
        let mut sides = Sides::default();
        sides.number(&item("t", 2));
        sides.directory = Directory::new(1);
        let late = Description {
            name: "late".into(),
            tensors: Vec::new().into(),
        };
        sides.directory.learn(0, 0, &late);
        assert!(sides.directory.get(0).is_none());
        sides.catalog.enter(1);
        let mut written = None;
        sides
            .catalog
            .number(&item("t", 2), |number, _| {
                written = Some(number);
                true
            })
            .unwrap();
        assert_eq!(written, Some(0));
    }
}

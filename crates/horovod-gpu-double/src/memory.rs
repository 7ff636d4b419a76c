//! Allocations, and who used them last: the happens-before checker.
//!
//! Memory comes from one reserved range of addresses and no address is given out twice, so that what was freed is known
//! as such. Every allocation keeps the accesses that are not known to the host to have ended; an access that conflicts
//! with one of them (one of the two writes) must have happened after it.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use crate::clock::{Agent, Clock, HOST};

/// Address range of all allocations together; only reserved.
const ARENA_BYTES: u64 = 64 << 30;
const PAGE: u64 = 4096;
/// Fresh memory has this in every byte, at most so far.
const POISON: u8 = 0xa5;
const POISONED_MAX: u64 = 1 << 20;

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Of `cuMemAlloc`, `cuMemAllocAsync`, `double_alloc`.
    Device,
    /// Host memory that poses as a device's (`double_register`).
    Posing,
    /// Of `cuMemHostAlloc`.
    Pinned,
    /// Of `cuMemHostRegister`.
    HostRegistered,
}

impl Kind {
    pub(crate) fn is_on_device(self) -> bool {
        matches!(self, Self::Device | Self::Posing)
    }
}

/// One range that an operation reads or writes.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) writes: bool,
    /// Parts of one operation with different numbers have no order among themselves.
    pub(crate) part: usize,
}

impl Access {
    pub(crate) fn read(address: u64, bytes: u64) -> Self {
        Self {
            address,
            bytes,
            writes: false,
            part: 0,
        }
    }

    pub(crate) fn write(address: u64, bytes: u64) -> Self {
        Self {
            writes: true,
            ..Self::read(address, bytes)
        }
    }

    pub(crate) fn of_part(self, part: usize) -> Self {
        Self { part, ..self }
    }

    fn verb(&self) -> &'static str {
        if self.writes { "writes" } else { "reads" }
    }
}

/// Who accesses, and what it knows.
pub(crate) struct Accessor<'a> {
    pub(crate) agent: Agent,
    pub(crate) step: u64,
    pub(crate) clock: &'a Clock,
    pub(crate) what: &'a str,
}

/// An access that the host does not know to have ended.
#[derive(Debug)]
struct Record {
    from: u64,
    to: u64,
    writes: bool,
    agent: Agent,
    step: u64,
    what: String,
}

#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) id: u64,
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    pub(crate) device: i32,
    pub(crate) kind: Kind,
    records: Vec<Record>,
}

/// All allocations of the process.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    live: BTreeMap<u64, Allocation>,
    /// End and story of what was freed, by its start.
    freed: BTreeMap<u64, (u64, String)>,
    starts: BTreeMap<u64, u64>,
    /// Freed in a stream that has not come there yet: what was queued before may still use it.
    doomed: BTreeMap<u64, Allocation>,
    next_id: u64,
    used: u64,
}

/// The reserved range; 0 where there is none to be had.
fn arena() -> u64 {
    static START: OnceLock<u64> = OnceLock::new();
    *START.get_or_init(|| {
        // SAFETY: a new private mapping, which replaces nothing.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                ARENA_BYTES as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            0
        } else {
            start as u64
        }
    })
}

impl Memory {
    /// New memory of the arena; `None` when that is used up.
    pub(crate) fn allocate(&mut self, bytes: u64, device: i32, kind: Kind) -> Option<u64> {
        let start = arena();
        // A page that belongs to nobody lies behind each allocation.
        let room = bytes.next_multiple_of(PAGE).checked_add(PAGE)?;
        if start == 0 || self.used.checked_add(room)? > ARENA_BYTES {
            return None;
        }
        let address = start + self.used;
        self.used += room;
        // SAFETY: the range lies in the arena and was given to nobody.
        unsafe {
            std::ptr::write_bytes(address as *mut u8, POISON, bytes.min(POISONED_MAX) as usize);
        }
        self.insert(address, bytes, device, kind);
        Some(address)
    }

    /// Foreign memory becomes known. `false`: it overlaps something that is.
    pub(crate) fn insert(&mut self, start: u64, bytes: u64, device: i32, kind: Kind) -> bool {
        if self.overlapping(start, bytes).is_some() {
            return false;
        }
        self.freed
            .retain(|from, (to, _)| *to <= start || *from >= start + bytes);
        self.next_id += 1;
        let id = self.next_id;
        self.starts.insert(id, start);
        self.live.insert(
            start,
            Allocation {
                id,
                start,
                bytes,
                device,
                kind,
                records: Vec::new(),
            },
        );
        true
    }

    /// Nothing is allocated any more; addresses that were given out stay so.
    pub(crate) fn emptied(self) -> Self {
        for gone in self.live.values() {
            Self::give_back(gone);
        }
        Self {
            used: self.used,
            next_id: self.next_id,
            ..Self::default()
        }
    }

    fn overlapping(&self, start: u64, bytes: u64) -> Option<&Allocation> {
        let (_, last) = self.live.range(..start + bytes.max(1)).next_back()?;
        (last.start + last.bytes > start).then_some(last)
    }

    pub(crate) fn is_live(&self, id: u64) -> bool {
        self.starts.contains_key(&id) || self.doomed.contains_key(&id)
    }

    /// What was taken out by a stream stays until that comes there.
    pub(crate) fn doom(&mut self, gone: Allocation) {
        self.doomed.insert(gone.id, gone);
    }

    /// The stream came there.
    pub(crate) fn end(&mut self, id: u64) {
        if let Some(gone) = self.doomed.remove(&id) {
            Self::give_back(&gone);
        }
    }

    /// The allocation that starts here.
    pub(crate) fn at(&self, start: u64) -> Option<&Allocation> {
        self.live.get(&start)
    }

    /// The allocation that `address` lies in.
    pub(crate) fn containing(&self, address: u64) -> Option<&Allocation> {
        let (_, found) = self.live.range(..=address).next_back()?;
        (address < found.start + found.bytes.max(1)).then_some(found)
    }

    pub(crate) fn live_allocations(&self) -> usize {
        self.live.len()
    }

    pub(crate) fn used_by(&self, device: i32) -> u64 {
        self.live
            .values()
            .filter(|a| a.device == device && a.kind == Kind::Device)
            .map(|a| a.bytes)
            .sum()
    }

    /// Why `[address, address + bytes)` is not all of one live allocation; its id else.
    fn find(&self, access: &Access) -> Result<&Allocation, String> {
        let (address, bytes) = (access.address, access.bytes);
        if let Some(found) = self.containing(address) {
            if address.saturating_add(bytes) <= found.start + found.bytes {
                return Ok(found);
            }
            return Err(format!(
                "out of bounds: {} {bytes} bytes at {address:#x}, which lies {} bytes into an allocation of {}",
                access.verb(),
                address - found.start,
                found.bytes,
            ));
        }
        let grave = self.freed.range(..=address).next_back();
        if let Some((start, (end, how))) = grave
            && address < *end
        {
            return Err(format!(
                "after free: {} {bytes} bytes at {address:#x}, {} bytes into what {how}",
                access.verb(),
                address - start,
            ));
        }
        Err(format!(
            "out of bounds: {} {bytes} bytes at {address:#x}, which belongs to no allocation",
            access.verb(),
        ))
    }

    /// The allocations of `accesses`, and all that is wrong: nothing may be done with memory that is not there, while
    /// what lacks an edge can be carried out (the second list).
    pub(crate) fn check(
        &mut self,
        accesses: &[Access],
        by: &Accessor<'_>,
        host: &Clock,
    ) -> Result<(Vec<u64>, Vec<String>), String> {
        let mut ids = Vec::with_capacity(accesses.len());
        for access in accesses.iter().filter(|a| a.bytes > 0) {
            let found = self
                .find(access)
                .map_err(|why| format!("{}: {why}", by.what))?;
            ids.push(found.id);
        }
        let mut complaints = overlaps(accesses, by.what);
        for (access, id) in accesses.iter().filter(|a| a.bytes > 0).zip(&ids) {
            let start = self.starts[id];
            if let Some(allocation) = self.live.get_mut(&start) {
                allocation.check(access, by, host, &mut complaints);
            }
        }
        for (access, id) in accesses.iter().filter(|a| a.bytes > 0).zip(&ids) {
            let start = self.starts[id];
            if let Some(allocation) = self.live.get_mut(&start) {
                allocation.note(access, by);
            }
        }
        Ok((ids, complaints))
    }

    /// The allocation at `start` goes. By the host: what the host does not know to have ended is wrong. By a stream: as a
    /// write of all of it.
    pub(crate) fn free(
        &mut self,
        start: u64,
        by: &Accessor<'_>,
        host: &Clock,
    ) -> Result<(Allocation, Vec<String>), String> {
        let access = Access::write(start, 1);
        let Some(mut gone) = self.live.remove(&start) else {
            return Err(match self.find(&access) {
                Ok(_) => format!("{}: {start:#x} is no start of an allocation", by.what),
                Err(why) if why.starts_with("after free") => {
                    format!("freed twice: {}: {start:#x}", by.what)
                }
                Err(_) => format!("{}: {start:#x} is no allocation", by.what),
            });
        };
        let mut complaints = Vec::new();
        let all = Access::write(start, gone.bytes);
        gone.check(&all, by, host, &mut complaints);
        for complaint in &mut complaints {
            *complaint = format!("freed in use: {complaint}");
        }
        self.starts.remove(&gone.id);
        let end = start + gone.bytes.max(1);
        self.freed
            .insert(start, (end, format!("{} gave back", by.what)));
        Ok((gone, complaints))
    }

    /// Lets the system have the pages of what was freed; the addresses stay reserved.
    pub(crate) fn give_back(gone: &Allocation) {
        if matches!(gone.kind, Kind::Device | Kind::Pinned) && gone.bytes > 0 {
            let bytes = gone.bytes.next_multiple_of(PAGE) as usize;
            // SAFETY: whole pages of the arena that belonged to this allocation alone.
            unsafe {
                libc::madvise(gone.start as *mut libc::c_void, bytes, libc::MADV_DONTNEED);
            }
        }
    }
}

impl Allocation {
    fn check(
        &mut self,
        access: &Access,
        by: &Accessor<'_>,
        host: &Clock,
        complaints: &mut Vec<String>,
    ) {
        // What the host knows to have ended happened before everything that is submitted from now on.
        self.records.retain(|r| host.get(r.agent) < r.step);
        let (from, to) = (access.address, access.address + access.bytes);
        for record in &self.records {
            let conflicts = (record.writes || access.writes)
                && record.from < to
                && from < record.to
                && by.clock.get(record.agent) < record.step;
            if conflicts {
                complaints.push(format!(
                    "no order: {} {} bytes at {from:#x}, which {} {}, with nothing that orders the two",
                    access_text(by, access),
                    access.bytes,
                    record.what,
                    if record.writes { "writes" } else { "reads" },
                ));
            }
        }
    }

    fn note(&mut self, access: &Access, by: &Accessor<'_>) {
        if by.agent == HOST {
            return;
        }
        let (from, to) = (access.address, access.address + access.bytes);
        // What lies within this access and before it is implied by it, unless it wrote and this only reads.
        self.records.retain(|r| {
            let is_within = from <= r.from && r.to <= to;
            let is_before = by.clock.get(r.agent) >= r.step && r.step != by.step;
            !(is_within && is_before && (access.writes || (!r.writes && r.agent == by.agent)))
        });
        self.records.push(Record {
            from,
            to,
            writes: access.writes,
            agent: by.agent,
            step: by.step,
            what: by.what.to_owned(),
        });
    }
}

fn access_text(by: &Accessor<'_>, access: &Access) -> String {
    format!("{} {}", by.what, access.verb())
}

/// Parts of one operation that write what others of its parts use.
fn overlaps(accesses: &[Access], what: &str) -> Vec<String> {
    let mut sorted: Vec<&Access> = accesses.iter().filter(|a| a.bytes > 0).collect();
    sorted.sort_by_key(|a| a.address);
    let mut complaints = Vec::new();
    for (i, a) in sorted.iter().enumerate() {
        let end = a.address + a.bytes;
        for b in sorted[i + 1..].iter().take_while(|b| b.address < end) {
            if a.part != b.part && (a.writes || b.writes) {
                complaints.push(format!(
                    "no order: two parts of {what} use {:#x}, and one writes",
                    b.address
                ));
            }
        }
    }
    complaints
}

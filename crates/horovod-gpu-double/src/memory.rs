//! Allocations, and who used them last: the happens-before checker.
//!
//! Memory comes from one reserved range of addresses and no address is given out twice, so that what was freed is known
//! as such. Every allocation keeps the accesses that are not known to the host to have ended; an access that conflicts
//! with one of them (one of the two writes) must have happened after it.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use crate::clock::{Agent, Clock, HOST};

/// Address range of all allocations together; only reserved.
const ARENA_BYTES: u64 = 1 << 40;
const PAGE: u64 = 4096;
/// Fresh memory has this in every byte, at most so far.
const POISON: u8 = 0xa5;
const POISONED_MAX: u64 = 1 << 20;

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    /// Of `cuMemAlloc`, `cuMemAllocAsync`, `double_alloc`.
    Device,
    /// Host memory that poses as a device's (`double_register`).
    Posing,
    /// Of `cuMemHostAlloc`.
    Pinned,
    /// Of `cuMemHostRegister`.
    HostRegistered,
}

impl MemoryKind {
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

/// The accessing agent, and its clock.
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
    pub(crate) kind: MemoryKind,
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

/// Maps fresh pages, of which only those that are touched need memory.
fn map(at: u64, bytes: u64, flags: i32) -> Option<u64> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let address = at as *mut libc::c_void;
    // SAFETY: it replaces nothing, or (MAP_FIXED) pages of the arena that nobody uses any more.
    let start = unsafe { libc::mmap(address, bytes as usize, protection, flags, -1, 0) };
    (start != libc::MAP_FAILED).then_some(start as u64)
}

/// The reserved range, if there is one to be had.
fn arena() -> Option<u64> {
    static START: OnceLock<Option<u64>> = OnceLock::new();
    *START.get_or_init(|| map(0, ARENA_BYTES, 0))
}

impl Memory {
    /// New memory of the arena; `None` when that is used up.
    pub(crate) fn allocate(&mut self, bytes: u64, device: i32, kind: MemoryKind) -> Option<u64> {
        let start = arena()?;
        // A page that belongs to nobody lies behind each allocation.
        let room = bytes.next_multiple_of(PAGE).checked_add(PAGE)?;
        if self.used.checked_add(room)? > ARENA_BYTES {
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
    pub(crate) fn insert(&mut self, start: u64, bytes: u64, device: i32, kind: MemoryKind) -> bool {
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

    /// Memory freed in the order of a stream stays until the stream reaches that point.
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
            .filter(|a| a.device == device && a.kind == MemoryKind::Device)
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
        let mut complaints: Vec<String> = overlap(accesses, by.what).into_iter().collect();
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
        if matches!(gone.kind, MemoryKind::Device | MemoryKind::Pinned) && gone.bytes > 0 {
            // Over the old ones, which frees their page tables as well. Without it they only stay.
            map(
                gone.start,
                gone.bytes.next_multiple_of(PAGE),
                libc::MAP_FIXED,
            );
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
        // Accesses that the host knows to have ended happened before everything that is submitted from now on.
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
        // An earlier access within this one is implied by it, unless the earlier one wrote and this one only reads.
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

/// Two parts of one operation of which one writes what the other uses.
fn overlap(accesses: &[Access], what: &str) -> Option<String> {
    let mut sorted: Vec<&Access> = accesses.iter().filter(|a| a.bytes > 0).collect();
    sorted.sort_by_key(|a| a.address);
    sorted.iter().enumerate().find_map(|(i, a)| {
        let end = a.address + a.bytes;
        let mut later = sorted[i + 1..].iter().take_while(|b| b.address < end);
        let found = later.find(|b| a.part != b.part && (a.writes || b.writes))?;
        Some(format!(
            "no order: two parts of {what} use {:#x}, and one writes",
            found.address
        ))
    })
}

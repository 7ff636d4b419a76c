//! The hub of a communicator's ranks, in the process that made its unique id: it collects what they put into
//! each collective, compares the calls, and sends the results.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use super::part::{self, Function};
use super::wire::{Hello, Magic, Message, Shape};

static SESSIONS: LazyLock<Mutex<HashMap<Magic, Arc<Session>>>> = LazyLock::new(Mutex::default);

fn sessions() -> MutexGuard<'static, HashMap<Magic, Arc<Session>>> {
    SESSIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One communicator's hub.
#[derive(Default)]
struct Session(Mutex<HubState>);

#[derive(Default)]
struct HubState {
    magic: Magic,
    members: BTreeMap<u32, (Hello, TcpStream)>,
    /// All were there once; so many.
    is_complete: bool,
    size: usize,
    /// Parts of each collective, by its place in the sequence and by rank, and whose shape the others must have.
    collectives: BTreeMap<u64, PendingCollective>,
    /// Unmatched ends of transfers, by sender and receiver.
    sends: HashMap<Pair, VecDeque<Sent>>,
    receives: HashMap<Pair, VecDeque<(Claim, Shape)>>,
    splits: BTreeMap<u64, BTreeMap<u32, (i32, i32)>>,
    finalized: BTreeSet<u32>,
}

struct PendingCollective {
    shape: Shape,
    first: u32,
    parts: BTreeMap<u32, (Claim, Vec<u8>)>,
}

/// Launch and part for which a rank waits for an outcome.
type Claim = (u64, u32);
/// Sender and receiver.
type Pair = (u32, u32);
type Sent = (Claim, Shape, Vec<u8>);

/// Opens a session; its magic number and the address.
pub(crate) fn open() -> io::Result<(Magic, SocketAddrV4)> {
    /// Where a process listens; a forked child does not.
    static LISTENING: Mutex<Option<(u32, SocketAddrV4)>> = Mutex::new(None);
    let own = std::process::id();
    let mut listening = LISTENING.lock().unwrap_or_else(PoisonError::into_inner);
    let address = match *listening {
        Some((process, address)) if process == own => address,
        _ => {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            let port = listener.local_addr()?.port();
            let thread = std::thread::Builder::new().name("gpu-double-hub".to_owned());
            thread.spawn(move || accept(&listener))?;
            let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
            *listening = Some((own, address));
            address
        }
    };
    drop(listening);
    Ok((new_session()?, address))
}

fn new_session() -> io::Result<Magic> {
    let mut magic = Magic::default();
    getrandom::fill(&mut magic).map_err(|error| io::Error::other(error.to_string()))?;
    let session = Arc::new(Session::default());
    session.lock().magic = magic;
    sessions().insert(magic, session);
    Ok(magic)
}

fn accept(listener: &TcpListener) {
    for stream in listener.incoming().flatten() {
        let thread = std::thread::Builder::new().name("gpu-double-rank".to_owned());
        // A rank that gets no thread sees its connection closed.
        let _ = thread.spawn(move || serve(stream));
    }
}

/// Serves one rank until it goes.
fn serve(mut stream: TcpStream) {
    let Ok(Message::Hello(hello)) = Message::read(&mut stream) else {
        return;
    };
    let _ = stream.set_nodelay(true);
    let rank = hello.rank;
    let found = sessions().get(&hello.magic).cloned();
    let (Some(session), Ok(writer)) = (found, stream.try_clone()) else {
        let text = "no communicator has this unique id".to_owned();
        let _ = Message::Refused { code: 5, text }.write(&mut stream);
        return;
    };
    let magic = hello.magic;
    session.lock().join(hello, writer);
    while let Ok(message) = Message::read(&mut stream) {
        session.lock().receive(rank, message);
    }
    let mut hub = session.lock();
    hub.leave(rank);
    if hub.members.is_empty() && hub.is_complete {
        drop(hub);
        sessions().remove(&magic);
    }
}

impl Session {
    fn lock(&self) -> MutexGuard<'_, HubState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HubState {
    fn send_to(&mut self, rank: u32, message: &Message) {
        if let Some((_, stream)) = self.members.get_mut(&rank) {
            // A rank whose connection fails is found to be lost by the next read.
            let _ = message.write(stream);
        }
    }

    fn send_all(&mut self, message: &Message) {
        for (_, stream) in self.members.values_mut() {
            let _ = message.write(stream);
        }
    }

    fn join(&mut self, hello: Hello, mut stream: TcpStream) {
        if let Some(text) = self.objection(&hello) {
            let refused = Message::Refused { code: 5, text };
            let _ = refused.write(&mut stream);
            self.send_all(&refused);
            return;
        }
        let size = hello.size as usize;
        self.members.insert(hello.rank, (hello, stream));
        if self.members.len() == size {
            self.is_complete = true;
            self.size = size;
            self.send_all(&Message::Welcome);
        }
    }

    fn objection(&self, new: &Hello) -> Option<String> {
        if self.is_complete || self.members.contains_key(&new.rank) {
            return Some(format!("rank {} is there already", new.rank));
        }
        self.members.values().find_map(|(other, _)| {
            if other.size != new.size {
                return Some(format!(
                    "rank {} says {} ranks, rank {} says {}",
                    other.rank, other.size, new.rank, new.size
                ));
            }
            if other.version != new.version {
                return Some(format!(
                    "Mismatched NCCL version detected : rank {} version {} rank {} version {}",
                    other.rank, other.version, new.rank, new.version
                ));
            }
            (other.uuid == new.uuid && !(other.may_share && new.may_share)).then(|| {
                format!(
                    "Duplicate GPU detected : rank {} and rank {}",
                    other.rank, new.rank
                )
            })
        })
    }

    fn leave(&mut self, rank: u32) {
        if self.members.remove(&rank).is_none() || !self.is_complete {
            return;
        }
        if !self.finalized.contains(&rank) {
            let text = format!("rank {rank} is gone");
            self.send_all(&Message::Lost { text });
        }
    }

    fn receive(&mut self, rank: u32, message: Message) {
        match message {
            Message::Part {
                launch,
                part,
                sequence,
                shape,
                data,
            } => {
                let claim = (launch, part);
                match Function::ALL.get(usize::from(shape.function)) {
                    Some(Function::Send) => self.send(rank, claim, shape, data),
                    Some(Function::Recv) => self.receive_from(rank, claim, shape),
                    Some(_) => self.collective(rank, claim, sequence, shape, data),
                    None => {}
                }
            }
            Message::Split { number, color, key } => self.split(rank, number, color, key),
            Message::Finalize => {
                self.finalized.insert(rank);
                let are_all = self
                    .members
                    .keys()
                    .all(|rank| self.finalized.contains(rank));
                if are_all {
                    self.send_all(&Message::Finalized);
                }
            }
            _ => {}
        }
    }

    fn collective(&mut self, rank: u32, claim: Claim, sequence: u64, shape: Shape, data: Vec<u8>) {
        let size = self.size;
        let slot = self
            .collectives
            .entry(sequence)
            .or_insert_with(|| PendingCollective {
                shape,
                first: rank,
                parts: BTreeMap::new(),
            });
        if slot.shape != shape {
            let text = format!(
                "collective {sequence} is {} on rank {}, {} on rank {rank}",
                describe(slot.shape),
                slot.first,
                describe(shape),
            );
            self.send_all(&Message::Mismatch { text });
            return;
        }
        slot.parts.insert(rank, (claim, data));
        if slot.parts.len() < size {
            return;
        }
        let Some(slot) = self.collectives.remove(&sequence) else {
            return;
        };
        let (claims, data): (Vec<_>, Vec<_>) = slot
            .parts
            .into_iter()
            .map(|(r, (t, d))| ((r, t), d))
            .unzip();
        let results = part::results(shape, &data);
        for ((rank, (launch, part)), data) in claims.into_iter().zip(results) {
            self.send_to(rank, &Message::Outcome { launch, part, data });
        }
    }

    fn send(&mut self, rank: u32, claim: Claim, shape: Shape, data: Vec<u8>) {
        let pair = (rank, shape.root as u32);
        let waiting = self.receives.entry(pair).or_default().pop_front();
        match waiting {
            Some((receiver, wanted)) => {
                self.transfer(pair, (claim, shape), (receiver, wanted), data)
            }
            None => self
                .sends
                .entry(pair)
                .or_default()
                .push_back((claim, shape, data)),
        }
    }

    fn receive_from(&mut self, rank: u32, claim: Claim, shape: Shape) {
        let pair = (shape.root as u32, rank);
        let waiting = self.sends.entry(pair).or_default().pop_front();
        match waiting {
            Some((sender, sent, data)) => self.transfer(pair, (sender, sent), (claim, shape), data),
            None => self
                .receives
                .entry(pair)
                .or_default()
                .push_back((claim, shape)),
        }
    }

    fn transfer(
        &mut self,
        (from, to): (u32, u32),
        (sender, sent): (Claim, Shape),
        (receiver, wanted): (Claim, Shape),
        data: Vec<u8>,
    ) {
        if (sent.count, sent.dtype) != (wanted.count, wanted.dtype) {
            let text = format!(
                "rank {from} sends {}, rank {to} receives {}",
                describe(sent),
                describe(wanted)
            );
            self.send_all(&Message::Mismatch { text });
            return;
        }
        let outcome = |(launch, part): Claim, data| Message::Outcome { launch, part, data };
        self.send_to(to, &outcome(receiver, data));
        self.send_to(from, &outcome(sender, Vec::new()));
    }

    fn split(&mut self, rank: u32, number: u64, color: i32, key: i32) {
        let asked = self.splits.entry(number).or_default();
        asked.insert(rank, (color, key));
        if asked.len() < self.size {
            return;
        }
        let mut groups: BTreeMap<i32, Vec<(i32, u32)>> = BTreeMap::new();
        for (rank, (color, key)) in self.splits.remove(&number).unwrap_or_default() {
            groups.entry(color).or_default().push((key, rank));
        }
        for (_, mut ranks) in groups.into_iter().filter(|(color, _)| *color >= 0) {
            ranks.sort_unstable();
            let Ok(magic) = new_session() else {
                return;
            };
            let size = ranks.len() as u32;
            for (new, (_, rank)) in ranks.into_iter().enumerate() {
                let rank_there = new as u32;
                self.send_to(
                    rank,
                    &Message::SplitDone {
                        number,
                        rank: rank_there,
                        size,
                        magic,
                    },
                );
            }
        }
    }
}

fn describe(shape: Shape) -> String {
    let function = Function::ALL.get(usize::from(shape.function));
    let name = function.map_or("?", |f| f.name());
    format!(
        "{name}(count {}, type {}, op {}, root {})",
        shape.count, shape.dtype, shape.operator, shape.root
    )
}

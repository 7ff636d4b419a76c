//! The control plane of one rank: small ordered messages to and from its neighbours in the tree, and news of who is
//! gone.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use horovod_protocol::{LossCause, PeerLost, Rank, Time};

use crate::{
    framing::{FrameQueue, FrameReader, Incoming},
    heartbeat::Watch,
    link::{Link, LinkError, PeerName},
    platform::fd::Fd,
    platform::{HANGUP, READABLE},
    poller::Poller,
    rendezvous::{Client, Notice, ToServer},
    tcp::stream::{self, Got},
};

/// Longest control frame in bytes.
pub const CONTROL_FRAME_MAX: usize = horovod_protocol::MESSAGE_BYTES_MAX;
/// Most bytes that may wait for one peer.
pub const CONTROL_QUEUE_MAX: usize = 64 << 20;
/// Longest memory of a message that is kept for the next.
const SPARE_BYTES_MAX: usize = 64 << 10;
/// Polls that find nothing between two looks at the sockets, for callers that never sleep.
const POLL_EVERY: u32 = 64;
/// Byte that a rank sends before it leaves, on the sockets that otherwise only detect deaths.
const GOODBYE: u8 = b'B';

/// Event returned by [`Control::poll`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ControlEvent {
    /// A message.
    Frame {
        /// The sender.
        from: Rank,
        /// The message.
        bytes: Vec<u8>,
    },
    /// A message that is no part of the main conversation ([`Control::send_out_of_band`]).
    OutOfBand {
        /// The sender.
        from: Rank,
        /// The message.
        bytes: Vec<u8>,
    },
    /// A rank is gone without goodbye: its process died, or its connection failed. Comes once per
    /// rank, after its last frame.
    Lost(PeerLost),
    /// A rank said goodbye ([`Control::goodbye`]). Comes once per rank, after its last frame, and
    /// instead of `Lost`.
    Left {
        /// The rank that left.
        rank: Rank,
    },
    /// A neighbour has sent nothing for the timeout given to [`Control::watch`], although this rank polled: its process
    /// or its host is stopped, or the network is cut. The neighbour counts as lost; this event replaces `Lost`.
    Silent {
        /// The silent rank.
        rank: Rank,
        /// Time since its last message.
        silence: Duration,
    },
    /// The bytes received from a neighbour differ from those it sent, though the connection works: neither rank is at
    /// fault. Nothing more is read from the neighbour; frames sent to it may still arrive.
    Altered {
        /// The sender.
        rank: Rank,
        /// The check that failed.
        what: Arc<str>,
    },
    /// The launcher reports a death.
    Notice(PeerLost),
    /// The launcher of an elastic job announces a change of its members.
    HostsUpdated {
        /// Grows with each announcement of the job.
        version: u64,
        /// 1 if somebody is removed, 2 if added, 3 if both.
        kind: u8,
    },
    /// The connection to the launcher's rendezvous ended.
    LauncherLost {
        /// The operating system's error.
        cause: String,
    },
}

/// A peer with which frames are exchanged.
pub(crate) struct Peer {
    name: PeerName,
    link: Box<dyn Link>,
    reader: FrameReader,
    queue: FrameQueue,
    /// Something came from it since [`Watch::check`] last asked.
    has_received: bool,
    ended: bool,
    /// Frames from this peer are not read any more.
    deaf: bool,
}

impl Peer {
    pub(crate) fn new(name: PeerName, link: Box<dyn Link>) -> Self {
        let (reader, queue) = (FrameReader::new(CONTROL_FRAME_MAX), FrameQueue::default());
        Self {
            name,
            link,
            reader,
            queue,
            has_received: false,
            ended: false,
            deaf: false,
        }
    }

    pub(crate) fn rank(&self) -> Rank {
        self.name.rank
    }

    fn flush(&mut self) -> Result<bool, LinkError> {
        self.queue.flush(|bytes| self.link.try_send(bytes))
    }

    fn next(&mut self, spare: &mut Vec<u8>) -> Result<Option<Incoming>, LinkError> {
        if self.deaf {
            return Ok(None);
        }
        loop {
            match self.reader.pop(spare) {
                Ok(None) => {}
                // A sign of life has done its work by coming.
                Ok(Some(Incoming::OutOfBand(bytes))) if bytes.is_empty() => {
                    *spare = bytes;
                    continue;
                }
                Ok(message) => return Ok(message),
                Err(_) => return Err(self.name.corrupt("a control frame over the limit")),
            }
            let n = self.link.try_recv(self.reader.space())?;
            if n == 0 {
                return Ok(None);
            }
            self.has_received = true;
            self.reader.filled(n);
        }
    }
}

/// A socket to a rank of the same host that stays silent until that rank leaves or dies.
pub(crate) struct Detector {
    pub(crate) name: PeerName,
    pub(crate) fd: Arc<Fd>,
    pub(crate) token: usize,
    pub(crate) ended: bool,
}

impl Detector {
    /// `None` while the peer lives.
    fn poll(&mut self) -> Option<ControlEvent> {
        let mut byte = [0];
        let cause = match stream::recv(&self.fd, &mut byte) {
            Ok(Got::Nothing) => return None,
            Ok(Got::Bytes(_)) if byte[0] == GOODBYE => {
                return Some(ControlEvent::Left {
                    rank: self.name.rank,
                });
            }
            Ok(Got::Bytes(_)) => "it wrote to a socket that must stay silent".into(),
            Ok(Got::End) => "its process ended (the local socket was closed)".into(),
            Err(e) => std::io::Error::from(e).to_string(),
        };
        Some(lost(&self.name, cause))
    }
}

fn lost(name: &PeerName, cause: String) -> ControlEvent {
    ControlEvent::Lost(PeerLost {
        rank: name.rank,
        host: name.host.to_string(),
        cause: LossCause::Connection(cause),
    })
}

/// The control plane of one rank. Never blocks.
pub struct Control {
    peers: Vec<Peer>,
    /// Index into `peers` by rank.
    index: Vec<Option<usize>>,
    detectors: Vec<Detector>,
    /// The rendezvous connection and its token, while it lasts.
    launcher: Option<(usize, Client)>,
    poller: Arc<Poller>,
    /// Ends found but not told yet: frames go first.
    endings: Vec<ControlEvent>,
    /// Ranks whose end was found.
    gone: Vec<bool>,
    /// Of `peers`, by index; `None`: nobody is given up for being silent.
    watch: Option<Watch>,
    next: usize,
    empty_polls: u32,
    /// Memory for the next message.
    spare: Vec<u8>,
}

impl Control {
    pub(crate) fn new(
        size: usize,
        peers: Vec<Peer>,
        detectors: Vec<Detector>,
        launcher: Option<(usize, Client)>,
        poller: Arc<Poller>,
    ) -> Self {
        if let Some((token, _)) = &launcher {
            // Frames received earlier may lie in our buffer, for which no socket becomes readable.
            poller.set(*token, READABLE);
        }
        let mut index = vec![None; size];
        for (i, peer) in peers.iter().enumerate() {
            index[peer.name.rank.index()] = Some(i);
        }
        Self {
            peers,
            index,
            detectors,
            launcher,
            poller,
            endings: Vec::new(),
            gone: vec![false; size],
            watch: None,
            next: 0,
            empty_polls: 0,
            spare: Vec::new(),
        }
    }

    /// Takes back the bytes of a message that has been read, so that the next needs no allocation.
    pub fn give_back(&mut self, bytes: Vec<u8>) {
        if bytes.capacity() <= SPARE_BYTES_MAX {
            self.spare = bytes;
        }
    }

    /// Queues a frame and sends what can be sent at once; later [`Self::poll`]s send the rest.
    /// Frames of a pair of ranks arrive in order. Links exist where the mesh's tree has them.
    pub fn send(&mut self, to: Rank, frame: &[u8]) -> Result<(), LinkError> {
        if frame.len() > CONTROL_FRAME_MAX {
            let (len, limit) = (frame.len(), CONTROL_FRAME_MAX);
            return Err(LinkError::FrameTooLong {
                rank: to,
                len,
                limit,
            });
        }
        let Some(i) = self.index.get(to.index()).copied().flatten() else {
            return Err(LinkError::NoLink { rank: to });
        };
        let peer = &mut self.peers[i];
        let queued = peer.queue.len() + frame.len();
        if queued > CONTROL_QUEUE_MAX {
            let (host, limit) = (peer.name.host.clone(), CONTROL_QUEUE_MAX);
            return Err(LinkError::Stuffed {
                rank: to,
                host,
                queued,
                limit,
            });
        }
        peer.queue.push(frame);
        peer.flush().map(|_| ())
    }

    /// Sends a frame that can wait: only when nothing else waits for this peer, so that it holds nothing up
    /// but what comes while it is written. It is made of `parts`. `false`: not now.
    pub fn send_out_of_band(&mut self, to: Rank, parts: [&[u8]; 2]) -> Result<bool, LinkError> {
        let len = parts[0].len() + parts[1].len();
        if len > CONTROL_FRAME_MAX {
            let limit = CONTROL_FRAME_MAX;
            return Err(LinkError::FrameTooLong {
                rank: to,
                len,
                limit,
            });
        }
        let Some(i) = self.index.get(to.index()).copied().flatten() else {
            return Err(LinkError::NoLink { rank: to });
        };
        let peer = &mut self.peers[i];
        if !peer.queue.is_empty() {
            return Ok(false);
        }
        peer.queue.push_out_of_band(parts);
        peer.flush().map(|_| true)
    }

    /// Tells the launcher of an elastic job what this process holds of the training state.
    pub fn send_training_state(&mut self, training_state: u8) {
        if let Some((_, client)) = &mut self.launcher {
            // A launcher that is gone shows when it is heard.
            let _ = client.send(&ToServer::StateChanged { training_state });
        }
    }

    /// Tells the launcher which rank this one gives up for its silence.
    pub fn report_silent(&mut self, rank: Rank) {
        if let Some((_, client)) = &mut self.launcher {
            // As above.
            let _ = client.send(&ToServer::Silent { rank: rank.0 });
        }
    }

    /// The next thing that happened, if any. Also sends what waits to be sent.
    pub fn poll(&mut self) -> Option<ControlEvent> {
        loop {
            if let Some(frame) = self.next_frame() {
                return Some(frame);
            }
            if !self.endings.is_empty() {
                return Some(self.endings.remove(0));
            }
            // An ended peer may have sent frames since the last poll: poll again before reporting.
            if !self.poll_endings() {
                break;
            }
        }
        if let Some(notice) = self.next_notice() {
            return Some(notice);
        }
        self.empty_polls = self.empty_polls.wrapping_add(1);
        if self.empty_polls.is_multiple_of(POLL_EVERY) {
            self.poller.pump(Some(Duration::ZERO));
        }
        None
    }

    /// From now on neighbours that say nothing for `timeout` are given up ([`ControlEvent::Silent`]), and are told
    /// that this rank lives, as long as [`Self::check_neighbours`] is called in time.
    pub fn watch(&mut self, timeout: Duration, now: Time) {
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        self.watch = Some(Watch::new(timeout_ns, self.peers.len(), now));
    }

    /// When [`Self::check_neighbours`] has something to do.
    pub fn heartbeat_due(&self) -> Option<Time> {
        self.watch.as_ref().and_then(Watch::due)
    }

    /// Sees who of the neighbours is silent, and tells them that this rank lives. To be called when it is due, after
    /// all that has arrived was taken by [`Self::poll`]. `true`: poll again, there may be something.
    pub fn check_neighbours(&mut self, now: Time) -> bool {
        let Some(watch) = self
            .watch
            .as_mut()
            .filter(|w| w.due().is_some_and(|at| at <= now))
        else {
            return false;
        };
        for (i, peer) in self.peers.iter().enumerate() {
            if peer.ended || self.gone[peer.rank().index()] {
                watch.forget(i);
            }
        }
        let peers = &mut self.peers;
        let check = watch.check(now, |i| std::mem::take(&mut peers[i].has_received));
        if check.send {
            // Frames queued for a peer are a sign of life, too. A send error shows again when the peer is read.
            let idle = peers.iter_mut().filter(|p| !p.ended && p.queue.is_empty());
            for peer in idle {
                peer.queue.push_out_of_band([&[], &[]]);
                let _ = peer.flush();
            }
        }
        if check.again {
            // Frames that arrived while no thread polled the sockets.
            self.poller.pump(Some(Duration::ZERO));
            return true;
        }
        for (i, silence_ns) in &check.silent {
            self.peers[*i].ended = true;
            let rank = self.peers[*i].rank();
            let silence = Duration::from_nanos(*silence_ns);
            self.end(rank, ControlEvent::Silent { rank, silence });
        }
        !check.silent.is_empty()
    }

    /// Whether frames wait to be sent to peers that are still there.
    pub fn has_unsent(&self) -> bool {
        self.peers.iter().any(|p| !p.ended && !p.queue.is_empty())
    }

    /// Tells all peers that this rank leaves in good order, so that its end is no loss to them. Waits
    /// at most `wait_timeout` until everything queued has been sent; false if it has not.
    pub fn goodbye(&mut self, wait_timeout: Duration) -> bool {
        let deadline = Instant::now() + wait_timeout;
        for peer in self.peers.iter_mut().filter(|p| !p.ended) {
            peer.queue.push_goodbye();
        }
        let all_sent = loop {
            for peer in self.peers.iter_mut().filter(|p| !p.ended) {
                peer.ended = peer.flush().is_err();
            }
            if !self.has_unsent() {
                break true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break false;
            }
            // A ring in shared memory makes no event when there is space again: look often.
            self.poller.pump(Some(left.min(Duration::from_millis(1))));
        };
        for detector in self.detectors.iter().filter(|d| !d.ended) {
            // If the peer is gone already there is nobody to greet.
            let _ = stream::send(&detector.fd, &[GOODBYE]);
        }
        all_sent
    }

    fn next_frame(&mut self) -> Option<ControlEvent> {
        for step in 0..self.peers.len() {
            let i = (self.next + step) % self.peers.len();
            let peer = &mut self.peers[i];
            if peer.ended {
                continue;
            }
            // Read first: what arrived before a failed write must not be lost.
            let end = match peer.next(&mut self.spare) {
                Ok(Some(Incoming::Frame(bytes))) => {
                    let from = peer.name.rank;
                    self.next = i + 1;
                    return Some(ControlEvent::Frame { from, bytes });
                }
                Ok(Some(Incoming::OutOfBand(bytes))) => {
                    let from = peer.name.rank;
                    self.next = i + 1;
                    return Some(ControlEvent::OutOfBand { from, bytes });
                }
                Ok(Some(Incoming::Goodbye)) => ControlEvent::Left {
                    rank: peer.name.rank,
                },
                Ok(None) => match peer.flush() {
                    Ok(_) => continue,
                    Err(e) => lost(&peer.name, cause_of(&e)),
                },
                Err(LinkError::Altered { rank, what, .. }) => {
                    peer.deaf = true;
                    self.end(rank, ControlEvent::Altered { rank, what });
                    continue;
                }
                Err(e) => lost(&peer.name, cause_of(&e)),
            };
            peer.ended = true;
            let rank = peer.name.rank;
            self.end(rank, end);
        }
        None
    }

    fn next_notice(&mut self) -> Option<ControlEvent> {
        let (token, client) = self.launcher.as_mut()?;
        if !self.poller.is(*token, READABLE | HANGUP) {
            return None;
        }
        self.poller.clear(*token, READABLE | HANGUP);
        match client.next_notice() {
            Ok(None) => None,
            Ok(Some(notice)) => {
                // There may be more.
                self.poller.set(*token, READABLE);
                Some(match notice {
                    Notice::Died(lost) => ControlEvent::Notice(lost),
                    Notice::HostsUpdated { version, kind } => {
                        ControlEvent::HostsUpdated { version, kind }
                    }
                })
            }
            Err(cause) => {
                self.launcher = None;
                Some(ControlEvent::LauncherLost { cause })
            }
        }
    }

    fn poll_endings(&mut self) -> bool {
        let mut found = Vec::new();
        for detector in self.detectors.iter_mut().filter(|d| !d.ended) {
            if !self.poller.is(detector.token, READABLE | HANGUP) {
                continue;
            }
            self.poller.clear(detector.token, READABLE | HANGUP);
            if let Some(event) = detector.poll() {
                detector.ended = true;
                found.push((detector.name.rank, event));
            }
        }
        let any = !found.is_empty();
        for (rank, event) in found {
            self.end(rank, event);
        }
        any
    }

    fn end(&mut self, rank: Rank, event: ControlEvent) {
        if !std::mem::replace(&mut self.gone[rank.index()], true) {
            self.endings.push(event);
        }
    }
}

fn cause_of(error: &LinkError) -> String {
    match error {
        LinkError::Lost { cause, .. } => cause.to_string(),
        LinkError::Corrupt { what, .. } => format!("broke the protocol: {what}"),
        other => other.to_string(),
    }
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let peers: Vec<Rank> = self.peers.iter().map(|p| p.name.rank).collect();
        f.debug_struct("Control")
            .field("peers", &peers)
            .finish_non_exhaustive()
    }
}

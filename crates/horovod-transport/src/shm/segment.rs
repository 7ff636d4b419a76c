//! The shared memory segment of a host: its first rank hands the arena, the notifiers, and sockets that tell of each
//! other's death to the ranks that attach, as descriptors over the local socket.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::BorrowedFd,
    sync::Arc,
};

use horovod_protocol::{Rank, Tree};
use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage,
    },
};

use super::{arena::Arena, layout::Layout};
use crate::{
    mesh::SharedMemory,
    platform::{self, fd::Fd, net, region::Region},
    tcp::stream::SEND_FLAGS,
};

/// Descriptors per message; the kernel allows 253.
const BATCH: usize = 128;
const WORDS: usize = 4;
const MESSAGE: usize = WORDS * 8;

/// Shared-memory segment that the first rank of a host has created for all.
pub(crate) struct ShmSegment {
    layout: Layout,
    members: Arc<[Rank]>,
    file: Fd,
    notifiers: Vec<(Arc<Fd>, Arc<Fd>)>,
    /// Members that notice each other's end, child and parent, by child; and what both get for it.
    /// The first rank keeps none of it.
    pairs: Vec<([usize; 2], [Arc<Fd>; 2])>,
}

/// A rank and the socket that ends with it.
pub(crate) type Watched = (Rank, Arc<Fd>);

/// The ranks whose end a member must notice though it has no connection of its own to them: its
/// neighbours in the tree of control links, where neither is the first of the host. Ascending.
pub(crate) fn watched(tree: &Tree, members: &[Rank], local: usize) -> Vec<Rank> {
    let mine = members[local];
    let linked = |rank: &Rank| tree.parent(*rank) == Some(mine) || tree.parent(mine) == Some(*rank);
    let others = members.iter().skip(1).copied();
    others.filter(|rank| local > 0 && linked(rank)).collect()
}

impl ShmSegment {
    pub(crate) fn new(members: Arc<[Rank]>, staging: usize, tree: &Tree) -> io::Result<Self> {
        let layout = Layout::new(members.len(), staging);
        if !layout.is_sane() {
            return Err(io::Error::other(format!(
                "{} ranks on one host",
                members.len()
            )));
        }
        let file = platform::shared_file(layout.total())?;
        let notifiers = members
            .iter()
            .map(|_| platform::notifier())
            .collect::<io::Result<_>>()?;
        let mut pairs = Vec::new();
        for child in 0..members.len() {
            for parent in watched(tree, &members, child) {
                if let Ok(parent) = members.binary_search(&parent)
                    && parent < child
                {
                    pairs.push(([child, parent], net::socket_pair()?));
                }
            }
        }
        Ok(Self {
            layout,
            members,
            file,
            notifiers,
            pairs,
        })
    }

    /// The view of one member of this process.
    pub(crate) fn shared(&self, local: usize) -> io::Result<SharedMemory> {
        let region = Arc::new(Region::map(&self.file, self.layout.total())?);
        let senders: Vec<_> = self
            .notifiers
            .iter()
            .map(|(_, senders)| senders.clone())
            .collect();
        let arena = Arena::new(region, self.layout, self.members.clone(), local, &senders);
        Ok(SharedMemory {
            arena,
            notified_fd: self.notifiers[local].0.clone(),
        })
    }

    /// Sends what a member needs, from the `sent`th descriptor on; true when all is sent.
    pub(crate) fn give(&self, to: &Fd, local: usize, sent: &mut usize) -> io::Result<bool> {
        let mut fds = vec![self.file.get()?, self.notifiers[local].0.get()?];
        for (_, senders) in &self.notifiers {
            fds.push(senders.get()?);
        }
        for (pair, ends) in &self.pairs {
            if let Some(mine) = pair.iter().position(|member| *member == local) {
                fds.push(ends[mine].get()?);
            }
        }
        while *sent < fds.len() {
            let batch = &fds[*sent..fds.len().min(*sent + BATCH)];
            match send_fds(to, &self.layout, batch) {
                Ok(()) => *sent += batch.len(),
                Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
                Err(e) => return Err(e.into()),
            }
        }
        Ok(true)
    }
}

fn send_fds(to: &Fd, layout: &Layout, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let words = [
        layout.ranks,
        layout.staging,
        layout.control_ring,
        layout.data_ring,
    ];
    let mut message = [0; MESSAGE];
    for (bytes, word) in message.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&(word as u64).to_le_bytes());
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::NOBUFS);
    }
    let n = rustix::net::sendmsg(
        to.get()?,
        &[IoSlice::new(&message)],
        &mut control,
        SEND_FLAGS,
    )?;
    // A socket that has been silent so far has room for so little.
    if n == MESSAGE {
        Ok(())
    } else {
        Err(Errno::MSGSIZE)
    }
}

/// Messages that an attaching rank has received so far.
#[derive(Default)]
pub(crate) struct AttachingRank {
    layout: Option<Layout>,
    fds: Vec<Fd>,
}

impl AttachingRank {
    /// Reads what is there; `Some` when all has come: the arena, and sockets to those who are [`watched`].
    pub(crate) fn receive(
        &mut self,
        from: &Fd,
        members: &Arc<[Rank]>,
        tree: &Tree,
        local: usize,
    ) -> io::Result<Option<(SharedMemory, Vec<Watched>)>> {
        let watched = watched(tree, members, local);
        let want = 2 + members.len() + watched.len();
        while self.fds.len() < want {
            let (layout, fds) = match recv_fds(from) {
                Ok(received) => received,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) => return Err(e),
            };
            let same = self.layout.is_none_or(|l| l == layout);
            if !same || fds.is_empty() || !layout.is_sane() || layout.ranks != members.len() {
                return Err(io::Error::other(
                    "the host's first rank offers an impossible arena",
                ));
            }
            self.layout = Some(layout);
            self.fds.extend(fds);
        }
        let (Some(layout), true) = (self.layout, self.fds.len() == want) else {
            return Err(io::Error::other(
                "the host's first rank sent too many descriptors",
            ));
        };
        let mut fds = self.fds.drain(..);
        let (Some(file), Some(notified_fd)) = (fds.next(), fds.next()) else {
            return Ok(None);
        };
        let senders: Vec<_> = fds.by_ref().take(members.len()).map(Arc::new).collect();
        let watched = watched.into_iter().zip(fds.map(Arc::new)).collect();
        let size = rustix::fs::fstat(file.get()?)?.st_size;
        if u64::try_from(size).unwrap_or(0) < layout.total() as u64 {
            return Err(io::Error::other(
                "the host's first rank offers too small an arena",
            ));
        }
        platform::check_shared_file(&file)?;
        let region = Arc::new(Region::map(&file, layout.total())?);
        let arena = Arena::new(region, layout, members.clone(), local, &senders);
        let shared = SharedMemory {
            arena,
            notified_fd: Arc::new(notified_fd),
        };
        Ok(Some((shared, watched)))
    }
}

fn recv_fds(from: &Fd) -> io::Result<(Layout, Vec<Fd>)> {
    let mut message = [0; MESSAGE];
    let (n, fds) = Fd::open_all(|| -> io::Result<_> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        #[cfg(not(target_vendor = "apple"))]
        let flags = RecvFlags::CMSG_CLOEXEC;
        #[cfg(target_vendor = "apple")]
        let flags = RecvFlags::empty();
        let iov = &mut [IoSliceMut::new(&mut message)];
        let got = rustix::net::recvmsg(from.get()?, iov, &mut control, flags)?;
        if got.flags.contains(ReturnFlags::CTRUNC) {
            // The system has dropped descriptors for which this process has no numbers left.
            return Err(Errno::MFILE.into());
        }
        let mut fds = Vec::new();
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = part {
                fds.extend(rights);
            }
        }
        Ok((got.bytes, fds))
    })?;
    match n {
        0 => {
            return Err(io::Error::other(
                "the host's first rank ended before it shared its memory",
            ));
        }
        MESSAGE => {}
        _ => {
            return Err(io::Error::other(format!(
                "the host's first rank sent {n} bytes, expected {MESSAGE} with descriptors"
            )));
        }
    }
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(message.as_chunks::<8>().0) {
        *word = usize::try_from(u64::from_le_bytes(*bytes)).unwrap_or(usize::MAX);
    }
    let [ranks, staging, control_ring, data_ring] = words;
    Ok((
        Layout {
            ranks,
            staging,
            control_ring,
            data_ring,
        },
        fds,
    ))
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::process::Command;

    use rustix::process::{Resource, getrlimit, setrlimit};

    use super::*;

    const LAYOUT: Layout = Layout {
        ranks: 2,
        staging: 4096,
        control_ring: 4096,
        data_ring: 4096,
    };

    #[test]
    fn dropped_descriptors_are_too_many_open_files() {
        let test = "shm::segment::tests::descriptors_beyond_the_limit";
        let ended = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--ignored", "--nocapture"])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&ended.stdout).into_owned();
        assert!(ended.status.success(), "{text}");
        assert!(text.contains("1 passed"), "{text}");
    }

    #[test]
    #[ignore = "lowers a limit of its whole process; the test above runs it in a process of its own"]
    fn descriptors_beyond_the_limit() {
        let [first, attaching] = net::socket_pair().unwrap();
        let offered = [first.get().unwrap(); 8];
        send_fds(&first, &LAYOUT, &offered).unwrap();
        let before = getrlimit(Resource::Nofile);
        let mut none = before;
        none.current = Some(0);
        setrlimit(Resource::Nofile, none).unwrap();
        let error = recv_fds(&attaching).map(|_| ()).unwrap_err();
        // A sanitizer opens files when the process ends.
        setrlimit(Resource::Nofile, before).unwrap();
        assert_eq!(Errno::from_io_error(&error), Some(Errno::MFILE), "{error}");
    }

    #[test]
    fn a_shortened_message_says_how_much_came() {
        let [first, attaching] = net::socket_pair().unwrap();
        rustix::io::write(first.get().unwrap(), &[0; 5]).unwrap();
        let error = recv_fds(&attaching).map(|_| ()).unwrap_err();
        let expected = "the host's first rank sent 5 bytes, expected 32 with descriptors";
        assert_eq!(error.to_string(), expected);
    }
}

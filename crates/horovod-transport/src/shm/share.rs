//! How the first rank of a host gives the arena and the doorbells to the others: descriptors over
//! the local socket.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::BorrowedFd,
    sync::Arc,
};

use horovod_protocol::Rank;
use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage,
    },
};

use super::{arena::Arena, layout::Layout};
use crate::{
    mesh::Shared,
    platform::{self, fd::Fd, region::Region},
    tcp::stream::SEND_FLAGS,
};

/// Descriptors per message; the kernel allows 253.
const BATCH: usize = 128;
const WORDS: usize = 4;
const MESSAGE: usize = WORDS * 8;

/// What the first rank of a host has made for all.
pub(crate) struct Estate {
    layout: Layout,
    members: Arc<[Rank]>,
    file: Fd,
    bells: Vec<(Arc<Fd>, Arc<Fd>)>,
}

impl Estate {
    pub(crate) fn new(members: Arc<[Rank]>, staging: usize) -> io::Result<Self> {
        let layout = Layout::new(members.len(), staging);
        if !layout.is_sane() {
            return Err(io::Error::other(format!(
                "{} ranks on one host",
                members.len()
            )));
        }
        let file = platform::shared_file(layout.total())?;
        let bells = members
            .iter()
            .map(|_| platform::bell())
            .collect::<io::Result<_>>()?;
        Ok(Self {
            layout,
            members,
            file,
            bells,
        })
    }

    /// The view of one member of this process.
    pub(crate) fn shared(&self, local: usize) -> io::Result<Shared> {
        let region = Arc::new(Region::map(&self.file, self.layout.total())?);
        let rings: Vec<_> = self.bells.iter().map(|(_, rings)| rings.clone()).collect();
        let arena = Arena::new(region, self.layout, self.members.clone(), local, &rings);
        Ok(Shared {
            arena,
            hears: self.bells[local].0.clone(),
        })
    }

    /// Sends what a member needs, from the `sent`th descriptor on; true when all is sent.
    pub(crate) fn give(&self, to: &Fd, local: usize, sent: &mut usize) -> io::Result<bool> {
        let mut fds = vec![self.file.get()?, self.bells[local].0.get()?];
        for (_, rings) in &self.bells {
            fds.push(rings.get()?);
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

/// What a member has received so far.
#[derive(Default)]
pub(crate) struct Heir {
    layout: Option<Layout>,
    fds: Vec<Fd>,
}

impl Heir {
    /// Reads what is there; `Some` when all has come.
    pub(crate) fn receive(
        &mut self,
        from: &Fd,
        members: &Arc<[Rank]>,
        local: usize,
    ) -> io::Result<Option<Shared>> {
        let want = members.len() + 2;
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
        let (Some(file), Some(hears)) = (fds.next(), fds.next()) else {
            return Ok(None);
        };
        let rings: Vec<_> = fds.map(Arc::new).collect();
        let size = rustix::fs::fstat(file.get()?)?.st_size;
        if u64::try_from(size).unwrap_or(0) < layout.total() as u64 {
            return Err(io::Error::other(
                "the host's first rank offers too small an arena",
            ));
        }
        let region = Arc::new(Region::map(&file, layout.total())?);
        let arena = Arena::new(region, layout, members.clone(), local, &rings);
        Ok(Some(Shared {
            arena,
            hears: Arc::new(hears),
        }))
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
        _ => return Err(io::Error::other("half a message with descriptors")),
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

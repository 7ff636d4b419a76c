//! The data plane of one rank: a byte link to each peer, and the arena of its host.

use std::sync::Arc;

use horovod_protocol::Rank;

use crate::{link::Link, shm::arena::Arena};

/// Links for tensor data.
pub struct Data {
    links: Vec<Option<Box<dyn Link>>>,
    arena: Option<Arc<Arena>>,
}

impl Data {
    pub(crate) fn new(links: Vec<Option<Box<dyn Link>>>, arena: Option<Arena>) -> Self {
        Self {
            links,
            arena: arena.map(Arc::new),
        }
    }

    /// The link to another rank: shared rings on the same host, TCP between hosts.
    ///
    /// Panics for this rank itself and for ranks that do not exist: those are bugs of the caller.
    #[expect(
        clippy::expect_used,
        clippy::panic,
        reason = "a bug of the caller, as documented"
    )]
    pub fn link(&mut self, peer: Rank) -> &mut dyn Link {
        match self.links.get_mut(peer.index()) {
            Some(link) => link.as_deref_mut().expect("a rank has no link to itself"),
            None => panic!("there is no {peer}"),
        }
    }

    /// Puts something between the links and their user.
    #[cfg(feature = "testing")]
    pub(crate) fn wrap_links(&mut self, wrap: impl Fn(Box<dyn Link>) -> Box<dyn Link>) {
        for link in &mut self.links {
            *link = link.take().map(&wrap);
        }
    }

    /// The memory shared with the other ranks of this host; `None` when alone on it or when shared
    /// memory is switched off.
    pub fn arena(&self) -> Option<&Arc<Arena>> {
        self.arena.as_ref()
    }
}

impl std::fmt::Debug for Data {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Data")
            .field("arena", &self.arena)
            .finish_non_exhaustive()
    }
}

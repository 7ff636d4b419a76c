//! Shared memory inside a host: the arena, the byte rings in it, and the notifiers of its ranks.

pub(crate) mod notifier;
pub(crate) mod ring;

#[cfg(not(loom))]
pub(crate) mod arena;
#[cfg(not(loom))]
pub(crate) mod layout;
#[cfg(not(loom))]
pub(crate) mod link;
#[cfg(not(loom))]
pub(crate) mod segment;

//! Sockets between processes: streams that have been authenticated, and links made of them.

pub(crate) mod checked;
pub(crate) mod link;
pub(crate) mod listener;
pub(crate) mod sealed;
pub(crate) mod stream;
mod stripes;

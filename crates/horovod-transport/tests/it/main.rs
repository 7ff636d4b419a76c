//! The integration tests of this crate, in one binary: most of what a binary costs is linking it.

mod altered;
mod cluster;
mod common;
mod connect;
mod elastic;
mod strangers;
mod unreached;

//! The integration tests of this crate, in one binary: most of what a binary costs is linking it.

mod adasum;
mod allreduce;
mod common;
mod failures;
mod float_mode;
mod movement;
mod pauses;
mod prestaged;
mod reproducible;
mod small;

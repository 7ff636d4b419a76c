//! The integration tests of this crate, in one binary: most of what a binary costs is linking it.

mod common;
mod elastic_by_calls;
mod endings;
mod output;
mod start;

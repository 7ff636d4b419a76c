//! The integration tests of this crate, in one binary: most of what a binary costs is linking it.

mod allocation;
mod common;
mod defaults;
mod elastic_by_calls;
mod endings;
mod output;
mod start;

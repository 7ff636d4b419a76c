//! The integration tests of this crate, in one binary: most of what a binary costs is linking it.

mod barriers;
mod checkers;
mod failures;
mod job;
mod lateness;
mod membership;
mod safety;
mod scenarios;
mod seeds;
mod trees;

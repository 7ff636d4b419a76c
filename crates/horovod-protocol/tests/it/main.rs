//! The integration tests of this crate, in one binary: most of what a binary costs is linking it.

// Its allocator counts per thread, so these tests and the others do not disturb each other.
mod allocations;
mod messages;

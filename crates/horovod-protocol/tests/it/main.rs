//! The integration tests of this crate, in one binary: most of what a binary costs is linking it.

// Its allocator counts for each thread by itself, and disturbs nobody.
mod allocations;
mod messages;

//! The integration tests of this crate, in one binary: most of what a binary costs is linking it.

mod checks;
mod kernels;
mod library;
mod random_programs;
mod rank_faults;
mod ranks;
mod rig;

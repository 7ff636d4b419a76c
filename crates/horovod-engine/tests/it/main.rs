//! The integration tests of this crate, in one binary: most of what a binary costs is linking it.

mod autotune;
mod callbacks;
mod common;
mod engines;
mod even_rows;
mod gpu;
mod gpu_adasum;
mod gpu_double;
mod gpu_even_rows;
mod gpu_failures;
mod gpu_interrupted;
mod gpu_sets;
mod gpu_stalls;
mod gpu_timeline;
mod orders;
mod replicas;
mod start;
mod threads;
mod timeline;
mod toy_device;
mod trees;

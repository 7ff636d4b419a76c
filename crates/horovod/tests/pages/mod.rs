//! Pages whose blocks in Rust are documentation tests.

#[doc = include_str!("../../../../README.md")]
struct Project;
#[doc = include_str!("../../../../docs/rust.md")]
struct Rust;
#[doc = include_str!("../../README.md")]
struct Crate;

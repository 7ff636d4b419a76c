//! Pages whose blocks in Rust are documentation tests.

#[doc = include_str!("../../../../docs/burn.md")]
struct Burn;
#[doc = include_str!("../../README.md")]
struct Crate;

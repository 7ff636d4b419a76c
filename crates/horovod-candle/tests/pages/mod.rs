//! Pages whose blocks in Rust are documentation tests.

#[doc = include_str!("../../../../docs/candle.md")]
struct Candle;
#[doc = include_str!("../../README.md")]
struct Crate;

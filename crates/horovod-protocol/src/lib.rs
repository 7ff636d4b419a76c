//! Negotiation between ranks as pure state machines: events and the time go in, actions come out.
//!
//! Deliberately absent: sockets, clocks, threads, environment variables, floating-point decisions,
//! hash-ordered iteration and `unsafe`.
#![forbid(unsafe_code)]

mod types;

pub use types::*;

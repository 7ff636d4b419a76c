//! The rendezvous of a job's ranks: each registers, all learn of all, and deaths are told.
//!
//! The launcher runs a [`Server`]; [`crate::connect`] is the client. A round goes: every rank says
//! hello, all get the roster, every rank says where it listens, all get the table. Registering
//! again starts the next generation. The connections stay open for notices of deaths.
//!
//! In an elastic job processes are known by worker numbers, wait in the waiting set, and the launcher says which of
//! them form the next round and with which ranks.

mod client;
mod config;
mod elastic;
#[cfg(feature = "testing")]
pub(crate) mod harness;
mod messages;
mod round;
mod server;

pub(crate) use client::{Client, Notice};
pub use config::{ServerConfig, ServerEvent};
pub use messages::RankAssignment;
#[cfg(feature = "testing")]
pub(crate) use messages::samples;
pub(crate) use messages::{Common, MemberEntry, ToClient, ToServer, Where};
pub use server::Server;

//! Where the ranks of a job meet: each registers, all learn of all, and deaths are told.
//!
//! The launcher runs a [`Server`]; [`crate::connect`] is the client. A round goes: every rank says
//! hello, all get the roster, every rank says where it listens, all get the table. Registering
//! again starts the next generation. The connections stay open for notices of deaths.

mod client;
mod messages;
mod round;
mod server;

pub(crate) use client::Client;
pub(crate) use messages::{Common, MemberEntry, ToClient, ToServer, Where};
pub use server::{Server, ServerConfig, ServerEvent};

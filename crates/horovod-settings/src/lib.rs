//! The `HOROVOD_*` settings: each is declared once, with its name, default, accepted values and one line of
//! documentation, and everything else follows from that.
//!
//! Parsing and its errors, the defaults of the runtime and of the layers below it, and `docs/settings.md`. Also the
//! warning of unknown variables, and the help and limits of `horovodrun`'s options. It is a crate of its own, below all
//! others, because the launcher and the runtime both read it and neither shall be built for the other.
//!
//! An internal part of horovod-rs: programs use the crate `horovod`, and this interface may change in any version.
#![forbid(unsafe_code)]

mod declaration;
mod environment;
mod kinds;
mod known;
mod spelling;
mod table;

pub use declaration::{Declaration, Declared, Refused, Whose};
pub use environment::{Environment, ProcessEnvironment, text_of};
pub use kinds::{
    Accepts, Addresses, Decimal, Flag, Kind, List, NUMBER_MAX, Number, Optional, PortRange, Text,
    Whole, Words,
};
pub use known::{nearest_setting, steers_a_build, unknown_settings};
pub use spelling::nearest_of;
pub use table::*;

#[cfg(test)]
mod tests;

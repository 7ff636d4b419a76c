//! Description of its place by an agent that has dialed.

use horovod_protocol::wire::{DecodeError, Reader, Writer};

use super::text;

/// The place of an agent that has dialed: one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DialedTask {
    /// The number of its task.
    pub index: u32,
    /// How often that task was started before.
    pub attempt: u32,
    /// Equal for two agents exactly if their ranks share a host.
    pub host: String,
    /// The host name that ranks use.
    pub host_name: String,
    /// Its process.
    pub pid: u32,
    /// Version of the Python that started it.
    pub python: String,
}

impl DialedTask {
    pub(super) fn put(&self, w: &mut Writer<'_>) {
        w.varint(u64::from(self.index));
        w.varint(u64::from(self.attempt));
        w.str(&self.host);
        w.str(&self.host_name);
        w.varint(u64::from(self.pid));
        w.str(&self.python);
    }

    pub(super) fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            index: r.varint_u32("task")?,
            attempt: r.varint_u32("attempt")?,
            host: text(r, "host")?,
            host_name: text(r, "host name")?,
            pid: r.varint_u32("pid")?,
            python: text(r, "Python's version")?,
        })
    }
}

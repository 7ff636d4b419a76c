//! Description of its place by an agent that has dialed.

use serde::{Deserialize, Serialize};

/// The place of an agent that has dialed: one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

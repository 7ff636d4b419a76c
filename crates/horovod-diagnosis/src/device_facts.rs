//! Facts about operations on GPUs: where a rank's GPU stands, complaints about one that does not end, findings.

use horovod_protocol::Rank;
use serde::{Deserialize, Serialize};

use super::{Key, Standing, messages};

/// How far the operation is that a GPU is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DevicePhase {
    /// The call by which it is launched has not returned.
    Launching,
    /// It is launched, behind work of the script's that has not ended.
    AwaitsInputs,
    /// It is launched, and nothing else keeps the GPU from it.
    Runs,
}

/// The operation that a GPU is at: the next to end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OnDevice {
    /// Its place in the job's order.
    pub seq: u64,
    /// Its process set and its name; of several together the first's, and how many more.
    #[serde(
        serialize_with = "messages::put_key",
        deserialize_with = "messages::get_key"
    )]
    pub key: Key,
    /// How far it is.
    pub phase: DevicePhase,
    /// For so long the GPU has been at it.
    pub ms: u64,
}

/// Where a rank and its GPU stand.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStanding {
    /// The place in the job's order of what was given to the GPU last.
    pub given: Option<u64>,
    /// `None`: all of it has ended.
    pub at: Option<OnDevice>,
}

/// A rank's word that its GPU does not end an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Complaint {
    pub(crate) seq: u64,
    #[serde(
        serialize_with = "messages::put_key",
        deserialize_with = "messages::get_key"
    )]
    pub(crate) key: Key,
    pub(crate) ms: u64,
    /// The time that operations have is over.
    pub(crate) ends: bool,
}

/// Where a rank is with an operation that does not end on some GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DeviceProgress {
    /// Its GPU has done its part.
    Ended,
    /// So it has, and the host is at its own.
    OnHost,
    Runs,
    AwaitsInputs,
    Launching,
    /// Its GPU is still at this operation, which comes before.
    Behind(Key, DevicePhase),
    NotLaunched,
    Silent,
}

/// Where one rank is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankPlace {
    pub(crate) rank: Rank,
    pub(crate) place: DeviceProgress,
    pub(crate) standing: Option<Standing>,
}

/// Findings about an operation that does not end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceDiagnosis {
    pub(crate) complaint: Complaint,
    /// By rank.
    pub(crate) ranks: Vec<RankPlace>,
    /// Members that were not asked because there are so many.
    pub(crate) unasked: usize,
}

impl DeviceDiagnosis {
    /// Whether the time that operations have is over, and the job ends.
    pub fn ends_job(&self) -> bool {
        self.complaint.ends
    }

    /// Those for which the others wait; none if all are at it alike.
    pub(crate) fn culprits(&self) -> impl Iterator<Item = &RankPlace> {
        self.ranks.iter().filter(|rank| {
            !matches!(
                rank.place,
                DeviceProgress::Ended | DeviceProgress::OnHost | DeviceProgress::Runs
            )
        })
    }
}

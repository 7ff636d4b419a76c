//! Variables between this launcher, that of MPI, and the agents and ranks that it starts.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use super::{AGENTS_KEY, forwarded};
use crate::frames::Variables;

/// Where agents that MPI's launcher starts dial.
pub(super) const AGENTS_ADDRESSES: &str = "HOROVODRUN_AGENTS_ADDRESSES";
/// Names of the variables of [`of_agents`].
pub(crate) const OF_AGENTS: [&str; 2] = [AGENTS_KEY, AGENTS_ADDRESSES];
/// Rank of a process that MPI's launcher has started; those that others have, too, come last.
pub(crate) const RANKS_OF_MPI: [&str; 5] = [
    "OMPI_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
    "MV2_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
];
/// Prefixes of variables by which a process finds MPI's launcher; those of another process are wrong.
const OF_MPI_PREFIXES: [&str; 9] = [
    "OMPI_",
    "PMI",
    "MPI_LOCAL",
    "MPIEXEC_",
    "HYDI_",
    "I_MPI_",
    "MV2_",
    "JSM_",
    "PRTE_",
];

/// Variables of MPI's launcher for the agents that it starts.
pub(crate) fn of_agents(
    key: &str,
    addresses: &[std::net::SocketAddr],
) -> [(&'static str, String); 2] {
    let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    [
        (AGENTS_KEY, key.to_owned()),
        (AGENTS_ADDRESSES, addresses.join(",")),
    ]
}

/// Key and addresses, in an agent that MPI's launcher has started.
#[expect(
    clippy::disallowed_methods,
    reason = "this is the launcher's environment module"
)]
pub(crate) fn agent_of_mpi() -> Result<(String, String), String> {
    let value = |name: &str| {
        std::env::var(name).map_err(|_| format!("MPI's launcher did not pass {name} on to here"))
    };
    Ok((value(AGENTS_KEY)?, value(AGENTS_ADDRESSES)?))
}

/// This process's rank, as MPI's launcher says.
#[expect(
    clippy::disallowed_methods,
    reason = "this is the launcher's environment module"
)]
pub(crate) fn rank_of_mpi() -> Result<u32, String> {
    let found = |name: &&str| std::env::var(name).ok()?.parse().ok();
    RANKS_OF_MPI.iter().find_map(found).ok_or_else(|| {
        format!(
            "MPI's launcher tells no rank: none of {} is a number",
            RANKS_OF_MPI.join(", ")
        )
    })
}

/// Whether this is a job of LSF.
#[expect(
    clippy::disallowed_methods,
    reason = "this is the launcher's environment module"
)]
pub(crate) fn is_in_lsf() -> bool {
    std::env::var_os("LSB_JOBID").is_some()
}

/// The launcher's environment for ranks that MPI's launcher starts, without what that gives them: its own variables,
/// and those that it was told to give.
pub(crate) fn forwarded_to_mpi(given: &[String]) -> Variables {
    let mut variables = forwarded(false);
    let is_of_mpi = |name: &OsStr| {
        let mut prefixes = OF_MPI_PREFIXES.iter();
        prefixes.any(|prefix| name.as_bytes().starts_with(prefix.as_bytes()))
    };
    let is_given = |name: &OsStr| given.iter().any(|other| name == other.as_str());
    variables.retain(|(name, _)| !is_of_mpi(name) && !is_given(name));
    variables
}

/// The variable by which a rank knows that MPI's launcher has started it.
pub(crate) fn controller_is_mpi() -> (OsString, OsString) {
    ("HOROVOD_CONTROLLER".into(), "mpi".into())
}

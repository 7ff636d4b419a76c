//! Reads variables that are none of ours, such as a scheduler's; errors name the variable, the value and what is
//! accepted.

use horovod_settings::Environment;

use crate::NoJob;

/// Rank from PMIx.
const PMIX_RANK: &str = "PMIX_RANK";
/// Number of the job's processes. Open MPI 4 sets it in each of them when the process initialises MPI.
const OPEN_MPI_PROCESSES: &str = "OMPI_MCA_orte_ess_num_procs";

pub(crate) struct Reader<'a> {
    pub(crate) env: &'a dyn Environment,
}

impl Reader<'_> {
    pub(crate) fn text(&self, name: &str) -> Option<String> {
        let text = horovod_settings::text_of(self.env, name)?;
        (name != PMIX_RANK || !self.is_alone_with_mpi(&text)).then_some(text)
    }

    /// Whether the rank from PMIx is that of a process without a launcher: Open MPI 4 makes such a process rank 0 of 1.
    fn is_alone_with_mpi(&self, rank: &str) -> bool {
        let processes = horovod_settings::text_of(self.env, OPEN_MPI_PROCESSES);
        rank.trim() == "0" && processes.is_some_and(|number| number.trim() == "1")
    }

    pub(crate) fn number<T: std::str::FromStr>(&self, name: &str, default: T) -> Result<T, NoJob> {
        match self.text(name) {
            None => Ok(default),
            Some(v) => v
                .trim()
                .parse()
                .map_err(|_| NoJob(format!("{name}={v:?}: expected a number of at least 0"))),
        }
    }
}

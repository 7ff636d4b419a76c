//! Variables of PMI that an outer step of Slurm left in the environment.
//!
//! `srun` within a step passes on all variables of that step, and `--mpi=none` sets no own ones. The outer step's rank and
//! size are not those of this process, and its store does not know this process.

use horovod_settings::Environment;

use crate::ancestors::ancestors;

/// Programs that start ranks and set variables of PMI, as the kernel names them.
const LAUNCHERS: [&str; 6] = [
    "slurmstepd",
    "hydra_pmi_proxy",
    "mpispawn",
    "orted",
    "prted",
    "flux-shell",
];

/// An environment without the variables that an outer step of Slurm left in it.
pub struct OwnStep<'a> {
    env: &'a dyn Environment,
    hidden: Vec<&'static str>,
}

impl<'a> OwnStep<'a> {
    /// Looks at the variables, and at the processes above this one where they name another step.
    pub fn of(env: &'a dyn Environment) -> Self {
        Self::under(env, || {
            ancestors()
                .find(|ancestor| LAUNCHERS.contains(&&*ancestor.name))
                .map(|ancestor| ancestor.name)
        })
    }

    /// `launcher` is the nearest one above this process. An MPI's own launcher sets variables anew, but leaves the names of
    /// the step in place.
    pub(crate) fn under(
        env: &'a dyn Environment,
        launcher: impl FnOnce() -> Option<String>,
    ) -> Self {
        let mut hidden = others(env);
        if !hidden.is_empty() && launcher().as_deref() != Some("slurmstepd") {
            hidden.clear();
        }
        Self { env, hidden }
    }

    fn is_hidden(&self, name: &str) -> bool {
        self.hidden.iter().any(|prefix| name.starts_with(prefix))
    }
}

impl Environment for OwnStep<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (!self.is_hidden(name)).then(|| self.env.get(name))?
    }

    fn names(&self) -> Vec<String> {
        let mut names = self.env.names();
        names.retain(|name| !self.is_hidden(name));
        names
    }
}

/// How the variables begin that name a step of Slurm, and not this one.
fn others(env: &dyn Environment) -> Vec<&'static str> {
    let (Some(job), Some(step)) = (env.get("SLURM_JOB_ID"), env.get("SLURM_STEP_ID")) else {
        return Vec::new();
    };
    let own = format!("{job}.{step}");
    let is_other = |variable: &str, before: &str| {
        let value = env.get(variable).unwrap_or_default();
        value.strip_prefix(before).is_some_and(|step| step != own)
    };
    let mut others = Vec::new();
    if is_other("PMI_JOBID", "") {
        others.push("PMI_");
    }
    if is_other("PMIX_NAMESPACE", "slurm.pmix.") {
        others.push("PMIX_");
    }
    others
}

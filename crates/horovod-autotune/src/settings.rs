//! Settings of the autotuner.

use std::path::PathBuf;

use horovod_settings::{self as settings, Environment, Refused, SETTINGS};

/// How to tune; the fields are the settings of the same names.
#[derive(Clone, Debug, PartialEq)]
#[expect(
    missing_docs,
    reason = "each field is the setting of the same name in SETTINGS"
)]
pub struct AutotuneSettings {
    pub log: Option<PathBuf>,
    pub warmup_samples: u32,
    pub steps_per_sample: u32,
    pub bayes_opt_max_samples: u32,
    pub gaussian_process_noise: Option<f64>,
    /// Variables that the user has set: what they decide is not tuned.
    pub explicit: Vec<&'static str>,
}

impl AutotuneSettings {
    /// Reads and checks them; `None` where nothing is to be tuned.
    pub fn from_environment(env: &dyn Environment) -> Result<Option<Self>, Refused> {
        let names = SETTINGS.iter().map(|s| s.name);
        let settings = Self {
            log: settings::AUTOTUNE_LOG.read(env)?.map(PathBuf::from),
            warmup_samples: settings::AUTOTUNE_WARMUP_SAMPLES.read(env)?,
            steps_per_sample: settings::AUTOTUNE_STEPS_PER_SAMPLE.read(env)?,
            bayes_opt_max_samples: settings::AUTOTUNE_BAYES_OPT_MAX_SAMPLES.read(env)?,
            gaussian_process_noise: settings::AUTOTUNE_GAUSSIAN_PROCESS_NOISE.read(env)?,
            explicit: names
                .filter(|name| settings::text_of(env, name).is_some())
                .collect(),
        };
        Ok(settings::AUTOTUNE.read(env)?.then_some(settings))
    }
}

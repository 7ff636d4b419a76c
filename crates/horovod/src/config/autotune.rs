//! Settings of the autotuner.

use std::path::PathBuf;

use super::SETTINGS;
use super::reader::Reader;
use crate::error::Error;

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
    pub(super) fn from_environment(r: &Reader<'_>) -> Result<Option<Self>, Error> {
        const NOISE: &str = "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE";
        let noise = match r.text(NOISE) {
            None => None,
            Some(_) => Some(r.not_negative(NOISE, 0.0)?),
        };
        if let Some(noise) = noise.filter(|n| *n > 1.0) {
            return Err(Error::Init(format!(
                "{NOISE}={noise}: expected a number from 0 to 1"
            )));
        }
        let steps_per_sample = r.number("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", 10u32)?;
        if steps_per_sample == 0 {
            return Err(Error::Init(
                "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE=0: expected at least 1".into(),
            ));
        }
        let names = SETTINGS.iter().map(|s| s.name);
        let settings = Self {
            log: r.text("HOROVOD_AUTOTUNE_LOG").map(PathBuf::from),
            warmup_samples: r.number("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", 3)?,
            steps_per_sample,
            bayes_opt_max_samples: r.number("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", 20)?,
            gaussian_process_noise: noise,
            explicit: names.filter(|name| r.text(name).is_some()).collect(),
        };
        Ok(r.flag("HOROVOD_AUTOTUNE", false)?.then_some(settings))
    }
}

//! Autotuning: watches the collectives of rank 0 and proposes settings, which then change on all ranks at the same
//! place of the job's total order. Knows neither clock nor peers; the engine carries proposals out.
//!
//! An internal part of horovod-rs: programs use the crate `horovod`, and this interface may change in any version.
#![forbid(unsafe_code)]

mod ab_comparison;
mod gaussian;
mod meter;
mod report;
mod search;
mod settings;
mod space;

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use horovod_protocol::{Execution, Op, ProcessSetId, Time};

use ab_comparison::median;
use meter::Meter;
use report::Report;
use search::{Next, Search, SearchPlan};
use space::Space;

pub use settings::AutotuneSettings;
pub use space::{Parameter, Values};

/// A sample may take this many times what it took under the first settings.
const OVERDUE_FACTOR: f64 = 4.0;
/// Samples under the first settings that are remembered for it.
const REMEMBERED: usize = 5;

/// Tuning under way; lives on rank 0.
pub struct Autotuner {
    meter: Meter,
    search: Search,
    report: Report,
    /// Values were proposed and are not in force here yet.
    announced: bool,
    finished: bool,
    /// Nanoseconds of samples under the first values.
    first: Vec<f64>,
    changed: bool,
}

impl Autotuner {
    /// Begins with `defaults`, the values in force; of those only `tunable` will be changed.
    pub fn new(
        settings: &AutotuneSettings,
        defaults: Values,
        tunable: &[Parameter],
        cache_enabled: bool,
    ) -> Self {
        let space = Space::new(defaults, tunable);
        let plan = SearchPlan {
            warmup_rounds: settings.warmup_samples,
            proposals: settings.bayes_opt_max_samples,
            noise: settings.gaussian_process_noise,
            seed: 0,
        };
        let parameters = space.parameters().collect();
        let mut tuner = Self {
            meter: Meter::new(settings.steps_per_sample),
            report: Report::new(settings.log.as_deref(), parameters, cache_enabled),
            search: Search::new(space, plan),
            announced: false,
            finished: false,
            first: Vec::new(),
            changed: false,
        };
        tuner.report_news();
        tuner
    }

    /// An execution has ended on this rank. `Some`: put these values in force, then call [`Self::applied`].
    pub fn observe(&mut self, now: Time, execution: &Execution) -> Option<Values> {
        if self.announced || self.finished || execution.set != ProcessSetId::GLOBAL {
            return None;
        }
        let bytes = match execution.op {
            Op::Allreduce { .. } => bytes_of(execution),
            Op::Allgather | Op::Broadcast { .. } | Op::Alltoall | Op::Reducescatter { .. } => 0,
            // These move no tensors.
            _ => return None,
        };
        let names = execution.items.iter().map(|item| &item.name);
        let sample = self
            .meter
            .observe(now, names, bytes, self.overdue_after())?;
        if !self.changed && self.first.len() < REMEMBERED {
            #[expect(clippy::cast_precision_loss, reason = "a duration")]
            self.first.push(sample.nanos as f64);
        }
        let next = self.search.handle_sample(sample.score());
        self.report_news();
        match next {
            Next::Stay => None,
            Next::Run(values) => self.announce(values),
            Next::Finished(values) => {
                self.finished = true;
                self.announce(values)
            }
        }
    }

    /// The values that were announced last are in force.
    pub fn applied(&mut self) {
        self.announced = false;
        self.meter.restart();
    }

    /// Whether the last word has been said.
    pub fn is_finished(&self) -> bool {
        self.finished && !self.announced
    }

    /// The line for the user if the job ends now, before tuning does.
    pub fn unfinished(&self) -> Option<String> {
        let state = self.search.unfinished().filter(|_| !self.finished)?;
        Some(format!(
            "the job ended before tuning did, while it {state}; no best values were found. Train for more steps, or \
             lower HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE, HOROVOD_AUTOTUNE_WARMUP_SAMPLES or \
             HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES"
        ))
    }

    fn announce(&mut self, values: Values) -> Option<Values> {
        self.announced = true;
        self.changed = true;
        Some(values)
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a positive duration; the cast saturates"
    )]
    fn overdue_after(&self) -> Option<u64> {
        let known = self.changed && !self.first.is_empty();
        known.then(|| (OVERDUE_FACTOR * median(&self.first)) as u64)
    }

    fn report_news(&mut self) {
        for news in self.search.take_news() {
            self.report.tell(&news);
        }
    }
}

fn bytes_of(execution: &Execution) -> u64 {
    let tensors = execution.items.iter().flat_map(|item| item.tensors.iter());
    tensors
        .map(|t| t.elems().unwrap_or(0).saturating_mul(t.dtype.size() as u64))
        .sum()
}

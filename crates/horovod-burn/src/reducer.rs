//! The reduction of gradients over the ranks: its passes, and the comparison of the ranks before it.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Shape};
use horovod::Communicator;
use horovod::framework::{self, Lines, Settings};

use crate::error::{Error, Result};
use crate::gradients::{self, Gradients, Missing, TYPES};
use crate::parameters::{agree, line};

/// Reduces the gradients of one optimizer.
pub(crate) struct Reducer {
    hvd: Communicator,
    settings: Settings,
    /// Sums of the passes since the last reduction, or the first error of these passes, and their number.
    sums: Result<GradientsParams>,
    done: usize,
    /// Tells this optimizer from others of the same parameters.
    number: String,
    /// Made by the first reduction, and again for a model with other parameters.
    compared: Option<Compared>,
}

/// The parameters of a reduction, and the lines that all ranks must have alike.
struct Compared {
    parameters: Vec<(String, DType, Shape)>,
    lines: Lines,
}

impl Reducer {
    pub(crate) fn new(hvd: &Communicator, settings: Settings) -> Self {
        Self {
            hvd: hvd.clone(),
            settings,
            sums: Ok(GradientsParams::new()),
            done: 0,
            number: framework::optimizer_line(hvd),
            compared: None,
        }
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The settings, to be changed: the next reduction compares them again.
    pub(crate) fn settings_mut(&mut self) -> &mut Settings {
        self.compared = None;
        &mut self.settings
    }

    /// Adds the gradients to those of earlier passes. The last pass reduces the sums over all ranks and returns them.
    ///
    /// `rate` is a line that the ranks compare; `None` if the caller does not know the rate.
    pub(crate) fn reduce<M: Module>(
        &mut self,
        model: &M,
        gradients: GradientsParams,
        rate: Option<&str>,
    ) -> Result<Option<GradientsParams>> {
        let sums = std::mem::replace(&mut self.sums, Ok(GradientsParams::new()));
        let sums = sums.and_then(|mut sums| {
            gradients::add(model, gradients, &mut sums)?;
            Ok(sums)
        });
        let done = std::mem::take(&mut self.done) + 1;
        if done < self.settings.passes {
            (self.sums, self.done) = (sums, done);
            return Ok(None);
        }
        self.reduce_sums(model, sums, rate).map(Some)
    }

    /// Reduces the sums of the passes since the last reduction, if there are any.
    #[cfg(feature = "train")]
    pub(crate) fn finish<M: Module>(
        &mut self,
        model: &M,
        rate: Option<&str>,
    ) -> Result<Option<GradientsParams>> {
        if std::mem::take(&mut self.done) == 0 {
            return Ok(None);
        }
        let sums = std::mem::replace(&mut self.sums, Ok(GradientsParams::new()));
        self.reduce_sums(model, sums, rate).map(Some)
    }

    fn reduce_sums<M: Module>(
        &mut self,
        model: &M,
        sums: Result<GradientsParams>,
        rate: Option<&str>,
    ) -> Result<GradientsParams> {
        let own = self.settings.check().map_err(Error::invalid).and(sums);
        let own = own.and_then(|sums| Gradients::take(model, sums, Missing::Zeros));
        let own = own.and_then(|gradients| check_types(&gradients).and(Ok(gradients)));
        let mut gradients = self.agree(own, rate)?;
        gradients.reduce(&self.hvd, self.settings.op, self.settings.groups)?;
        Ok(gradients.put())
    }

    /// Compares parameters and settings of all ranks. Ranks may give another model to each call, so each call compares.
    fn agree(&mut self, own: Result<Gradients>, rate: Option<&str>) -> Result<Gradients> {
        if let Ok(gradients) = &own {
            let compared = self.compared.take();
            let compared = compared.filter(|compared| compared.is_of(gradients));
            self.compared = Some(compared.unwrap_or_else(|| self.lines_of(gradients)));
        }
        let nothing = Lines::new(Vec::new());
        let lines = match (&own, &self.compared) {
            (Ok(_), Some(compared)) => &compared.lines,
            _ => &nothing,
        };
        agree(&self.hvd, "burn.parameters", lines, rate, own)
    }

    fn lines_of(&self, gradients: &Gradients) -> Compared {
        let parameters = gradients.parameters();
        let mut lines: Vec<String> = parameters
            .map(|(path, dtype, shape)| line(path, dtype, shape))
            .collect();
        lines.extend(self.settings.lines());
        lines.push(self.number.clone());
        let parameters = gradients.parameters();
        Compared {
            parameters: parameters
                .map(|(path, dtype, shape)| (path.to_owned(), dtype, shape.clone()))
                .collect(),
            lines: Lines::new(lines),
        }
    }
}

impl Compared {
    fn is_of(&self, gradients: &Gradients) -> bool {
        let own = self.parameters.iter();
        own.map(|(path, dtype, shape)| (path.as_str(), *dtype, shape))
            .eq(gradients.parameters())
    }
}

/// Scales these gradients so that the norm of all of them is at most `max`, and returns the norm before.
pub(crate) fn clip<M: Module>(model: &M, gradients: &mut GradientsParams, max: f64) -> Result<f64> {
    framework::check_norm(max).map_err(Error::invalid)?;
    let mut taken = Gradients::take(model, std::mem::take(gradients), Missing::Nothing)?;
    check_types(&taken)?;
    let norm = taken.clip(max)?;
    *gradients = taken.put();
    Ok(norm)
}

fn check_types(gradients: &Gradients) -> Result<()> {
    let mut parameters = gradients.parameters();
    match parameters.find(|(_, dtype, _)| !TYPES.contains(dtype)) {
        Some((path, dtype, _)) => Err(Error::invalid(format!(
            "parameter {path:?} is of type {}, whose gradients cannot be sent; use one of {}",
            dtype.name(),
            TYPES.map(|dtype| dtype.name()).join(", ")
        ))),
        None => Ok(()),
    }
}

//! Times calls that all ranks make, and writes lines of JSON for `bench/frameworks.py`. Warm-up and repeats are those of
//! its ranks in Python.

use std::fs::File;
use std::io::Write;
use std::time::Instant;

use horovod::ReduceOp::Max;
use horovod::{Communicator, Error};

const WARM_UP: usize = 5;
const REPEATS: (f64, f64) = (9.0, 500.0);

/// One rank of the benchmark.
pub(crate) struct Bench {
    hvd: Communicator,
    /// Rank 0 has it.
    out: Option<File>,
    budget_s: f64,
}

/// A call by its name: it prepares what it needs, and returns the seconds of the part in [`Bench::time`].
pub(crate) type Case<'a, E> = (&'a str, &'a mut dyn FnMut(&Bench) -> Result<f64, E>);

impl Bench {
    /// By the arguments of the program: `--out FILE --budget SECONDS`.
    pub(crate) fn new(hvd: &Communicator) -> Result<Self, Error> {
        let words: Vec<String> = std::env::args().skip(1).collect();
        let [_, out, _, budget_s] = words.as_slice() else {
            return Err(invalid("usage: --out FILE --budget SECONDS"));
        };
        let out = match hvd.rank() {
            0 => Some(File::create(out).map_err(|error| invalid(&format!("{out}: {error}")))?),
            _ => None,
        };
        Ok(Self {
            hvd: hvd.clone(),
            out,
            budget_s: budget_s
                .parse()
                .map_err(|_| invalid("--budget needs a number"))?,
        })
    }

    /// The seconds of a call that begins when all ranks are ready.
    pub(crate) fn time<E: From<Error>>(
        &self,
        call: impl FnOnce() -> Result<(), E>,
    ) -> Result<f64, E> {
        self.hvd.barrier()?;
        let begin = Instant::now();
        call()?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Times these in turns, so that disturbances reach all alike, and writes the times on the slowest rank.
    pub(crate) fn in_turns<E: From<Error>>(&self, cases: &mut [Case<'_, E>]) -> Result<(), E> {
        let count = cases.len();
        let mut round = || {
            let times = cases.iter_mut().map(|(_, call)| call(self));
            times.collect::<Result<Vec<f64>, E>>()
        };
        for _ in 0..WARM_UP {
            round()?;
        }
        let mut typical: Vec<f64> = Vec::new();
        for _ in 0..5 {
            typical.push(round()?.iter().sum());
        }
        typical.sort_by(f64::total_cmp);
        let (least, most) = REPEATS;
        let rounds = self.budget_s * count as f64 / typical[2];
        let mut rounds = [rounds.clamp(least, most) as u32];
        self.hvd.broadcast_in_place(&mut rounds, 0)?;
        let mut seconds = Vec::new();
        for _ in 0..rounds[0] {
            seconds.push(round()?);
        }
        for (at, (name, _)) in cases.iter().enumerate() {
            let mut own: Vec<f64> = seconds.iter().map(|round| round[at]).collect();
            self.hvd.allreduce_in_place(&mut own, Max)?;
            self.write(&format!("{{\"case\": {name:?}, \"seconds\": {own:?}}}\n"))?;
        }
        Ok(())
    }

    /// Notes that all was measured.
    pub(crate) fn done(self) -> Result<(), Error> {
        self.write("{\"done\": true}\n")?;
        self.hvd.barrier()
    }

    fn write(&self, line: &str) -> Result<(), Error> {
        let Some(mut out) = self.out.as_ref() else {
            return Ok(());
        };
        let written = out.write_all(line.as_bytes());
        written.map_err(|error| invalid(&format!("cannot write the results: {error}")))
    }
}

fn invalid(mistake: &str) -> Error {
    let mistake = mistake.to_owned();
    Error::Invalid { mistake }
}

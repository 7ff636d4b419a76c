//! Reports of tuning to people: a line in the log and a row in the CSV file per score.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use horovod_transport::output_file::{self, OpenMode};

use super::search::{News, ScorePhase};
use super::space::{Parameter, Values};

/// Where the news go.
pub(crate) struct Report {
    file: Option<File>,
    tunable: Vec<Parameter>,
    cache_enabled: bool,
}

/// The original's columns in its order, then ours.
const HEADER: &str = "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,\
                      tensor_fusion_threshold,score,chunk_bytes,direct_max_bytes,exchange_max_bytes,\
                      wire_chunk_bytes,phase";

impl Report {
    /// Truncates the file. One that cannot be written is no reason not to train.
    pub(crate) fn new(path: Option<&Path>, tunable: Vec<Parameter>, cache_enabled: bool) -> Self {
        let file = path.and_then(|path| match output_file::open(path, OpenMode::Truncate) {
            Ok(file) => Some(file),
            Err(e) => {
                tracing::warn!("Autotuner: cannot write {}: {e}", path.display());
                None
            }
        });
        let names: Vec<&str> = tunable.iter().map(|p| p.name()).collect();
        tracing::info!("Autotuner: Tunable params [{}] score", names.join(","));
        let mut report = Self {
            file,
            tunable,
            cache_enabled,
        };
        report.write(HEADER);
        report
    }

    pub(crate) fn tell(&mut self, news: &News) {
        match news {
            News::WarmingUp { remaining } => {
                tracing::info!("Autotuner: Warming up ({remaining} remaining)");
            }
            News::Scored {
                phase,
                values,
                score,
            } => {
                let best = if *phase == ScorePhase::Best {
                    "Best params "
                } else {
                    ""
                };
                tracing::info!("Autotuner: {best}[{}] {score:.6}", self.show(values));
                let row = row(*phase, values, *score, self.cache_enabled);
                self.write(&row);
            }
        }
    }

    fn show(&self, values: &Values) -> String {
        let shown = self.tunable.iter().map(|&parameter| {
            let value = parameter.in_log_unit(values.get(parameter));
            format!("{value}{}", parameter.unit())
        });
        shown.collect::<Vec<_>>().join(", ")
    }

    fn write(&mut self, line: &str) {
        let Some(file) = &mut self.file else { return };
        // One call per line: whoever looks in between sees whole lines.
        if let Err(e) = file.write_all(format!("{line}\n").as_bytes()) {
            tracing::warn!("Autotuner: the log file ends here: {e}");
            self.file = None;
        }
    }
}

fn row(phase: ScorePhase, values: &Values, score: f64, cache_enabled: bool) -> String {
    use Parameter::{
        Chunk, CycleTime, DirectMax, ExchangeMax, FusionThreshold, Hierarchical, WireChunk,
    };
    let shown = |p: Parameter| p.in_log_unit(values.get(p));
    // Not choices here.
    let (allgather, torus) = (0, 0);
    let phase = match phase {
        ScorePhase::Search => "search",
        ScorePhase::Confirm => "confirm",
        ScorePhase::Best => "best",
    };
    format!(
        "{},{allgather},{torus},{},{},{},{score:.6},{},{},{},{},{phase}",
        shown(Hierarchical),
        u8::from(cache_enabled),
        shown(CycleTime),
        shown(FusionThreshold),
        shown(Chunk),
        shown(DirectMax),
        shown(ExchangeMax),
        shown(WireChunk),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_as_many_fields_as_the_header_and_no_spaces() {
        let values = Values::new(|p| match p {
            Parameter::FusionThreshold => 128 << 20,
            Parameter::CycleTime => 300,
            Parameter::Hierarchical => 1,
            _ => 4096,
        });
        let row = row(ScorePhase::Search, &values, 12.5, true);
        assert_eq!(row, "1,0,0,1,0.3,128,12.500000,4096,4096,4096,4096,search");
        assert_eq!(row.split(',').count(), HEADER.split(',').count());
        assert!(!HEADER.contains(' '));
    }

    #[test]
    fn an_unwritable_file_is_no_reason_to_stop() {
        let mut report = Report::new(Some(Path::new("/nonexistent/log.csv")), Vec::new(), true);
        report.tell(&News::WarmingUp { remaining: 1 });
        assert!(report.file.is_none());
    }
}

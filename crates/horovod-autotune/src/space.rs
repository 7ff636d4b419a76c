//! The search space: the parameters, the levels each may take, and the points between them.

use horovod_settings as settings;

/// Something that tuning may change. The discriminants are indices into [`Values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parameter {
    /// Bytes of tensors that run as one collective.
    FusionThreshold,
    /// Microseconds that the coordinator may hold back a response.
    CycleTime,
    /// Bytes that a rank stages for a peer at a time inside a host.
    Chunk,
    /// Bytes up to which every rank of a host reduces everything itself.
    DirectMax,
    /// Bytes that a host may receive up to which hosts exchange whole vectors.
    ExchangeMax,
    /// Bytes at a time on a stream between hosts.
    WireChunk,
    /// Whether hosts with several ranks add up inside first; 1 or 0.
    Hierarchical,
}

use Parameter::{
    Chunk, CycleTime, DirectMax, ExchangeMax, FusionThreshold, Hierarchical, WireChunk,
};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

impl Parameter {
    /// All of them, in the order of their discriminants.
    pub(crate) const ALL: [Self; 7] = [
        FusionThreshold,
        CycleTime,
        Chunk,
        DirectMax,
        ExchangeMax,
        WireChunk,
        Hierarchical,
    ];

    /// Its name in log lines and in the log file's header.
    pub(crate) fn name(self) -> &'static str {
        match self {
            FusionThreshold => "tensor_fusion_threshold",
            CycleTime => "cycle_time_ms",
            Chunk => "chunk_bytes",
            DirectMax => "direct_max_bytes",
            ExchangeMax => "exchange_max_bytes",
            WireChunk => "wire_chunk_bytes",
            Hierarchical => "hierarchical_allreduce",
        }
    }

    /// The variables by which a user decides it.
    pub fn variables(self) -> Vec<&'static str> {
        match self {
            FusionThreshold => vec![settings::FUSION_THRESHOLD.name],
            CycleTime => vec![settings::CYCLE_TIME.name],
            Chunk => vec![settings::CHUNK_BYTES.name],
            DirectMax => vec![settings::DIRECT_MAX_BYTES.name],
            ExchangeMax => vec![settings::EXCHANGE_MAX_BYTES.name],
            WireChunk => vec![settings::WIRE_CHUNK_BYTES.name],
            Hierarchical => vec![
                settings::HIERARCHICAL_ALLREDUCE.name,
                settings::TORUS_ALLREDUCE.name,
            ],
        }
    }

    /// A value in the unit of the log file: MB, ms, bytes, 0 or 1.
    pub(crate) fn in_log_unit(self, value: u64) -> f64 {
        #[expect(
            clippy::cast_precision_loss,
            reason = "for people; exact below 2 to the 53rd"
        )]
        let value = value as f64;
        match self {
            FusionThreshold => value / 1_048_576.0,
            CycleTime => value / 1e3,
            _ => value,
        }
    }

    /// The unit in log lines.
    pub(crate) fn unit(self) -> &'static str {
        match self {
            FusionThreshold => " MB",
            CycleTime => " ms",
            Hierarchical => "",
            _ => " B",
        }
    }

    /// The levels worth trying, ascending.
    fn levels(self) -> &'static [u64] {
        match self {
            FusionThreshold => &[
                64 * KIB,
                256 * KIB,
                MIB,
                4 * MIB,
                16 * MIB,
                64 * MIB,
                128 * MIB,
            ],
            CycleTime => &[0, 100, 300, 1000, 3000],
            Chunk => &[
                16 * KIB,
                32 * KIB,
                64 * KIB,
                128 * KIB,
                256 * KIB,
                512 * KIB,
            ],
            DirectMax => &[2 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB],
            ExchangeMax => &[
                4 * KIB,
                16 * KIB,
                32 * KIB,
                64 * KIB,
                128 * KIB,
                256 * KIB,
                512 * KIB,
            ],
            Hierarchical => &[0, 1],
            WireChunk => &[
                32 * KIB,
                64 * KIB,
                128 * KIB,
                256 * KIB,
                512 * KIB,
                MIB,
                2 * MIB,
            ],
        }
    }
}

/// One value of every parameter, tuned or not, each in its own unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Values([u64; Parameter::ALL.len()]);

impl Values {
    /// The value of each parameter is that which `of` gives for it.
    pub fn new(of: impl Fn(Parameter) -> u64) -> Self {
        Self(Parameter::ALL.map(of))
    }

    /// As every rank is told.
    pub fn as_slice(&self) -> &[u64] {
        &self.0
    }

    /// As heard; `None` when the number of values is not ours.
    pub fn from_slice(values: &[u64]) -> Option<Self> {
        values.try_into().ok().map(Self)
    }

    /// The value of one parameter.
    pub fn get(&self, parameter: Parameter) -> u64 {
        self.0[parameter as usize]
    }

    fn set(&mut self, parameter: Parameter, value: u64) {
        self.0[parameter as usize] = value;
    }
}

/// A place in the search space: the index of a level on each axis.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Point(pub(crate) Vec<usize>);

struct Axis {
    parameter: Parameter,
    levels: Vec<u64>,
    /// Where the value lies that tuning began with.
    origin: usize,
}

/// The levels of all parameters that are tuned, around the values that tuning begins with.
pub(crate) struct Space {
    defaults: Values,
    axes: Vec<Axis>,
}

impl Space {
    /// A parameter that is not `tunable` keeps its default.
    pub(crate) fn new(defaults: Values, tunable: &[Parameter]) -> Self {
        let axes = tunable.iter().map(|&parameter| {
            let mut levels = parameter.levels().to_vec();
            let start = defaults.get(parameter);
            let origin = levels.binary_search(&start).unwrap_or_else(|place| {
                levels.insert(place, start);
                place
            });
            Axis {
                parameter,
                levels,
                origin,
            }
        });
        Self {
            defaults,
            axes: axes.collect(),
        }
    }

    pub(crate) fn parameters(&self) -> impl Iterator<Item = Parameter> + '_ {
        self.axes.iter().map(|axis| axis.parameter)
    }

    /// Number of levels on each axis.
    pub(crate) fn shape(&self) -> Vec<usize> {
        self.axes.iter().map(|axis| axis.levels.len()).collect()
    }

    /// The point of the defaults.
    pub(crate) fn origin(&self) -> Point {
        Point(self.axes.iter().map(|axis| axis.origin).collect())
    }

    /// The settings at a point.
    pub(crate) fn values(&self, point: &Point) -> Values {
        let mut values = self.defaults;
        for (axis, &level) in self.axes.iter().zip(&point.0) {
            values.set(axis.parameter, axis.levels[level]);
        }
        values
    }

    /// A point's coordinates, each from 0 to 1; the levels of an axis are equally far apart.
    #[expect(clippy::cast_precision_loss, reason = "a handful of levels")]
    pub(crate) fn coordinates(&self, point: &Point) -> Vec<f64> {
        let last = |axis: &Axis| (axis.levels.len() - 1).max(1) as f64;
        let pairs = self.axes.iter().zip(&point.0);
        pairs
            .map(|(axis, &level)| level as f64 / last(axis))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start() -> Values {
        Values::new(|p| match p {
            FusionThreshold => 128 * MIB,
            Chunk => 48 * KIB,
            _ => 0,
        })
    }

    #[test]
    fn indices_are_the_discriminants() {
        for (i, p) in Parameter::ALL.into_iter().enumerate() {
            assert_eq!(p as usize, i);
        }
    }

    #[test]
    fn the_origin_is_what_tuning_began_with_even_off_the_levels() {
        let space = Space::new(start(), &[FusionThreshold, Chunk, CycleTime]);
        assert_eq!(space.shape(), [7, 7, 5]);
        assert_eq!(space.origin(), Point(vec![6, 2, 0]));
        assert_eq!(space.values(&space.origin()), start());
    }

    #[test]
    fn what_is_not_tunable_keeps_its_value() {
        let space = Space::new(start(), &[CycleTime]);
        let moved = space.values(&Point(vec![4]));
        assert_eq!(moved.get(CycleTime), 3000);
        assert_eq!(moved.get(Chunk), 48 * KIB);
        assert_eq!(space.coordinates(&Point(vec![4])), [1.0]);
        assert_eq!(space.coordinates(&Point(vec![1])), [0.25]);
    }

    #[test]
    fn levels_ascend() {
        for p in Parameter::ALL {
            assert!(p.levels().is_sorted_by(|a, b| a < b), "{}", p.name());
        }
    }
}

//! The ports that listeners take.

/// Which port a listener takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ports {
    /// One of the system's choice.
    #[default]
    Any,
    /// This one, which others know already.
    One(u16),
    /// The first that is free, from the first to the last of these.
    Range(u16, u16),
}

impl Ports {
    /// A range, if there is one (`HOROVOD_PORT_RANGE`).
    pub fn within(range: Option<(u16, u16)>) -> Self {
        range.map_or(Self::Any, |(first, last)| Self::Range(first, last))
    }

    /// The ports to try, in order.
    pub(crate) fn candidates(self) -> std::ops::RangeInclusive<u16> {
        match self {
            Self::Any => 0..=0,
            Self::One(port) => port..=port,
            Self::Range(first, last) => first..=last,
        }
    }
}

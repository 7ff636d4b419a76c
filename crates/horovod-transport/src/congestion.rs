//! The choice of congestion control for data over TCP.

/// Congestion control of the data that this rank sends over TCP.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Congestion {
    /// The system's choice, but cubic instead of bbr on short paths (docs/algorithms.md).
    #[default]
    Auto,
    /// The system's choice.
    System,
    /// The algorithm of this name (`net.ipv4.tcp_allowed_congestion_control`).
    Named(String),
}

impl Congestion {
    /// Parses `auto`, `system` or a name.
    pub fn from_setting(text: &str) -> Self {
        match text.trim().to_ascii_lowercase().as_str() {
            "auto" => Self::Auto,
            "system" => Self::System,
            name => Self::Named(name.into()),
        }
    }
}

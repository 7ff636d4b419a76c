//! Numbers of things and of bytes, as texts.

/// A number of things, as a text.
#[must_use]
pub fn counted(n: u64, of: &str) -> String {
    match n {
        1 => format!("1 {of}"),
        n => format!("{n} {of}s"),
    }
}

/// An amount of memory, as a text.
#[must_use]
pub fn in_bytes(bytes: u64) -> String {
    const GIB: u64 = 1 << 30;
    match bytes {
        0..GIB => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / GIB as f64),
    }
}

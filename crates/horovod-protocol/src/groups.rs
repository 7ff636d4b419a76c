//! Names of the members of grouped operations in texts.

/// `base` for a single tensor, `base_2of3` for the second of a group of three.
pub(crate) fn member_name(base: &str, index: usize, count: usize) -> String {
    if count > 1 {
        format!("{base}_{}of{count}", index + 1)
    } else {
        base.to_owned()
    }
}

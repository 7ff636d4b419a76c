//! The names by which the ranks' operations find each other.

/// The core's name of the operation of a node.
///
/// In a graph a node's name has its scopes before it, separated by slashes; ranks whose scopes differ ask for the last
/// part alone. An eager operation has that of its type.
pub(crate) fn of_node(node: &str, ignore_scope: bool) -> &str {
    if ignore_scope {
        return node.rsplit('/').next().unwrap_or(node);
    }
    node
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_are_kept_or_left_out() {
        let node = "DistributedGradientTape_Allreduce/cond/then/_8/grad_0";
        assert_eq!(of_node(node, false), node);
        assert_eq!(of_node(node, true), "grad_0");
        assert_eq!(of_node("grad_0", true), "grad_0");
        assert_eq!(of_node("HorovodAllreduce", false), "HorovodAllreduce");
        assert_eq!(of_node("", true), "");
    }
}

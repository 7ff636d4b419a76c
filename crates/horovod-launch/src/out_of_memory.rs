//! The kernel's kills for want of memory, as it counts them for the control group of this process and its descendants.

use std::path::{Path, PathBuf};

/// Where control groups are mounted.
const ROOT: &str = "/sys/fs/cgroup";

/// Tells new kills from those before.
#[derive(Debug)]
pub(crate) struct MemoryKills {
    seen: Option<u64>,
}

impl MemoryKills {
    /// From now on kills are new.
    pub(crate) fn watch() -> Self {
        Self { seen: count() }
    }

    /// Whether the kernel has killed a process of the group since this was asked before.
    pub(crate) fn is_any_new(&mut self) -> bool {
        let now = count();
        let is_new = matches!((self.seen, now), (Some(before), Some(now)) if now > before);
        self.seen = now;
        is_new
    }
}

fn count() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    counters(&groups, Path::new(ROOT))
        .iter()
        .find_map(|file| kills_in(&std::fs::read_to_string(file).ok()?))
}

/// Files that may have the count, the likeliest first, for groups as `/proc/self/cgroup` lists them.
fn counters(groups: &str, root: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let path = path.trim_start_matches('/');
        if controllers.split(',').any(|name| name == "memory") {
            let mounted = root.join("memory");
            // In a container the group's own files are where the path of the host would begin.
            files.insert(0, mounted.join("memory.oom_control"));
            files.insert(0, mounted.join(path).join("memory.oom_control"));
        } else if controllers.is_empty() {
            files.push(root.join(path).join("memory.events"));
            files.push(root.join("memory.events"));
        }
    }
    files
}

fn kills_in(text: &str) -> Option<u64> {
    let count = |line: &str| line.strip_prefix("oom_kill ")?.trim().parse().ok();
    text.lines().find_map(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_found_in_both_versions_of_control_groups() {
        let files = |groups| counters(groups, Path::new("/r"));
        assert_eq!(
            files("0::/a/b\n"),
            [
                Path::new("/r/a/b/memory.events"),
                Path::new("/r/memory.events")
            ]
        );
        assert_eq!(
            files("9:cpu,memory:/job\n1:name=systemd:/\n0::/\n")[..2],
            [
                Path::new("/r/memory/job/memory.oom_control"),
                Path::new("/r/memory/memory.oom_control")
            ]
        );
        assert_eq!(
            kills_in("low 0\nhigh 0\noom 4\noom_kill 3\noom_group_kill 0\n"),
            Some(3)
        );
        assert_eq!(
            kills_in("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
            Some(2)
        );
        assert_eq!(kills_in("oom_kill_disable 0\n"), None);
    }
}

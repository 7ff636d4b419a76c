//! The processes above this one.

/// No chain of parents is longer.
const ANCESTORS_MAX: usize = 64;

/// A process above this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ancestor {
    /// Its number.
    pub pid: i32,
    /// Its command, of which the kernel keeps 15 bytes.
    pub name: String,
    /// When it started, in clock ticks since the machine did.
    pub started: u64,
}

/// The parent, its parent and so on, as far as `/proc` shows them.
pub fn ancestors() -> impl Iterator<Item = Ancestor> {
    let mut next = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    std::iter::from_fn(move || {
        let pid = next.take()?;
        let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
        let (ancestor, parent) = read(pid, &String::from_utf8_lossy(&stat))?;
        next = Some(parent).filter(|parent| *parent > 0);
        Some(ancestor)
    })
    .take(ANCESTORS_MAX)
}

/// Also the number of the parent. A name may contain any characters.
fn read(pid: i32, stat: &str) -> Option<(Ancestor, i32)> {
    let (head, tail) = stat.rsplit_once(')')?;
    let name = head.split_once('(')?.1.to_owned();
    // Fields 4 and 22 of the whole line.
    let mut fields = tail.split_ascii_whitespace().skip(1);
    let parent = fields.next()?.parse().ok()?;
    let started = fields.nth(17)?.parse().ok()?;
    Some((Ancestor { pid, name, started }, parent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_blanks_and_parentheses_is_read() {
        let stat = "7 (a) b (c) S 5 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 8192 9 10 11";
        let (found, parent) = read(7, stat).unwrap();
        assert_eq!(
            (found.name.as_str(), found.started, parent),
            ("a) b (c", 8192, 5)
        );
    }
}

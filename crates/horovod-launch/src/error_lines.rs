//! The filter of a rank's output for the report: keeps its error, but not the stacks of all its threads.
//!
//! Reporters of crashes in the process itself (Python's faulthandler, PyTorch, Rust) print the cause first, and then
//! frames, often hundreds. The last lines would then be frames of threads that only waited.

/// Frames of one stack that are kept: the innermost ones, which are printed first.
const FRAMES_MAX: u32 = 5;

/// Where in such a report a stream stands.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    /// Frames in a row so far.
    count: u32,
    /// They are of a thread that is not to blame.
    is_bystander: bool,
}

impl Frames {
    /// Whether a new line is worth keeping.
    pub(crate) fn are_worth(&mut self, line: &[u8]) -> bool {
        if is_bystander(line) {
            (self.count, self.is_bystander) = (0, true);
            return false;
        }
        if is_frame(line) {
            self.count += 1;
            return !self.is_bystander && self.count <= FRAMES_MAX;
        }
        let was_bystander = std::mem::take(&mut self.is_bystander);
        self.count = 0;
        // The empty line after its frames, and a list of a hundred names.
        let is_gap = was_bystander && line.trim_ascii().is_empty();
        !is_gap && !line.starts_with(b"Extension modules: ")
    }
}

/// The headline of a thread's stack, as faulthandler writes it for all but the current one.
fn is_bystander(line: &[u8]) -> bool {
    line.starts_with(b"Thread 0x") && contains(line, b"(most recent call first):")
}

fn is_frame(line: &[u8]) -> bool {
    // faulthandler's; those of a traceback, which stand before the error, have a comma after the number.
    let is_python = line.starts_with(b"  File \"") && contains(line, b", line ") && {
        let after = line.rsplit(|b| *b == b'"').next().unwrap_or_default();
        after.split(|b| *b == b',').count() == 2 && contains(after, b" in ")
    };
    let is_torch = line.starts_with(b"frame #");
    // `   0: function` and, below it, `             at file`.
    let rest = line.trim_ascii_start();
    let digits = rest.iter().take_while(|b| b.is_ascii_digit()).count();
    let is_rust = line.len() >= rest.len() + 2
        && ((digits > 0 && rest[digits..].starts_with(b": "))
            || (line.len() - rest.len() >= 10 && rest.starts_with(b"at ")));
    is_python
        || is_torch
        || is_rust
        || line.starts_with(b"  <no Python frame>")
        || line == b"  ...\n"
}

fn contains(line: &[u8], part: &[u8]) -> bool {
    line.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(text: &str) -> Vec<&str> {
        let mut frames = Frames::default();
        let lines = text.split_inclusive('\n');
        lines
            .filter(|line| frames.are_worth(line.as_bytes()))
            .map(str::trim_end)
            .collect()
    }

    #[test]
    fn of_a_crash_the_cause_and_its_own_thread_stay() {
        let frames = "  File \"/a b/t.py\", line 7 in wait\n".repeat(9);
        let text = format!(
            "Fatal Python error: Segmentation fault\n\nThread 0x7f (most recent call first):\n{frames}\n\
             Current thread 0x80 (most recent call first):\n{frames}\nExtension modules: a, b\nbye\n"
        );
        let mut want = vec![
            "Fatal Python error: Segmentation fault",
            "",
            "Current thread 0x80 (most recent call first):",
        ];
        want.extend(["  File \"/a b/t.py\", line 7 in wait"; 5]);
        want.extend(["", "bye"]);
        assert_eq!(kept(&text), want);
        let torch = format!("what(): no\n{}end\n", "frame #3: c10::x\n".repeat(30));
        assert_eq!(kept(&torch).len(), 7);
        let rust = "   0: a::b\n             at /x.rs:1\n".repeat(9);
        assert_eq!(
            kept(&format!("panicked\nstack backtrace:\n{rust}note\n")).len(),
            8
        );
    }

    #[test]
    fn a_traceback_and_other_words_stay_whole() {
        let text = "Traceback (most recent call last):\n  File \"t.py\", line 1, in f\n    g()\n"
            .to_owned()
            + &"  File \"t.py\", line 2, in g\n    h()\n".repeat(20)
            + "ValueError: no\n\n\n1: one\n2: two\nat 3\n";
        assert_eq!(kept(&text).len(), text.lines().count());
    }
}

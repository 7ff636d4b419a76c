//! The diagnosis' needs of the system: processor time, and a file for the report.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;

/// Names tried for a report's file.
const NAMES_TRIED_MAX: u32 = 100;

/// Processor time that this process has used, in milliseconds.
pub(crate) fn cpu_ms() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let ms = t.tv_sec.saturating_mul(1000) + t.tv_nsec / 1_000_000;
    u64::try_from(ms).unwrap_or(0)
}

/// The file into which reports go, made with the first one.
#[derive(Debug)]
pub(crate) struct ReportFile {
    /// The user's choice; else a new file among the temporary ones.
    wanted: Option<PathBuf>,
    open: Option<(PathBuf, File)>,
}

impl ReportFile {
    pub(crate) fn new(wanted: Option<PathBuf>) -> Self {
        Self { wanted, open: None }
    }

    /// Append this report; where it stands now.
    pub(crate) fn write(&mut self, report: &str) -> io::Result<PathBuf> {
        let (path, mut file) = match self.open.take() {
            Some(open) => open,
            None => self.create()?,
        };
        file.write_all(report.as_bytes())?;
        file.write_all(b"\n\n")?;
        let (path, _) = self.open.insert((path, file));
        Ok(path.clone())
    }

    fn create(&self) -> io::Result<(PathBuf, File)> {
        if let Some(path) = &self.wanted {
            let file = OpenOptions::new().append(true).create(true).open(path)?;
            return Ok((path.clone(), file));
        }
        // Others may write where temporary files are: never follow what lies there already.
        let (dir, pid) = (std::env::temp_dir(), std::process::id());
        for n in 0..NAMES_TRIED_MAX {
            let path = dir.join(format!("horovod-stall-{pid}-{n}.txt"));
            let mut options = OpenOptions::new();
            options.append(true).create_new(true);
            #[cfg(unix)]
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
            match options.open(&path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                opened => return Ok((path, opened?)),
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_one_job_go_into_one_file_and_two_jobs_into_two() {
        let (mut a, mut b) = (ReportFile::new(None), ReportFile::new(None));
        let path = a.write("first").unwrap();
        let other = b.write("of another").unwrap();
        assert_eq!(a.write("second").unwrap(), path);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::remove_file(&other).unwrap();
        assert_eq!(text, "first\n\nsecond\n\n");
        assert_ne!(path, other);
    }

    #[test]
    fn a_file_that_cannot_be_made_is_an_error() {
        let mut file = ReportFile::new(Some("/nonexistent/report.txt".into()));
        assert!(file.write("x").is_err());
    }

    #[test]
    fn processor_time_grows_with_work() {
        let before = cpu_ms();
        let mut n = 0u64;
        while cpu_ms() == before {
            n = std::hint::black_box(n + 1);
        }
        assert!(cpu_ms() > before);
    }
}

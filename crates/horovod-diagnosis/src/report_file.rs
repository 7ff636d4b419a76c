//! The file of a job's reports: where the user wants it, or among the temporary files under the job's name.

use std::fs::{DirEntry, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use horovod_transport::output_file::{self, OpenMode};

/// Names tried for a report's file.
const NAMES_TRIED_MAX: u32 = 100;
/// Characters of a script's name in it.
const SCRIPT_NAME_MAX: usize = 40;
/// Files of this user that are kept among the temporary ones, the new one included.
const KEPT_MAX: usize = 10;
/// How the names of such files begin and end.
const BEGINNING: &str = "horovod-stall-";
const ENDING: &str = ".txt";

/// The file into which reports go, made with the first one.
#[derive(Debug)]
pub struct ReportFile {
    /// The user's choice; else a new file in `temporary`.
    wanted: Option<PathBuf>,
    temporary: PathBuf,
    open: Option<(PathBuf, File)>,
}

impl ReportFile {
    /// The file that the user wants, or one among the temporary files.
    pub fn new(wanted: Option<PathBuf>) -> Self {
        Self {
            wanted,
            temporary: std::env::temp_dir(),
            open: None,
        }
    }

    /// Append this report; where it stands now.
    pub fn write(&mut self, report: &str) -> io::Result<PathBuf> {
        let (path, mut file) = match self.open.take() {
            Some(open) => open,
            None => self.create()?,
        };
        file.write_all(report.as_bytes())?;
        file.write_all(b"\n\n")?;
        let (path, _) = self.open.insert((path, file));
        Ok(path.clone())
    }

    /// The job has ended well: nobody needs its temporary file.
    pub fn discard(&mut self) {
        if let Some((path, _)) = self.open.take_if(|_| self.wanted.is_none()) {
            let _ = std::fs::remove_file(path); // the user may have removed it
        }
    }

    fn create(&self) -> io::Result<(PathBuf, File)> {
        if let Some(path) = &self.wanted {
            let file = output_file::open(path, OpenMode::Append)?;
            return Ok((path.clone(), file));
        }
        let job = job_name(std::env::args_os().skip(1).map(|word| {
            let word = word.to_string_lossy();
            word.into_owned()
        }));
        // Others may write where temporary files are: never follow what lies there already.
        for n in 0..NAMES_TRIED_MAX {
            let path = self.temporary.join(format!("{BEGINNING}{job}-{n}{ENDING}"));
            let mut options = OpenOptions::new();
            options.append(true).create_new(true).mode(0o600);
            match options.open(&path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                opened => {
                    let file = opened?;
                    remove_oldest(&self.temporary, &path);
                    return Ok((path, file));
                }
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }
}

/// The script that the job runs, as far as its words tell, and the number of this process.
fn job_name(words: impl Iterator<Item = String>) -> String {
    let script = words
        .take_while(|word| word != "-c")
        .find(|word| !word.starts_with('-'));
    let name = script.as_deref().map(Path::new).and_then(Path::file_name);
    let name = name.unwrap_or_default().to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let mut name: String = name.chars().filter(|c| plain(*c)).collect();
    name.truncate(SCRIPT_NAME_MAX);
    let pid = std::process::id();
    match name.is_empty() {
        true => pid.to_string(),
        false => format!("{name}-{pid}"),
    }
}

/// Removes the oldest reports of this user, so that [`KEPT_MAX`] are left, the new one among them. One that cannot be
/// removed stays.
fn remove_oldest(folder: &Path, new: &Path) {
    let own = rustix::process::geteuid().as_raw();
    let modified = |entry: DirEntry| {
        let name = entry.file_name();
        let name = name.to_str()?;
        let is_report = name.starts_with(BEGINNING) && name.ends_with(ENDING);
        // That of a link itself.
        let found = is_report.then(|| entry.metadata().ok()).flatten()?;
        let is_own = found.is_file() && found.uid() == own && entry.path() != new;
        is_own.then(|| (found.mtime(), found.mtime_nsec(), entry.path()))
    };
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    let mut reports: Vec<_> = entries.flatten().filter_map(modified).collect();
    reports.sort();
    let too_many = (reports.len() + 1).saturating_sub(KEPT_MAX);
    for (_, _, path) in reports.drain(..too_many) {
        let _ = std::fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::FileTimes;
    use std::time::{Duration, SystemTime};

    use super::*;

    /// A folder for temporary files, removed at the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn report_file(&self) -> ReportFile {
            ReportFile {
                temporary: self.0.clone(),
                ..ReportFile::new(None)
            }
        }

        fn count(&self) -> usize {
            std::fs::read_dir(&self.0).unwrap().count()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn reports_of_one_job_go_into_one_file_and_two_jobs_into_two() {
        let folder = Folder::new("horovod-reports");
        let (mut a, mut b) = (folder.report_file(), folder.report_file());
        let path = a.write("first").unwrap();
        let other = b.write("of another").unwrap();
        assert_eq!(a.write("second").unwrap(), path);
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "first\n\nsecond\n\n");
        assert_ne!(path, other);
    }

    #[test]
    fn a_job_that_ended_well_leaves_only_what_the_user_wanted() {
        let folder = Folder::new("horovod-reports-ended-well");
        let mut report = folder.report_file();
        report.discard();
        report.write("x").unwrap();
        assert_eq!(folder.count(), 1);
        report.discard();
        assert_eq!(folder.count(), 0);

        let wanted = folder.0.join("wanted");
        let mut report = ReportFile::new(Some(wanted.clone()));
        report.write("x").unwrap();
        report.discard();
        assert!(wanted.exists());
        report.write("y").unwrap();
        assert_eq!(std::fs::read_to_string(wanted).unwrap(), "x\n\ny\n\n");
    }

    #[test]
    fn the_last_ten_are_kept_and_nothing_else_is_removed() {
        let folder = Folder::new("horovod-reports-kept");
        let now = SystemTime::now();
        let at = |age: u64| FileTimes::new().set_modified(now - Duration::from_secs(age));
        for age in 1..=KEPT_MAX as u64 + 2 {
            let name = format!("{BEGINNING}{age}{ENDING}");
            let file = File::create(folder.0.join(name)).unwrap();
            file.set_times(at(age)).unwrap();
        }
        for other in ["horovod-stall-notes.md", "report.txt"] {
            let file = File::create(folder.0.join(other)).unwrap();
            file.set_times(at(1000)).unwrap();
        }
        let path = folder.report_file().write("new").unwrap();
        assert!(path.exists());
        assert_eq!(folder.count(), KEPT_MAX + 2);
        for age in [KEPT_MAX, KEPT_MAX + 1, KEPT_MAX + 2] {
            let name = format!("{BEGINNING}{age}{ENDING}");
            assert!(!folder.0.join(name).exists(), "{age}");
        }
    }

    #[test]
    fn a_job_has_the_name_of_its_script() {
        let pid = std::process::id();
        for (words, name) in [
            ("train.py --lr 0.1", "train.py-"),
            ("-u /home/me/train.py", "train.py-"),
            ("-m package.train x", "package.train-"),
            ("-c print(1)", ""),
            ("a$b/t;r", "tr-"),
            ("", ""),
        ] {
            let words = words.split_whitespace().map(str::to_owned);
            assert_eq!(job_name(words), format!("{name}{pid}"));
        }
        let long = job_name(std::iter::once("x".repeat(500)));
        assert_eq!(long, format!("{}-{pid}", "x".repeat(SCRIPT_NAME_MAX)));
    }

    #[test]
    fn a_file_that_cannot_be_made_is_an_error() {
        let mut file = ReportFile::new(Some("/nonexistent/report.txt".into()));
        assert!(file.write("x").is_err());
    }
}

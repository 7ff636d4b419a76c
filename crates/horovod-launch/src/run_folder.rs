//! Where the files of the ranks' output go: the folder of `--output-filename`, or a new one under that of `--log-dir`.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::SystemTime;

use horovod_transport::output_file;

use crate::options::Options;
use crate::platform;

/// Runs that may begin in one second in one folder.
const RUNS_MAX: u32 = 1000;

/// The folder, made now if it is this run's alone; `None`: there are no files.
pub(crate) fn of(options: &Options) -> Result<Option<PathBuf>, String> {
    let Some(parent) = &options.log_dir else {
        return Ok(options.output_filename.clone());
    };
    let fails = |path: &std::path::Path, error: std::io::Error| {
        format!("--log-dir: cannot create {}: {error}", path.display())
    };
    output_file::create_folders(parent).map_err(|error| fails(parent, error))?;
    let stamp = platform::compact_time(SystemTime::now());
    for run in 0..RUNS_MAX {
        let folder = parent.join(match run {
            0 => stamp.clone(),
            run => format!("{stamp}-{run}"),
        });
        // Another run that makes it at the same time gets the next.
        match std::fs::create_dir(&folder) {
            Ok(()) => return Ok(Some(folder)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(fails(&folder, error)),
        }
    }
    Err(format!(
        "--log-dir: {RUNS_MAX} runs have begun in this second in {}",
        parent.display()
    ))
}

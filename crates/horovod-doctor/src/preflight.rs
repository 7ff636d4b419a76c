//! The check before the start: does the command exist on this host, and the script that it names?

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Something that the job needs and this host does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Exit code that a shell or Python would give.
    pub code: u8,
    /// The reason, in words.
    pub why: String,
}

fn missing<T>(code: u8, why: String) -> Result<T, Missing> {
    Err(Missing { code, why })
}

/// `Err` says what is missing.
pub fn check_command(
    command: &[OsString],
    cwd: &Path,
    path: Option<&OsStr>,
) -> Result<(), Missing> {
    let Some(program) = command.first() else {
        return missing(127, "no command".to_owned());
    };
    find_program(program, cwd, path)?;
    if let Some(script) = script_of(command) {
        let full = cwd.join(script);
        if let Err(error) = std::fs::metadata(&full) {
            let why = format!(
                "the script {} cannot be read: {error} (working directory {})",
                script.display(),
                cwd.display()
            );
            return missing(2, why);
        }
    }
    Ok(())
}

/// `Err` if the timeline's file cannot be made, because its folder does not exist; `None` and `DYNAMIC` name no file.
pub fn check_timeline(file: Option<&OsStr>, cwd: &Path) -> Result<(), Missing> {
    let named = file.filter(|file| !file.is_empty() && *file != "DYNAMIC");
    let Some(folder) = named.and_then(|file| Path::new(file).parent()) else {
        return Ok(());
    };
    if cwd.join(folder).is_dir() {
        return Ok(());
    }
    let why = format!(
        "the folder {} of the timeline (--timeline-filename, HOROVOD_TIMELINE) does not exist: create it, or name a \
         file in another folder",
        folder.display()
    );
    missing(1, why)
}

fn find_program(program: &OsStr, cwd: &Path, path: Option<&OsStr>) -> Result<(), Missing> {
    let shown = program.to_string_lossy();
    if program.as_bytes().contains(&b'/') {
        let full = cwd.join(program);
        return match std::fs::metadata(&full) {
            Err(error) => missing(127, format!("the command {shown} cannot be run: {error}")),
            Ok(found) if found.is_dir() => {
                missing(126, format!("the command {shown} is a directory"))
            }
            Ok(_) if !is_executable(&full) => missing(
                126,
                format!("the command {shown} cannot be run: the file is not executable"),
            ),
            Ok(_) => Ok(()),
        };
    }
    // Without PATH, the folders that the C library searches.
    let path = path.unwrap_or(OsStr::new("/bin:/usr/bin"));
    let places: Vec<PathBuf> = std::env::split_paths(path)
        .map(|place| cwd.join(place))
        .collect();
    if places
        .iter()
        .any(|place| is_executable(&place.join(program)))
    {
        return Ok(());
    }
    let hint = if cwd.join(program).is_file() {
        format!(" (there is a file {shown} here: did you mean `python {shown}` or `./{shown}`?)")
    } else {
        String::new()
    };
    missing(127, format!("command not found: {shown}{hint}"))
}

fn is_executable(file: &Path) -> bool {
    std::fs::metadata(file)
        .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// The script that a Python or shell command line names, if it plainly does.
fn script_of(command: &[OsString]) -> Option<&Path> {
    let name = Path::new(command.first()?).file_name()?.to_str()?;
    let version = name
        .strip_prefix("python")
        .or_else(|| name.strip_prefix("pypy"));
    let is_python =
        version.is_some_and(|rest| rest.chars().all(|c| c.is_ascii_digit() || c == '.'));
    let mut words = command[1..].iter();
    while let Some(word) = words.next() {
        let bytes = word.as_bytes();
        if bytes.first() != Some(&b'-') {
            let is_shell = ["sh", "bash", "dash"].contains(&name);
            return (is_python || is_shell).then(|| Path::new(word));
        }
        if !is_python || bytes == b"-" || bytes.starts_with(b"--") {
            return None;
        }
        // Of a cluster such as `-um`, the first letter that takes a value decides.
        match bytes.iter().position(|b| b"cmWX".contains(b)) {
            Some(at) if b"cm".contains(&bytes[at]) => return None,
            Some(at) if at + 1 == bytes.len() => {
                words.next();
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn finds_the_script_of_a_command_line() {
        #[track_caller]
        fn check(line: &str, want: Option<&str>) {
            assert_eq!(script_of(&words(line)), want.map(Path::new), "{line}");
        }
        check("python train.py --x", Some("train.py"));
        check(
            "/opt/bin/python3.11 -u -W ignore -Xdev a/b.py",
            Some("a/b.py"),
        );
        check("python -uX dev b.py", Some("b.py"));
        check("python -m pkg.train", None);
        check("python -um pkg.train", None);
        check("python -c pass", None);
        check("python - x", None);
        check("python --version", None);
        check("bash run.sh", Some("run.sh"));
        check("bash -c run.sh", None);
        check("python-config x", None);
        check("./train x", None);
    }

    #[test]
    fn a_timeline_needs_its_folder() {
        let check = |file: &str| check_timeline(Some(OsStr::new(file)), Path::new("/"));
        let error = check("/no/such/t.json").expect_err("no folder").why;
        assert!(error.contains("the folder /no/such of the timeline"));
        assert!(check("no/t.json").is_err(), "below the working directory");
        for well in ["t.json", "/tmp/t.json", "tmp/t.json", "DYNAMIC", ""] {
            assert_eq!(check(well), Ok(()), "{well}");
        }
        assert_eq!(check_timeline(None, Path::new("/")), Ok(()));
    }

    #[test]
    fn names_what_is_missing() {
        #[track_caller]
        fn check(line: &str, want: &str) {
            let error = check_command(&words(line), Path::new("/"), Some(OsStr::new("/bin")))
                .expect_err(line)
                .why;
            assert!(error.contains(want), "{line}: {error}");
        }
        check("no-such-program", "command not found: no-such-program");
        check("/no/such/program", "No such file");
        check("/bin", "is a directory");
        check("/etc/passwd", "is not executable");
        check(
            "sh no-such-script.sh",
            "the script no-such-script.sh cannot be read: No such file",
        );
        assert_eq!(
            check_command(&words("sh -c true"), Path::new("/"), None),
            Ok(())
        );
    }
}

//! Shared memory from a file that has lost its name, for systems that have or allow no memfd.

use std::io;

use rustix::fs::{Mode, OFlags};

use super::fd::Fd;

/// Directories tried for the shared file, the one in memory first.
fn directories() -> [std::path::PathBuf; 2] {
    ["/dev/shm".into(), std::env::temp_dir()]
}

/// A file of `len` zero bytes without a name, which can be passed to other processes.
pub(crate) fn shared_file(len: usize) -> io::Result<Fd> {
    shared_file_in(&directories(), len)
}

fn shared_file_in(directories: &[std::path::PathBuf], len: usize) -> io::Result<Fd> {
    let mut failures = String::new();
    for directory in directories {
        match file_in(directory, len) {
            Ok(fd) => return Ok(fd),
            Err(e) => failures += &format!(" {}: {e};", directory.display()),
        }
    }
    Err(io::Error::other(format!(
        "no place for {len} bytes of shared memory:{failures}"
    )))
}

fn file_in(directory: &std::path::Path, len: usize) -> io::Result<Fd> {
    let name = super::secret_name()?;
    let path = directory.join(name);
    let fd = Fd::open(|| {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR)
    })?;
    rustix::fs::unlink(&path)?;
    // A full file system would end the process with SIGBUS at the first touch: ask now instead.
    let space = rustix::fs::fstatvfs(fd.get()?)?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if space.f_blocks > 0 && free < len as u64 {
        return Err(io::Error::other(format!("{len} bytes needed, {free} free")));
    }
    rustix::fs::ftruncate(fd.get()?, len as u64)?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_place_is_tried_and_the_file_is_for_its_user_alone() {
        let absent = "/dev/null/no folder".into();
        let [_, usual] = directories();
        let fd = shared_file_in(&[absent, usual], 1 << 16).unwrap();
        let stat = rustix::fs::fstat(fd.get().unwrap()).unwrap();
        assert_eq!((stat.st_size, stat.st_nlink), (1 << 16, 0));
        assert_eq!(stat.st_mode & 0o777, 0o600);
    }

    #[test]
    fn more_than_there_is_room_for_is_refused_at_once_with_every_place() {
        // More than any disk has. A file system in memory may have no limit, and says so.
        let limited = |place: &std::path::PathBuf| {
            rustix::fs::statvfs(place).is_ok_and(|space| space.f_blocks > 0)
        };
        let places: Vec<_> = directories().into_iter().filter(limited).collect();
        let error = shared_file_in(&places, 1 << 60).unwrap_err().to_string();
        assert_eq!(
            error.matches("bytes needed").count(),
            places.len(),
            "{error}"
        );
        for place in places {
            assert!(error.contains(&place.display().to_string()), "{error}");
        }
    }
}

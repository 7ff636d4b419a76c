//! Files at places that users name. In folders that others may write to, nothing that others have put there is followed.
//!
//! A folder is *shared* if somebody else owns it, or if its mode lets its group or others write. What stands in a folder
//! that is not shared was put there by its user or by root, and is used as it is. In a shared folder a symbolic link is
//! followed only if this user or root owns it, and a file that exists is written only if this user, root or the
//! folder's owner owns it and it has no second name. Every name of the path is looked up in an open folder, so nothing
//! can be exchanged between the look and the use.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

/// Links followed on one path, as many as the system follows.
const LINKS_MAX: u32 = 40;
/// How often a file that comes and goes is tried.
const TRIES_MAX: u32 = 8;
/// Permissions that let more than the owner write.
const OTHERS_WRITE: u32 = 0o022;

#[cfg(target_os = "linux")]
const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
#[cfg(not(target_os = "linux"))]
const FOLDER: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);

/// What becomes of what a file holds already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// The file is emptied.
    Truncate,
    /// All that is written is appended.
    Append,
}

/// What somebody else may have put there.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Foreign {
    #[error(
        "{name:?} is a link of the user {owner} in a folder to which others may write; expected a link of this user or \
         of root: remove it, or name another place"
    )]
    Link { name: OsString, owner: u32 },
    #[error(
        "the file exists, belongs to the user {owner} and is in a folder to which others may write; expected a file of \
         this user: remove it, or name another place"
    )]
    File { owner: u32 },
    #[error(
        "the file exists, has {names} names (hard links) and is in a folder to which others may write; expected one: \
         remove it, or name another place"
    )]
    SeveralNames { names: u64 },
}

impl From<Foreign> for io::Error {
    fn from(foreign: Foreign) -> Self {
        Self::new(io::ErrorKind::PermissionDenied, foreign)
    }
}

/// Opens a file to write to it, and makes it if it is not there.
pub fn open(path: &Path, mode: OpenMode) -> io::Result<File> {
    let mut walk = Walk::new(path)?;
    while let Some(name) = walk.left.pop() {
        if !walk.left.is_empty() {
            walk.enter(&name, Missing::Fails)?;
            continue;
        }
        match walk.open_last(&name, mode) {
            Err(e) if e.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
                walk.follow(&name, Errno::LOOP)?;
            }
            opened => return opened,
        }
    }
    Err(Errno::ISDIR.into())
}

/// Makes a folder and those above it, as far as they are not there.
pub fn create_folders(path: &Path) -> io::Result<()> {
    let mut walk = Walk::new(path)?;
    while let Some(name) = walk.left.pop() {
        walk.enter(&name, Missing::IsMade)?;
    }
    Ok(())
}

/// What to do about a folder that is not there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    Fails,
    IsMade,
}

/// A way down a path.
struct Walk {
    /// The folder reached.
    at: OwnedFd,
    /// Names below it, the next one last.
    left: Vec<OsString>,
    links: u32,
}

impl Walk {
    fn new(path: &Path) -> io::Result<Self> {
        if path.as_os_str().is_empty() {
            return Err(Errno::NOENT.into());
        }
        let mut walk = Self {
            at: rustix::fs::open(".", FOLDER, Mode::empty())?,
            left: Vec::new(),
            links: 0,
        };
        walk.push(path)?;
        Ok(walk)
    }

    /// This path comes before the names that are left.
    fn push(&mut self, path: &Path) -> io::Result<()> {
        if path.is_absolute() {
            self.at = rustix::fs::open("/", FOLDER, Mode::empty())?;
        }
        for component in path.components().rev() {
            match component {
                Component::Normal(name) => self.left.push(name.to_owned()),
                Component::ParentDir => self.left.push("..".into()),
                Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
            }
        }
        Ok(())
    }

    fn enter(&mut self, name: &OsStr, missing: Missing) -> io::Result<()> {
        match rustix::fs::openat(&self.at, name, FOLDER | self.no_follow(), Mode::empty()) {
            Ok(folder) => self.at = folder,
            Err(Errno::NOENT) if missing == Missing::IsMade => {
                match rustix::fs::mkdirat(&self.at, name, Mode::from_raw_mode(0o777)) {
                    Ok(()) | Err(Errno::EXIST) => self.enter(name, Missing::Fails)?,
                    Err(e) => return Err(e.into()),
                }
            }
            Err(e @ (Errno::LOOP | Errno::NOTDIR)) => self.follow(name, e)?,
            Err(e) => return Err(e.into()),
        }
        Ok(())
    }

    /// Goes where a link leads; `error` is what comes of a name that is none.
    fn follow(&mut self, name: &OsStr, error: Errno) -> io::Result<()> {
        let Some((owner, target)) = self.read_link(name)? else {
            return Err(error.into());
        };
        if self.is_shared()? && !is_trusted(owner)? {
            let name = name.to_owned();
            return Err(Foreign::Link { name, owner }.into());
        }
        self.links += 1;
        if self.links > LINKS_MAX {
            return Err(Errno::LOOP.into());
        }
        self.push(&target)
    }

    /// Owner and target of a link; `None`: it is no link.
    fn read_link(&self, name: &OsStr) -> io::Result<Option<(u32, PathBuf)>> {
        #[cfg(target_os = "linux")]
        let (owner, target) = {
            // The link itself is opened, so that owner and target are of the same one.
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let link = rustix::fs::openat(&self.at, name, flags, Mode::empty())?;
            let owner = rustix::fs::fstat(&link)?.st_uid;
            (owner, rustix::fs::readlinkat(&link, "", Vec::new()))
        };
        #[cfg(not(target_os = "linux"))]
        let (owner, target) = {
            let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
            let owner = rustix::fs::statat(&self.at, name, flags)?.st_uid;
            (owner, rustix::fs::readlinkat(&self.at, name, Vec::new()))
        };
        match target {
            Ok(target) => {
                use std::os::unix::ffi::OsStringExt;
                let target = OsString::from_vec(target.into_bytes());
                Ok(Some((owner, target.into())))
            }
            Err(Errno::INVAL | Errno::NOENT) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    fn open_last(&self, name: &OsStr, mode: OpenMode) -> io::Result<File> {
        // A pipe that somebody has put there must not make this wait.
        let mut flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        flags |= self.no_follow();
        if mode == OpenMode::Append {
            flags |= OFlags::APPEND;
        }
        let new = OFlags::CREATE | OFlags::EXCL;
        for _ in 0..TRIES_MAX {
            let file = match rustix::fs::openat(&self.at, name, flags, Mode::empty()) {
                Err(Errno::NOENT) => {
                    let mode = Mode::from_raw_mode(0o666);
                    match rustix::fs::openat(&self.at, name, flags | new, mode) {
                        Err(Errno::EXIST) => continue,
                        made => made?,
                    }
                }
                opened => {
                    let file = opened?;
                    self.check(&file)?;
                    file
                }
            };
            return finish(file, mode);
        }
        Err(Errno::EXIST.into())
    }

    /// Whether a file that was there may be written to.
    fn check(&self, file: &OwnedFd) -> io::Result<()> {
        if !self.is_shared()? {
            return Ok(());
        }
        let found = rustix::fs::fstat(file)?;
        let owner = found.st_uid;
        if !is_trusted(owner)? && owner != rustix::fs::fstat(&self.at)?.st_uid {
            return Err(Foreign::File { owner }.into());
        }
        #[allow(
            clippy::useless_conversion,
            reason = "the width differs between systems"
        )]
        let names = u64::from(found.st_nlink);
        if FileType::from_raw_mode(found.st_mode) == FileType::RegularFile && names > 1 {
            return Err(Foreign::SeveralNames { names }.into());
        }
        Ok(())
    }

    /// Whether others than this user and root may put something into the folder.
    fn is_shared(&self) -> io::Result<bool> {
        let found = rustix::fs::fstat(&self.at)?;
        #[allow(
            clippy::useless_conversion,
            reason = "the width differs between systems"
        )]
        let mode = u32::from(found.st_mode);
        Ok(mode & OTHERS_WRITE != 0 || !is_trusted(found.st_uid)?)
    }

    /// Only the kernel makes links in `/proc`, and not all have a target that can be read: `/dev/stdout` leads there.
    fn no_follow(&self) -> OFlags {
        #[cfg(target_os = "linux")]
        if rustix::fs::fstatfs(&self.at).is_ok_and(|fs| fs.f_type == rustix::fs::PROC_SUPER_MAGIC) {
            return OFlags::empty();
        }
        OFlags::NOFOLLOW
    }
}

/// This user and root, under which number ever: in a container of a user, root outside may be "nobody" inside, and it
/// owns `/`.
fn is_trusted(owner: u32) -> io::Result<bool> {
    let own = rustix::process::geteuid().as_raw();
    Ok(owner == own || owner == 0 || owner == rustix::fs::stat("/")?.st_uid)
}

/// An open file as callers want it: writes wait, and it holds what it should.
fn finish(file: OwnedFd, mode: OpenMode) -> io::Result<File> {
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
    if mode == OpenMode::Truncate && kind == FileType::RegularFile {
        rustix::fs::ftruncate(&file, 0)?;
    }
    Ok(File::from(file))
}

#[cfg(test)]
mod tests;

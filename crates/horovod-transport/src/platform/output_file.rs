//! Files at places that users name. In folders that others may write to, nothing that others have put there is followed.
//!
//! A folder is *shared* if somebody else owns it, or if its mode lets its group or others write. A folder that is not
//! shared has only what its user or root put there: that is used as it is. In a shared folder a symbolic link is followed
//! only if this user or root owns it, or the folder's owner where nobody else may write. A file that exists there is
//! written only if this user, root or the folder's owner owns it and it has no second name. To write it anew, it is
//! removed and made again. Every name of the path is looked up in an open folder, so no folder can be exchanged between
//! the check and the use.

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

/// The treatment of what a file holds already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// The file is emptied.
    Truncate,
    /// All that is written is appended.
    Append,
}

/// A link or file that somebody else may have put there.
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

/// The treatment of a folder that is not there.
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
        // The current folder may be one that this user cannot open.
        let start = if path.is_absolute() { "/" } else { "." };
        let mut walk = Self {
            at: rustix::fs::open(start, FOLDER, Mode::empty())?,
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
        let folder = self.folder()?;
        let is_of_the_only_writer = owner == folder.owner && !folder.others_write;
        if folder.is_shared && !is_trusted(owner) && !is_of_the_only_writer {
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
        let folder = self.folder()?;
        let mut flags = OFlags::WRONLY | OFlags::NOCTTY | OFlags::CLOEXEC | self.no_follow();
        if mode == OpenMode::Append {
            flags |= OFlags::APPEND;
        }
        if folder.is_shared {
            // A pipe that somebody else has put there must not make this wait.
            flags |= OFlags::NONBLOCK;
        } else if mode == OpenMode::Truncate {
            flags |= OFlags::TRUNC;
        }
        for _ in 0..TRIES_MAX {
            match rustix::fs::openat(&self.at, name, flags, Mode::empty()) {
                Err(Errno::NOENT) => {
                    let new = flags | OFlags::CREATE | OFlags::EXCL;
                    match rustix::fs::openat(&self.at, name, new, Mode::from_raw_mode(0o666)) {
                        Err(Errno::EXIST) => {}
                        made => return finish(made?),
                    }
                }
                opened => {
                    let file = opened?;
                    if !folder.is_shared {
                        return finish(file);
                    }
                    self.check(&file, &folder)?;
                    if mode == OpenMode::Append || self.cannot_remove(&file, name)? {
                        return finish(file);
                    }
                }
            }
        }
        Err(Errno::EXIST.into())
    }

    /// Whether a file of a shared folder may be written to.
    fn check(&self, file: &OwnedFd, folder: &Folder) -> io::Result<()> {
        let found = rustix::fs::fstat(file)?;
        let owner = found.st_uid;
        if !is_trusted(owner) && (owner != folder.owner || folder.is_of_root) {
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

    /// Removes a regular file of a shared folder, so that a new one takes its place: this one may have had a second name
    /// until just now. Returns `true` if that is not allowed, and then nobody else may remove it either; it is emptied.
    fn cannot_remove(&self, file: &OwnedFd, name: &OsStr) -> io::Result<bool> {
        let kind = FileType::from_raw_mode(rustix::fs::fstat(file)?.st_mode);
        if kind != FileType::RegularFile {
            return Ok(true);
        }
        match rustix::fs::unlinkat(&self.at, name, rustix::fs::AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(false),
            Err(Errno::PERM | Errno::ACCESS) => {
                rustix::fs::ftruncate(file, 0)?;
                Ok(true)
            }
            Err(e) => Err(e.into()),
        }
    }

    fn folder(&self) -> io::Result<Folder> {
        let found = rustix::fs::fstat(&self.at)?;
        #[allow(
            clippy::useless_conversion,
            reason = "the width differs between systems"
        )]
        let mode = u32::from(found.st_mode);
        let owner = found.st_uid;
        // In a container of a user, root outside may be "nobody" inside, and root owns `/`. Other users are "nobody", too.
        let is_of_root = owner == rustix::fs::stat("/")?.st_uid;
        let others_write = mode & OTHERS_WRITE != 0;
        Ok(Folder {
            owner,
            is_of_root,
            others_write,
            is_shared: others_write || !(is_trusted(owner) || is_of_root),
        })
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

/// The folder that holds a name of the path.
struct Folder {
    owner: u32,
    is_of_root: bool,
    others_write: bool,
    /// Whether others than this user and root may put something into it.
    is_shared: bool,
}

/// Whether this is this user or root.
fn is_trusted(owner: u32) -> bool {
    owner == 0 || owner == rustix::process::geteuid().as_raw()
}

/// An open file as callers want it: writes wait.
fn finish(file: OwnedFd) -> io::Result<File> {
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
    Ok(File::from(file))
}

#[cfg(test)]
mod tests;

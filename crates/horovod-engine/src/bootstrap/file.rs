//! The file through which ranks meet: rank 0's addresses and the key, readable by this user only.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use horovod_transport::JobKey;

const TITLE: &str = "horovod-rs rendezvous 1";
/// Longest file that is read.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Most addresses that are taken from it.
pub(super) const ADDRESSES_MAX: usize = 64;

/// Writes it whole or not at all; `private` if its folder is to be this user's alone.
pub(super) fn write(
    path: &Path,
    private: bool,
    addresses: &[SocketAddr],
    key: &JobKey,
) -> Result<(), String> {
    let folder = path.parent().ok_or("no folder")?;
    let fails = |what: &str, e: &io::Error| format!("{what} {}: {e}", folder.display());
    if private {
        match DirBuilder::new().mode(0o700).create(folder) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                return Err(fails("cannot create", &e));
            }
            _ => check_private(folder)?,
        }
    }
    let text = text_of(addresses, key);
    // Another host's rank 0 of another job may have the same process id.
    let unfinished = path.with_extension(format!("{}.{}", std::process::id(), nonce()?));
    let written = (|| {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&unfinished)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&unfinished, path)
    })();
    written.map_err(|e| {
        let _ = std::fs::remove_file(&unfinished);
        fails("rank 0 cannot leave its address in", &e)
    })
}

/// Text of the file; [`parse`] reads it.
pub(super) fn text_of(addresses: &[SocketAddr], key: &JobKey) -> String {
    let mut text = format!("{TITLE}\nkey {}\n", key.to_hex());
    for address in addresses {
        text.push_str(&format!("address {address}\n"));
    }
    text
}

fn nonce() -> Result<String, String> {
    let random = JobKey::random().map_err(|e| format!("no random numbers: {e}"))?;
    Ok(random.to_hex()[..8].to_owned())
}

/// Nobody else may be able to put anything there.
fn check_private(folder: &Path) -> Result<(), String> {
    let found = std::fs::symlink_metadata(folder).map_err(|e| e.to_string())?;
    let own = rustix::process::geteuid().as_raw();
    if !found.is_dir() || found.uid() != own || found.mode() & 0o077 != 0 {
        return Err(format!(
            "{} must be a folder of this user (uid {own}) with mode 700; it is of uid {} with mode {:o}: remove it",
            folder.display(),
            found.uid(),
            found.mode() & 0o7777
        ));
    }
    Ok(())
}

/// Reads what rank 0 has written; the error says why there is nothing to be trusted.
pub(super) fn read(path: &Path) -> Result<(Vec<SocketAddr>, JobKey), String> {
    let shown = path.display();
    let file = open(path).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => {
            format!("there is no {shown}: rank 0 writes it in its hvd.init(), on a file system that this host must see")
        }
        _ => format!("{shown}: {e}"),
    })?;
    let found = file.metadata().map_err(|e| format!("{shown}: {e}"))?;
    let own = rustix::process::geteuid().as_raw();
    if !found.is_file() || found.uid() != own || found.mode() & 0o077 != 0 {
        return Err(format!(
            "{shown} is of uid {} with mode {:o}: only a file of this user (uid {own}) with mode 600 is trusted",
            found.uid(),
            found.mode() & 0o7777
        ));
    }
    let text = limited(file).map_err(|e| format!("{shown}: {e}"))?;
    parse(&text).ok_or_else(|| format!("{shown} was not written by rank 0 of this version"))
}

fn open(path: &Path) -> io::Result<File> {
    // A link may lead anywhere, and opening a pipe may wait for ever.
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    OpenOptions::new()
        .read(true)
        .custom_flags(i32::try_from(flags.bits()).unwrap_or(0))
        .open(path)
}

fn limited(file: File) -> io::Result<String> {
    let mut text = String::new();
    file.take(FILE_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

pub(super) fn parse(text: &str) -> Option<(Vec<SocketAddr>, JobKey)> {
    let mut lines = text.lines();
    (lines.next()? == TITLE).then_some(())?;
    let key = JobKey::from_hex(lines.next()?.strip_prefix("key ")?)?;
    let addresses = lines
        .take(ADDRESSES_MAX)
        .map(|line| line.strip_prefix("address ")?.parse().ok())
        .collect::<Option<Vec<_>>>()?;
    (!addresses.is_empty()).then_some((addresses, key))
}

/// It has served its purpose; a file that is gone is as good.
pub(super) fn remove(path: &Path) {
    let _ = std::fs::remove_file(path);
}

/// Number and start of the nearest process above this one with this name, as all its descendants see it.
pub(super) fn ancestor(name: &str) -> Option<String> {
    let found = horovod_pmi::ancestors().find(|ancestor| ancestor.name == name)?;
    Some(format!("{}-{}", found.pid, found.started))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new() -> Self {
            let name = format!(
                "horovod-rendezvous-test-{}-{:?}",
                std::process::id(),
                std::thread::current().id()
            );
            let path = std::env::temp_dir().join(name);
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn place() -> (Vec<SocketAddr>, JobKey) {
        let addresses = vec![
            "10.0.0.1:7".parse().unwrap(),
            "[fe80::1]:8".parse().unwrap(),
        ];
        (addresses, JobKey::random().unwrap())
    }

    #[test]
    fn what_rank_0_writes_the_others_read_and_nobody_else_can() {
        let folder = Folder::new();
        let path = folder.0.join("own").join("rendezvous");
        let (addresses, key) = place();
        write(&path, true, &addresses, &key).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        let (read_addresses, read_key) = read(&path).unwrap();
        assert_eq!(
            (read_addresses, read_key.to_hex()),
            (addresses, key.to_hex())
        );
        // An old one is replaced, nothing else is left in the folder.
        let (addresses, key) = place();
        write(&path, true, &addresses, &key).unwrap();
        assert_eq!(read(&path).unwrap().1.to_hex(), key.to_hex());
        assert_eq!(path.parent().unwrap().read_dir().unwrap().count(), 1);
        remove(&path);
        assert!(read(&path).unwrap_err().contains("rank 0 writes it"));
    }

    #[test]
    fn a_file_that_others_could_read_or_have_put_there_is_not_trusted() {
        let folder = Folder::new();
        let path = folder.0.join("rendezvous");
        let (addresses, key) = place();
        write(&path, false, &addresses, &key).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(read(&path).unwrap_err().contains("mode 640"));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let link = folder.0.join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(read(&link).is_err());
        std::fs::write(&path, "something else").unwrap();
        assert!(read(&path).unwrap_err().contains("not written by rank 0"));
        // Root may give files away; others cannot make such a file in the first place.
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
            assert!(read(&path).unwrap_err().contains("of uid 12345"));
        }
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_not_used_as_private() {
        let folder = Folder::new();
        std::fs::set_permissions(&folder.0, std::fs::Permissions::from_mode(0o777)).unwrap();
        let (addresses, key) = place();
        let error = write(&folder.0.join("rendezvous"), true, &addresses, &key).unwrap_err();
        assert!(error.contains("mode 700"), "{error}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_parent_is_found_by_its_name() {
        let parent = rustix::process::getppid().unwrap().as_raw_nonzero().get();
        let stat = std::fs::read_to_string(format!("/proc/{parent}/stat")).unwrap();
        let name = stat.split_once('(').unwrap().1.rsplit_once(')').unwrap().0;
        let started = stat
            .rsplit_once(')')
            .unwrap()
            .1
            .split_whitespace()
            .nth(19)
            .unwrap();
        assert_eq!(ancestor(name), Some(format!("{parent}-{started}")));
        assert_eq!(ancestor("no such name"), None);
    }
}

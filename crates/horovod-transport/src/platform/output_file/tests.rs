//! Links, pipes and files of others, in folders of several kinds.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};

use super::*;

/// A user that is neither this one nor root.
const OTHER: u32 = 12_345;

/// A folder that is removed at the end, and in it one of this mode.
struct Folders(PathBuf);

impl Folders {
    fn new(mode: u32) -> Self {
        let name = super::super::secret_name().unwrap();
        let place = std::env::temp_dir().join(name);
        fs::create_dir_all(place.join("folder")).unwrap();
        fs::set_permissions(&place, fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(place.join("folder"), fs::Permissions::from_mode(mode)).unwrap();
        fs::write(place.join("precious"), "precious").unwrap();
        Self(place)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join("folder").join(name)
    }

    /// Outside the folder.
    fn precious(&self) -> PathBuf {
        self.0.join("precious")
    }
}

impl Drop for Folders {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn put(path: &Path, text: &str) -> io::Result<()> {
    open(path, OpenMode::Truncate)?.write_all(text.as_bytes())
}

/// `false` if this test cannot run: root of a namespace has no other users either.
fn can_give_files_away() -> bool {
    let folders = Folders::new(0o700);
    let can = lchown(folders.precious(), Some(OTHER), None).is_ok();
    if !can {
        println!("NOT RUN: this user cannot give files to another user");
    }
    can
}

fn refused(result: io::Result<()>, words: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn a_file_is_made_emptied_or_appended_to() {
    for mode in [0o700, 0o777, 0o1777] {
        let folders = Folders::new(mode);
        let path = folders.path("file");
        put(&path, "first, long").unwrap();
        put(&path, "second").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "second");
        let mut file = open(&path, OpenMode::Append).unwrap();
        file.write_all(b" third").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "second third");
    }
}

#[test]
fn folders_are_made_and_those_that_are_there_are_used() {
    let folders = Folders::new(0o777);
    symlink("a", folders.path("link")).unwrap();
    for _ in 0..2 {
        create_folders(&folders.path("a/b/../b/c/")).unwrap();
        create_folders(&folders.path("link/b")).unwrap();
    }
    put(&folders.path("link/b/c/file"), "x").unwrap();
    assert!(folders.path("a/b/c/file").is_file());
    put(&folders.path("file"), "x").unwrap();
    assert!(create_folders(&folders.path("file/below")).is_err());
}

#[test]
fn what_is_no_place_for_a_file_is_an_error() {
    let folders = Folders::new(0o700);
    for (path, kind) in [
        (PathBuf::new(), io::ErrorKind::NotFound),
        (folders.path("absent/file"), io::ErrorKind::NotFound),
        ("/".into(), io::ErrorKind::IsADirectory),
        (folders.path(""), io::ErrorKind::IsADirectory),
        (folders.precious().join("x"), io::ErrorKind::NotADirectory),
    ] {
        let error = open(&path, OpenMode::Truncate).unwrap_err();
        assert_eq!(error.kind(), kind, "{}: {error}", path.display());
    }
    symlink("circle", folders.path("circle")).unwrap();
    assert!(put(&folders.path("circle"), "x").is_err());
}

#[test]
fn links_of_this_user_are_followed_wherever_they_are() {
    for mode in [0o700, 0o777, 0o1777] {
        let folders = Folders::new(mode);
        symlink("../precious", folders.path("link")).unwrap();
        symlink(folders.path("link"), folders.path("link to link")).unwrap();
        put(&folders.path("link to link"), "meant").unwrap();
        assert_eq!(fs::read_to_string(folders.precious()).unwrap(), "meant");
        // A link may lead to what is yet to be made.
        symlink("../new", folders.path("to new")).unwrap();
        put(&folders.path("to new"), "new").unwrap();
        assert_eq!(fs::read_to_string(folders.0.join("new")).unwrap(), "new");
    }
}

#[test]
fn links_of_others_are_followed_only_where_no_other_can_have_put_them() {
    if !can_give_files_away() {
        return;
    }
    for (mode, owner, is_followed) in [
        (0o755, 0, true),
        (0o777, 0, false),
        (0o1777, 0, false),
        (0o775, 0, false),
        (0o755, OTHER, true),
        (0o1777, OTHER, false),
    ] {
        let folders = Folders::new(mode);
        lchown(folders.path(""), Some(owner), None).unwrap();
        for (link, target) in [("file", "../precious"), ("folder", "..")] {
            symlink(target, folders.path(link)).unwrap();
            lchown(folders.path(link), Some(OTHER), None).unwrap();
        }
        for results in [
            put(&folders.path("file"), "overwritten"),
            put(&folders.path("folder/precious"), "overwritten"),
            create_folders(&folders.path("folder")),
        ] {
            if is_followed {
                results.unwrap();
            } else {
                refused(results, "is a link of the user 12345");
                let kept = fs::read_to_string(folders.precious()).unwrap();
                assert_eq!(kept, "precious", "{mode:o}");
            }
        }
    }
}

#[test]
fn files_of_others_are_kept_but_those_of_the_folders_owner() {
    if !can_give_files_away() {
        return;
    }
    for (mode, owner, is_written) in [
        (0o1777, 0, false),
        (0o1777, OTHER, true),
        (0o755, OTHER, true),
    ] {
        let folders = Folders::new(mode);
        lchown(folders.path(""), Some(owner), None).unwrap();
        let path = folders.path("file");
        fs::write(&path, "theirs").unwrap();
        lchown(&path, Some(OTHER), None).unwrap();
        let result = put(&path, "mine");
        if is_written {
            result.unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
        } else {
            refused(result, "belongs to the user 12345");
            assert_eq!(fs::read_to_string(&path).unwrap(), "theirs");
        }
    }
}

#[test]
fn a_file_of_a_shared_folder_is_made_anew() {
    use std::os::unix::fs::MetadataExt;

    for (mode, is_same) in [(0o700, true), (0o777, false)] {
        let folders = Folders::new(mode);
        let path = folders.path("file");
        put(&path, "first").unwrap();
        let opened = File::open(&path).unwrap();
        put(&path, "second").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "second");
        let now = fs::metadata(&path).unwrap().ino();
        assert_eq!(opened.metadata().unwrap().ino() == now, is_same);
    }
}

#[test]
fn a_second_name_of_a_file_is_not_written_to_in_a_shared_folder() {
    for (mode, is_written) in [(0o755, true), (0o1777, false)] {
        let folders = Folders::new(mode);
        fs::hard_link(folders.precious(), folders.path("file")).unwrap();
        let result = put(&folders.path("file"), "overwritten");
        if is_written {
            result.unwrap();
        } else {
            refused(result, "has 2 names");
            let kept = fs::read_to_string(folders.precious()).unwrap();
            assert_eq!(kept, "precious");
        }
    }
}

#[test]
fn a_pipe_without_a_reader_is_an_error_and_no_wait() {
    let folders = Folders::new(0o777);
    let path = folders.path("pipe");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &path,
        FileType::Fifo,
        Mode::from_raw_mode(0o666),
        0,
    )
    .unwrap();
    assert!(put(&path, "x").is_err());
}

#[cfg(target_os = "linux")]
#[test]
fn descriptors_and_devices_are_places_for_files() {
    use std::os::fd::AsRawFd;

    put(Path::new("/dev/null"), "x").unwrap();
    let (mut reader, writer) = std::io::pipe().unwrap();
    put(
        Path::new(&format!("/dev/fd/{}", writer.as_raw_fd())),
        "through a pipe",
    )
    .unwrap();
    drop(writer);
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(text, "through a pipe");
}

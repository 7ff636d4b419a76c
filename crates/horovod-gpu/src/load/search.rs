//! The order in which places are tried for a library, and the choice of the first that fits.

use std::path::{Path, PathBuf};

use super::library::{Library, file_of};
use super::{Found, Opened, Search, Stack};
use crate::error::{CUDA, GpuError, NCCL};
use crate::hip::{HIP, RCCL};

/// One of the two libraries.
pub(super) struct Wanted {
    /// Its soname.
    pub(super) name: &'static str,
    /// The oldest version that is supported, as the library tells versions.
    pub(super) oldest: i32,
    /// The same for people.
    pub(super) needed: &'static str,
    /// Makes a version readable.
    pub(super) text: fn(i32) -> String,
}

/// NVIDIA's driver; 12.0 is the oldest of which NCCL's packages are made.
pub(super) const DRIVER: Wanted = Wanted {
    name: CUDA,
    oldest: 12000,
    needed: "CUDA 12.0",
    text: |version| format!("CUDA {}.{}", version / 1000, version % 1000 / 10),
};

/// NCCL; 2.18 is the oldest with communicators that never block and can be split.
pub(super) const COLLECTIVES: Wanted = Wanted {
    name: NCCL,
    oldest: 21800,
    needed: "2.18",
    text: nccl_version_text,
};

/// HIP's runtime, which is AMD's driver library. One that is too old lacks functions: its version is not always known.
pub(super) const HIP_RUNTIME: Wanted = Wanted {
    name: "libamdhip64.so",
    oldest: 0,
    needed: "ROCm 5.1",
    text: |version| version.to_string(),
};

/// AMD's NCCL, which tells the version of the NCCL that it is made from.
pub(super) const RCCL_COLLECTIVES: Wanted = Wanted {
    name: RCCL[0],
    ..COLLECTIVES
};

fn nccl_version_text(version: i32) -> String {
    // Up to 2.8 a minor version had three digits below it.
    let unit = if version < 10000 { 1000 } else { 10000 };
    let (minor, patch) = (version % unit / 100, version % 100);
    format!("{}.{minor}.{patch}", version / unit)
}

/// One place to look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Candidate {
    /// A library that the process has already loaded under this name.
    Loaded(&'static str),
    /// A file.
    File(PathBuf),
    /// A name that the dynamic loader looks for.
    Name(&'static str),
}

impl Candidate {
    fn open(&self) -> Result<Library, String> {
        match self {
            Self::Loaded(name) => Library::open_loaded(Path::new(name)),
            Self::File(path) => Library::open(path),
            Self::Name(name) => Library::open(Path::new(name)),
        }
    }
}

impl std::fmt::Display for Candidate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Loaded(name) => write!(f, "{name} in this process"),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Name(name) => write!(f, "{name} by the dynamic loader"),
        }
    }
}

/// Toolkits hold only stubs of CUDA's library, so their folders are none of its places. AMD's is no driver but a
/// library of the toolkit, of which frameworks have copies: two of them in a process would not know each other's memory.
pub(super) fn driver_candidates(search: &Search, stack: Stack) -> Vec<Candidate> {
    match (stack, &search.cuda_library) {
        (Stack::Cuda, Some(path)) => vec![Candidate::File(path.clone())],
        (Stack::Cuda, None) => vec![Candidate::Loaded(CUDA), Candidate::Name(CUDA)],
        (Stack::Rocm, _) => of_rocm(search, &HIP),
    }
}

/// A framework's copy before all others: two NCCLs in one process double memory and threads.
pub(super) fn nccl_candidates(search: &Search, stack: Stack) -> Vec<Candidate> {
    if let Some(path) = &search.nccl_library {
        return vec![Candidate::File(path.clone())];
    }
    if stack == Stack::Rocm {
        return of_rocm(search, &RCCL);
    }
    let mut candidates = vec![Candidate::Loaded(NCCL)];
    candidates.extend(below(&search.wheel_folders, &["lib", ""], &[NCCL]));
    candidates.push(Candidate::Name(NCCL));
    candidates.extend(below(&search.nccl_homes, &["", "lib", "lib64"], &[NCCL]));
    candidates.extend(below(&search.cuda_homes, &["lib64"], &[NCCL]));
    let usual = [PathBuf::from("/usr/local/cuda")];
    candidates.extend(below(&usual, &["lib64"], &[NCCL]));
    candidates
}

/// Places of a library of AMD's. The configured one comes before those found on the machine, of which there may be
/// several.
fn of_rocm(search: &Search, names: &[&'static str]) -> Vec<Candidate> {
    let mut candidates: Vec<_> = names.iter().map(|name| Candidate::Loaded(name)).collect();
    candidates.extend(below(&search.rocm_homes, &["lib", "lib64"], names));
    candidates.extend(below(&search.rocm_folders, &[""], names));
    candidates.extend(names.iter().map(|name| Candidate::Name(name)));
    candidates.extend(below(&[PathBuf::from("/opt/rocm")], &["lib"], names));
    candidates
}

/// Files of these names in subfolders of folders; of AMD's, with several names, those that are there: to tell of each
/// that is not would hide the rest.
fn below(folders: &[PathBuf], subfolders: &[&str], names: &[&str]) -> Vec<Candidate> {
    let mut files = Vec::new();
    for folder in folders {
        for subfolder in subfolders {
            let all = names.iter().map(|name| folder.join(subfolder).join(name));
            files.extend(all.filter(|file| names.len() == 1 || file.exists()));
        }
    }
    files.into_iter().map(Candidate::File).collect()
}

/// Opens the candidates in turn until one has all functions and is new enough.
pub(super) fn first<T>(
    wanted: &Wanted,
    candidates: &[Candidate],
    read: impl Fn(&Library) -> Result<(T, i32, *const std::ffi::c_void), String>,
) -> Result<Opened<T>, GpuError> {
    let mut tried = Vec::new();
    let mut too_old = None;
    for candidate in candidates {
        let (table, version, function) = match candidate.open().and_then(|found| read(&found)) {
            Ok(read) => read,
            Err(why) => {
                tracing::debug!(%candidate, why, "not usable");
                tried.push((candidate.to_string(), why));
                continue;
            }
        };
        let path = file_of(function).unwrap_or_else(|| candidate.to_string());
        if version >= wanted.oldest {
            return Ok(Opened {
                found: Found { path, version },
                table,
            });
        }
        let found = (wanted.text)(version);
        tried.push((candidate.to_string(), format!("version {found} is too old")));
        too_old.get_or_insert(GpuError::TooOld {
            library: wanted.name,
            path,
            found,
            needed: wanted.needed,
        });
    }
    Err(too_old.unwrap_or(GpuError::NotLoaded {
        library: wanted.name,
        tried,
    }))
}

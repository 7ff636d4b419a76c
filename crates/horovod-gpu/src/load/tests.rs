//! Libraries that are missing, broken, too old, in the wrong place; and what is said about them.

use std::path::{Path, PathBuf};

use super::search::{Candidate, nccl_candidates};
use super::{
    Found, Library, Search, Stack, choose_stack, driver, find_driver, find_nccl, is_initialised,
    nccl, open_driver, open_nccl, set_default_search, set_search,
};
use crate::driver::{CudaTexts, DriverTable};
use crate::error::{CUDA, GpuError, NCCL};
use crate::nccl::{CommSettings, NcclTable};
use crate::testing::{FOLDER, Folder, Stub, alone, folder_of_parent, in_fork, skip, wheel_file};

fn only(path: PathBuf) -> Search {
    Search {
        cuda_library: Some(path.clone()),
        nccl_library: Some(path),
        ..Search::default()
    }
}

fn nccl_error(search: &Search) -> GpuError {
    open_nccl(search, Stack::Cuda)
        .err()
        .expect("it must not open")
}

fn found_nccl(search: &Search) -> Found {
    open_nccl(search, Stack::Cuda)
        .map(|opened| opened.found)
        .expect("it must open")
}

#[test]
fn a_file_that_is_missing_is_named_with_what_to_do() {
    let folder = Folder::new();
    let path = folder.path("libnone.so");
    let error = nccl_error(&only(path.clone()));
    let GpuError::NotLoaded { library, tried } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(*library, NCCL);
    let path = path.display().to_string();
    let loader = format!("{path}: cannot open shared object file: No such file or directory");
    assert_eq!(*tried, [(path.clone(), loader.clone())]);
    let expected = format!(
        "libnccl.so.2 could not be loaded; tried {path}: {loader}. Install the package nvidia-nccl-cu12 or \
         nvidia-nccl-cu13, or set HOROVOD_NCCL_LIBRARY to the file"
    );
    assert_eq!(error.to_string(), expected);
    let text = open_driver(&only(folder.path("libnone.so")), Stack::Cuda)
        .err()
        .expect("missing")
        .to_string();
    assert!(
        text.starts_with("libcuda.so.1 could not be loaded; tried "),
        "{text}"
    );
    assert!(
        text.ends_with("HOROVOD_CUDA_LIBRARY names a file"),
        "{text}"
    );
}

#[test]
fn a_file_that_is_no_library_is_refused_with_the_loaders_words() {
    let folder = Folder::new();
    let path = folder.path("libtext.so");
    std::fs::write(
        &path,
        "not a library, but long enough for a header".repeat(9),
    )
    .expect("a file");
    let text = nccl_error(&only(path)).to_string();
    assert!(text.contains("invalid ELF header"), "{text}");
}

#[test]
fn a_library_that_lacks_functions_is_refused_with_their_names() {
    let folder = Folder::new();
    let path = folder.path("libpart.so");
    let stub = Stub {
        lacks: &["ncclCommFinalize", "ncclRecv", "cuMemAllocAsync"],
        ..Stub::default()
    };
    stub.build(&path);
    let text = nccl_error(&only(path.clone())).to_string();
    assert!(
        text.contains("libpart.so: it lacks ncclCommFinalize, ncclRecv."),
        "{text}"
    );
    let text = open_driver(&only(path), Stack::Cuda)
        .err()
        .expect("it lacks one")
        .to_string();
    assert!(
        text.contains("libpart.so: it lacks cuMemAllocAsync."),
        "{text}"
    );
}

#[test]
fn versions_are_accepted_from_the_oldest_supported_on() {
    let folder = Folder::new();
    for (nccl, driver, text) in [
        (21701, 11080, ["2.17.1", "CUDA 11.8"]),
        (2804, 11000, ["2.8.4", "CUDA 11.0"]),
        (21800, 12000, ["", ""]),
        (22602, 12090, ["", ""]),
        (990000, 99000, ["", ""]),
    ] {
        let path = folder.path(&format!("lib{nccl}.so"));
        let stub = Stub {
            driver,
            nccl,
            ..Stub::default()
        };
        stub.build(&path);
        let search = only(path.clone());
        let results = [
            (
                open_nccl(&search, Stack::Cuda).map(|o| o.found),
                nccl,
                NCCL,
                "2.18",
                text[0],
            ),
            (
                open_driver(&search, Stack::Cuda).map(|o| o.found),
                driver,
                CUDA,
                "CUDA 12.0",
                text[1],
            ),
        ];
        let path = path.display().to_string();
        for (result, version, library, needed, found) in results {
            let expected = if found.is_empty() {
                Ok(Found {
                    path: path.clone(),
                    version,
                })
            } else {
                Err(GpuError::TooOld {
                    library,
                    path: path.clone(),
                    found: found.to_owned(),
                    needed,
                })
            };
            assert_eq!(result, expected);
        }
    }
    let text = nccl_error(&only(folder.path("lib21701.so"))).to_string();
    let path = folder.path("lib21701.so").display().to_string();
    let expected = format!(
        "libnccl.so.2 is version 2.17.1 ({path}), but at least 2.18 is needed; install a newer nvidia-nccl package \
         or framework"
    );
    assert_eq!(text, expected);
}

#[test]
fn one_that_is_too_old_does_not_hide_a_newer_one() {
    let folder = Folder::new();
    let old = Stub {
        nccl: 21602,
        ..Stub::default()
    };
    old.build(&folder.path("a/lib/libnccl.so.2"));
    Stub::default().build(&folder.path("b/libnccl.so.2"));
    let search = Search {
        wheel_folders: vec![folder.path("a"), folder.path("b")],
        ..Search::default()
    };
    let newer = folder.path("b/libnccl.so.2");
    assert_eq!(found_nccl(&search).path, newer.display().to_string());
}

#[test]
fn places_are_tried_in_order() {
    let search = Search {
        wheel_folders: vec!["/w".into()],
        nccl_homes: vec!["/h".into()],
        cuda_homes: vec!["/c".into()],
        ..Search::default()
    };
    let candidates: Vec<String> = nccl_candidates(&search, Stack::Cuda)
        .iter()
        .map(Candidate::to_string)
        .collect();
    let expected = [
        "libnccl.so.2 in this process",
        "/w/lib/libnccl.so.2",
        "/w/libnccl.so.2",
        "libnccl.so.2 by the dynamic loader",
        "/h/libnccl.so.2",
        "/h/lib/libnccl.so.2",
        "/h/lib64/libnccl.so.2",
        "/c/lib64/libnccl.so.2",
        "/usr/local/cuda/lib64/libnccl.so.2",
    ];
    assert_eq!(candidates, expected);
}

/// Stubs at all places of a folder, each with a version of its own.
fn stubs_everywhere(folder: &Folder) {
    for (place, nccl) in [
        ("wheel/lib", 23001),
        ("path", 23002),
        ("home/lib", 23003),
        ("cuda/lib64", 23004),
    ] {
        let stub = Stub {
            nccl,
            ..Stub::default()
        };
        stub.build(&folder.path(place).join(NCCL));
    }
}

fn everywhere(folder: &Path) -> Search {
    Search {
        wheel_folders: vec![folder.join("wheel")],
        nccl_homes: vec![folder.join("home")],
        cuda_homes: vec![folder.join("cuda")],
        ..Search::default()
    }
}

#[test]
fn what_a_framework_has_loaded_is_shared_and_before_all_else() {
    alone(&[], || {
        let folder = Folder::new();
        stubs_everywhere(&folder);
        let search = everywhere(&folder.path(""));
        assert_eq!(found_nccl(&search).version, 23001);
        let theirs = folder.path("torch/its_nccl.so");
        let stub = Stub {
            nccl: 22703,
            soname: Some(NCCL),
            ..Stub::default()
        };
        stub.build(&theirs);
        let _framework = Library::open(&theirs).expect("as a framework does it");
        let expected = Found {
            path: theirs.display().to_string(),
            version: 22703,
        };
        assert_eq!(found_nccl(&search), expected);
    });
}

#[test]
fn the_dynamic_loader_is_asked_before_homes() {
    let folder = Folder::new();
    stubs_everywhere(&folder);
    let environment = [
        ("LD_LIBRARY_PATH", folder.path("path")),
        (FOLDER, folder.path("")),
    ];
    alone(&environment, || {
        let wheel_elsewhere = Search {
            wheel_folders: Vec::new(),
            ..everywhere(&folder_of_parent())
        };
        assert_eq!(found_nccl(&wheel_elsewhere).version, 23002);
    });
}

#[test]
fn homes_are_the_last_places() {
    let folder = Folder::new();
    stubs_everywhere(&folder);
    // A file that is no library ends the dynamic loader's own search, so what is installed here does not matter.
    std::fs::create_dir_all(folder.path("broken")).expect("a folder");
    std::fs::write(folder.path("broken").join(NCCL), "x".repeat(999)).expect("a file");
    let path = [folder.path("broken"), folder.path("path")].map(|path| path.display().to_string());
    let environment = [
        ("LD_LIBRARY_PATH", path.join(":").into()),
        (FOLDER, folder.path("")),
    ];
    alone(&environment, || {
        let mut search = Search {
            wheel_folders: vec!["/nowhere".into()],
            ..everywhere(&folder_of_parent())
        };
        assert_eq!(found_nccl(&search).version, 23003);
        search.nccl_homes.clear();
        assert_eq!(found_nccl(&search).version, 23004);
    });
}

#[test]
fn the_drivers_own_places_are_the_process_and_the_dynamic_loader() {
    let folder = Folder::new();
    Stub::default().build(&folder.path("path").join(CUDA));
    let environment = [
        ("LD_LIBRARY_PATH", folder.path("path")),
        (FOLDER, folder.path("")),
    ];
    alone(&environment, || {
        let found = find_driver().expect("it is there");
        let path = folder_of_parent().join("path").join(CUDA);
        assert_eq!(found.path, path.display().to_string());
        assert_eq!(found.version, 12080);
        assert!(!is_initialised(), "finding must not initialise CUDA");
    });
}

#[test]
fn where_to_look_is_said_once_and_before_looking() {
    alone(&[], || {
        let folder = Folder::new();
        Stub::default().build(&folder.path("a.so"));
        assert!(set_search(only(folder.path("a.so"))));
        assert!(!set_search(Search::default()));
        let path = folder.path("a.so").display().to_string();
        assert_eq!(find_nccl().map(|found| found.path), Ok(path.clone()));
        assert_eq!(find_driver().map(|found| found.path), Ok(path));
        assert!(!set_search(Search::default()));
    });
}

#[test]
fn an_adapter_that_knows_more_is_heard_after_the_settings_and_before_the_first_look() {
    alone(&[], || {
        let folder = Folder::new();
        Stub::default().build(&folder.path("a.so"));
        set_default_search(only(folder.path("missing.so")));
        assert!(set_search(only(folder.path("a.so"))));
        let path = folder.path("a.so").display().to_string();
        assert_eq!(find_nccl().map(|found| found.path), Ok(path));
    });
}

#[test]
fn settings_are_heard_where_no_adapter_speaks() {
    alone(&[], || {
        let folder = Folder::new();
        Stub::default().build(&folder.path("a.so"));
        set_default_search(only(folder.path("a.so")));
        let path = folder.path("a.so").display().to_string();
        assert_eq!(find_nccl().map(|found| found.path), Ok(path));
    });
}

/// A driver of which `cuInit` fails, in this process; what `driver` says, twice.
fn failing(code: i32) -> GpuError {
    let folder = Folder::new();
    let path = folder.path("driver.so");
    let stub = Stub {
        init: code,
        ..Stub::default()
    };
    stub.build(&path);
    assert!(set_search(only(path.clone())));
    let first = driver().expect_err("it fails");
    assert_eq!(
        driver().err().as_ref(),
        Some(&first),
        "failure is remembered"
    );
    let library = Library::open(&path).expect("it is open");
    let calls = library
        .address(c"stub_init_calls")
        .expect("a counter")
        .cast::<i32>();
    // SAFETY: an integer of the library.
    assert_eq!(unsafe { *calls }, 1, "calls of cuInit");
    assert!(!is_initialised());
    first
}

#[test]
fn a_stub_of_a_toolkit_is_named_as_such() {
    alone(&[], || {
        let error = failing(34);
        let text = error.to_string();
        let expected = "cuInit failed with CUDA_ERROR_OF_STUB: a text (34); this libcuda is the stub of a toolkit, for \
                        linking only: take its folder out of LD_LIBRARY_PATH";
        assert_eq!(text, expected);
        assert!(!error.is_sticky());
    });
}

#[test]
fn a_machine_without_a_gpu_is_told_what_to_look_at() {
    alone(&[], || {
        let text = failing(100).to_string();
        assert!(
            text.contains("(100); is CUDA_VISIBLE_DEVICES empty"),
            "{text}"
        );
    });
}

#[test]
fn a_driver_that_is_missing_is_remembered_too() {
    alone(&[], || {
        let folder = Folder::new();
        assert!(set_search(only(folder.path("driver.so"))));
        let first = driver().err();
        assert!(matches!(first, Some(GpuError::NotLoaded { .. })));
        Stub::default().build(&folder.path("driver.so"));
        assert_eq!(driver().err(), first);
        assert!(find_driver().is_ok(), "finding looks again");
    });
}

#[test]
fn a_forked_child_of_one_that_initialised_is_refused() {
    alone(&[], || {
        let folder = Folder::new();
        Stub::default().build(&folder.path("both.so"));
        assert!(set_search(only(folder.path("both.so"))));
        assert_eq!(
            in_fork(|| nccl().is_ok()),
            Some(true),
            "not yet initialised"
        );
        assert!(driver().is_ok() && nccl().is_ok() && is_initialised());
        let refused = in_fork(|| {
            driver().err() == Some(GpuError::Forked)
                && nccl().err() == Some(GpuError::Forked)
                && !is_initialised()
                && find_driver().is_ok()
        });
        assert_eq!(refused, Some(true));
        let text = GpuError::Forked.to_string();
        assert!(text.contains("`spawn` or `forkserver`"), "{text}");
    });
}

/// Bytes of each argument, of a prototype in a header. Only the types that our functions have.
pub(crate) fn sizes_in(header: &str, name: &str) -> Vec<usize> {
    // A comment that mentions it begins with a space or a star.
    let after = header
        .match_indices(&format!(" {name}("))
        .find(|(at, _)| {
            let line = header[..*at].rsplit('\n').next().unwrap_or_default();
            line.starts_with(|c: char| c.is_ascii_alphabetic())
        })
        .map(|(at, found)| &header[at + found.len()..])
        .unwrap_or_else(|| panic!("{name} is not in the header"));
    let (arguments, _) = after.split_once(");").expect("the end of a prototype");
    let size = |argument: &str| {
        let kind = argument.trim().trim_start_matches("const ");
        match kind.split_whitespace().next().expect("a type") {
            _ if kind.contains('*') => 8,
            "hipStream_t" | "hipEvent_t" | "hipCtx_t" | "hipModule_t" | "hipFunction_t" => 8,
            "hipDeviceptr_t" | "hiprtcProgram" => 8,
            "hipDevice_t" | "hipDeviceAttribute_t" | "hipError_t" | "hiprtcResult" => 4,
            "CUstream" | "CUevent" | "CUcontext" | "CUmodule" | "CUfunction" => 8,
            "cudaStream_t" | "ncclComm_t" | "size_t" | "CUdeviceptr" => 8,
            "ncclUniqueId" => 128,
            "int" | "unsigned" | "CUdevice" | "CUdevice_attribute" | "CUresult" => 4,
            "ncclResult_t" | "ncclDataType_t" | "ncclRedOp_t" => 4,
            other => panic!("{name}: unknown type {other}"),
        }
    };
    let is_argument = |argument: &&str| !argument.trim().is_empty() && argument.trim() != "void";
    arguments.split(',').filter(is_argument).map(size).collect()
}

#[test]
fn functions_have_the_arguments_of_the_headers() {
    for (header, functions) in [
        ("nvidia/cu13/include/cuda.h", DriverTable::FUNCTIONS),
        ("nvidia/cu13/include/cuda.h", CudaTexts::FUNCTIONS),
        ("nvidia/nccl/include/nccl.h", NcclTable::FUNCTIONS),
    ] {
        let text = match wheel_file(header) {
            Ok(path) => std::fs::read_to_string(path).expect("a header"),
            Err(why) => return skip(&why),
        };
        // A function of CUDA that has changed keeps its name in the header, as a macro for the newer one.
        for (symbol, sizes, _) in functions {
            let symbol = symbol.to_str().expect("ASCII");
            let name = symbol.trim_end_matches("_v2");
            assert_eq!(sizes_in(&text, name), *sizes, "{symbol}");
            if symbol != name {
                // Some are wrapped in a macro that chooses the meaning of the null stream.
                let start = format!("#define {name} ");
                let mut macros = text.lines().filter(|line| line.starts_with(&start));
                let is_renamed = macros.any(|line| {
                    line[start.len()..]
                        .split(['(', ')', ' '])
                        .any(|word| word == symbol)
                });
                assert!(is_renamed, "{name} is not {symbol} in {header}");
            }
        }
    }
}

#[test]
fn the_nccl_of_the_wheel_opens_without_a_gpu() {
    let path = match wheel_file("nvidia/nccl/lib/libnccl.so.2") {
        Ok(path) => path,
        Err(why) => return skip(&why),
    };
    let environment = [(FOLDER, path)];
    alone(&environment, || {
        choose_stack(Stack::Cuda).expect("nothing is open");
        let lib = folder_of_parent().parent().expect("lib").to_owned();
        let header = std::fs::read_to_string(lib.join("../include/nccl.h")).expect("a header");
        let version = header
            .lines()
            .find_map(|line| line.strip_prefix("#define NCCL_VERSION_CODE "))
            .and_then(|version| version.trim().parse().ok());
        let search = Search {
            wheel_folders: vec![lib.parent().expect("nccl").to_owned()],
            ..Search::default()
        };
        assert!(set_search(search));
        let found = find_nccl().expect("it opens");
        assert_eq!(Some(found.version), version);
        assert!(
            found.path.ends_with("nvidia/nccl/lib/libnccl.so.2"),
            "{found:?}"
        );
        let nccl = nccl().expect("it has all functions");
        assert_eq!(nccl.version(), found.version);
        let ids = [nccl.unique_id(), nccl.unique_id()].map(|id| id.expect("it needs no GPU"));
        assert_ne!(ids[0], ids[1]);
        if find_driver().is_ok() {
            return skip("there is a driver, so making a communicator may not fail");
        }
        let error = nccl.begin(&ids[0], 1, 0, &CommSettings::default()).err();
        let Some(GpuError::Nccl { call, code, text }) = error else {
            panic!("{error:?}")
        };
        assert_eq!((call, code), ("ncclCommInitRankConfig", 1));
        assert!(
            text.contains("CUDA driver version is insufficient"),
            "{text}"
        );
    });
}

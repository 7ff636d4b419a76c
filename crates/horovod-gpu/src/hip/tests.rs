//! AMD's libraries: names against the header, the real ones where they are installed, and all of it over the double.

use std::path::{Path, PathBuf};

use super::{HIP, HipTexts, RCCL, call_name, name_of, version_of};
use crate::device::kernels::Elements;
use crate::driver::{Driver, DriverFunctions, DriverTable};
use crate::error::GpuError;
use crate::hiprtc::Compiler;
use crate::load::tests::sizes_in;
use crate::load::{
    Library, Search, Stack, choose_stack, driver, find_driver, find_nccl, set_search, stack,
};
use crate::testing::{Folder, Stub, alone, skip};

/// A header of HIP's, where it is installed.
fn header(name: &str) -> Option<String> {
    let folders = ["/usr/include/hip", "/opt/rocm/include/hip"];
    let mut files = folders.iter().map(|folder| Path::new(folder).join(name));
    files.find_map(|file| std::fs::read_to_string(file).ok())
}

/// The real library, where it is installed.
fn installed() -> Option<Library> {
    HIP.iter()
        .find_map(|name| Library::open(Path::new(name)).ok())
}

/// A folder as `HOROVOD_ROCM_HOME`, with links to a library by the names of AMD's.
fn home(folder: &Folder, library: &Path) -> PathBuf {
    let lib = folder.path("rocm/lib");
    std::fs::create_dir_all(&lib).expect("a folder");
    for name in [HIP[0], RCCL[0]] {
        std::os::unix::fs::symlink(library, lib.join(name)).expect("a link");
    }
    folder.path("rocm")
}

#[test]
fn every_function_that_must_be_there_has_a_name_in_hip() {
    for (symbol, _, is_required) in DriverTable::FUNCTIONS {
        assert!(!is_required || name_of(symbol).is_some(), "{symbol:?}");
    }
    for (file, version) in [
        ("/nowhere/libamdhip64.so.7.2.70200", 70_200_000),
        ("/nowhere/libamdhip64.so.6", 60_000_000),
        ("/nowhere/libamdhip64.so", 0),
    ] {
        assert_eq!(version_of(file), version, "{file}");
    }
    assert_eq!(call_name("cuMemAlloc"), "hipMalloc");
    assert_eq!(call_name("cuInit"), "hipInit");
    assert_eq!(call_name("hiprtcGetCode"), "hiprtcGetCode");
}

#[test]
fn functions_have_the_arguments_of_the_headers() {
    let (Some(of_hip), Some(of_compiler)) = (header("hip_runtime_api.h"), header("hiprtc.h"))
    else {
        return skip("no header of HIP is installed (Debian: libamdhip64-dev)");
    };
    let renamed = DriverTable::FUNCTIONS.iter();
    let renamed = renamed.filter_map(|(symbol, sizes, _)| Some((name_of(symbol)?, *sizes)));
    let texts = HipTexts::FUNCTIONS
        .iter()
        .map(|(name, sizes, _)| (*name, *sizes));
    for (name, sizes) in renamed.chain(texts) {
        let name = name.to_str().expect("ASCII");
        assert_eq!(sizes_in(&of_hip, name), *sizes, "{name}");
    }
    for (name, sizes, _) in Compiler::FUNCTIONS {
        let name = name.to_str().expect("ASCII");
        assert_eq!(sizes_in(&of_compiler, name), *sizes, "{name}");
    }
}

#[test]
fn the_real_library_has_all_functions_and_says_that_there_is_no_gpu() {
    let Some(library) = installed() else {
        return skip("HIP is not installed (Debian: libamdhip64-5)");
    };
    let (functions, version, _) =
        DriverFunctions::of_library(Stack::Rocm, &library).unwrap_or_else(|why| panic!("{why}"));
    assert!(version >= 50_000_000, "{version}");
    let Some(error) = Driver::initialise(&functions, version).err() else {
        return skip("there is a GPU of AMD's");
    };
    let text = error.to_string();
    assert!(
        text.starts_with("hipInit failed with hipErrorNoDevice")
            || text.starts_with("hipInit failed with hipErrorInvalidDevice"),
        "{text}"
    );
    assert!(text.contains("/dev/kfd"), "{text}");
}

#[test]
fn which_gpus_is_what_a_framework_says_or_what_is_there() {
    let folder = Folder::new();
    let double = horovod_gpu_double::library().expect("the double");
    Stub::default().build(&folder.path("libcuda.so.1"));
    let rocm = [("GPU_TEST_FOLDER", home(&folder, &double))];
    let search = || Search {
        rocm_homes: vec![crate::testing::folder_of_parent()],
        ..Search::default()
    };
    alone(&rocm, || {
        // The configured path is the only one searched, and an opened library stays open.
        let cuda = crate::testing::folder_of_parent().with_file_name("libcuda.so.1");
        assert!(set_search(Search {
            cuda_library: Some(cuda.clone()),
            ..search()
        }));
        assert_eq!(stack(), Stack::Cuda);
        assert_eq!(
            find_driver().expect("the stub").path,
            cuda.display().to_string()
        );
        let error = choose_stack(Stack::Rocm).expect_err("another one is used");
        assert!(
            error
                .to_string()
                .contains("GPU of ROCm, but this process has begun to use those of CUDA"),
            "{error}"
        );
    });
}

#[test]
fn where_cuda_is_not_there_amds_libraries_are_used() {
    let folder = Folder::new();
    let double = horovod_gpu_double::library().expect("the double");
    let rocm = [("GPU_TEST_FOLDER", home(&folder, &double))];
    alone(&rocm, || {
        let home = crate::testing::folder_of_parent();
        assert!(set_search(Search {
            rocm_homes: vec![home.clone()],
            ..Search::default()
        }));
        if find_driver().is_ok_and(|found| !found.path.starts_with(&home.display().to_string())) {
            return skip("another driver's library is installed");
        }
        assert_eq!(stack(), Stack::Rocm);
        assert_eq!(choose_stack(Stack::Rocm), Ok(()));
        let nccl = find_nccl().expect("the double");
        assert!(
            nccl.path.ends_with("librccl.so.1") || nccl.path.ends_with(HIP[0]),
            "{nccl:?}"
        );
        let error = choose_stack(Stack::Cuda).expect_err("AMD's are used");
        assert!(matches!(error, GpuError::Invalid(_)));
    });
}

#[test]
fn what_is_missing_and_too_old_is_told_with_what_to_do() {
    alone(&[], || {
        assert_eq!(choose_stack(Stack::Rocm), Ok(()));
        assert!(set_search(Search {
            nccl_library: Some("/nowhere/librccl.so.1".into()),
            ..Search::default()
        }));
        let text = find_nccl().expect_err("nowhere").to_string();
        assert!(
            text.starts_with("librccl.so.1 could not be loaded; tried /nowhere/"),
            "{text}"
        );
        assert!(
            text.ends_with("set HOROVOD_ROCM_HOME to its folder"),
            "{text}"
        );
    });
}

#[test]
fn a_gpu_of_amds_is_driven_by_the_same_code() {
    alone(&[], || {
        let double = crate::tests::Double::start_rocm("devices=2");
        let device = crate::tests::Double::adopted(1);
        let one = driver().expect("the double");
        assert_eq!((one.stack(), one.device_count()), (Stack::Rocm, Ok(2)));
        assert_eq!(
            (device.compute_capability(), device.multiprocessors()),
            ((9, 0), 132)
        );
        assert_ne!(device.uuid(), one.device(0).expect("a device").uuid());
        device.check_kernels().expect("compiled");
        let stream = device.create_stream().expect("a stream");
        let memory = double.alloc(1, 800);
        let kernels = device.kernels().expect("kernels");
        // SAFETY: a hundred elements.
        unsafe { kernels.fill(&stream, memory, 100, &2.5f64.to_le_bytes()) }.expect("filled");
        // SAFETY: as above.
        unsafe {
            kernels.scale(
                &stream,
                Elements::in_place(horovod_protocol::DType::F64, 100, memory),
                2.0,
            )
        }
        .expect("scaled");
        assert_eq!(
            double.read(stream.raw(), memory, 800),
            5f64.to_le_bytes().repeat(100)
        );
        let error = device
            .allocate(1 << 60)
            .expect_err("more than there is")
            .to_string();
        assert!(
            error.contains("hipMalloc failed with hipErrorOutOfMemory"),
            "{error}"
        );
        assert!(error.contains("look with rocm-smi"), "{error}");
        double.assert_clean();
    });
}

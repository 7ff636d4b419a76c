//! Values and layouts passed to NCCL, and its results.

use std::mem::offset_of;
use std::process::Command;

use horovod_protocol::DType;

use super::{CommSettings, Config, NcclType, Progress, UniqueId};
use crate::error::GpuError;
use crate::load::{Library, Search, nccl, set_search};
use crate::testing::{Folder, Stub, alone, skip, wheel_file};

/// Fields of `ncclConfig_t` by their names in C, and where they are here.
const FIELDS: [(&str, usize); 20] = [
    ("size", offset_of!(Config, size)),
    ("magic", offset_of!(Config, magic)),
    ("version", offset_of!(Config, version)),
    ("blocking", offset_of!(Config, blocking)),
    ("cgaClusterSize", offset_of!(Config, cga_cluster_size)),
    ("minCTAs", offset_of!(Config, min_ctas)),
    ("maxCTAs", offset_of!(Config, max_ctas)),
    ("netName", offset_of!(Config, net_name)),
    ("splitShare", offset_of!(Config, split_share)),
    ("trafficClass", offset_of!(Config, traffic_class)),
    ("commName", offset_of!(Config, comm_name)),
    ("collnetEnable", offset_of!(Config, collnet_enable)),
    ("CTAPolicy", offset_of!(Config, cta_policy)),
    ("shrinkShare", offset_of!(Config, shrink_share)),
    ("nvlsCTAs", offset_of!(Config, nvls_ctas)),
    (
        "nChannelsPerNetPeer",
        offset_of!(Config, n_channels_per_net_peer),
    ),
    (
        "nvlinkCentricSched",
        offset_of!(Config, nvlink_centric_sched),
    ),
    ("graphUsageMode", offset_of!(Config, graph_usage_mode)),
    ("numRmaCtx", offset_of!(Config, num_rma_ctx)),
    ("maxP2pPeers", offset_of!(Config, max_p2p_peers)),
];

#[test]
fn the_config_lies_in_memory_as_in_every_version() {
    let offsets = FIELDS.map(|(_, offset)| offset);
    let expected = [
        0, 8, 12, 16, 20, 24, 28, 32, 40, 44, 48, 56, 60, 64, 68, 72, 76, 80, 84, 88,
    ];
    assert_eq!(offsets, expected);
    assert_eq!(offset_of!(Config, graph_stream_ordering), 92);
    assert_eq!(size_of::<Config>(), 96);
    assert_eq!((size_of::<UniqueId>(), align_of::<UniqueId>()), (128, 1));
}

#[test]
fn the_config_and_the_numbers_are_those_of_the_header() {
    let header = match wheel_file("nvidia/nccl/include/nccl.h") {
        Ok(path) => path,
        Err(why) => return skip(&why),
    };
    let mut source = "#include <stddef.h>\n#include <nccl.h>\n".to_owned();
    for (field, offset) in FIELDS {
        source += &format!("_Static_assert(offsetof(ncclConfig_t, {field}) == {offset}, \"\");\n");
    }
    for (name, value) in [
        ("ncclInt8", NcclType::I8 as i32),
        ("ncclUint8", NcclType::U8 as i32),
        ("ncclInt32", NcclType::I32 as i32),
        ("ncclUint32", NcclType::U32 as i32),
        ("ncclInt64", NcclType::I64 as i32),
        ("ncclUint64", NcclType::U64 as i32),
        ("ncclFloat16", NcclType::F16 as i32),
        ("ncclFloat32", NcclType::F32 as i32),
        ("ncclFloat64", NcclType::F64 as i32),
        ("ncclBfloat16", NcclType::Bf16 as i32),
        ("ncclSum", super::NcclOp::Sum as i32),
        ("ncclProd", super::NcclOp::Product as i32),
        ("ncclMax", super::NcclOp::Max as i32),
        ("ncclMin", super::NcclOp::Min as i32),
        ("ncclSuccess", super::SUCCESS),
        ("ncclInProgress", super::IN_PROGRESS),
        ("NCCL_CONFIG_UNDEF_INT", super::UNDEFINED),
    ] {
        source += &format!("_Static_assert((long){name} == {value}, \"\");\n");
    }
    source += &format!(
        "_Static_assert(NCCL_API_MAGIC == {}u && sizeof(ncclUniqueId) == 128, \"\");\n",
        super::CONFIG_MAGIC
    );
    let folder = Folder::new();
    std::fs::write(folder.path("layout.c"), source).expect("a file");
    // All that the header needs of CUDA's, which need a compiler of NVIDIA's.
    let stream = "typedef struct CUstream_st *cudaStream_t;";
    std::fs::write(folder.path("cuda_runtime.h"), stream).expect("a file");
    std::fs::write(folder.path("cuda_fp16.h"), "").expect("a file");
    let output = Command::new("gcc")
        .arg("-fsyntax-only")
        .arg("-I")
        .arg(folder.path(""))
        .arg("-I")
        .arg(header.parent().expect("a folder"))
        .arg(folder.path("layout.c"))
        .output()
        .expect("gcc");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}

#[test]
fn the_id_goes_by_value_and_the_config_by_address() {
    alone(&[], || {
        let folder = Folder::new();
        let path = folder.path("nccl.so");
        let stub = Stub {
            nccl: 22602,
            ..Stub::default()
        };
        stub.build(&path);
        assert!(set_search(Search {
            nccl_library: Some(path.clone()),
            ..Search::default()
        }));
        let id: [u8; 128] = std::array::from_fn(|i| i as u8 ^ 0x55);
        let settings = CommSettings {
            name: "hvd-0-1".to_owned(),
            blocking: true,
            max_ctas: Some(8),
        };
        let error = nccl().expect("a stub").begin(&id, 3, 2, &settings).err();
        let expected = GpuError::Nccl {
            call: "ncclCommInitRankConfig",
            code: 3, // so size and rank have arrived too
            text: "internal error: the last error".to_owned(),
        };
        assert_eq!(error, Some(expected));
        let library = Library::open(&path).expect("it is open");
        let address = |name| library.address(name).expect("a variable of the stub");
        // SAFETY: arrays of the stub, of this many bytes.
        let (arrived, config) = unsafe {
            (
                address(c"stub_id").cast::<[u8; 128]>().read_unaligned(),
                address(c"stub_config").cast::<[u8; 96]>().read_unaligned(),
            )
        };
        assert_eq!(arrived, id);
        let word = |at: usize| {
            let bytes = config[at..at + 4].try_into().expect("four bytes");
            i32::from_le_bytes(bytes)
        };
        assert_eq!((word(0), word(4)), (96, 0));
        assert_eq!(word(8) as u32, 0xcafe_beef);
        assert_eq!(
            word(12),
            22602,
            "the library's version, if it is older than the struct"
        );
        assert_eq!((word(16), word(28)), (1, 8), "blocking, maxCTAs");
        for at in [20, 24, 40, 44, 56, 60, 64, 68, 72, 76, 80, 84, 88, 92] {
            assert_eq!(word(at), i32::MIN, "undefined at {at}");
        }
        assert_eq!((word(32), word(36)), (0, 0), "netName");
    });
}

#[test]
fn one_address_for_all_communicators_is_refused() {
    let environment = [("NCCL_COMM_ID", "127.0.0.1:9999".into())];
    alone(&environment, || {
        let folder = Folder::new();
        Stub::default().build(&folder.path("nccl.so"));
        assert!(set_search(Search {
            nccl_library: Some(folder.path("nccl.so")),
            ..Search::default()
        }));
        let nccl = nccl().expect("a stub");
        for error in [
            nccl.unique_id().err(),
            nccl.begin(&[0; 128], 2, 0, &CommSettings::default()).err(),
        ] {
            let text = error.expect("refused").to_string();
            assert!(text.starts_with("NCCL_COMM_ID is set"), "{text}");
        }
    });
}

#[test]
fn types_are_nccls_or_none() {
    let without: Vec<DType> = DType::ALL
        .into_iter()
        .filter(|dtype| NcclType::of(*dtype).is_none())
        .collect();
    assert_eq!(without, [DType::U16, DType::I16, DType::Bool]);
    assert_eq!(NcclType::of(DType::BF16), Some(NcclType::Bf16));
    assert_ne!(Progress::Done, Progress::InProgress);
}

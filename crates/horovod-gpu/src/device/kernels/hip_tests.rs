//! The kernels for AMD's GPUs: run as C++ on the CPU and compared with the oracle, and compiled by AMD's compiler.

use std::ffi::{CStr, CString};
use std::path::Path;
use std::process::Command;

use horovod_protocol::DType;

use super::tests::{FACTORS, assert_same, noise, scaled};
use super::{BATCH, BLOCK, CopyTable, ENTRIES, HIP, blocks};
use crate::hip;
use crate::hiprtc::Compiler;
use crate::load::Library;
use crate::testing::{Folder, skip};

/// Definitions that a GPU's compiler has built in, for one thread at a time.
const CPU: &str = r#"
#define __global__
#define __device__
struct dim { unsigned x, y; };
static dim blockIdx, blockDim, threadIdx, gridDim;
extern "C" void place(unsigned x, unsigned y, unsigned thread, unsigned columns, unsigned block) {
    blockIdx = {x, y}; threadIdx = {thread, 0}; gridDim = {columns, y + 1}; blockDim = {block, 1};
}
"#;

/// The kernels as functions of the CPU.
struct Cpu(Library);

type PlaceFunction = unsafe extern "C" fn(u32, u32, u32, u32, u32);

impl Cpu {
    /// Or why it cannot be compiled here.
    fn compiled(folder: &Folder) -> Result<Self, String> {
        let (source, library) = (folder.path("kernels.cpp"), folder.path("libkernels.so"));
        std::fs::write(&source, [CPU, HIP.to_str().expect("ASCII")].concat()).expect("a file");
        let mut compiler = Command::new("g++");
        compiler
            .args(["-O1", "-w", "-shared", "-fPIC", "-o"])
            .arg(&library)
            .arg(&source);
        let output = compiler.output().map_err(|error| format!("g++: {error}"))?;
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        if errors.contains("_Float16") {
            return Err("this g++ has no _Float16".to_owned());
        }
        assert!(output.status.success(), "{errors}");
        Library::open(&library).map(Self)
    }

    /// Runs all threads of a grid, one after the other.
    fn launch<T: Copy>(&self, name: &CStr, (columns, rows): (u32, u32), call: impl Fn(T)) {
        // SAFETY: a function of the text above; the kernel's type is the caller's.
        let (place, kernel): (PlaceFunction, T) = unsafe {
            let place = self.0.function(c"place").expect("a function");
            (place, self.0.function(name).expect("a kernel"))
        };
        for y in 0..rows {
            for x in 0..columns {
                for thread in 0..BLOCK {
                    // SAFETY: numbers.
                    unsafe { place(x, y, thread, columns, BLOCK) };
                    call(kernel);
                }
            }
        }
    }
}

type Three = unsafe extern "C" fn(u64, u64, u64);
type Scale = unsafe extern "C" fn(u64, u64, u64, f64);

fn cpu(folder: &Folder) -> Option<Cpu> {
    Cpu::compiled(folder).map_err(|why| skip(&why)).ok()
}

#[test]
fn they_compute_what_the_oracle_does() {
    let folder = Folder::new();
    let Some(cpu) = cpu(&folder) else { return };
    let halves: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for (dtype, name) in [
        (DType::F16, c"hvd_scale_f16"),
        (DType::BF16, c"hvd_scale_bf16"),
        (DType::F32, c"hvd_scale_f32"),
        (DType::F64, c"hvd_scale_f64"),
    ] {
        let input = if dtype.size() == 2 {
            halves.clone()
        } else {
            noise(9999 * dtype.size(), 3)
        };
        for factor in FACTORS {
            let mut result = vec![0; input.len()];
            let count = (input.len() / dtype.size()) as u64;
            let (to, from) = (result.as_mut_ptr() as u64, input.as_ptr() as u64);
            cpu.launch(name, (blocks(input.len() as u64, 4), 1), |kernel: Scale| {
                // SAFETY: so many elements.
                unsafe { kernel(to, from, count, factor) };
            });
            assert_same(
                dtype,
                &result,
                &scaled(dtype, &input, factor),
                &format!("{name:?} by {factor}"),
            );
        }
    }
    for (name, size) in [
        (c"hvd_fill_b8", 1),
        (c"hvd_fill_b16", 2),
        (c"hvd_fill_b32", 4),
        (c"hvd_fill_b64", 8),
    ] {
        let pattern = 0x8877_6655_4433_2211_u64;
        let mut memory = vec![0xee; 1025 * size + 1];
        let to = memory.as_mut_ptr() as u64;
        // SAFETY: room for so many patterns.
        cpu.launch(name, (2, 1), |kernel: Three| unsafe {
            kernel(to, 1025, pattern)
        });
        assert_eq!(memory.pop(), Some(0xee));
        assert_eq!(memory, pattern.to_le_bytes()[..size].repeat(1025));
    }
    let (narrow, wide) = (noise(2 * 4099, 5), noise(4 * 4099, 6));
    let values = || {
        narrow
            .chunks(2)
            .map(|two| u16::from_le_bytes([two[0], two[1]]))
    };
    let signed: Vec<u8> = values()
        .flat_map(|v| i32::from(v as i16).to_le_bytes())
        .collect();
    let unsigned: Vec<u8> = values().flat_map(|v| u32::from(v).to_le_bytes()).collect();
    let lower: Vec<u8> = wide.chunks(4).flat_map(|four| [four[0], four[1]]).collect();
    for (name, input, expected) in [
        (c"hvd_widen_i16", &narrow, &signed),
        (c"hvd_widen_u16", &narrow, &unsigned),
        (c"hvd_narrow_16", &wide, &lower),
    ] {
        let mut result = vec![0; expected.len()];
        let (to, from) = (result.as_mut_ptr() as u64, input.as_ptr() as u64);
        // SAFETY: so many elements.
        cpu.launch(name, (3, 1), |kernel: Three| unsafe {
            kernel(to, from, 4099)
        });
        assert!(result == *expected, "{name:?}");
    }
}

#[test]
fn a_batch_copies_ranges_of_every_alignment() {
    let folder = Folder::new();
    let Some(cpu) = cpu(&folder) else { return };
    let (source, mut result, mut expected) =
        (noise(1 << 16, 7), vec![1; 1 << 17], vec![1; 1 << 17]);
    let mut table = CopyTable {
        dst: [0; BATCH],
        src: [0; BATCH],
        bytes: [0; BATCH],
        count: BATCH as u64,
    };
    let mut to = 0;
    for i in 0..BATCH {
        let (from, length) = (i * 61 + i % 3, 1 + i * i % 700);
        to += if i % 2 == 0 {
            (16 + from % 16 - to % 16) % 16
        } else {
            i % 5
        };
        table.dst[i] = result.as_mut_ptr() as u64 + to as u64;
        table.src[i] = source.as_ptr() as u64 + from as u64;
        table.bytes[i] = length as u64;
        expected[to..to + length].copy_from_slice(&source[from..from + length]);
        to += length;
    }
    type Batch = unsafe extern "C" fn(std::mem::ManuallyDrop<CopyTable>);
    cpu.launch(c"hvd_copy_batch", (2, BATCH as u32 + 1), |kernel: Batch| {
        // SAFETY: a plain struct, which the call gets a copy of; its ranges are those of the vectors.
        unsafe {
            kernel(std::mem::ManuallyDrop::new(std::ptr::read(
                &raw const table,
            )))
        };
    });
    assert!(result == expected);
}

#[test]
fn amds_compiler_takes_the_text() {
    let Some(name) = hip::HIP
        .iter()
        .find(|name| Library::open(Path::new(name)).is_ok())
    else {
        return skip("HIP is not installed (Debian: libamdhip64-5)");
    };
    let Ok(compiler) = Compiler::beside(Path::new(name)) else {
        return skip("HIP's compiler is not installed");
    };
    for gpu in ["gfx906", "gfx90a", "gfx1030"] {
        let option = CString::new(format!("--offload-arch={gpu}")).expect("no NUL");
        let code = match compiler.compile(HIP, &[&option]) {
            Ok(code) => code,
            Err(why) => panic!("{gpu}: {why}"),
        };
        for entry in ENTRIES {
            let entry = entry.to_bytes();
            assert!(
                code.windows(entry.len()).any(|at| at == entry),
                "{gpu}: {entry:?}"
            );
        }
    }
    let wrong = CString::new(
        HIP.to_str()
            .expect("ASCII")
            .replace("float by =", "float of ="),
    )
    .expect("no NUL");
    let text = compiler
        .compile(&wrong, &[c"--offload-arch=gfx90a"])
        .expect_err("an unknown name")
        .to_string();
    assert!(
        text.starts_with("hiprtcCompileProgram failed with") && text.contains("'by'"),
        "{text}"
    );
}

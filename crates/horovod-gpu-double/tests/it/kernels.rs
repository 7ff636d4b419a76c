//! Kernels by their names: results, what is refused, what is found.
#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

use std::ffi::{CString, c_int, c_void};
use std::ptr::null_mut;

use crate::rig::{bytes_of, configure, own_stream, rig};
use horovod_gpu_double::Handle;
use horovod_gpu_double::driver::module::{
    cuLaunchKernel, cuModuleGetFunction, cuModuleLoadData, cuModuleUnload,
};
use horovod_gpu_double::testing::{
    double_alloc, double_stream_read, double_stream_synchronize, double_stream_write,
};
use horovod_protocol::DType;

const SCALE: &str = "(.param .u64 dst, .param .u64 src, .param .u64 count, .param .f64 factor)";
const THREE: &str = "(.param .u64 dst, .param .u64 a, .param .u64 b)";

/// A module with these entries, which do nothing as far as the text is concerned.
fn module(entries: &[(&str, &str)]) -> Handle {
    let mut text = ".version 6.4\n.target sm_70\n.address_size 64\n".to_owned();
    for (name, parameters) in entries {
        text += &format!(".visible .entry {name}{parameters}\n.maxntid 512, 1, 1\n{{ ret; }}\n");
    }
    let text = CString::new(text).unwrap();
    let mut module = null_mut();
    // SAFETY: a place for one handle, a C string.
    let code = unsafe { cuModuleLoadData(&raw mut module, text.as_ptr().cast()) };
    assert_eq!(code, 0);
    module
}

fn function(module: Handle, name: &str) -> Result<Handle, c_int> {
    let (mut function, name) = (null_mut(), CString::new(name).unwrap());
    // SAFETY: a place for one handle, a C string.
    match unsafe { cuModuleGetFunction(&raw mut function, module, name.as_ptr()) } {
        0 => Ok(function),
        code => Err(code),
    }
}

fn launch(function: Handle, rows: u32, stream: Handle, words: &mut [u64]) -> c_int {
    let mut parameters: Vec<*mut c_void> = words.iter_mut().map(|w| (&raw mut *w).cast()).collect();
    launch_with(function, rows, stream, &mut parameters)
}

fn launch_with(
    function: Handle,
    rows: u32,
    stream: Handle,
    parameters: &mut [*mut c_void],
) -> c_int {
    let list = parameters.as_mut_ptr();
    // SAFETY: as many parameters as the entry declares.
    unsafe { cuLaunchKernel(function, 4, rows, 1, 512, 1, 1, 0, stream, list, null_mut()) }
}

fn put<T>(stream: Handle, values: &[T]) -> u64 {
    let memory = double_alloc(0, size_of_val(values));
    // SAFETY: so many bytes.
    unsafe { double_stream_write(stream, memory, bytes_of(values), size_of_val(values)) };
    memory
}

fn get<T: Clone + Default>(stream: Handle, memory: u64, count: usize) -> Vec<T> {
    let mut values = vec![T::default(); count];
    // SAFETY: so many bytes, which stay until the stream has come there.
    unsafe {
        double_stream_read(
            stream,
            values.as_mut_ptr().cast(),
            memory,
            count * size_of::<T>(),
        );
        double_stream_synchronize(stream);
    }
    values
}

#[test]
fn scaling_is_that_of_the_product() {
    let rig = rig("");
    let stream = own_stream();
    let values: Vec<u16> = (0..4096).map(|i| (i * 17) as u16).collect();
    let cases = [
        ("hvd_scale_f16", DType::F16),
        ("hvd_scale_bf16", DType::BF16),
    ];
    let module = module(&cases.map(|(name, _)| (name, SCALE)));
    for (name, dtype) in cases {
        let (from, to) = (put(stream, &values), double_alloc(0, 8192));
        let factor = 1.0f64 / 3.0;
        let scale = function(module, name).unwrap();
        assert_eq!(
            launch(scale, 1, stream, &mut [to, from, 4096, factor.to_bits()]),
            0
        );
        let mut expected = vec![0u16; 4096];
        // SAFETY: both hold so many elements.
        unsafe {
            let (source, into) = (values.as_ptr().cast(), expected.as_mut_ptr().cast());
            horovod_kernels::scale(dtype, factor, source, into, 4096);
        }
        assert_eq!(get::<u16>(stream, to, 4096), expected);
        // In place.
        assert_eq!(
            launch(scale, 1, stream, &mut [from, from, 4096, factor.to_bits()]),
            0
        );
        assert_eq!(get::<u16>(stream, from, 4096), expected);
    }
    rig.is_clean();
}

#[test]
fn integers_widen_narrow_and_fill() {
    let rig = rig("");
    let stream = own_stream();
    let names = [
        "hvd_widen_i16",
        "hvd_widen_u16",
        "hvd_narrow_16",
        "hvd_fill_b32",
    ];
    let module = module(&names.map(|name| (name, THREE)));
    let [signed, unsigned, narrow, fill] = names.map(|name| function(module, name).unwrap());
    let (from, to) = (put(stream, &[-1i16, 7, i16::MIN]), double_alloc(0, 12));
    assert_eq!(launch(signed, 1, stream, &mut [to, from, 3]), 0);
    assert_eq!(get::<i32>(stream, to, 3), [-1, 7, -32768]);
    assert_eq!(launch(unsigned, 1, stream, &mut [to, from, 3]), 0);
    assert_eq!(get::<i32>(stream, to, 3), [65535, 7, 32768]);
    assert_eq!(launch(narrow, 1, stream, &mut [from, to, 3]), 0);
    assert_eq!(get::<i16>(stream, from, 3), [-1, 7, i16::MIN]);
    assert_eq!(launch(fill, 1, stream, &mut [to, 2, 0x1_0000_0007]), 0);
    assert_eq!(get::<i32>(stream, to, 3), [7, 7, 32768]);
    rig.is_clean();
    // Not aligned to the type.
    launch(fill, 1, stream, &mut [to + 2, 1, 0]);
    rig.broke("alignment", "hvd_fill_b32");
    configure("");
    // Source and destination overlap, and are not one.
    launch(signed, 1, stream, &mut [to, to + 2, 2]);
    rig.broke("memory", "two parts of hvd_widen_i16");
    configure("");
    assert_eq!(launch(fill, 1, stream, &mut [to, 4, 0]), 1);
    rig.broke("memory", "out of bounds");
}

#[test]
fn a_batch_copies_as_many_as_the_grid_has_rows() {
    let rig = rig("");
    let stream = own_stream();
    let module = module(&[("hvd_copy_batch", "(.param .align 8 .b8 table[3848])")]);
    let copy = function(module, "hvd_copy_batch").unwrap();
    let (from, to) = (put(stream, &[1u8, 2, 3, 4, 5]), put(stream, &[0u8; 5]));
    // Destinations, sources, lengths, count.
    let mut table = [0u64; 481];
    for (i, (at, bytes)) in [(0, 3), (3, 2)].into_iter().enumerate() {
        (table[i], table[160 + i], table[320 + i]) = (to + at, from + at, bytes);
    }
    table[480] = 2;
    let mut parameters = [table.as_mut_ptr().cast::<c_void>()];
    assert_eq!(launch_with(copy, 1, stream, &mut parameters), 0);
    assert_eq!(get::<u8>(stream, to, 5), [1, 2, 3, 0, 0]);
    assert_eq!(launch_with(copy, 2, stream, &mut parameters), 0);
    assert_eq!(get::<u8>(stream, to, 5), [1, 2, 3, 4, 5]);
    rig.is_clean();
    table[1] = to + 2;
    let mut parameters = [table.as_mut_ptr().cast::<c_void>()];
    launch_with(copy, 2, stream, &mut parameters);
    rig.broke("memory", "two parts of hvd_copy_batch");
    configure("");
    table[480] = 161;
    let mut parameters = [table.as_mut_ptr().cast::<c_void>()];
    assert_eq!(launch_with(copy, 2, stream, &mut parameters), 1);
}

#[test]
fn what_is_unknown_or_declared_otherwise_is_refused() {
    let rig = rig("");
    let other = [("hvd_scale_f32", THREE), ("somebody_elses", THREE)];
    let module = module(&other);
    assert_eq!(function(module, "hvd_scale_f64"), Err(500));
    assert_eq!(function(module, "somebody_elses"), Err(500));
    rig.is_clean();
    assert_eq!(function(module, "hvd_scale_f32"), Err(500));
    rig.broke("parameters", "hvd_scale_f32 declares");
    // SAFETY: a module.
    assert_eq!(unsafe { cuModuleUnload(module) }, 0);
    configure("");
    assert_eq!(function(module, "hvd_scale_f32"), Err(400));
    rig.broke("after destroy", "module");
}

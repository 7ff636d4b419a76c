//! Modules and launches of kernels.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::call::{Call, Need, driver, put};
use crate::codes;
use crate::handles::{Handle, Sort, decode, encode};
use crate::kernels::Kernel;
use crate::module::Module;

/// Most threads of one block.
const BLOCK_MAX: u64 = 1024;

/// `cuModuleLoadData`: NUL-terminated PTX text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut Handle, image: *const c_void) -> c_int {
    driver(
        "cuModuleLoadData",
        Need::NoCapture,
        format_args!(""),
        |call| {
            if image.is_null() {
                return Err(codes::INVALID_VALUE);
            }
            // SAFETY: the caller's promise.
            let text = unsafe { CStr::from_ptr(image.cast::<c_char>()) };
            let text = text.to_str().map_err(|_| codes::INVALID_PTX)?;
            let (version, capability) =
                (call.config.driver_version, call.config.compute_capability);
            let loaded = Module::parse(text, version, capability)?;
            let id = call.new_id();
            call.modules.insert(id, loaded);
            // SAFETY: the caller's promise.
            unsafe { put(module, encode(Sort::Module, id)) }
        },
    )
}

/// `cuModuleUnload`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleUnload(module: Handle) -> c_int {
    driver(
        "cuModuleUnload",
        Need::NoCapture,
        format_args!("{module:?}"),
        |call| {
            let id = find(call, module)?;
            call.modules.remove(&id);
            Ok(())
        },
    )
}

fn find(call: &mut Call, module: Handle) -> Result<u64, i32> {
    let id = decode(Sort::Module, module).ok_or(codes::INVALID_HANDLE)?;
    if !call.modules.contains_key(&id) {
        let name = call.name;
        call.gone(name, "module", id);
        return Err(codes::INVALID_HANDLE);
    }
    Ok(id)
}

/// `cuModuleGetFunction`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: *mut Handle,
    module: Handle,
    name: *const c_char,
) -> c_int {
    if name.is_null() {
        return codes::INVALID_VALUE;
    }
    // SAFETY: not null; the caller's promise.
    let entry = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let arguments = format_args!("{entry}");
    driver("cuModuleGetFunction", Need::Context, arguments, |call| {
        let module = find(call, module)?;
        let declared = call
            .modules
            .get(&module)
            .and_then(|m| m.entries.get(&*entry));
        let declared = declared.ok_or(codes::NOT_FOUND)?.clone();
        let kernel = Kernel::named(&entry).ok_or(codes::NOT_FOUND)?;
        if declared != kernel.parameters() {
            let text = format!(
                "{entry} declares {declared:?}, the double carries it out with {:?}",
                kernel.parameters()
            );
            call.violation("parameters", &text);
            return Err(codes::NOT_FOUND);
        }
        let id = call.new_id();
        call.functions
            .insert(id, (entry.clone().into_owned(), module));
        // SAFETY: the caller's promise.
        unsafe { put(function, encode(Sort::Function, id)) }
    })
}

/// `cuLaunchKernel`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: Handle,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: Handle,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> c_int {
    let arguments = format_args!(
        "{function:?} ({grid_x} {grid_y} {grid_z}) ({block_x} {block_y} {block_z}) {shared_bytes} {stream:?}"
    );
    driver("cuLaunchKernel", Need::Context, arguments, |call| {
        let (device, name) = (call.device, call.name);
        let id = call.stream_of(stream, device, name)?;
        let function = decode(Sort::Function, function).ok_or(codes::INVALID_HANDLE)?;
        let found = call.functions.get(&function).cloned();
        let (entry, module) = found.ok_or(codes::INVALID_HANDLE)?;
        if !call.modules.contains_key(&module) {
            call.gone(&entry, "module", module);
            return Err(codes::INVALID_HANDLE);
        }
        let threads: u64 = [block_x, block_y, block_z].map(u64::from).iter().product();
        let blocks: u64 = [grid_x, grid_y, grid_z].map(u64::from).iter().product();
        let is_possible =
            (1..=BLOCK_MAX).contains(&threads) && blocks > 0 && grid_y <= 65535 && grid_z <= 65535;
        if !is_possible || parameters.is_null() || !extra.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        let kernel = Kernel::named(&entry).ok_or(codes::NOT_FOUND)?;
        // SAFETY: the caller's promise: as many values as the entry declares, which was compared.
        let launch = unsafe { kernel.launch(parameters.cast::<*const c_void>(), grid_y as usize) };
        let (accesses, work) = launch.ok_or(codes::INVALID_VALUE)?;
        for access in &accesses {
            let found = call.memory.containing(access.address);
            let other = found.map(|a| (a.device, a.kind.is_on_device()));
            if access.bytes > 0 && other.is_some_and(|other| other != (device, true)) {
                let text = format!(
                    "{entry} on device {device} uses {:#x} of another",
                    access.address
                );
                call.violation("memory", &text);
            }
        }
        call.submit(id, &entry, &accesses, work)?;
        Ok(())
    })
}

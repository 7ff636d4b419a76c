//! The module `horovod._core`: the list of what Python sees.

mod buffer;
mod checksums;
mod dlpack;
mod errors;
mod exit;
mod ffi;
mod gpu;
mod launch;
mod log;
mod memory;
mod output;
mod payloads;
mod plain;
mod results;
mod runtime;
mod signals;
mod stacks;
mod submit;

use pyo3::prelude::*;

/// The runtime of horovod-rs. Used by the packages under `horovod`, not by users.
#[pymodule]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::buffer::Buffer;
    #[pymodule_export]
    use crate::checksums::{checks_replicas, checksums, report_replica};
    #[pymodule_export]
    use crate::exit::{end_within, staying_threads};
    #[pymodule_export]
    use crate::gpu::{
        Streams, advise_one_gpu, gpu_libraries, gpu_loss, nccl_version, prefer_gpus, prepare_gpus,
        wait_for_devices,
    };
    #[pymodule_export]
    use crate::launch::{
        Rendezvous, assign_ranks, names_of_a_job, parse_hosts, place_ranks, read_hostfile,
    };
    #[pymodule_export]
    use crate::output::open_output;
    #[pymodule_export]
    use crate::payloads::{PayloadServer, deliver_payload, fetch_payload};
    #[pymodule_export]
    use crate::plain::PlainTensors;
    #[pymodule_export]
    use crate::results::{called_back, expect_guests, handles, poll};
    #[pymodule_export]
    use crate::runtime::{
        add_process_set, barrier, consistency, cross_rank, cross_size, dynamic_process_sets,
        group_settings, hold_state, host_updates, hostname, init, is_elastic, is_homogeneous,
        is_initialized, jax_ordered_calls, join, lacks_rendezvous, launcher, leave_at_exit,
        leave_interrupted, local_rank, local_size, mark_input, mark_step, needs_sync,
        process_set_ids, process_set_ranks, rank, registered_process_set, remove_process_set,
        shutdown, signal_grace, size, start_timeline, stats, stop_timeline, transports,
    };
    #[pymodule_export]
    use crate::submit::{enqueue, scattered_rows, wait, wait_softly};

    #[pymodule_init]
    fn init_module(m: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::log::install();
        crate::stacks::install();
        m.add("FRAMES_MAX", horovod_engine::FRAMES_MAX)?;
        m.add("MOVED", crate::plain::MOVED)?;
        m.add(
            "NCCL_SHARES_GPUS_SINCE",
            crate::gpu::nccl_shares_gpus_since(),
        )?;
        m.add("THREADS_MAX", horovod_engine::THREADS_MAX)?;
        m.add("__version__", env!("CARGO_PKG_VERSION"))?;
        for (code, name) in crate::submit::KINDS.iter().enumerate() {
            m.add(*name, code)?;
        }
        Ok(())
    }
}

//! The launcher's library for executors in Python: places, environments, the rendezvous.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use horovod_engine::JobKey;
use horovod_launch::executor::{self, Process, RendezvousSource};
use horovod_launch::hosts::{self, Host, HostSlot, HostsError};
use horovod_launch::{Reach, RendezvousError};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::exit;

/// Where the ranks of one job meet, served by this process.
#[pyclass(frozen, module = "horovod._core")]
pub(crate) struct Rendezvous {
    /// `None` once closed.
    served: Mutex<Option<horovod_launch::Rendezvous>>,
    addresses: Vec<String>,
    key: String,
}

fn parsed(key: &str) -> PyResult<JobKey> {
    JobKey::from_hex(key).ok_or_else(|| PyValueError::new_err("the key is not 64 hex digits"))
}

impl Rendezvous {
    fn of(served: Result<horovod_launch::Rendezvous, RendezvousError>) -> PyResult<Self> {
        let served = served.map_err(|error| match error {
            RendezvousError::Interfaces(_) | RendezvousError::Ports(_) => {
                PyValueError::new_err(error.to_string())
            }
            error => PyOSError::new_err(error.to_string()),
        })?;
        Ok(Self {
            addresses: served.addresses().iter().map(ToString::to_string).collect(),
            key: served.key(),
            served: Mutex::new(Some(served)),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<horovod_launch::Rendezvous>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Rendezvous {
    /// For ranks of any host that have this key and know this port already.
    #[staticmethod]
    fn at(port: u16, size: u32, key: &str) -> PyResult<Self> {
        let key = parsed(key)?;
        Self::of(horovod_launch::Rendezvous::start_at(port, size, key))
    }

    /// For `size` ranks; on the loopback only if `local`, else on these interfaces or all. Without a key it makes one.
    #[new]
    #[pyo3(signature = (size, local, interfaces, key=None))]
    fn new(size: u32, local: bool, interfaces: Vec<String>, key: Option<String>) -> PyResult<Self> {
        let key = key.map(|key| parsed(&key)).transpose()?;
        let reach = if local {
            Reach::ThisHost
        } else {
            Reach::AllHosts
        };
        Self::of(horovod_launch::Rendezvous::start_with_key(
            size,
            reach,
            &interfaces,
            key,
        ))
    }

    /// Where ranks reach it, as `ip:port`.
    fn addresses(&self) -> Vec<String> {
        self.addresses.clone()
    }

    /// 64 hex digits; whoever has them belongs to the job.
    fn key(&self) -> String {
        self.key.clone()
    }

    /// Whether all ranks have met.
    fn has_met(&self) -> bool {
        let mut served = self.lock();
        served.as_mut().is_some_and(|served| {
            served.follow();
            served.has_met()
        })
    }

    /// Tells all ranks that one of them has died.
    fn report_death(&self, rank: u32, host: &str, cause: &str) {
        if let Some(served) = &*self.lock() {
            served.report_death(rank, host, cause);
        }
    }

    /// Stops serving.
    fn close(&self, py: Python<'_>) {
        exit::detached(py, || {
            let served = self.lock().take();
            drop(served);
        });
    }
}

/// Addresses as `ip:port`.
pub(crate) fn parsed_addresses(addresses: &[String]) -> PyResult<Vec<SocketAddr>> {
    let parsed = addresses.iter().map(|at| {
        at.parse()
            .map_err(|_| PyValueError::new_err(format!("{at:?} is not ip:port")))
    });
    parsed.collect()
}

/// Rank, size, local rank, local size, cross rank, cross size.
type Numbers = (u32, u32, u32, u32, u32, u32);

fn numbers(slot: HostSlot) -> Numbers {
    let (local, cross) = (
        (slot.local_rank, slot.local_size),
        (slot.cross_rank, slot.cross_size),
    );
    (slot.rank, slot.size, local.0, local.1, cross.0, cross.1)
}

/// The place and the variables of each process, given as host and address. The ranks meet at `addresses`, or without any at
/// rank 0, which listens on `port`.
#[pyfunction]
pub(crate) fn assign_ranks(
    processes: Vec<(String, String)>,
    addresses: Vec<String>,
    port: u16,
    key: &str,
    interfaces: Vec<String>,
) -> PyResult<Vec<(Numbers, BTreeMap<String, String>)>> {
    let key = JobKey::from_hex(key)
        .ok_or_else(|| PyValueError::new_err("the key is not 64 hex digits"))?;
    let rendezvous = if addresses.is_empty() {
        RendezvousSource::RankZero { port, key }
    } else {
        RendezvousSource::At {
            addresses: parsed_addresses(&addresses)?,
            key,
        }
    };
    let processes: Vec<Process> = processes
        .into_iter()
        .map(|(host, address)| Process { host, address })
        .collect();
    let assigned = executor::assign(&processes, &rendezvous, &interfaces)
        .map_err(|error| PyValueError::new_err(error.to_string()))?;
    let plain = |assigned: executor::Assigned| {
        let numbers = numbers(assigned.slot);
        let text = |word: std::ffi::OsString| word.to_string_lossy().into_owned();
        let variables = assigned.environment.into_iter();
        let variables = variables.map(|(name, value)| (text(name), text(value)));
        (numbers, variables.collect())
    };
    Ok(assigned.into_iter().map(plain).collect())
}

/// Variables that tell a process its part in a job.
#[pyfunction]
pub(crate) fn names_of_a_job() -> Vec<&'static str> {
    executor::names_of_a_job().collect()
}

/// The hosts of `host1:2,host2:4` with their slots; one that is named twice is there twice.
#[pyfunction]
pub(crate) fn parse_hosts(text: &str) -> PyResult<Vec<(String, u32)>> {
    pairs(hosts::parse_items(text, |_| None))
}

/// The hosts of a hostfile with their slots.
#[pyfunction]
pub(crate) fn read_hostfile(file: PathBuf) -> PyResult<Vec<(String, u32)>> {
    pairs(hosts::read_hostfile(&file))
}

/// The host and the numbers of each rank: as many as there are slots, at least `least` and at most `most`.
#[pyfunction]
pub(crate) fn place_ranks(
    hosts: Vec<(String, u32)>,
    least: u32,
    most: Option<u32>,
) -> PyResult<Vec<(String, Numbers)>> {
    let hosts = hosts.into_iter().map(|(name, slots)| Host { name, slots });
    let placed = hosts::assign_between(hosts.collect(), least, most).map_err(hosts_error)?;
    let ranks = placed.into_iter().flat_map(|placement| {
        let name = placement.host.name;
        let slots = placement.slots.into_iter();
        slots.map(move |slot| (name.clone(), numbers(slot)))
    });
    Ok(ranks.collect())
}

fn pairs(hosts: Result<Vec<Host>, HostsError>) -> PyResult<Vec<(String, u32)>> {
    let hosts = hosts.map_err(hosts_error)?.into_iter();
    Ok(hosts.map(|host| (host.name, host.slots)).collect())
}

fn hosts_error(error: HostsError) -> PyErr {
    match &error {
        HostsError::Unread { kind, .. } if *kind != io::ErrorKind::Other => {
            io::Error::new(*kind, error.to_string()).into()
        }
        _ => PyValueError::new_err(error.to_string()),
    }
}

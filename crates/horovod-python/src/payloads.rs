//! Payloads: what `horovod.run` and services have for others, and what those deliver.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use horovod_engine::payload::{PayloadClient, PayloadError, Server};
use horovod_engine::{JobKey, loopback, resolve_interfaces};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::exit;
use crate::signals;

/// Holds what every rank of one call, or client of a service, fetches, and collects what they deliver.
#[pyclass(frozen, module = "horovod._core")]
pub(crate) struct PayloadServer {
    /// `None` once closed.
    server: Mutex<Option<Server>>,
    addresses: Vec<SocketAddr>,
    key: JobKey,
}

#[pymethods]
impl PayloadServer {
    /// Listens on the loopback only if all ranks run on this host. Without a key it makes one.
    #[new]
    #[pyo3(signature = (payload, local, interfaces, key=None))]
    fn new(
        payload: &[u8],
        local: bool,
        interfaces: Vec<String>,
        key: Option<&str>,
    ) -> PyResult<Self> {
        let key = key.map_or_else(|| Ok(JobKey::random()?), key_of)?;
        let chosen = resolve_interfaces(&interfaces)?;
        let bind: Vec<IpAddr> = if local {
            vec![loopback()?]
        } else if chosen.is_empty() {
            vec![Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()]
        } else {
            chosen
        };
        let ports = horovod_engine::config::ports(&horovod_engine::config::ProcessEnvironment)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        let server = Server::start(&bind, ports, key.clone(), payload.to_vec())?;
        Ok(Self {
            addresses: server.addrs().to_vec(),
            server: Mutex::new(Some(server)),
            key,
        })
    }

    /// Where ranks can reach it, as `ip:port`.
    fn addresses(&self) -> Vec<String> {
        self.addresses.iter().map(ToString::to_string).collect()
    }

    /// 64 hex digits; whoever has them belongs to the call.
    fn key(&self) -> String {
        self.key.to_hex()
    }

    /// Has those who ask from now on fetch this.
    fn publish(&self, payload: &[u8]) {
        let server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(server) = &*server {
            server.publish(payload.to_vec());
        }
    }

    /// The next delivery that has arrived, as rank and content; None if there is none.
    fn take<'py>(&self, py: Python<'py>) -> Option<(u32, Bound<'py, PyBytes>)> {
        let server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        let (rank, content) = server.as_ref()?.wait(Duration::ZERO)?;
        Some((rank, PyBytes::new(py, &content)))
    }

    /// Stops listening.
    fn close(&self, py: Python<'_>) {
        exit::detached(py, || {
            let server = self
                .server
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
            drop(server);
        });
    }
}

fn key_of(hex: &str) -> PyResult<JobKey> {
    JobKey::from_hex(hex).ok_or_else(|| PyValueError::new_err("the key is not 64 hex digits"))
}

fn client(addresses: &[String], key: &str, rank: u32, timeout_s: f64) -> PyResult<PayloadClient> {
    let addresses = addresses
        .iter()
        .map(|at| {
            at.parse()
                .map_err(|_| PyValueError::new_err(format!("{at:?} is not ip:port")))
        })
        .collect::<PyResult<_>>()?;
    let key = key_of(key)?;
    let wait_timeout = Duration::try_from_secs_f64(timeout_s)
        .map_err(|e| PyValueError::new_err(format!("{timeout_s} s: {e}")))?;
    Ok(PayloadClient {
        rank,
        addresses,
        key,
        wait_timeout,
    })
}

/// Runs what may wait, with an eye on signals.
fn interruptible<T: Send>(
    py: Python<'_>,
    run: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<T, PayloadError> + Send,
) -> PyResult<T> {
    let mut raised = None;
    let result = exit::detached(py, || {
        run(&mut || match exit::attached(signals::check) {
            Some(checked) => {
                raised = checked.err();
                raised.is_none()
            }
            None => false,
        })
    });
    match raised {
        Some(raised) => Err(raised),
        None => result.map_err(|e| PyRuntimeError::new_err(e.to_string())),
    }
}

/// Fetches the payload of the caller of `horovod.run`.
#[pyfunction]
pub(crate) fn fetch_payload<'py>(
    py: Python<'py>,
    addresses: Vec<String>,
    key: &str,
    rank: u32,
    timeout_s: f64,
) -> PyResult<Bound<'py, PyBytes>> {
    let client = client(&addresses, key, rank, timeout_s)?;
    let content = interruptible(py, |go_on| client.fetch(go_on))?;
    Ok(PyBytes::new(py, &content))
}

/// Brings it this rank's content; returns when it has arrived.
#[pyfunction]
pub(crate) fn deliver_payload(
    py: Python<'_>,
    addresses: Vec<String>,
    key: &str,
    rank: u32,
    content: &[u8],
    timeout_s: f64,
) -> PyResult<()> {
    let client = client(&addresses, key, rank, timeout_s)?;
    interruptible(py, |go_on| client.deliver(content, go_on))
}

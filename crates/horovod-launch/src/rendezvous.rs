//! The job's meeting point, where its ranks find each other.

use std::net::{SocketAddr, TcpListener};

/// Serves one job.
#[derive(Debug)]
pub(crate) struct Rendezvous {
    listener: TcpListener,
}

impl Rendezvous {
    pub(crate) fn start(
        _size: u32,
        _all_local: bool,
        _interfaces: &[String],
    ) -> Result<Self, String> {
        let listener = TcpListener::bind("127.0.0.1:0").map_err(|e| e.to_string())?;
        Ok(Self { listener })
    }
    pub(crate) fn key(&self) -> String {
        "0".repeat(64)
    }
    pub(crate) fn addresses(&self) -> Vec<SocketAddr> {
        self.listener.local_addr().into_iter().collect()
    }
    pub(crate) fn report_death(&mut self, _rank: u32, _host: &str, _cause: &str) {}
    pub(crate) fn departure(&self, _rank: u32) -> Option<usize> {
        None
    }
    pub(crate) fn has_met(&self) -> bool {
        true
    }
}

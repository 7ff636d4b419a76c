//! Claims by strangers decide no allocation: a test of its own, because it watches the allocator.
#![allow(
    clippy::unwrap_used,
    reason = "a test wants to fail at once, with the place"
)]

#[path = "it/common/mod.rs"]
mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, TcpStream},
    sync::atomic::{AtomicUsize, Ordering},
};

use common::TIMEOUT;
use horovod_transport::{
    JobKey,
    rendezvous::{Server, ServerConfig},
};

/// Remembers the largest piece of memory that anybody asked for.
struct Largest;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is left to the system's allocator; only a number is kept.
unsafe impl GlobalAlloc for Largest {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Largest = Largest;

#[test]
fn nothing_is_allocated_by_what_strangers_claim() {
    let key = JobKey::random().unwrap();
    let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let server = Server::start(ServerConfig::new(vec![loopback], key, 1)).unwrap();
    let at = server.addrs()[0];
    LARGEST.store(0, Ordering::Relaxed);
    for claimed in [0x7fff_ffffu32, 0x4000_0000, 1 << 24, 0xffff] {
        for version in 0..9 {
            let mut stranger = TcpStream::connect(at).unwrap();
            stranger.set_read_timeout(Some(TIMEOUT)).unwrap();
            // As far as a first message can be right without the key.
            let mut bytes = [b"horovod", &[version, 1, 1][..], &[0; 12], &[0xff; 4]].concat();
            bytes.truncate(if version == 0 { 0 } else { bytes.len() });
            bytes.extend([0xff; 48]);
            bytes.extend(claimed.to_le_bytes());
            bytes.extend(claimed.to_be_bytes());
            // The server may have hung up already.
            let _ = stranger.write_all(&bytes);
            let _ = stranger.shutdown(std::net::Shutdown::Write);
            // A reset is a way to hang up, too.
            let _ = stranger.read_to_end(&mut Vec::new());
        }
    }
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(
        largest > 0 && largest <= 32 << 10,
        "{largest} bytes at once"
    );
}

//! Replies of a rendezvous to strangers that replay recordings or reflect messages.
#![allow(
    clippy::unwrap_used,
    reason = "a test wants to fail at once, with the place"
)]

use std::{
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    thread::JoinHandle,
};

use crate::common::TIMEOUT;
use horovod_protocol::{Generation, Rank};
use horovod_transport::{
    JobKey, MeshConfig, connect,
    rendezvous::{Server, ServerConfig, ServerEvent},
};

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn server(key: &JobKey) -> Server {
    Server::start(ServerConfig::new(vec![LOOPBACK], key.clone(), 1)).unwrap()
}

fn dial(at: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

/// Everything that comes until the other side hangs up.
fn read_to_end(mut stream: TcpStream) -> Vec<u8> {
    let mut received = Vec::new();
    // A reset is a way to hang up, too.
    let _ = stream.read_to_end(&mut received);
    received
}

/// Passes everything on; what it was, and how much of it came first.
fn copy(mut from: TcpStream, mut to: TcpStream) -> JoinHandle<Sent> {
    std::thread::spawn(move || {
        let (mut copied, mut first) = (Vec::new(), 0);
        let mut buf = [0; 4096];
        while let Ok(n @ 1..) = from.read(&mut buf) {
            copied.extend_from_slice(&buf[..n]);
            if first == 0 {
                first = n;
            }
            to.write_all(&buf[..n]).unwrap();
        }
        let _ = to.shutdown(std::net::Shutdown::Write);
        (copied, first)
    })
}

/// Bytes sent by one side, and the length of its first message, after which it waits for an answer.
type Sent = (Vec<u8>, usize);

/// A whole registration as recorded between the two: the bytes of the rank, and the bytes of the server.
fn record(server: &Server, key: &JobKey) -> (Sent, Sent) {
    let tap = TcpListener::bind((LOOPBACK, 0)).unwrap();
    let mut config = MeshConfig::new(Rank(0), 1, key.clone(), vec![tap.local_addr().unwrap()]);
    config.timeout = TIMEOUT;
    let rank = std::thread::spawn(move || drop(connect(&config).unwrap()));
    let (left, _) = tap.accept().unwrap();
    let right = TcpStream::connect(server.addrs()[0]).unwrap();
    let sent = copy(left.try_clone().unwrap(), right.try_clone().unwrap());
    let answered = copy(right, left);
    rank.join().unwrap();
    (sent.join().unwrap(), answered.join().unwrap())
}

fn registrations(server: &Server) -> usize {
    let mut count = 0;
    while let Some(event) = server.poll_event() {
        count += usize::from(matches!(event, ServerEvent::Registered { .. }));
    }
    count
}

/// A true rank still gets in, and is the only one that did.
fn still_works(server: &Server, key: &JobKey, generation: u64) {
    let mut config = MeshConfig::new(Rank(0), 1, key.clone(), server.addrs().to_vec());
    config.timeout = TIMEOUT;
    let mesh = connect(&config).unwrap();
    assert_eq!(mesh.topology.generation, Generation(generation));
    assert_eq!(registrations(server), 1);
}

#[test]
fn a_recorded_registration_played_again_registers_nobody() {
    let key = JobKey::random().unwrap();
    let server = server(&key);
    let ((sent, hello), (answered, reply)) = record(&server, &key);
    assert_eq!(registrations(&server), 1);
    assert!(sent.starts_with(b"horovod") && sent.len() > hello + 16 && answered.len() > reply);

    // All at once, and each message after the answer to the one before.
    for pieces in [vec![&sent[..]], vec![&sent[..hello], &sent[hello..]]] {
        let mut player = dial(server.addrs()[0]);
        let mut received = Vec::new();
        for piece in pieces {
            player.write_all(piece).unwrap();
            if piece.len() == hello {
                received = vec![0; reply];
                player.read_exact(&mut received).unwrap();
            }
        }
        received.extend(read_to_end(player));
        assert!(received.len() <= reply, "more than the handshake came");
        assert!(received.is_empty() || received != answered[..received.len()]);
    }
    // Replay the server's recorded bytes to the server, then reflect its own new answer.
    let mut player = dial(server.addrs()[0]);
    player.write_all(&answered).unwrap();
    assert!(read_to_end(player).len() <= reply);
    let mut player = dial(server.addrs()[0]);
    player.write_all(&sent[..hello]).unwrap();
    let mut new = vec![0; reply];
    player.read_exact(&mut new).unwrap();
    player.write_all(&new).unwrap();
    assert_eq!(read_to_end(player), []);

    still_works(&server, &key, 2);
}

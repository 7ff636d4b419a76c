//! A start that takes long; it never ends, so no other test here may use the engine of the process.

use std::sync::mpsc;
use std::time::Duration;

use horovod_engine::config::Config;

#[test]
fn queries_do_not_wait_for_a_start_that_takes_long() {
    // Something that takes the connection and never answers.
    let mute = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut config = Config::solo();
    config.ranks.size = 2;
    config.start.rendezvous = vec![mute.local_addr().expect("its address")];
    config.start.job_key = Some("5a".repeat(32));
    config.start.connect_timeout = Duration::from_secs(3600);
    std::thread::spawn(|| horovod_engine::init_with(config));
    let _connection = mute.accept().expect("the start has begun");
    let (done, answer) = mpsc::channel();
    std::thread::spawn(move || done.send(horovod_engine::is_initialized()));
    assert_eq!(answer.recv_timeout(Duration::from_secs(240)), Ok(false));
}

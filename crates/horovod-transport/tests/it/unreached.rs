//! Ranks that cannot connect: all ranks fail with one text, which says what was tried.

use std::time::{Duration, Instant};

use horovod_protocol::Rank;
use horovod_transport::{
    JobKey, MeshConfig, connect,
    rendezvous::{Server, ServerConfig, ServerEvent},
    testing::Refusing,
    unreached::post::Post,
};

/// Nothing here takes so long, however busy the machine is.
const TIMEOUT: Duration = Duration::from_secs(120);

fn server(key: &JobKey, size: u32) -> Server {
    let here = vec![std::net::Ipv4Addr::LOCALHOST.into()];
    let mut config = ServerConfig::new(here, key.clone(), size);
    config.check = "horovodrun --doctor -H a,b".into();
    Server::start(config).expect("listens")
}

/// The part of an agent and its launcher: they carry reports to the server, and its cause back.
fn carry(mut post: Post, server: &Server, tellers: usize) -> String {
    let deadline = Instant::now() + TIMEOUT;
    let mut reports = Vec::new();
    while reports.len() < tellers {
        assert!(Instant::now() < deadline, "only {reports:?}");
        reports.extend(post.take(Instant::now()));
        // The events that come meanwhile are of no interest.
        server.wait_event(Duration::from_millis(10));
    }
    reports
        .into_iter()
        .for_each(|one| server.report_unreached(one));
    loop {
        assert!(Instant::now() < deadline, "no cause");
        if let Some(ServerEvent::Unreachable(text)) = server.wait_event(TIMEOUT) {
            post.answer(&text);
            return text;
        }
    }
}

#[test]
fn those_that_wait_fail_as_soon_as_the_others_know_and_with_the_same_text() {
    let key = JobKey::random().unwrap();
    let server = server(&key, 4);
    let post = Post::open().unwrap();
    let refusing = Refusing::new();
    let name = post.name().to_owned();
    let config = |rank: u32| {
        let far = rank > 1;
        let at = if far {
            vec![refusing.at]
        } else {
            server.addrs().to_vec()
        };
        let mut config = MeshConfig::new(Rank(rank), 4, key.clone(), at);
        config.hostname = if far {
            "host-b".into()
        } else {
            "host-a".into()
        };
        config.timeout = TIMEOUT;
        config.post = far.then(|| name.clone());
        config
    };
    let (cause, texts) = std::thread::scope(|s| {
        // Rank 1 comes when all is over.
        let early = [0, 2, 3].map(|rank| {
            let config = config(rank);
            s.spawn(move || connect(&config).unwrap_err().to_string())
        });
        let cause = carry(post, &server, 2);
        let late = connect(&config(1)).unwrap_err().to_string();
        let mut texts: Vec<String> = early.map(|rank| rank.join().unwrap()).into();
        texts.push(late);
        (cause, texts)
    });
    let expected = format!(
        "the job could not be set up: ranks 2, 3 on host-b cannot connect to the launcher, where all ranks meet (tried \
         {}: connection refused). A firewall on one of the hosts or between them rejects the connections, or nobody \
         listens there. `horovodrun --doctor -H a,b` checks the network and says what to allow",
        refusing.at
    );
    assert_eq!(texts, [&*expected; 4]);
    assert!(expected.ends_with(&cause));
}

#[test]
fn the_ranks_may_come_again_afterwards() {
    let key = JobKey::random().unwrap();
    let server = server(&key, 2);
    let post = Post::open().unwrap();
    let refusing = Refusing::new();
    let mut failing = MeshConfig::new(Rank(1), 2, key.clone(), vec![refusing.at]);
    failing.post = Some(post.name().to_owned());
    failing.timeout = TIMEOUT;
    let good = |rank| {
        let mut config = MeshConfig::new(Rank(rank), 2, key.clone(), server.addrs().to_vec());
        config.timeout = TIMEOUT;
        config
    };
    std::thread::scope(|s| {
        let waiting = s.spawn(|| connect(&good(0)).unwrap_err());
        let failing = s.spawn(|| connect(&failing).unwrap_err());
        let cause = carry(post, &server, 1);
        for error in [waiting.join().unwrap(), failing.join().unwrap()] {
            assert!(error.to_string().ends_with(&cause), "{error}");
        }
        let again = [0, 1].map(|rank| {
            let config = good(rank);
            s.spawn(move || connect(&config).unwrap())
        });
        for rank in again {
            rank.join().unwrap();
        }
    });
}

#[test]
fn without_an_agent_a_rank_says_itself_what_it_tried() {
    let key = JobKey::random().unwrap();
    let refusing = Refusing::new();
    let mut config = MeshConfig::new(Rank(1), 2, key, vec![refusing.at]);
    config.hostname = "host-b".into();
    config.interfaces = vec!["lo".into()];
    config.timeout = TIMEOUT;
    let text = connect(&config).unwrap_err().to_string();
    for part in [
        &*format!(
            "rank 1 on host-b cannot connect to the launcher, where all ranks meet (tried {}: ",
            refusing.at
        ),
        "--network-interfaces (HOROVOD_GLOO_IFACE) names lo, which does not lead to the other host",
        "`horovodrun --doctor -H 127.0.0.1,host-b`",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

//! The exchange of rank 0's addresses and the job's key over the key-value store of a launcher.
//!
//! Others may read what is put there. A key that the user has set never goes there, not even sealed: each rank has the
//! key, and proves that to rank 0. Where the user has set none, rank 0 makes a key and seals it for each rank.
//!
//! The calls wait for other ranks without a limit of their own. They are made on a thread that is left to itself when
//! the time is over.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use horovod_pmi::{Found, Store};
use horovod_transport::sealing::{KeyReceiver, is_proof, prove, seal};
use horovod_transport::{Interrupt, JobKey, RendezvousPlace};

use crate::config::Config;
use crate::error::Error;

/// How often the caller's wish to leave is looked up.
const POLL: Duration = Duration::from_millis(50);
/// Launchers' values have at least 1,024 bytes.
const VALUE_BYTES_MAX: usize = 900;
/// Begins the text of rank 0 where it cannot serve the others; the rest is the reason.
const PROBLEM: &str = "!";
/// First character of a proof, which a rank with a user's key puts instead of its public key. Rank 0 puts this character
/// alone instead of a sealed key.
const USERS_KEY: &str = "-";

/// Exchanges that this process has begun. All ranks have begun equally many.
static ROUND: AtomicU32 = AtomicU32::new(0);

/// Rank 0's part: its place, or why there is none.
pub(super) type Offer = Result<RendezvousPlace, String>;

/// Meets the other ranks: every rank gets rank 0's place. `users_key` is the key that the user has set on this rank.
pub(super) fn meet(
    found: &Found,
    config: &Config,
    users_key: Option<JobKey>,
    offer: Option<Offer>,
    interrupt: Option<&Interrupt>,
) -> Result<RendezvousPlace, Error> {
    let (sender, receiver) = channel();
    let (store, size, rank) = (found.clone(), config.ranks.size, config.ranks.rank);
    let round = ROUND.fetch_add(1, Ordering::Relaxed);
    std::thread::Builder::new()
        .name("hvd-meet".to_owned())
        .spawn(move || {
            let met = (store.open().map_err(|e| e.to_string()))
                .and_then(|mut store| exchange(&mut *store, round, (rank, size), users_key, offer));
            // It may have been given up.
            let _ = sender.send(met);
        })
        .map_err(|e| Error::Init(format!("no thread can be started: {e}")))?;
    let deadline = Instant::now() + config.start.connect_timeout;
    loop {
        if interrupt.is_some_and(Interrupt::wants_to_leave) {
            return Err(Error::Interrupted);
        }
        match receiver.recv_timeout(POLL.min(deadline.saturating_duration_since(Instant::now()))) {
            Ok(met) => return met.map_err(Error::Init),
            Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
            Err(_) => return Err(Error::Init(not_in_time(config))),
        }
    }
}

fn not_in_time(config: &Config) -> String {
    let by = config.start.started.as_ref().map_or("a launcher", |s| s.by);
    format!(
        "rank {} of {} started by {by}: not all ranks have called hvd.init() within {} s \
         (HOROVOD_GLOO_TIMEOUT_SECONDS), or the launcher has not passed on their addresses. All {} ranks must call it; \
         with HOROVOD_RENDEZVOUS_DIR set to a folder that all hosts share, they meet without the launcher",
        config.ranks.rank,
        config.ranks.size,
        config.start.connect_timeout.as_secs_f64(),
        config.ranks.size
    )
}

/// The steps of one rank.
fn exchange(
    store: &mut dyn Store,
    round: u32,
    (rank, size): (u32, u32),
    users_key: Option<JobKey>,
    offer: Option<Offer>,
) -> Result<RendezvousPlace, String> {
    let text = |e: horovod_pmi::StoreError| e.to_string();
    let key_of = |rank: u32| format!("hvd-{round}-public-{rank}");
    let sealed_for = |rank: u32| format!("hvd-{round}-sealed-{rank}");
    let addresses = format!("hvd-{round}-rank0");
    let own = KeyReceiver::new().map_err(|e| format!("no key for this rank: {e}"))?;
    let public = match &users_key {
        Some(key) => {
            let proof = prove(key).map_err(|e| format!("no proof of this rank's key: {e}"))?;
            format!("{USERS_KEY}{proof}")
        }
        None => own.public(),
    };
    store.put(&key_of(rank), &public).map_err(text)?;
    if let Some(offer) = &offer {
        let value = match offer {
            Ok(place) => text_of(&place.addresses),
            Err(why) => problem(why),
        };
        store.put(&addresses, &value).map_err(text)?;
    }
    store.fence().map_err(text)?;
    let mut offer = offer;
    if let Some(Ok(place)) = &offer {
        let mut publics = Vec::new();
        for other in 1..size {
            publics.push(store.get(other, &key_of(other)).map_err(text)?);
        }
        let sealed = sealed_for_all(&publics, users_key.as_ref(), &place.key);
        for (at, other) in (1..size).enumerate() {
            let value = match &sealed {
                Ok(sealed) => sealed[at].clone(),
                Err(why) => problem(why),
            };
            store.put(&sealed_for(other), &value).map_err(text)?;
        }
        if let Err(why) = sealed {
            offer = Some(Err(why));
        }
    }
    store.fence().map_err(text)?;
    if let Some(offer) = offer {
        return offer;
    }
    let value = without_problem(store.get(0, &addresses).map_err(text)?)?;
    let sealed = without_problem(store.get(0, &sealed_for(rank)).map_err(text)?)?;
    let key = match users_key {
        Some(key) => key,
        None => own.open(&sealed).ok_or_else(|| {
            "rank 0 has sealed the key for another process than this one".to_owned()
        })?,
    };
    let addresses =
        read(&value).ok_or_else(|| format!("rank 0 has put no addresses: {value:?}"))?;
    Ok(RendezvousPlace { addresses, key })
}

/// The values that rank 0 puts for the other ranks, whose public keys or proofs these are; or why they cannot meet.
fn sealed_for_all(
    publics: &[String],
    users_key: Option<&JobKey>,
    key: &JobKey,
) -> Result<Vec<String>, String> {
    let mut others = Vec::new();
    for (rank, public) in (1..).zip(publics) {
        let (here, there) = match (users_key, public.strip_prefix(USERS_KEY)) {
            (None, None) => continue,
            (Some(key), Some(proof)) if is_proof(key, proof) => continue,
            (Some(_), Some(_)) => ("is set on rank 0", "is another"),
            (Some(_), None) => ("is set on rank 0", "is not set"),
            (None, Some(_)) => ("is not set on rank 0", "is set"),
        };
        others.push((rank, here, there));
    }
    if let Some((rank, here, there)) = others.first() {
        let more = match others.len() {
            1 => String::new(),
            count => format!(" ({} ranks differ from rank 0)", count),
        };
        return Err(format!(
            "HOROVOD_JOB_KEY (or HOROVOD_JOB_KEY_FILE) {here}, and {there} on rank {rank}{more}: set the same key on \
             all ranks, or on none"
        ));
    }
    let sealed = |public: &String| match users_key {
        Some(_) => Ok(USERS_KEY.to_owned()),
        None => seal(key, public).ok_or_else(|| format!("{public:?} is no public key")),
    };
    publics.iter().map(sealed).collect()
}

/// A value that says why the ranks cannot meet, without white space and short enough for a store.
fn problem(why: &str) -> String {
    let mut text = PROBLEM.to_owned();
    for c in why.chars() {
        match c {
            '%' => text.push_str("%25"),
            c if c.is_whitespace() => text.push_str("%20"),
            c => text.push(c),
        }
        if text.len() > VALUE_BYTES_MAX {
            break;
        }
    }
    text
}

fn without_problem(value: String) -> Result<String, String> {
    match value.strip_prefix(PROBLEM) {
        Some(why) => Err(format!(
            "rank 0: {}",
            why.replace("%20", " ").replace("%25", "%")
        )),
        None => Ok(value),
    }
}

/// As many addresses as a value holds. To another host the loopback is itself.
fn text_of(addresses: &[SocketAddr]) -> String {
    let mut text = String::new();
    for address in addresses.iter().filter(|at| !at.ip().is_loopback()) {
        let more = format!("{}{address}", if text.is_empty() { "" } else { "," });
        if text.len() + more.len() <= VALUE_BYTES_MAX {
            text.push_str(&more);
        }
    }
    text
}

fn read(text: &str) -> Option<Vec<SocketAddr>> {
    text.split(',').map(|one| one.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::{Arc, Barrier, Mutex};

    use horovod_pmi::StoreError;

    use super::*;

    /// A store of a launcher among threads: texts that are put are known from the next fence on.
    #[derive(Clone)]
    struct SharedStore {
        texts: Arc<Mutex<HashMap<String, String>>>,
        fence: Arc<Barrier>,
        unseen: Vec<(String, String)>,
    }

    impl Store for SharedStore {
        fn put(&mut self, key: &str, value: &str) -> Result<(), StoreError> {
            assert!(key.len() < 64 && value.len() < 1024, "{key}={value}");
            let words = [key, value].concat();
            assert!(
                !words.is_empty() && !words.contains([' ', '\n']),
                "{key}={value}"
            );
            self.unseen.push((key.to_owned(), value.to_owned()));
            Ok(())
        }

        fn fence(&mut self) -> Result<(), StoreError> {
            self.texts.lock().unwrap().extend(self.unseen.drain(..));
            self.fence.wait();
            Ok(())
        }

        fn get(&mut self, _: u32, key: &str) -> Result<String, StoreError> {
            let found = self.texts.lock().unwrap().get(key).cloned();
            found.ok_or_else(|| StoreError {
                by: "test".to_owned(),
                why: format!("no {key}"),
            })
        }
    }

    type Met = Vec<Result<RendezvousPlace, String>>;

    fn met_by_all(size: u32, offer: &Offer) -> (Met, SharedStore) {
        met_with_keys(&vec![None; size as usize], offer)
    }

    fn met_with_keys(keys: &[Option<JobKey>], offer: &Offer) -> (Met, SharedStore) {
        let size = keys.len() as u32;
        let shared = SharedStore {
            texts: Arc::default(),
            fence: Arc::new(Barrier::new(size as usize)),
            unseen: Vec::new(),
        };
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let (mut store, offer) = (shared.clone(), (rank == 0).then(|| offer.clone()));
                let key = keys[rank as usize].clone();
                std::thread::spawn(move || exchange(&mut store, 7, (rank, size), key, offer))
            })
            .collect();
        let met = ranks.into_iter().map(|rank| rank.join().unwrap());
        (met.collect(), shared)
    }

    fn place(addresses: &[&str]) -> RendezvousPlace {
        RendezvousPlace {
            addresses: addresses.iter().map(|at| at.parse().unwrap()).collect(),
            key: JobKey::random().unwrap(),
        }
    }

    #[test]
    fn all_ranks_get_the_place_and_the_store_never_has_the_key() {
        let offered = place(&["127.0.0.1:5", "10.0.0.1:5", "[fe80::1%3]:5"]);
        for size in [2, 3, 5] {
            let (met, shared) = met_by_all(size, &Ok(offered.clone()));
            for (rank, met) in met.into_iter().enumerate() {
                let met = met.unwrap();
                assert_eq!(met.key.to_hex(), offered.key.to_hex());
                let without_loopback = if rank == 0 { 0 } else { 1 };
                assert_eq!(met.addresses, offered.addresses[without_loopback..]);
            }
            let texts = shared.texts.lock().unwrap();
            let known = texts
                .values()
                .any(|text| text.contains(&offered.key.to_hex()));
            assert!(!known, "the key travelled in clear");
        }
    }

    #[test]
    fn a_key_of_the_users_is_not_even_sealed_in_the_store() {
        let offered = place(&["10.0.0.1:5"]);
        let keys = vec![Some(offered.key.clone()); 3];
        let (met, shared) = met_with_keys(&keys, &Ok(offered.clone()));
        for met in met {
            let met = met.unwrap();
            assert_eq!(met.key.to_hex(), offered.key.to_hex());
            assert_eq!(met.addresses, offered.addresses);
        }
        let mut values: Vec<_> = shared.texts.lock().unwrap().values().cloned().collect();
        // Three proofs, each another.
        values.retain(|value| !(value.starts_with('-') && value.len() == 97));
        values.sort();
        assert_eq!(values, ["-", "-", "10.0.0.1:5"]);
    }

    #[test]
    fn a_key_that_is_not_the_same_on_all_ranks_is_one_error_on_all() {
        let offered = place(&["10.0.0.1:5"]);
        let key = || Some(offered.key.clone());
        let other = || Some(JobKey::random().unwrap());
        let cases = [
            (
                [key(), None, key()],
                "is set on rank 0, and is not set on rank 1:",
            ),
            (
                [key(), None, None],
                "is set on rank 0, and is not set on rank 1 (2 ranks differ from rank 0):",
            ),
            (
                [None, None, key()],
                "is not set on rank 0, and is set on rank 2:",
            ),
            (
                [key(), key(), other()],
                "is set on rank 0, and is another on rank 2:",
            ),
        ];
        for (keys, words) in cases {
            for met in met_with_keys(&keys, &Ok(offered.clone())).0 {
                let error = met.unwrap_err();
                assert!(error.contains(words), "{error}");
            }
        }
    }

    #[test]
    fn the_reason_of_rank_0_reaches_all() {
        let why = "HOROVOD_PORT_RANGE=5-9: 100 % of its ports are in use";
        for met in met_by_all(3, &Err(why.to_owned())).0 {
            assert!(met.unwrap_err().ends_with(why));
        }
        // The store of this test has a limit.
        for met in met_by_all(2, &Err("a b ".repeat(1000))).0 {
            assert!(met.unwrap_err().contains("a b a b"));
        }
    }

    #[test]
    fn more_addresses_than_a_value_holds_are_left_out() {
        let many: Vec<String> = (0..200).map(|n| format!("10.0.1.{n}:12345")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let (met, _) = met_by_all(2, &Ok(place(&many)));
        let found = met[1].clone().unwrap().addresses.len();
        assert!((40..200).contains(&found), "{found}");
    }
}

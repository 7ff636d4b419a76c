//! Hosts, hostfiles and the places of ranks.

use super::*;

fn host(name: &str, slots: u32) -> Host {
    Host {
        name: name.to_owned(),
        slots,
    }
}

#[track_caller]
fn bad_item(text: &str, item: &str) {
    assert_eq!(
        parse_hosts(text, |_| None),
        Err(HostsError::Item {
            item: item.to_owned()
        }),
        "{text}"
    );
}

#[test]
fn reads_host_lists() {
    let hosts = parse_hosts("worker-0:2, w.1:3 ,u@x_y:0,[fe80::1]:4", |_| None).expect("valid");
    assert_eq!(
        hosts,
        [
            host("worker-0", 2),
            host("w.1", 3),
            host("u@x_y", 0),
            host("[fe80::1]", 4)
        ]
    );
    assert_eq!(hosts[2].address(), "x_y");
    assert_eq!(hosts[3].address(), "fe80::1");
}

#[test]
fn a_comma_may_stand_after_the_last_host() {
    for text in ["a:2,", "a:2, ", "a:2 ,"] {
        assert_eq!(
            parse_hosts(text, |_| None),
            Ok(vec![host("a", 2)]),
            "{text}"
        );
    }
}

#[test]
fn a_name_alone_has_the_slots_that_are_known_of_it() {
    let cores_of = |name: &str| (name == "localhost").then_some(3);
    assert_eq!(
        parse_hosts("localhost,b:1", cores_of).expect("valid"),
        [host("localhost", 3), host("b", 1)]
    );
    assert!(parse_hosts("localhost,b", cores_of).is_err());
}

#[test]
fn an_error_does_not_repeat_more_than_a_line() {
    let long = "x ".repeat(100_000);
    let error = parse_hostfile("f", &long).expect_err("no host").to_string();
    assert!(error.len() < 1000, "{}", error.len());
    let error = parse_discovered(&long, None).expect_err("no host");
    assert!(error.len() < 1000, "{}", error.len());
}

#[test]
fn names_the_bad_item() {
    bad_item("a:2,b", "b");
    bad_item("a:-1", "a:-1");
    bad_item("a:2,,", "");
    bad_item("a:2,,b:1", "");
    bad_item(",", "");
    bad_item("", "");
    bad_item("a:x", "a:x");
    bad_item("-o:1", "-o:1");
    bad_item("a b:1", "a b:1");
    bad_item("::1:2", "::1:2");
    bad_item("a:99999999999", "a:99999999999");
}

#[test]
fn reads_hostfiles() {
    let text = "# cluster\n\nh1 slots=2 max-slots=4\n h2:3  # fast\nh3\nh1\nh4 slots = 5\n";
    let hosts = parse_hostfile("f", text).expect("valid");
    assert_eq!(
        hosts,
        [host("h1", 3), host("h2", 3), host("h3", 1), host("h4", 5)]
    );
}

#[test]
fn names_file_line_and_content_of_a_bad_hostfile_line() {
    #[track_caller]
    fn bad(line: &str, with: &str) {
        let text = format!("ok slots=1\n\n{line}\n");
        let error = parse_hostfile("my/hosts", &text)
            .expect_err(line)
            .to_string();
        assert!(error.starts_with("my/hosts, line 3: "), "{error}");
        assert!(error.contains(line) && error.contains(with), "{error}");
    }
    bad("h1 slots=two", "(\"two\" is not a whole number)");
    bad("h1 slots=", "is not a whole number");
    bad("h1 2", "is not slots=n");
    bad("h1 speed=2", "unknown setting");
    bad("h1:2:3", "is not a host name");
    bad("h1 slots=1 slots=2", "given twice");
    bad("=2", "is not a host name");
    assert_eq!(
        parse_hostfile("f", "# nothing\n")
            .expect_err("empty")
            .to_string(),
        "f names no host"
    );
}

#[test]
fn assigns_ranks_as_horovod_does() {
    let hosts = [host("a", 2), host("b", 4), host("c", 1)];
    let slots: Vec<_> = assign(&hosts, 7)
        .expect("enough")
        .into_iter()
        .flat_map(|placement| placement.slots)
        .map(|s| {
            (
                s.rank,
                s.local_rank,
                s.local_size,
                s.cross_rank,
                s.cross_size,
            )
        })
        .collect();
    assert_eq!(
        slots,
        [
            (0, 0, 2, 0, 3),
            (1, 1, 2, 0, 2),
            (2, 0, 4, 1, 3),
            (3, 1, 4, 1, 2),
            (4, 2, 4, 0, 1),
            (5, 3, 4, 0, 1),
            (6, 0, 1, 2, 3),
        ]
    );
}

#[test]
fn starts_no_more_than_asked() {
    let placed = assign(&[host("localhost", 4), host("b", 4)], 2).expect("enough");
    assert_eq!(placed.len(), 1);
    assert_eq!(placed[0].slots.len(), 2);
    assert_eq!(
        (placed[0].slots[1].size, placed[0].slots[1].local_size),
        (2, 2)
    );
    let placed = assign(&[host("a", 0), host("b", 1)], 1).expect("enough");
    assert_eq!(placed[0].host.name, "b");
}

#[test]
fn a_host_named_twice_gets_distinct_local_ranks() {
    let placed = assign(&parse_hosts("a:2,b:1,a:2", |_| None).expect("valid"), 5).expect("enough");
    assert_eq!(placed.len(), 2);
    let local: Vec<_> = placed[0]
        .slots
        .iter()
        .map(|s| (s.local_rank, s.local_size))
        .collect();
    assert_eq!(local, [(0, 4), (1, 4), (2, 4), (3, 4)]);
}

#[test]
fn starts_as_many_as_there_are_slots_between_two_numbers() {
    let twice = || vec![host("a", 2), host("b", 1), host("a", 1)];
    let counts = |least, most| {
        let placed = assign_between(twice(), least, most)?;
        Ok::<_, HostsError>(placed.iter().map(|p| p.slots.len()).collect::<Vec<_>>())
    };
    assert_eq!(counts(1, None).expect("enough"), [3, 1]);
    assert_eq!(counts(1, Some(3)).expect("enough"), [3]);
    assert_eq!(counts(0, Some(0)).expect("enough"), [0; 0]);
    assert!(matches!(
        counts(5, None),
        Err(HostsError::Slots { wanted: 5, .. })
    ));
}

#[test]
fn a_hostfile_that_cannot_be_read_is_an_error_with_its_kind() {
    let error = read_hostfile(Path::new("/no/such/hosts")).expect_err("missing");
    assert!(
        matches!(&error, HostsError::Unread { kind, .. } if *kind == io::ErrorKind::NotFound),
        "{error}"
    );
    let error = read_hostfile(Path::new("/dev/zero")).expect_err("endless");
    assert!(error.to_string().contains("longer than"), "{error}");
}

#[test]
fn refuses_more_processes_than_an_agent_starts() {
    let many = u32::try_from(HOST_RANKS_MAX).expect("small") + 1;
    let error = assign(&[host("a", many)], many)
        .expect_err("too many")
        .to_string();
    assert!(error.contains("16385 processes on host a"), "{error}");
}

#[test]
fn refuses_too_few_slots() {
    let error = assign(&[host("a", 2), host("b", 1)], 4)
        .expect_err("too few")
        .to_string();
    assert_eq!(
        error,
        "Requested more processes (4) than there are available slots (3) on a:2,b:1: give the hosts more slots (-H \
         name:slots, or slots=n in the hostfile), or ask for fewer processes with -np"
    );
}

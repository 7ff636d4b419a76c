//! Banners and command lines of every family.

use super::*;

const AGENT: &str = "/opt/horovodrun __agent --dial-from-mpi";

fn hosts(text: &str) -> Vec<Host> {
    crate::hosts::parse_hosts(text, |_| None).expect("hosts")
}

fn family(kind: FamilyKind) -> Family {
    Family {
        kind,
        program: "/usr/bin/mpirun".into(),
        banner: "MPI 1".to_owned(),
    }
}

fn options(set: impl FnOnce(&mut Options)) -> Options {
    let mut options = Options::default();
    set(&mut options);
    options
}

fn line(kind: FamilyKind, hosts_text: &str, options: &Options) -> Result<String, String> {
    let line = family(kind).line(options, &hosts(hosts_text), Path::new("/opt/horovodrun"));
    line.map(|line| line.to_string())
        .map_err(|error| error.to_string())
}

#[track_caller]
fn is(kind: FamilyKind, set: impl FnOnce(&mut Options), expected: &str) {
    let line = line(kind, "a:2,b:2", &options(set)).expect("valid");
    assert_eq!(line, format!("/usr/bin/mpirun {expected} {AGENT}"));
}

const PASSED: &str = "-x HOROVODRUN_AGENTS_KEY -x HOROVODRUN_AGENTS_ADDRESSES";

#[test]
fn each_family_is_recognised() {
    for (text, kind, name) in [
        (
            "mpirun (Open MPI) 4.1.4\n\nReport bugs to",
            FamilyKind::OpenMpi,
            "Open MPI 4.1.4",
        ),
        (
            "mpirun (Open MPI) 5.0.11\n",
            FamilyKind::Prrte,
            "Open MPI 5.0.11",
        ),
        ("OpenRTE 2.0.1", FamilyKind::OpenMpi, "Open MPI 2.0.1"),
        (
            "mpirun (IBM Spectrum MPI) 10.3.1",
            FamilyKind::Spectrum,
            "Spectrum MPI 10.3.1",
        ),
        (
            "HYDRA build details:\n    Version:       5.0.2\n",
            FamilyKind::Hydra,
            "Hydra 5.0.2",
        ),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.18",
            FamilyKind::Intel,
            "Intel(R) MPI Library for Linux* OS, Version 2021.18",
        ),
    ] {
        assert_eq!(recognise(text), Some((kind, name.to_owned())), "{text}");
    }
    assert_eq!(recognise("slurm 24.11"), None);
}

#[test]
fn open_mpi_5_has_other_names_for_what_its_launcher_does() {
    let plain =
        format!("--allow-run-as-root -np 4 -H a:2,b:2 --bind-to none --map-by slot {PASSED}");
    is(FamilyKind::OpenMpi, |_| (), &plain);
    is(FamilyKind::Prrte, |_| (), &plain);
    let set = |o: &mut Options| {
        o.ssh_port = Some(22);
        o.ssh_identity_file = Some("/k".into());
        o.network_interfaces = vec!["eth0".to_owned(), "eth1".to_owned()];
        o.mpi.binding = Some("--map-by node".to_owned());
        o.mpi.args = Some("-mca pml ob1 -x 'A=b c'".to_owned());
    };
    let start = "--allow-run-as-root -np 4 -H a:2,b:2 --map-by node";
    is(
        FamilyKind::OpenMpi,
        set,
        &format!(
            "{start} -mca plm_rsh_args -p 22 -i /k -mca btl_tcp_if_include eth0,eth1 -mca oob_tcp_if_include eth0,eth1 \
             {PASSED} -mca pml ob1 -x A=b c"
        ),
    );
    is(
        FamilyKind::Prrte,
        set,
        &format!(
            "{start} --prtemca plm_ssh_args -p 22 -i /k -mca btl_tcp_if_include eth0,eth1 --prtemca prte_if_include \
             eth0,eth1 {PASSED} -mca pml ob1 -x A=b c"
        ),
    );
}

#[test]
fn many_hosts_are_reached_at_once() {
    let names: Vec<String> = (0..64).map(|at| format!("h{at}:1")).collect();
    let of = |kind| line(kind, &names.join(","), &options(|_| ())).expect("valid");
    let four = of(FamilyKind::OpenMpi);
    assert!(four.contains(" -mca plm_rsh_no_tree_spawn true -mca plm_rsh_num_concurrent 64 "));
    let five = of(FamilyKind::Prrte);
    assert!(
        five.contains(" --prtemca plm_ssh_no_tree_spawn true --prtemca plm_ssh_num_concurrent 64 ")
    );
}

#[test]
fn spectrum_has_an_option_for_tcp() {
    let start = "--allow-run-as-root -np 4 -H a:2,b:2 -bind-to socket -map-by socket -rank-by core";
    is(FamilyKind::Spectrum, |_| (), &format!("{start} {PASSED}"));
    is(
        FamilyKind::Spectrum,
        |o| o.mpi.tcp = true,
        &format!("{start} -tcp {PASSED}"),
    );
    is(
        FamilyKind::OpenMpi,
        |o| o.mpi.tcp = true,
        &format!("--allow-run-as-root -np 4 -H a:2,b:2 --bind-to none --map-by slot {PASSED}"),
    );
}

#[test]
fn hydra_and_intel_name_hosts_in_their_ways() {
    is(
        FamilyKind::Hydra,
        |_| (),
        "-np 4 -hosts a:2,b:2 -bind-to none",
    );
    is(FamilyKind::Intel, |_| (), "-np 4 -ppn 2 -hosts a,b");
    let unequal = line(FamilyKind::Hydra, "a:2,b:1", &options(|_| ())).expect("valid");
    assert!(unequal.contains("-np 3 -hosts a:2,b:1 "), "{unequal}");
    let why = line(FamilyKind::Intel, "a:2,b:1", &options(|_| ())).expect_err("unequal");
    assert_eq!(
        why,
        "Intel MPI's -ppn needs the same number of processes on each host, got a:2,b:1: choose -np and -H accordingly"
    );
    let set = |o: &mut Options| o.network_interfaces = vec!["eth0".to_owned()];
    is(
        FamilyKind::Hydra,
        set,
        "-np 4 -hosts a:2,b:2 -bind-to none -iface eth0",
    );
    let two = options(|o| o.network_interfaces = vec!["x".to_owned(), "y".to_owned()]);
    let why = line(FamilyKind::Hydra, "a:1", &two).expect_err("two");
    assert!(why.contains("takes one interface, got x,y"), "{why}");
    let with_port = options(|o| o.ssh_port = Some(22));
    for (kind, name) in [
        (FamilyKind::Hydra, "HYDRA_LAUNCHER_EXTRA_ARGS"),
        (FamilyKind::Intel, "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"),
    ] {
        let line = family(kind).line(&with_port, &hosts("a:1"), Path::new("/x"));
        assert_eq!(line.expect("valid").env, [(name, "-p 22".to_owned())]);
    }
}

#[test]
fn jsrun_makes_one_resource_set_for_each_host() {
    let usual = "--nrs 2 --tasks_per_rs 2 --rs_per_host 1 --cpu_per_rs ALL_CPUS --gpu_per_rs ALL_GPUS --bind none";
    is(FamilyKind::Jsrun, |_| (), usual);
    let set = |o: &mut Options| {
        o.mpi.tcp = true;
        o.mpi.args = Some("-gpu".to_owned());
    };
    is(
        FamilyKind::Jsrun,
        set,
        &format!("{usual} --smpiargs -tcp -gpu"),
    );
    let own = |o: &mut Options| o.mpi.binding = Some("--np 4 -c 7".to_owned());
    is(FamilyKind::Jsrun, own, "--np 4 -c 7");
    let why = line(FamilyKind::Jsrun, "a:2,b:1", &options(|_| ())).expect_err("unequal");
    assert!(why.contains("--binding-args"), "{why}");
    let with_port = options(|o| o.ssh_port = Some(22));
    let why = line(FamilyKind::Jsrun, "a:2", &with_port).expect_err("no ssh");
    assert_eq!(
        why,
        "argument -p: not allowed with --jsrun, which uses no ssh; leave -p out"
    );
}

#[test]
fn what_cannot_be_given_to_a_launcher_is_refused() {
    let why = line(FamilyKind::OpenMpi, "me@a:1", &options(|_| ())).expect_err("a user");
    assert!(
        why.contains("host me@a: MPI's launcher takes no user names"),
        "{why}"
    );
    let open = options(|o| o.mpi.args = Some("-x 'A".to_owned()));
    let why = line(FamilyKind::OpenMpi, "a:1", &open).expect_err("a quote");
    assert!(
        why.starts_with("argument --mpi-args: the quote ' has no end"),
        "{why}"
    );
}

//! PMI-1 against a launcher's end that the tests play, and the variables of launchers. PMIx runs with real launchers, in
//! tests/hosts/test_mpi_hosts.py.

use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use horovod_settings::Environment;

use crate::pmi1::Pmi1;
use crate::{Found, OwnStep, Store, StoreError, find};

struct Variables(&'static [(&'static str, &'static str)]);

impl Environment for Variables {
    fn get(&self, name: &str) -> Option<String> {
        let found = self.0.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    }

    fn names(&self) -> Vec<String> {
        self.0.iter().map(|(name, _)| (*name).to_owned()).collect()
    }
}

/// A launcher that expects these requests and gives these answers, byte by byte where they are long.
fn launcher(dialogue: &'static [(&'static str, &'static str)]) -> (UnixStream, JoinHandle<()>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let thread = std::thread::spawn(move || {
        let mut requests = BufReader::new(theirs.try_clone().unwrap()).lines();
        let mut answers = theirs;
        for (request, answer) in dialogue {
            assert_eq!(requests.next().unwrap().unwrap(), *request);
            for piece in answer.as_bytes().chunks(7) {
                answers.write_all(piece).unwrap();
            }
        }
    });
    (ours, thread)
}

fn opened(stream: UnixStream) -> Result<Pmi1, StoreError> {
    Pmi1::over(stream.into(), "PMI-1".to_owned())
}

/// As MPICH 5 answers, whose fields have another order than those of version 4.
const BEGIN: [(&str, &str); 3] = [
    (
        "cmd=init pmi_version=1 pmi_subversion=1",
        "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1\n",
    ),
    (
        "cmd=get_maxes",
        "cmd=maxes tag=0 rc=0 kvsname_max=256 keylen_max=64 vallen_max=16\n",
    ),
    (
        "cmd=get_my_kvsname",
        "cmd=my_kvsname rc=0 tag=0 kvsname=kvs_1_2\n",
    ),
];

#[test]
fn texts_are_put_and_got() {
    const DIALOGUE: [(&str, &str); 6] = [
        BEGIN[0],
        BEGIN[1],
        BEGIN[2],
        (
            "cmd=put kvsname=kvs_1_2 key=a value=one,two",
            "cmd=put_result rc=0 msg=success\n",
        ),
        ("cmd=barrier_in", "cmd=barrier_out\n"),
        (
            "cmd=get kvsname=kvs_1_2 key=b",
            "value=[::1%2]:5=x rc=0 msg=success cmd=get_result\n",
        ),
    ];
    let (stream, launcher) = launcher(&DIALOGUE);
    let mut store = opened(stream).unwrap();
    store.put("a", "one,two").unwrap();
    store.fence().unwrap();
    assert_eq!(store.get(1, "b").unwrap(), "[::1%2]:5=x");
    // 16 bytes are the launcher's limit, with the NUL that it adds.
    let error = store.put("a", "0123456789abcdef").unwrap_err();
    assert!(error.why.contains("16 bytes"), "{error}");
    launcher.join().unwrap();
}

#[test]
fn a_refusal_names_request_and_answer_and_the_store_goes_on() {
    const DIALOGUE: [(&str, &str); 5] = [
        BEGIN[0],
        BEGIN[1],
        BEGIN[2],
        (
            "cmd=get kvsname=kvs_1_2 key=b",
            "cmd=get_result rc=-1 msg=key_b_not_found\n",
        ),
        ("cmd=barrier_in", "cmd=barrier_out rc=0\n"),
    ];
    let (stream, launcher) = launcher(&DIALOGUE);
    let mut store = opened(stream).unwrap();
    let error = store.get(1, "b").unwrap_err().to_string();
    assert!(
        error.contains("key=b") && error.contains("key_b_not_found"),
        "{error}"
    );
    store.fence().unwrap();
    launcher.join().unwrap();
}

#[test]
fn a_launcher_that_answers_something_else_or_nothing_is_an_error() {
    for (answer, expected) in [
        ("cmd=barrier_out\n", "was answered by"),
        ("", "has closed its end"),
    ] {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(answer.as_bytes()).unwrap();
        theirs.shutdown(Shutdown::Write).unwrap();
        let error = opened(ours).err().unwrap();
        assert!(error.why.contains(expected), "{error}");
    }
}

#[test]
fn after_a_request_without_answer_the_store_is_of_no_use() {
    let (stream, launcher) = launcher(&BEGIN);
    let mut store = opened(stream).unwrap();
    launcher.join().unwrap();
    store.fence().unwrap_err();
    let error = store.fence().unwrap_err();
    assert!(error.why.contains("out of step"), "{error}");
}

#[test]
fn a_descriptor_that_is_not_open_is_named() {
    for descriptor in [-1, i32::MAX] {
        let error = Found::Pmi1(descriptor).open().err().unwrap();
        assert!(error.by.contains(&descriptor.to_string()), "{error}");
    }
}

#[test]
fn launchers_are_known_by_their_variables() {
    let pmix = Found::Pmix {
        namespace: "job@1".to_owned(),
        rank: 3,
    };
    const HYDRA: &[(&str, &str)] = &[("PMI_FD", "9"), ("PMI_RANK", "1"), ("PMI_SIZE", "2")];
    const OPEN_MPI_4: &[(&str, &str)] = &[
        ("PMIX_NAMESPACE", "job@1"),
        ("PMIX_RANK", "3"),
        ("PMIX_SERVER_URI41", "x"),
    ];
    const OPEN_MPI_5: &[(&str, &str)] = &[
        ("PMIX_NAMESPACE", "job@1"),
        ("PMIX_RANK", "3"),
        ("PMIX_SERVER_URI41", "x"),
        ("OMPI_VERSION", "5.0.11"),
    ];
    const HALF: &[(&str, &str)] = &[("PMIX_NAMESPACE", "job@1"), ("PMIX_RANK", "3")];
    assert_eq!(find(&Variables(HYDRA)), Some(Found::Pmi1(9)));
    assert_eq!(find(&Variables(OPEN_MPI_4)), Some(pmix));
    assert_eq!(find(&Variables(OPEN_MPI_5)), None);
    assert_eq!(find(&Variables(HALF)), None);
    assert_eq!(find(&Variables(&[])), None);
}

/// The steps that variables name, the nearest launcher, and what is left of rank and namespace.
#[test]
fn variables_of_an_outer_step_of_slurm_are_hidden() {
    let slurm = [("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "2")];
    for (job_of_pmi, namespace, launcher, has_pmi, has_pmix) in [
        ("7.2", "slurm.pmix.7.2", "slurmstepd", true, true),
        ("7.1", "slurm.pmix.7.1", "slurmstepd", false, false),
        ("7.1", "slurm.pmix.7.2", "slurmstepd", false, true),
        ("7.2", "prterun-1", "slurmstepd", true, true),
        // It set rank and size for this process, and the number of the job is left from the step around it.
        ("7.1", "slurm.pmix.7.1", "hydra_pmi_proxy", true, true),
    ] {
        let pmi = [("PMI_JOBID", job_of_pmi), ("PMI_RANK", "0")];
        let pmix = [("PMIX_NAMESPACE", namespace), ("PMIX_RANK", "0")];
        let env = Variables(Vec::leak([slurm, pmi, pmix].concat()));
        let own = OwnStep::under(&env, || Some(launcher.to_owned()));
        let found = (own.get("PMI_RANK"), own.get("PMIX_RANK"));
        let rank = |is_there: bool| is_there.then(|| "0".to_owned());
        assert_eq!(
            found,
            (rank(has_pmi), rank(has_pmix)),
            "{job_of_pmi} {namespace} {launcher}"
        );
        assert_eq!(own.names().contains(&"PMI_RANK".to_owned()), has_pmi);
        assert!(own.get("SLURM_STEP_ID").is_some());
    }
    // Outside of Slurm nothing is hidden, and no process is looked at.
    let env = Variables(&[("PMI_JOBID", "7.1"), ("PMI_RANK", "0")]);
    let own = OwnStep::under(&env, || unreachable!());
    assert!(own.get("PMI_RANK").is_some());
}

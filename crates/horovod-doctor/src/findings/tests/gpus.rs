//! Findings on GPUs, their driver and NCCL.

use super::*;

#[test]
fn what_tensors_on_gpus_need() {
    check(
        |f| f.gpus = vec!["A100".into()],
        Severity::Note,
        "2 ranks share 1 GPU",
        "give this host 1 slot if",
    );
    check(
        |f| {
            f.gpus = vec!["A100".into(); 2];
            f.python.as_mut().expect("well").cuda = Err("libcuda.so.1: not found".into());
        },
        Severity::Risk,
        "there are GPUs, and CUDA cannot be used: libcuda.so.1: not found",
        "--gpus all",
    );
    check(
        |f| {
            f.gpus = vec!["A100".into(); 2];
            f.python.as_mut().expect("well").nccl = Err("libnccl.so.2: not found".into());
        },
        Severity::Slow,
        "NCCL cannot be used, tensors on GPUs go through host memory: libnccl.so.2: not found",
        "HOROVOD_NCCL_LIBRARY",
    );
    check(
        |f| {
            f.gpus = vec!["A100".into(); 2];
            f.gpus_apart = vec!["GPU0 and GPU1 (NS)".into()];
        },
        Severity::Slow,
        "cannot read each other's memory: GPU0 and GPU1 (NS)",
        "IOMMU",
    );
    // Without a GPU nobody misses them.
    let mut without = chart(1);
    let python = facts(&mut without, 0).python.as_mut().expect("well");
    python.cuda = Err("not found".into());
    python.nccl = Err("not found".into());
    assert_eq!(of(&without), []);
    check(
        |f| f.gpu_problem = Some("Driver/library version mismatch".into()),
        Severity::Risk,
        "version mismatch",
        "driver",
    );
}

#[test]
fn versions_of_nccl_are_compared_where_there_are_gpus() {
    let mut chart = chart(3);
    let change = |facts: &mut HostFacts| {
        facts.gpus = vec!["H100".into(); 2];
        let python = facts.python.as_mut().expect("well");
        python.nccl = Ok(("2.18.1".into(), "libnccl.so.2".into()));
    };
    change(facts(&mut chart, 1));
    assert_eq!(of(&chart), []);
    facts(&mut chart, 2).gpus = vec!["H100".into(); 2];
    only(
        &chart,
        Severity::Slow,
        "h1,h2",
        "different versions of NCCL: 2.18.1 on h1; 2.30.7 on h2",
        "the same everywhere",
    );
}

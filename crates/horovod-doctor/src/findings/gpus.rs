//! Findings on GPUs: driver and NCCL of each host, ranks that share a GPU, GPUs that cannot reach each other.

use std::collections::BTreeMap;

use super::super::chart::Chart;
use super::super::facts::HostFacts;
use super::{Findings, Severity};

/// Looks at one host.
pub(super) fn judge(slots: u32, name: &str, facts: &HostFacts, found: &mut Findings) {
    if let Some(why) = &facts.gpu_problem {
        let what = format!("nvidia-smi: {why}");
        let fix = "check the driver (`dmesg | grep -i nvrm`); of no concern to jobs without GPUs";
        found.add(Severity::Risk, name, what, fix);
    }
    let gpus = facts.gpus.len();
    if !facts.has_gpus() {
        return;
    }
    if gpus > 0 && slots as usize > gpus {
        let (word, own) = if gpus == 1 {
            ("GPU", "slot")
        } else {
            ("GPUs", "slots")
        };
        let what = format!(
            "{slots} ranks share {gpus} {word}: NCCL refuses two ranks on one GPU (before 2.30.3 always, then without \
             NCCL_MULTI_RANK_GPU_ENABLE=1), and their tensors go through host memory"
        );
        let fix = format!("give this host {gpus} {own} if every rank is to have its own");
        found.add(Severity::Note, name, what, fix);
    }
    if let Ok(python) = &facts.python
        && python.horovod.is_ok()
    {
        if python.rocm.is_some() {
            if let Err(why) = &python.nccl {
                let what = format!(
                    "AMD's NCCL (RCCL) cannot be used, tensors on GPUs go through host memory: {why}"
                );
                let fix = "install rccl of the same ROCm, or name its folder by HOROVOD_ROCM_HOME";
                found.add(Severity::Slow, name, what, fix);
            }
        } else if let Err(why) = &python.cuda {
            let what = format!("there are GPUs, and CUDA cannot be used: {why}");
            let fix = "install the driver's library there, in a container run it with the NVIDIA runtime \
                       (`docker run --gpus all`); of no concern to jobs without GPUs";
            found.add(Severity::Risk, name, what, fix);
        } else if let Err(why) = &python.nccl {
            let what =
                format!("NCCL cannot be used, tensors on GPUs go through host memory: {why}");
            let fix = "pip install nvidia-nccl-cu13 (or -cu12, as PyTorch's CUDA), or name the file by \
                       HOROVOD_NCCL_LIBRARY";
            found.add(Severity::Slow, name, what, fix);
        }
    }
    if !facts.gpus_apart.is_empty() && slots > 1 {
        let what = format!(
            "GPUs that cannot read each other's memory: {} (see `nvidia-smi topo -p2p r`)",
            facts.gpus_apart.join(", ")
        );
        let fix = "NCCL goes through host memory between them; a virtual machine or the IOMMU (ACS) may be in the way";
        found.add(Severity::Slow, name, what, fix);
    }
}

/// NCCL's version, which has to be the same everywhere.
pub(super) fn compare(chart: &Chart, found: &mut Findings) {
    let mut have: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for host in chart.hosts.iter().filter(|host| host.slots > 0) {
        let Some(facts) = host.facts.as_ref().filter(|facts| facts.has_gpus()) else {
            continue;
        };
        if let Ok(python) = &facts.python
            && let Ok((version, _)) = &python.nccl
        {
            let of = if python.rocm.is_some() {
                " of AMD's"
            } else {
                ""
            };
            have.entry(format!("{version}{of}"))
                .or_default()
                .push(&host.name);
        }
    }
    if have.len() < 2 {
        return;
    }
    let list: Vec<String> = have
        .iter()
        .map(|(version, hosts)| format!("{version} on {}", hosts.join(", ")))
        .collect();
    let what = format!("different versions of NCCL: {}", list.join("; "));
    let fix = "install the same everywhere (PyTorch brings its own): else tensors on GPUs go through host memory, or \
               with HOROVOD_GPU_OPERATIONS=NCCL the job fails";
    for host in have.values().flatten() {
        found.add(Severity::Slow, host, &*what, fix);
    }
}

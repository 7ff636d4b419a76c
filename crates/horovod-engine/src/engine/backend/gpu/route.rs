//! The agreement of a set's members on how operations on their GPU tensors are carried out.

use horovod_gpu::{NCCL_SHARES_GPUS_SINCE, Stack};
use horovod_protocol::Rank;
use horovod_protocol::wire::cut_at;

use super::super::AdasumScope;
use crate::config::GpuOperations;

/// Capabilities that each member sends to the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) operations: GpuOperations,
    /// Several ranks may use one GPU.
    pub(super) shares_gpus: bool,
    /// Result of `nccl_built()` there.
    pub(super) reports_nccl: bool,
    /// Its equipment, or why it has none.
    pub(super) has: Result<Equipment, String>,
}

/// Requirements of NCCL that a member meets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Equipment {
    /// Vendor of the GPU.
    pub(super) stack: Stack,
    /// NCCL's version, as it says it.
    pub(super) nccl: i32,
    pub(super) uuid: [u8; 16],
    /// Of the first member: the communicator's.
    pub(super) id: [u8; 128],
}

/// How operations of a set are carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SetRoute {
    /// By this member alone.
    Alone,
    /// By NCCL, with this id.
    Nccl(Box<[u8; 128]>),
    /// Through host memory; why, if that is worth a warning.
    Staged(Option<String>),
}

/// Agreement of the members of a set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Conclusion {
    pub(super) route: SetRoute,
    /// Scope of Adasum, or why there is none.
    pub(super) adasum: Result<AdasumScope, String>,
}

/// Longest reason that is told.
const REASON_MAX: usize = 600;
const HEAD: usize = 4;
const FIXED: usize = HEAD + 1 + 4 + 16 + 128;

impl Offer {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![
            self.operations as u8,
            u8::from(self.shares_gpus),
            u8::from(self.reports_nccl),
            u8::from(self.has.is_ok()),
        ];
        match &self.has {
            Ok(equipment) => {
                bytes.push(equipment.stack as u8);
                bytes.extend(equipment.nccl.to_le_bytes());
                bytes.extend(equipment.uuid);
                bytes.extend(equipment.id);
            }
            Err(reason) => {
                bytes.extend(cut_at(reason, REASON_MAX).as_bytes());
            }
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let [operations, shares, reports_nccl, has, rest @ ..] = bytes else {
            return None;
        };
        let all = [
            GpuOperations::Auto,
            GpuOperations::Nccl,
            GpuOperations::Host,
        ];
        let operations = all.into_iter().find(|one| *one as u8 == *operations)?;
        let has = match has {
            1 if bytes.len() == FIXED => Ok(Equipment {
                stack: [Stack::Cuda, Stack::Rocm]
                    .into_iter()
                    .find(|one| *one as u8 == rest[0])?,
                nccl: i32::from_le_bytes(rest[1..5].try_into().ok()?),
                uuid: rest[5..21].try_into().ok()?,
                id: rest[21..].try_into().ok()?,
            }),
            1 => return None,
            _ => Err(String::from_utf8_lossy(rest).into_owned()),
        };
        Some(Self {
            operations,
            shares_gpus: *shares == 1,
            reports_nccl: *reports_nccl == 1,
            has,
        })
    }
}

/// One member as all see it.
struct Member {
    rank: Rank,
    offer: Offer,
}

/// The conclusion from all offers. It depends on the offers alone, so all members conclude the same. `host` names a
/// rank's host.
pub(super) fn conclude(
    ranks: &[Rank],
    offers: &[Vec<u8>],
    host: impl Fn(Rank) -> String,
) -> Result<Conclusion, String> {
    let mut members = Vec::new();
    for (rank, bytes) in ranks.iter().zip(offers) {
        let offer = Offer::decode(bytes);
        let offer = offer.ok_or_else(|| format!("{rank} does not say what it has for GPUs"))?;
        members.push(Member { rank: *rank, offer });
    }
    Ok(Conclusion {
        route: route(&members, &host)?,
        adasum: adasum(&members, &host),
    })
}

/// Scripts multiply the learning rate by `local_size()` where `nccl_built()` says so, for the sums inside the hosts are
/// divided by it there: so this follows from that answer, and not from the route.
fn adasum(members: &[Member], host: &impl Fn(Rank) -> String) -> Result<AdasumScope, String> {
    let telling = |tells| members.iter().find(|m| m.offer.reports_nccl == tells);
    match (telling(true), telling(false)) {
        (Some(with), Some(without)) => Err(format!(
            "Adasum of GPU tensors averages inside each host where NCCL is found, which hvd.nccl_built() tells scripts, \
             and combines all ranks elsewhere: it is found on {} (host {}), and not on {} (host {}). Install the same \
             NCCL on all hosts, or set HOROVOD_GPU_OPERATIONS=HOST",
            with.rank,
            host(with.rank),
            without.rank,
            host(without.rank)
        )),
        (Some(_), None) => Ok(AdasumScope::Hosts),
        _ => Ok(AdasumScope::Ranks),
    }
}

fn route(members: &[Member], host: &impl Fn(Rank) -> String) -> Result<SetRoute, String> {
    let Some(first) = members.first() else {
        return Err("a process set without members".into());
    };
    let operations = first.offer.operations;
    if let Some(other) = members.iter().find(|m| m.offer.operations != operations) {
        return Err(format!(
            "HOROVOD_GPU_OPERATIONS is {} on {} and {} on {}; it must be the same on all ranks",
            word(operations),
            first.rank,
            word(other.offer.operations),
            other.rank
        ));
    }
    if operations == GpuOperations::Host {
        return Ok(SetRoute::Staged(None));
    }
    if members.len() == 1 && operations == GpuOperations::Auto {
        return Ok(SetRoute::Alone);
    }
    match (obstacle(members, host), &first.offer.has) {
        (None, Ok(_)) if members.len() == 1 => Ok(SetRoute::Alone),
        (None, Ok(equipment)) => Ok(SetRoute::Nccl(Box::new(equipment.id))),
        (obstacle, _) => {
            let obstacle = obstacle.unwrap_or_default();
            match operations {
                GpuOperations::Nccl => Err(format!(
                    "HOROVOD_GPU_OPERATIONS=NCCL, but NCCL cannot be used: {obstacle}"
                )),
                _ => Ok(SetRoute::Staged(Some(obstacle))),
            }
        }
    }
}

fn word(operations: GpuOperations) -> &'static str {
    match operations {
        GpuOperations::Auto => "AUTO",
        GpuOperations::Nccl => "NCCL",
        GpuOperations::Host | GpuOperations::Mpi => "HOST",
    }
}

/// Why these members cannot use NCCL together.
fn obstacle(members: &[Member], host: &impl Fn(Rank) -> String) -> Option<String> {
    let at = |rank: Rank| format!("{rank} (host {})", host(rank));
    for member in members {
        if let Err(reason) = &member.offer.has {
            return Some(format!("{}: {reason}", at(member.rank)));
        }
    }
    let mut all = members
        .iter()
        .filter_map(|m| Some((m, m.offer.has.as_ref().ok()?)));
    let (first, mine) = all.next()?;
    for (other, theirs) in all {
        // AMD's NCCL has versions like NVIDIA's, and waits for what it understands.
        if theirs.stack != mine.stack {
            return Some(format!(
                "{} has a GPU of {}, {} one of {}, and NCCL connects only GPUs of one kind",
                at(first.rank),
                mine.stack,
                at(other.rank),
                theirs.stack
            ));
        }
        if theirs.nccl != mine.nccl {
            return Some(format!(
                "{} has NCCL {}, {} has NCCL {}; install the same version on all hosts",
                at(first.rank),
                version(mine.nccl),
                at(other.rank),
                version(theirs.nccl)
            ));
        }
    }
    let may_share = members.iter().all(|member| member.offer.shares_gpus);
    if may_share && mine.nccl >= NCCL_SHARES_GPUS_SINCE {
        return None;
    }
    for (i, one) in members.iter().enumerate() {
        for other in &members[..i] {
            if let (Ok(mine), Ok(theirs)) = (&one.offer.has, &other.offer.has)
                && mine.uuid == theirs.uuid
                && host(one.rank) == host(other.rank)
            {
                return Some(format!(
                    "{} and {} are on the same GPU of host {}; call torch.cuda.set_device(hvd.local_rank()), start no \
                     more ranks than there are GPUs, or set NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL {} or later",
                    other.rank,
                    one.rank,
                    host(one.rank),
                    version(NCCL_SHARES_GPUS_SINCE)
                ));
            }
        }
    }
    None
}

/// As people write it.
fn version(code: i32) -> String {
    format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(nccl: i32, gpu: u8) -> Offer {
        Offer {
            operations: GpuOperations::Auto,
            shares_gpus: false,
            reports_nccl: true,
            has: Ok(Equipment {
                stack: Stack::Cuda,
                nccl,
                uuid: [gpu; 16],
                id: [gpu; 128],
            }),
        }
    }

    fn concluded(offers: &[Offer]) -> Result<SetRoute, String> {
        agreed(offers).map(|conclusion| conclusion.route)
    }

    fn agreed(offers: &[Offer]) -> Result<Conclusion, String> {
        let ranks: Vec<_> = (0..offers.len() as u32).map(Rank).collect();
        let offers: Vec<_> = offers.iter().map(Offer::encode).collect();
        conclude(&ranks, &offers, |rank| format!("h{}", rank.0 / 2))
    }

    fn with(operations: GpuOperations, mut offer: Offer) -> Offer {
        offer.operations = operations;
        offer
    }

    #[test]
    fn offers_come_out_as_they_went_in() {
        let mut without = offer(0, 0);
        without.has = Err("no driver".into());
        without.reports_nccl = false;
        let mut of_amd = offer(22707, 3);
        of_amd.has.as_mut().unwrap().stack = Stack::Rocm;
        for offer in [
            offer(23007, 3),
            of_amd,
            without,
            with(GpuOperations::Host, offer(21805, 1)),
        ] {
            assert_eq!(Offer::decode(&offer.encode()), Some(offer));
        }
        for bad in [&[][..], &[0, 0, 0], &[9, 0, 0, 1], &[0, 0, 0, 1, 2, 3]] {
            assert_eq!(Offer::decode(bad), None);
        }
        let mut long = offer(0, 0);
        long.has = Err("ä".repeat(2 * REASON_MAX));
        assert!(long.encode().len() <= HEAD + REASON_MAX);
        assert!(Offer::decode(&long.encode()).is_some_and(|offer| offer.has.is_err()));
    }

    #[test]
    fn equal_libraries_and_gpus_of_their_own_mean_nccl() {
        assert_eq!(concluded(&[offer(23007, 1)]), Ok(SetRoute::Alone));
        let route = concluded(&[offer(23007, 1), offer(23007, 2)]);
        assert_eq!(route, Ok(SetRoute::Nccl(Box::new([1; 128]))));
        // Equal ids of GPUs mean nothing on different hosts.
        let offers = [offer(23007, 1), offer(23007, 2), offer(23007, 1)];
        assert!(matches!(concluded(&offers), Ok(SetRoute::Nccl(_))));
    }

    #[test]
    fn what_stands_in_the_way_is_told_or_an_error_if_nccl_was_demanded() {
        let mut without = offer(0, 2);
        without.has = Err("libnccl.so.2 could not be loaded".into());
        let mut of_amd = offer(23007, 2);
        of_amd.has.as_mut().unwrap().stack = Stack::Rocm;
        for (second, text) in [
            (
                offer(22703, 2),
                "rank 0 (host h0) has NCCL 2.30.7, rank 1 (host h0) has NCCL 2.27.3",
            ),
            (
                of_amd,
                "rank 0 (host h0) has a GPU of CUDA, rank 1 (host h0) one of ROCm",
            ),
            (
                offer(23007, 1),
                "rank 0 and rank 1 are on the same GPU of host h0",
            ),
            (
                without,
                "rank 1 (host h0): libnccl.so.2 could not be loaded",
            ),
        ] {
            let first = offer(23007, 1);
            let Ok(SetRoute::Staged(Some(why))) = concluded(&[first.clone(), second.clone()])
            else {
                panic!("{second:?}")
            };
            assert!(why.contains(text), "{why}");
            let demanded = [first, second].map(|offer| with(GpuOperations::Nccl, offer));
            let why = concluded(&demanded).unwrap_err();
            assert!(
                why.contains(text) && why.contains("HOROVOD_GPU_OPERATIONS=NCCL"),
                "{why}"
            );
        }
    }

    #[test]
    fn a_gpu_is_shared_only_if_all_say_so() {
        let mut sharing = offer(23007, 1);
        sharing.shares_gpus = true;
        let route = concluded(&[sharing.clone(), sharing.clone()]);
        assert!(matches!(route, Ok(SetRoute::Nccl(_))));
        let route = concluded(&[sharing.clone(), offer(23007, 1)]);
        assert!(matches!(route, Ok(SetRoute::Staged(Some(_)))));
        // An older NCCL does not know of it, and would refuse its communicator.
        let older = |nccl| {
            let mut both = [sharing.clone(), sharing.clone()];
            for Offer { has, .. } in &mut both {
                has.as_mut().unwrap().nccl = nccl;
            }
            concluded(&both)
        };
        assert!(matches!(
            older(NCCL_SHARES_GPUS_SINCE - 1),
            Ok(SetRoute::Staged(Some(_)))
        ));
        assert!(matches!(
            older(NCCL_SHARES_GPUS_SINCE),
            Ok(SetRoute::Nccl(_))
        ));
    }

    #[test]
    fn settings_must_be_alike_and_host_needs_nothing() {
        let host = with(GpuOperations::Host, offer(23007, 1));
        let why = concluded(&[offer(23007, 1), host.clone()]).unwrap_err();
        assert!(why.contains("AUTO on rank 0 and HOST on rank 1"), "{why}");
        let mut without = host.clone();
        without.has = Err("nothing".into());
        assert_eq!(concluded(&[host, without]), Ok(SetRoute::Staged(None)));
    }

    #[test]
    fn adasum_combines_hosts_exactly_where_every_rank_is_told_of_nccl() {
        let telling = |reports_nccl, mut offer: Offer| {
            offer.reports_nccl = reports_nccl;
            offer
        };
        let scope = |offers: &[Offer]| agreed(offers).unwrap().adasum;
        // By whatever route: here the versions differ.
        let all = [offer(23007, 1), offer(23007, 2), offer(22703, 1)];
        assert!(matches!(concluded(&all), Ok(SetRoute::Staged(Some(_)))));
        assert_eq!(scope(&all), Ok(AdasumScope::Hosts));
        let host = telling(false, with(GpuOperations::Host, offer(23007, 1)));
        assert_eq!(scope(&[host.clone(), host]), Ok(AdasumScope::Ranks));
        let mixed =
            all.map(|offer| telling(offer.has.as_ref().is_ok_and(|e| e.nccl == 23007), offer));
        let why = scope(&mixed).unwrap_err();
        assert!(
            why.contains("found on rank 0 (host h0), and not on rank 2 (host h1)"),
            "{why}"
        );
    }
}

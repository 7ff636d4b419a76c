//! The agreement of a set's members on how operations on their GPU tensors are carried out.

use horovod_protocol::Rank;

use crate::config::GpuOperations;

/// What each member tells of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) operations: GpuOperations,
    /// Several ranks may use one GPU.
    pub(super) shares_gpus: bool,
    /// What it has; why not.
    pub(super) has: Result<Equipment, String>,
}

/// What NCCL is used with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Equipment {
    /// NCCL's version, as it says it.
    pub(super) nccl: i32,
    pub(super) uuid: [u8; 16],
    /// Of the first member: the communicator's.
    pub(super) id: [u8; 128],
}

/// How operations of a set are carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// By this member alone.
    Alone,
    /// By NCCL, with this id.
    Nccl(Box<[u8; 128]>),
    /// Through host memory; why, if that is worth a warning.
    Staged(Option<String>),
}

/// Longest reason that is told.
const REASON_MAX: usize = 600;
const FIXED: usize = 3 + 4 + 16 + 128;

impl Offer {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![
            self.operations as u8,
            u8::from(self.shares_gpus),
            u8::from(self.has.is_ok()),
        ];
        match &self.has {
            Ok(equipment) => {
                bytes.extend(equipment.nccl.to_le_bytes());
                bytes.extend(equipment.uuid);
                bytes.extend(equipment.id);
            }
            Err(reason) => {
                let mut end = reason.len().min(REASON_MAX);
                while !reason.is_char_boundary(end) {
                    end -= 1;
                }
                bytes.extend(&reason.as_bytes()[..end]);
            }
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let [operations, shares, has, rest @ ..] = bytes else {
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
                nccl: i32::from_le_bytes(rest[..4].try_into().ok()?),
                uuid: rest[4..20].try_into().ok()?,
                id: rest[20..].try_into().ok()?,
            }),
            1 => return None,
            _ => Err(String::from_utf8_lossy(rest).into_owned()),
        };
        Some(Self {
            operations,
            shares_gpus: *shares == 1,
            has,
        })
    }
}

/// One member as all see it.
struct Member {
    rank: Rank,
    offer: Offer,
}

/// What follows from all offers: alike on every member, for it follows from nothing else. `host` names a rank's host.
pub(super) fn conclude(
    ranks: &[Rank],
    offers: &[Vec<u8>],
    host: impl Fn(Rank) -> String,
) -> Result<Route, String> {
    let mut members = Vec::new();
    for (rank, bytes) in ranks.iter().zip(offers) {
        let offer = Offer::decode(bytes);
        let offer = offer.ok_or_else(|| format!("{rank} does not say what it has for GPUs"))?;
        members.push(Member { rank: *rank, offer });
    }
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
        return Ok(Route::Staged(None));
    }
    if members.len() == 1 && operations == GpuOperations::Auto {
        return Ok(Route::Alone);
    }
    match (obstacle(&members, &host), &first.offer.has) {
        (None, Ok(_)) if members.len() == 1 => Ok(Route::Alone),
        (None, Ok(equipment)) => Ok(Route::Nccl(Box::new(equipment.id))),
        (obstacle, _) => {
            let obstacle = obstacle.unwrap_or_default();
            match operations {
                GpuOperations::Nccl => Err(format!(
                    "HOROVOD_GPU_OPERATIONS=NCCL, but NCCL cannot be used: {obstacle}"
                )),
                _ => Ok(Route::Staged(Some(obstacle))),
            }
        }
    }
}

fn word(operations: GpuOperations) -> &'static str {
    match operations {
        GpuOperations::Auto => "AUTO",
        GpuOperations::Nccl => "NCCL",
        GpuOperations::Host => "HOST",
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
    if members.iter().all(|member| member.offer.shares_gpus) {
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
                     more ranks than there are GPUs, or set NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30.3 or later",
                    other.rank,
                    one.rank,
                    host(one.rank)
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
            has: Ok(Equipment {
                nccl,
                uuid: [gpu; 16],
                id: [gpu; 128],
            }),
        }
    }

    fn concluded(offers: &[Offer]) -> Result<Route, String> {
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
        for offer in [
            offer(23007, 3),
            without,
            with(GpuOperations::Host, offer(21805, 1)),
        ] {
            assert_eq!(Offer::decode(&offer.encode()), Some(offer));
        }
        for bad in [&[][..], &[0, 0], &[9, 0, 1], &[0, 0, 1, 2, 3]] {
            assert_eq!(Offer::decode(bad), None);
        }
        let mut long = offer(0, 0);
        long.has = Err("ä".repeat(2 * REASON_MAX));
        assert!(long.encode().len() <= 3 + REASON_MAX);
        assert!(Offer::decode(&long.encode()).is_some_and(|offer| offer.has.is_err()));
    }

    #[test]
    fn equal_libraries_and_gpus_of_their_own_mean_nccl() {
        assert_eq!(concluded(&[offer(23007, 1)]), Ok(Route::Alone));
        let route = concluded(&[offer(23007, 1), offer(23007, 2)]);
        assert_eq!(route, Ok(Route::Nccl(Box::new([1; 128]))));
        // Equal ids of GPUs mean nothing on different hosts.
        let offers = [offer(23007, 1), offer(23007, 2), offer(23007, 1)];
        assert!(matches!(concluded(&offers), Ok(Route::Nccl(_))));
    }

    #[test]
    fn what_stands_in_the_way_is_told_or_an_error_if_nccl_was_demanded() {
        let mut without = offer(0, 2);
        without.has = Err("libnccl.so.2 could not be loaded".into());
        for (second, text) in [
            (
                offer(22703, 2),
                "rank 0 (host h0) has NCCL 2.30.7, rank 1 (host h0) has NCCL 2.27.3",
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
            let Ok(Route::Staged(Some(why))) = concluded(&[first.clone(), second.clone()]) else {
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
        assert!(matches!(route, Ok(Route::Nccl(_))));
        let route = concluded(&[sharing, offer(23007, 1)]);
        assert!(matches!(route, Ok(Route::Staged(Some(_)))));
    }

    #[test]
    fn settings_must_be_alike_and_host_needs_nothing() {
        let host = with(GpuOperations::Host, offer(23007, 1));
        let why = concluded(&[offer(23007, 1), host.clone()]).unwrap_err();
        assert!(why.contains("AUTO on rank 0 and HOST on rank 1"), "{why}");
        let mut without = host.clone();
        without.has = Err("nothing".into());
        assert_eq!(concluded(&[host, without]), Ok(Route::Staged(None)));
    }
}

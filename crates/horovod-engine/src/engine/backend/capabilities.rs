//! The capability exchange of a set's members: settles once for each device whether all members can run its executions
//! there, and how.
//!
//! At a set's first execution on a device, at its place in the total order, the members exchange their offers over the
//! host's data plane. All members conclude from the same offers, so all reach the same result; nothing is decided
//! locally.

use std::collections::BTreeMap;
use std::sync::Arc;

use horovod_protocol::{Device, Execution, ProcessSetId, Rank};
use horovod_transport::Idle;

use super::host::Host;
use super::{Backend, Failure, Members, OFFER_MAX};

/// Bytes of an exchanged offer: a flag for a backend, the offer's length, its bytes.
const FRAME: usize = 3 + OFFER_MAX;

/// Results of the capability exchanges.
#[derive(Default)]
pub(in crate::engine) struct Capabilities {
    concluded: BTreeMap<(Device, ProcessSetId), Concluded>,
}

type Concluded = (Arc<[Rank]>, Result<(), String>);

impl Capabilities {
    /// Returns the set's result, if the exchange has taken place. An error is the result of every operation of the set
    /// on the device.
    pub(in crate::engine) fn of(&self, execution: &Execution) -> Option<&Result<(), String>> {
        let (members, concluded) = self.concluded.get(&(execution.device, execution.set))?;
        (members[..] == execution.members[..]).then_some(concluded)
    }

    /// Forgets a removed set, on all ranks at the same place in the order. If a later set gets its id, either all of
    /// its members must exchange offers or none.
    pub(in crate::engine) fn forget(&mut self, set: ProcessSetId) {
        self.concluded.retain(|(_, of), _| *of != set);
    }

    /// Exchanges offers with the other members, which do the same, and keeps the result.
    pub(in crate::engine) fn conclude(
        &mut self,
        execution: &Execution,
        host: &mut Host,
        mut backend: Option<&mut Box<dyn Backend>>,
        idle: &mut dyn Idle,
    ) -> Result<(), Failure> {
        let (device, set) = (execution.device, execution.set);
        let ranks = &execution.members[..];
        let mine = frame(backend.as_mut().map(|backend| backend.offer(set, ranks)))?;
        let all = host.exchange(execution, &mine, idle)?;
        let offers: Result<Vec<_>, _> = ranks
            .iter()
            .zip(all.chunks_exact(FRAME))
            .map(|(rank, frame)| {
                offer_in(frame).ok_or_else(|| {
                    format!(
                        "{rank} takes part in an operation on {} tensors, and nothing there moves their data: every \
                         rank of the process set needs what this one has",
                        device.name()
                    )
                })
            })
            .collect();
        let concluded = offers.and_then(|offers| {
            let offers = &offers[..];
            match backend {
                Some(backend) => backend.settle(set, &Members { ranks, offers }),
                None => Ok(()),
            }
        });
        let members = execution.members.clone();
        self.concluded.insert((device, set), (members, concluded));
        Ok(())
    }
}

fn frame(offer: Option<Vec<u8>>) -> Result<Vec<u8>, Failure> {
    let mut frame = vec![0; FRAME];
    let Some(offer) = offer else { return Ok(frame) };
    let length = u16::try_from(offer.len()).ok();
    let length = length.filter(|_| offer.len() <= OFFER_MAX).ok_or_else(|| {
        Failure::Local(format!(
            "a backend offers {} bytes, more than {OFFER_MAX}",
            offer.len()
        ))
    })?;
    frame[0] = 1;
    frame[1..3].copy_from_slice(&length.to_le_bytes());
    frame[3..3 + offer.len()].copy_from_slice(&offer);
    Ok(frame)
}

/// Returns the offer in a frame; `None` if the member has no backend.
fn offer_in(frame: &[u8]) -> Option<Vec<u8>> {
    let [1, low, high, offer @ ..] = frame else {
        return None;
    };
    let length = usize::from(u16::from_le_bytes([*low, *high]));
    offer.get(..length).map(<[u8]>::to_vec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_comes_out_as_it_went_in() {
        for offer in [vec![], vec![1, 2, 3], vec![7; OFFER_MAX]] {
            let framed = frame(Some(offer.clone())).unwrap();
            assert_eq!(framed.len(), FRAME);
            assert_eq!(offer_in(&framed), Some(offer));
        }
        assert_eq!(offer_in(&frame(None).unwrap()), None);
        assert!(frame(Some(vec![0; OFFER_MAX + 1])).is_err());
        // A peer may send a length beyond the frame.
        let mut framed = frame(Some(vec![1])).unwrap();
        framed[2] = 0xff;
        assert_eq!(offer_in(&framed), None);
    }
}

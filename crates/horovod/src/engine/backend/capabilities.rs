//! The capability exchange of a set's members: once for each device, whether all can carry out its executions there,
//! and how.
//!
//! At the first execution of a set on a device, at its place in the total order, the members exchange what each offers
//! over the host's data plane. All conclude from the same offers, so all alike; nothing is decided locally.

use std::collections::BTreeMap;
use std::sync::Arc;

use horovod_protocol::{Device, Execution, ProcessSetId, Rank};
use horovod_transport::Idle;

use super::host::Host;
use super::{Backend, Failure, Members, OFFER_MAX};

/// An offer as it is exchanged: whether there is a backend, its length, its bytes.
const FRAME: usize = 3 + OFFER_MAX;

/// Result of the capability exchange in each set.
#[derive(Default)]
pub(in crate::engine) struct Capabilities {
    concluded: BTreeMap<(Device, ProcessSetId), Concluded>,
}

type Concluded = (Arc<[Rank]>, Result<(), String>);

impl Capabilities {
    /// The set's result, if the exchange has taken place; an error is the result of the set's operations.
    pub(in crate::engine) fn of(&self, execution: &Execution) -> Option<&Result<(), String>> {
        let (members, concluded) = self.concluded.get(&(execution.device, execution.set))?;
        (members[..] == execution.members[..]).then_some(concluded)
    }

    /// The set was removed. All ranks forget it at once: members that come together again under its id must either all
    /// ask each other or none.
    pub(in crate::engine) fn forget(&mut self, set: ProcessSetId) {
        self.concluded.retain(|(_, of), _| *of != set);
    }

    /// Ask the other members, who ask as well.
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

/// `None` where there is no backend.
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
        // Of a peer: a length beyond the frame.
        let mut framed = frame(Some(vec![1])).unwrap();
        framed[2] = 0xff;
        assert_eq!(offer_in(&framed), None);
    }
}

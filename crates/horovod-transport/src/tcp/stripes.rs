//! One byte stream over several connections: in numbered stripes, each on a connection that has room for it.
//!
//! Connections of one way differ in speed, and in when the network lets them go faster. So none has its turn: a
//! stripe takes the next connection that takes bytes, and says its number at its head. The receiver puts the stripes
//! in order by leaving those that come early where they are, in the system's buffers.

use std::sync::Arc;

use super::link::{Fault, PolledStream};

/// Bytes of a stripe. All of a small message takes one, and each connection's buffers hold much more.
const STRIPE: usize = 128 << 10;
/// Bytes of its head: the number, and zeros, so that what follows keeps its place in cache lines.
const HEAD: usize = 64;
/// Bytes of the number.
const NUMBER: usize = 4;
/// A stripe further ahead of the one that is due has a wrong number: no buffers hold so much.
const AHEAD_MAX: u32 = 1 << 20;

/// One direction: the stripe that is under way or was last, and what is left of it.
struct Stripe {
    number: u32,
    stream: usize,
    left: usize,
}

impl Stripe {
    /// Ended, before the first one.
    const NONE: Self = Self {
        number: u32::MAX,
        stream: 0,
        left: 0,
    };

    fn begin(&mut self, stream: usize) {
        *self = Self {
            number: self.due(),
            stream,
            left: STRIPE,
        };
    }

    /// The number of the next one.
    fn due(&self) -> u32 {
        self.number.wrapping_add(1)
    }
}

pub(super) struct Stripes {
    streams: Vec<PolledStream>,
    sending: Stripe,
    /// Unsent part of the current stripe's head.
    head: [u8; HEAD],
    head_left: usize,
    receiving: Stripe,
    /// The head of the next stripe on each stream, as far as it has come.
    heads: Vec<Head>,
}

#[derive(Clone)]
struct Head {
    bytes: [u8; HEAD],
    len: usize,
}

impl Head {
    const NONE: Self = Self {
        bytes: [0; HEAD],
        len: 0,
    };

    fn number(&self) -> u32 {
        let [a, b, c, d, ..] = self.bytes;
        u32::from_le_bytes([a, b, c, d])
    }
}

impl Stripes {
    pub(super) fn new(streams: Vec<PolledStream>) -> Self {
        Self {
            sending: Stripe::NONE,
            head: [0; HEAD],
            head_left: 0,
            receiving: Stripe::NONE,
            heads: vec![Head::NONE; streams.len()],
            streams,
        }
    }

    /// As [`crate::Link::try_send`].
    pub(super) fn try_send(&mut self, bytes: &[u8]) -> Result<usize, Arc<str>> {
        let mut sent = 0;
        while sent < bytes.len() {
            let rest = &bytes[sent..];
            let (offered, taken) = if self.sending.left > 0 {
                self.go_on(rest)?
            } else {
                self.begin(rest)?
            };
            sent += taken;
            if taken < offered || taken == 0 {
                break;
            }
        }
        Ok(sent)
    }

    /// Sends more of the stripe under way; how much could have gone, and went.
    fn go_on(&mut self, bytes: &[u8]) -> Result<(usize, usize), Arc<str>> {
        let Stripe { stream, left, .. } = self.sending;
        let part = &bytes[..bytes.len().min(left)];
        let head = &self.head[HEAD - self.head_left..];
        let n = self.streams[stream].try_send_both(head, part)?;
        let of_head = n.min(self.head_left);
        self.head_left -= of_head;
        self.sending.left -= n - of_head;
        Ok((part.len(), n - of_head))
    }

    /// Begins a stripe on the next stream that takes something; as [`Self::go_on`].
    fn begin(&mut self, bytes: &[u8]) -> Result<(usize, usize), Arc<str>> {
        let (last, count) = (self.sending.stream, self.streams.len());
        for distance in 1..=count {
            let stream = (last + distance) % count;
            if !self.streams[stream].may_take() {
                continue;
            }
            let before = self.sending.number;
            self.sending.begin(stream);
            self.head[..NUMBER].copy_from_slice(&self.sending.number.to_le_bytes());
            self.head_left = HEAD;
            let went = self.go_on(bytes)?;
            if self.head_left < HEAD || self.streams[stream].is_bound_by_offers() {
                return Ok(went);
            }
            (self.sending.number, self.sending.left) = (before, 0);
        }
        Ok((bytes.len(), 0))
    }

    /// As [`crate::Link::try_recv`].
    pub(super) fn try_recv(&mut self, buf: &mut [u8]) -> Result<usize, Fault> {
        let mut received = 0;
        while received < buf.len() {
            if self.receiving.left == 0 && !self.find()? {
                break;
            }
            let Stripe { stream, left, .. } = self.receiving;
            let end = buf.len().min(received + left);
            let part = &mut buf[received..end];
            let n = self.streams[stream].try_recv(part)?;
            self.receiving.left -= n;
            received += n;
            if n < part.len() {
                break;
            }
        }
        Ok(received)
    }

    /// Looks for the stripe that is due; whether it has begun to come.
    fn find(&mut self) -> Result<bool, Fault> {
        let (last, count) = (self.receiving.stream, self.streams.len());
        let due = self.receiving.due();
        // Whether a stream can still bring it, and whether one that is closed would have.
        let (mut open, mut closed) = (false, None);
        for distance in 1..=count {
            let index = (last + distance) % count;
            let (stream, head) = (&mut self.streams[index], &mut self.heads[index]);
            if head.len < HEAD {
                match stream.try_recv(&mut head.bytes[head.len..]) {
                    Ok(n) => head.len += n,
                    // A peer that closes one stream closes all, but the bytes in flight on each stream arrive
                    // independently.
                    Err(fault) if stream.is_closed() => {
                        closed = Some(fault);
                        continue;
                    }
                    Err(fault) => return Err(fault),
                }
            }
            if head.len < HEAD {
                open = true;
                continue;
            }
            let ahead = head.number().wrapping_sub(due);
            if ahead == 0 {
                head.len = 0;
                self.receiving.begin(index);
                return Ok(true);
            }
            if ahead > AHEAD_MAX {
                return Err(Fault::Corrupt("a stripe has a wrong number"));
            }
        }
        match closed {
            _ if open => Ok(false),
            Some(fault) => Err(fault),
            None => Err(Fault::Corrupt("a stripe is missing")),
        }
    }
}

#[cfg(target_os = "linux")]
#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        handshake::{Binding, Initiator, Purpose, Responder},
        key::JobKey,
        platform::fd::Fd,
        tcp::checked::Use,
        tcp::{
            link::tests::{polled, pump, sockets},
            stream::{Got, Stream, recv, send},
        },
    };

    type Raw = Vec<Arc<Fd>>;

    /// Plain streams, and the sockets at their other ends.
    fn stripes(count: usize) -> (Stripes, Raw) {
        let (streams, others) = (0..count)
            .map(|_| {
                let [a, b] = sockets();
                (polled(Stream::authenticated(a, None)), b)
            })
            .unzip();
        (Stripes::new(streams), others)
    }

    fn pump_all(stripes: &Stripes) {
        stripes.streams.iter().for_each(pump);
    }

    fn sealed_pair() -> [Stream; 2] {
        let [a, b] = sockets();
        let key = JobKey::from_hex(&"a".repeat(64)).unwrap();
        let binding = Binding {
            purpose: Purpose::Data,
            lane: 0,
            sealed: true,
            generation: 1,
            from: 0,
            to: 1,
        };
        let mut initiator = Initiator::new(a, &key, binding).unwrap();
        let mut responder = Responder::new(b);
        let (mut left, mut right) = (None, None);
        while left.is_none() || right.is_none() {
            left = left.or_else(|| initiator.step().unwrap());
            right = right.or_else(|| responder.step(&key, |_| true).unwrap());
        }
        [left.unwrap(), right.unwrap().1]
    }

    /// Reads `bytes` of a socket.
    fn read(fd: &Fd, bytes: usize) -> Vec<u8> {
        let mut all = vec![0; bytes];
        let mut at = 0;
        while at < bytes {
            match recv(fd, &mut all[at..]).unwrap() {
                Got::Bytes(n) => at += n,
                other => panic!("{other:?} after {at} of {bytes} bytes"),
            }
        }
        all
    }

    fn head(number: u32) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        head[..NUMBER].copy_from_slice(&number.to_le_bytes());
        head
    }

    fn write(fd: &Fd, number: u32, fill: u8, bytes: usize) {
        let stripe = [&head(number)[..], &vec![fill; bytes]].concat();
        assert_eq!(send(fd, &stripe).unwrap(), stripe.len());
    }

    fn noise(len: usize) -> Vec<u8> {
        (0..len as u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect()
    }

    /// All bytes both ways at once, some at a time and each end by turns.
    fn both_ways(mut ends: [Stripes; 2]) {
        let sent = [noise(3_000_000), noise(2_345_678)];
        let mut at = [0; 2];
        let mut got = [vec![0; sent[1].len()], vec![0; sent[0].len()]];
        let mut have = [0; 2];
        let mut round = 0;
        while (0..2).any(|i| have[i] < got[i].len()) {
            round += 1;
            assert!(round < 1_000_000, "stuck: {at:?} sent, {have:?} received");
            for i in 0..2 {
                pump_all(&ends[i]);
                // The same bytes again, and sometimes more of them.
                let end = sent[i].len().min(at[i] + 17_000 * (1 + round % 30));
                at[i] += ends[i].try_send(&sent[i][at[i]..end]).unwrap();
                let end = got[i].len().min(have[i] + 1 + (round * 7919) % 200_000);
                let n = ends[i].try_recv(&mut got[i][have[i]..end]);
                have[i] += n.unwrap_or_else(|_| panic!("lost after {have:?}"));
            }
        }
        assert!(got[0] == sent[1] && got[1] == sent[0]);
    }

    #[test]
    fn bytes_arrive_in_order_plain_and_sealed() {
        for count in [2, 3, 5] {
            let plain = |_| sockets().map(|fd| polled(Stream::authenticated(fd, None)));
            let sealed = |_| sealed_pair().map(polled);
            for pairs in [
                (0..count).map(plain).collect::<Vec<_>>(),
                (0..count).map(sealed).collect(),
            ] {
                let (ones, others) = pairs.into_iter().map(<(_, _)>::from).unzip();
                both_ways([Stripes::new(ones), Stripes::new(others)]);
            }
        }
    }

    #[test]
    fn bytes_arrive_in_order_with_checksums() {
        for count in [2, 3, 5] {
            let checked = |_| {
                sockets().map(|fd| {
                    let mut stream = Stream::authenticated(fd, None);
                    stream.check(Use::Data);
                    polled(stream)
                })
            };
            let (ones, others) = (0..count).map(checked).map(<(_, _)>::from).unzip();
            both_ways([Stripes::new(ones), Stripes::new(others)]);
        }
    }

    #[test]
    fn a_sealed_record_that_does_not_open_is_no_loss() {
        let [a, b] = sealed_pair();
        let raw = a.fd().clone();
        let mut link = Stripes::new(vec![
            polled(b),
            polled(Stream::authenticated(raw.clone(), None)),
        ]);
        // Length, and what nobody sealed.
        assert!(send(&raw, &[&[20, 0][..], &[0; 20]].concat()).unwrap() == 22);
        pump_all(&link);
        assert!(matches!(
            link.try_recv(&mut [0; 50]),
            Err(Fault::Altered(_))
        ));
    }

    #[test]
    fn a_stream_that_takes_nothing_keeps_nothing_back() {
        let (mut link, others) = stripes(2);
        // The first stripe would go over the second stream, so the second goes over the first.
        let full = link.streams[0].try_send(&vec![9; 8 << 20]).unwrap();
        assert!(full < 8 << 20);
        let bytes = noise(5 * STRIPE);
        let (mut at, mut came) = (0, Vec::new());
        while at < bytes.len() {
            pump_all(&link);
            let n = link.try_send(&bytes[at..]).unwrap();
            assert!(n > 0, "nothing went after {at} bytes");
            // Whole stripes have their heads.
            let stripes = (at + n).div_ceil(STRIPE) - at.div_ceil(STRIPE);
            came.extend(read(&others[1], n + stripes * HEAD));
            at += n;
        }
        let want: Vec<u8> = bytes
            .chunks(STRIPE)
            .zip(0..)
            .flat_map(|(stripe, number)| [&head(number)[..], stripe].concat())
            .collect();
        assert!(came == want);
    }

    #[test]
    fn a_stripe_waits_for_those_before_it() {
        let (mut link, others) = stripes(3);
        let mut buf = vec![0; 3 * STRIPE];
        write(&others[2], 1, 1, 1000);
        pump_all(&link);
        assert!(matches!(link.try_recv(&mut buf), Ok(0)));
        // Its peer has closed two streams; what is due still comes over the third.
        let [first, ..] = <[Arc<Fd>; 3]>::try_from(others).unwrap();
        pump_all(&link);
        assert!(matches!(link.try_recv(&mut buf), Ok(0)));
        let mut left = STRIPE;
        write(&first, 0, 7, 0);
        while left > 0 {
            let n = send(&first, &vec![7; left.min(32 << 10)]).unwrap();
            pump_all(&link);
            assert!(matches!(link.try_recv(&mut buf[STRIPE - left..]), Ok(got) if got >= n));
            left -= n;
        }
        assert!(buf[..STRIPE].iter().all(|byte| *byte == 7));
        assert!(buf[STRIPE..STRIPE + 1000].iter().all(|byte| *byte == 1));
        // The rest of the second stripe can no longer come.
        pump_all(&link);
        assert!(matches!(link.try_recv(&mut buf), Err(Fault::Lost(_))));
    }

    #[test]
    fn the_link_is_lost_when_nobody_can_bring_the_stripe_that_is_due() {
        let (mut link, others) = stripes(2);
        write(&others[0], 1, 1, 10);
        pump_all(&link);
        assert!(matches!(link.try_recv(&mut [0; 50]), Ok(0)));
        drop(others);
        pump_all(&link);
        assert!(matches!(link.try_recv(&mut [0; 50]), Err(Fault::Lost(_))));
    }

    #[test]
    fn numbers_that_no_peer_sends_are_an_error() {
        for numbers in [[u32::MAX, 0], [AHEAD_MAX + 1, 0], [1, 1], [2, 1]] {
            let (mut link, others) = stripes(2);
            write(&others[0], numbers[0], 1, 10);
            if numbers[1] > 0 {
                write(&others[1], numbers[1], 1, 10);
            }
            pump_all(&link);
            let outcome = link.try_recv(&mut [0; 50]);
            assert!(matches!(outcome, Err(Fault::Corrupt(_))), "{numbers:?}");
        }
    }
}

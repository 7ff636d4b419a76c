//! A byte ring with one producer and one consumer, free of locks.
//!
//! The algorithm knows its memory only through [`Memory`]: shared memory in the product, checked
//! cells under loom. Positions count bytes for ever; the place in the ring is the position modulo the
//! capacity. A peer's position is checked before use: a broken peer gives an error, never a wild
//! copy.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// The words and bytes of one ring.
pub(crate) trait Memory {
    /// Bytes ever written; moved by the producer.
    fn head(&self) -> &AtomicU64;
    /// Bytes ever read; moved by the consumer.
    fn tail(&self) -> &AtomicU64;
    /// Not 0 while the producer waits for space.
    fn starved(&self) -> &AtomicU32;
    /// Bytes it holds; a power of two.
    fn capacity(&self) -> usize;
    /// Copies into the ring.
    ///
    /// # Safety
    /// `at + src.len() <= capacity`, and the bytes belong to the calling producer.
    unsafe fn write(&self, at: usize, src: &[u8]);
    /// Copies out of the ring.
    ///
    /// # Safety
    /// `at + dst.len() <= capacity`, and the bytes belong to the calling consumer.
    unsafe fn read(&self, at: usize, dst: &mut [u8]);
}

/// The other side moved its position to where no correct peer can.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Corrupt;

/// The writing end; at most one per ring.
pub(crate) struct Producer<M> {
    memory: M,
    head: u64,
    tail_seen: u64,
}

impl<M: Memory> Producer<M> {
    /// Of a ring that nobody has written to yet.
    pub(crate) fn new(memory: M) -> Self {
        debug_assert!(memory.capacity().is_power_of_two());
        Self {
            memory,
            head: 0,
            tail_seen: 0,
        }
    }

    fn space(&mut self, order: Ordering) -> Result<usize, Corrupt> {
        self.tail_seen = self.memory.tail().load(order);
        self.space_seen()
    }

    fn space_seen(&self) -> Result<usize, Corrupt> {
        let used = self.head.wrapping_sub(self.tail_seen);
        let capacity = self.memory.capacity();
        if used > capacity as u64 {
            return Err(Corrupt);
        }
        Ok(capacity - used as usize)
    }

    /// Writes as much as fits. After 0 the consumer's next read answers
    /// [`Consumer::producer_waits`] with true.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<usize, Corrupt> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let mut space = self.space_seen()?;
        if space < bytes.len() {
            space = self.space(Ordering::Acquire)?;
        }
        if space == 0 {
            self.memory.starved().store(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            space = self.space(Ordering::Acquire)?;
            if space == 0 {
                return Ok(0);
            }
            self.memory.starved().store(0, Ordering::Relaxed);
        }
        let n = space.min(bytes.len());
        let capacity = self.memory.capacity();
        let at = self.head as usize & (capacity - 1);
        let first = n.min(capacity - at);
        // SAFETY: both parts lie inside the ring, and `n <= space` bytes from `head` on have been
        // given back by the consumer (acquire load of `tail`).
        unsafe {
            self.memory.write(at, &bytes[..first]);
            self.memory.write(0, &bytes[first..n]);
        }
        self.head = self.head.wrapping_add(n as u64);
        self.memory.head().store(self.head, Ordering::Release);
        Ok(n)
    }
}

/// The reading end; at most one per ring.
pub(crate) struct Consumer<M> {
    memory: M,
    tail: u64,
    head_seen: u64,
}

impl<M: Memory> Consumer<M> {
    /// Of a ring that nobody has read from yet.
    pub(crate) fn new(memory: M) -> Self {
        debug_assert!(memory.capacity().is_power_of_two());
        Self {
            memory,
            tail: 0,
            head_seen: 0,
        }
    }

    /// Reads as much as there is and fits; 0 means that nothing is there.
    pub(crate) fn pop(&mut self, buf: &mut [u8]) -> Result<usize, Corrupt> {
        if self.head_seen == self.tail {
            self.head_seen = self.memory.head().load(Ordering::Acquire);
        }
        let available = self.head_seen.wrapping_sub(self.tail);
        let capacity = self.memory.capacity();
        if available > capacity as u64 {
            return Err(Corrupt);
        }
        let n = buf.len().min(available as usize);
        if n == 0 {
            return Ok(0);
        }
        let at = self.tail as usize & (capacity - 1);
        let first = n.min(capacity - at);
        let (start, rest) = buf[..n].split_at_mut(first);
        // SAFETY: both parts lie inside the ring, and `n <= available` bytes from `tail` on have
        // been published by the producer (acquire load of `head`).
        unsafe {
            self.memory.read(at, start);
            self.memory.read(0, rest);
        }
        self.tail = self.tail.wrapping_add(n as u64);
        self.memory.tail().store(self.tail, Ordering::Release);
        Ok(n)
    }

    /// After a successful [`Self::pop`]: whether the producer waits for the space and the caller,
    /// once per wait, must wake it.
    pub(crate) fn producer_waits(&self) -> bool {
        fence(Ordering::SeqCst);
        let starved = self.memory.starved();
        starved.load(Ordering::Relaxed) != 0 && starved.swap(0, Ordering::Relaxed) != 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{cell::UnsafeCell, sync::Arc};

    use proptest::prelude::*;

    use super::*;

    struct Cells {
        head: AtomicU64,
        tail: AtomicU64,
        starved: AtomicU32,
        bytes: Box<[UnsafeCell<u8>]>,
    }

    // SAFETY: the bytes are only touched by the side that owns them, which is what is tested.
    unsafe impl Send for Cells {}
    // SAFETY: as above.
    unsafe impl Sync for Cells {}

    fn cells(capacity: usize) -> Arc<Cells> {
        Arc::new(Cells {
            head: AtomicU64::new(0),
            tail: AtomicU64::new(0),
            starved: AtomicU32::new(0),
            bytes: (0..capacity).map(|_| UnsafeCell::new(0)).collect(),
        })
    }

    impl Memory for Arc<Cells> {
        fn head(&self) -> &AtomicU64 {
            &self.head
        }
        fn tail(&self) -> &AtomicU64 {
            &self.tail
        }
        fn starved(&self) -> &AtomicU32 {
            &self.starved
        }
        fn capacity(&self) -> usize {
            self.bytes.len()
        }
        unsafe fn write(&self, at: usize, src: &[u8]) {
            for (cell, byte) in self.bytes[at..at + src.len()].iter().zip(src) {
                // SAFETY: the caller owns these bytes.
                unsafe { *cell.get() = *byte };
            }
        }
        unsafe fn read(&self, at: usize, dst: &mut [u8]) {
            let cells = &self.bytes[at..at + dst.len()];
            for (byte, cell) in dst.iter_mut().zip(cells) {
                // SAFETY: the caller owns these bytes.
                *byte = unsafe { *cell.get() };
            }
        }
    }

    proptest! {
        #[test]
        fn bytes_come_out_as_they_went_in(
            log_capacity in 0u32..6,
            moves in prop::collection::vec((any::<bool>(), 0usize..80), 0..200),
        ) {
            let memory = cells(1 << log_capacity);
            let mut producer = Producer::new(memory.clone());
            let mut consumer = Consumer::new(memory);
            let (mut next_in, mut next_out) = (0usize, 0usize);
            for (write, len) in moves {
                if write {
                    let bytes: Vec<u8> = (next_in..next_in + len).map(|i| i as u8).collect();
                    let n = producer.push(&bytes).unwrap();
                    let space = (1 << log_capacity) - (next_in - next_out);
                    prop_assert_eq!(n, len.min(space));
                    next_in += n;
                } else {
                    let mut buf = vec![0; len];
                    let n = consumer.pop(&mut buf).unwrap();
                    prop_assert!(n == len.min(next_in - next_out) || (n > 0 && n < len));
                    for (i, byte) in buf[..n].iter().enumerate() {
                        prop_assert_eq!(*byte, (next_out + i) as u8);
                    }
                    next_out += n;
                }
            }
        }
    }

    #[test]
    fn a_position_out_of_range_is_an_error_on_both_sides() {
        let memory = cells(8);
        memory.head.store(9, Ordering::Relaxed);
        assert_eq!(Consumer::new(memory.clone()).pop(&mut [0; 4]), Err(Corrupt));
        memory.tail.store(1, Ordering::Relaxed);
        assert_eq!(Producer::new(memory).push(&[0; 9]), Err(Corrupt));
    }

    #[test]
    fn the_consumer_learns_once_that_the_producer_waits() {
        let memory = cells(4);
        let mut producer = Producer::new(memory.clone());
        let mut consumer = Consumer::new(memory);
        assert_eq!(producer.push(&[1; 9]), Ok(4));
        assert!(!consumer.producer_waits());
        assert_eq!(producer.push(&[1; 9]), Ok(0));
        assert_eq!(consumer.pop(&mut [0; 1]), Ok(1));
        assert!(consumer.producer_waits());
        assert!(!consumer.producer_waits());
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::{cell::UnsafeCell, sync::Arc, thread};

    use super::*;

    /// Cells in which loom reports any access that could race.
    struct Cells {
        head: AtomicU64,
        tail: AtomicU64,
        starved: AtomicU32,
        bytes: Vec<UnsafeCell<u8>>,
    }

    fn cells(capacity: usize) -> Arc<Cells> {
        Arc::new(Cells {
            head: AtomicU64::new(0),
            tail: AtomicU64::new(0),
            starved: AtomicU32::new(0),
            bytes: (0..capacity).map(|_| UnsafeCell::new(0)).collect(),
        })
    }

    impl Memory for Arc<Cells> {
        fn head(&self) -> &AtomicU64 {
            &self.head
        }
        fn tail(&self) -> &AtomicU64 {
            &self.tail
        }
        fn starved(&self) -> &AtomicU32 {
            &self.starved
        }
        fn capacity(&self) -> usize {
            self.bytes.len()
        }
        unsafe fn write(&self, at: usize, src: &[u8]) {
            for (cell, byte) in self.bytes[at..at + src.len()].iter().zip(src) {
                // SAFETY: loom checks that the caller owns the byte.
                cell.with_mut(|cell| unsafe { *cell = *byte });
            }
        }
        unsafe fn read(&self, at: usize, dst: &mut [u8]) {
            let cells = &self.bytes[at..at + dst.len()];
            for (byte, cell) in dst.iter_mut().zip(cells) {
                // SAFETY: loom checks that the caller owns the byte.
                *byte = cell.with(|cell| unsafe { *cell });
            }
        }
    }

    #[test]
    fn bytes_arrive_in_order_through_a_ring_that_wraps() {
        loom::model(|| {
            let memory = cells(2);
            let mut producer = Producer::new(memory.clone());
            let mut consumer = Consumer::new(memory);
            let writer = thread::spawn(move || {
                let sent = producer.push(&[1, 2]).unwrap();
                assert_eq!(sent, 2);
                producer.push(&[3]).unwrap()
            });
            let mut got = Vec::new();
            for _ in 0..2 {
                let mut buf = [0; 2];
                let n = consumer.pop(&mut buf).unwrap();
                got.extend_from_slice(&buf[..n]);
            }
            let sent = 2 + writer.join().unwrap();
            loop {
                let mut buf = [0; 1];
                if consumer.pop(&mut buf).unwrap() == 0 {
                    break;
                }
                got.push(buf[0]);
            }
            assert_eq!(got, [1, 2, 3][..sent]);
        });
    }

    #[test]
    fn a_producer_without_space_is_seen_by_the_consumer_or_sees_the_space() {
        loom::model(|| {
            let memory = cells(1);
            let mut producer = Producer::new(memory.clone());
            let mut consumer = Consumer::new(memory);
            assert_eq!(producer.push(&[1]), Ok(1));
            let writer = thread::spawn(move || producer.push(&[2]).unwrap());
            assert_eq!(consumer.pop(&mut [0]), Ok(1));
            let notified = consumer.producer_waits();
            let sent = writer.join().unwrap();
            // If the writer gave up although there is space, somebody must have been told.
            assert!(sent == 1 || notified);
        });
    }
}

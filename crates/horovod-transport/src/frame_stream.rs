//! Frames on an authenticated connection that is not one of the mesh: to the rendezvous, for a payload.

use crate::{
    framing::{FrameQueue, FrameReader, Incoming},
    platform::fd::Fd,
    tcp::stream::{Got, Stream},
};

/// A connection, the frame that is arriving and those that wait to be sent.
pub(crate) struct FrameStream {
    stream: Stream,
    reader: FrameReader,
    /// Frames still to be sent.
    queue: FrameQueue,
}

impl FrameStream {
    /// No frame of the other side may be longer than `frame_max`.
    pub(crate) fn new(stream: Stream, frame_max: usize) -> Self {
        Self {
            stream,
            reader: FrameReader::new(frame_max),
            queue: FrameQueue::default(),
        }
    }

    pub(crate) fn fd(&self) -> &std::sync::Arc<Fd> {
        self.stream.fd()
    }

    /// Queues a frame; [`FrameStream::flush`] sends.
    pub(crate) fn push(&mut self, frame: &[u8]) {
        self.queue.push(frame);
    }

    /// Bytes that are queued.
    pub(crate) fn unsent(&self) -> usize {
        self.queue.len()
    }

    /// Socket to wait for, and whether to wait until it is writable.
    pub(crate) fn wait(&self) -> (&Fd, bool) {
        (self.stream.fd(), !self.queue.is_empty())
    }

    /// The next frame, if it is there.
    pub(crate) fn next(&mut self) -> Result<Option<Vec<u8>>, String> {
        loop {
            match self
                .reader
                .pop(&mut Vec::new())
                .map_err(|e| format!("a message of {} bytes", e.0))?
            {
                Some(Incoming::Frame(bytes)) => return Ok(Some(bytes)),
                Some(Incoming::OutOfBand(_)) => return Err("a message of an unknown kind".into()),
                Some(Incoming::Goodbye) => return Err("it said goodbye".into()),
                None => {}
            }
            let got = self.stream.try_recv(self.reader.space());
            match got.map_err(|e| e.to_string())? {
                Got::Bytes(n) => self.reader.filled(n),
                Got::Nothing => return Ok(None),
                Got::End => return Err("it closed the connection".into()),
            }
        }
    }

    /// Sends what the socket takes now; whether that was everything.
    pub(crate) fn flush(&mut self) -> Result<bool, String> {
        let stream = &mut self.stream;
        self.queue
            .flush(|b| stream.try_send(b))
            .map_err(|e| e.to_string())
    }
}

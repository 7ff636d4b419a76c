//! Messages between a rank and the hub of its communicator: a length, a kind, fields.

use std::io::{self, Read, Write};

/// Identity of a hub's session, unguessable enough for two jobs on one machine.
pub(crate) type Magic = [u8; 8];

/// Properties of a collective that must be equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) function: u8,
    pub(crate) count: u64,
    pub(crate) dtype: i32,
    pub(crate) operator: i32,
    /// Or the peer.
    pub(crate) root: i32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) magic: Magic,
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) version: i32,
    pub(crate) uuid: [u8; 16],
    /// Ranks may share a GPU.
    pub(crate) may_share: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Hello(Hello),
    Welcome,
    Refused {
        code: i32,
        text: String,
    },
    /// A rank's input.
    Part {
        launch: u64,
        part: u32,
        sequence: u64,
        shape: Shape,
        data: Vec<u8>,
    },
    /// A rank's result.
    Outcome {
        launch: u64,
        part: u32,
        data: Vec<u8>,
    },
    Mismatch {
        text: String,
    },
    Lost {
        text: String,
    },
    Split {
        number: u64,
        color: i32,
        key: i32,
    },
    SplitDone {
        number: u64,
        rank: u32,
        size: u32,
        magic: Magic,
    },
    Finalize,
    Finalized,
}

struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk().ok_or_else(malformed)?;
        self.0 = rest;
        Ok(*first)
    }
    fn u32(&mut self) -> io::Result<u32> {
        self.array().map(u32::from_le_bytes)
    }
    fn i32(&mut self) -> io::Result<i32> {
        self.array().map(i32::from_le_bytes)
    }
    fn u64(&mut self) -> io::Result<u64> {
        self.array().map(u64::from_le_bytes)
    }
    fn u8(&mut self) -> io::Result<u8> {
        self.array::<1>().map(|b| b[0])
    }
    fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0).to_vec()
    }
    fn text(&mut self) -> String {
        String::from_utf8_lossy(&self.rest()).into_owned()
    }
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a message that is none")
}

/// Longer ones are none of ours.
const MESSAGE_MAX: u64 = 8 << 30;

impl Message {
    fn body(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Hello(hello) => {
                out.push(0);
                out.extend(hello.magic);
                out.extend(hello.rank.to_le_bytes());
                out.extend(hello.size.to_le_bytes());
                out.extend(hello.version.to_le_bytes());
                out.extend(hello.uuid);
                out.push(u8::from(hello.may_share));
            }
            Self::Welcome => out.push(1),
            Self::Refused { code, text } => {
                out.push(2);
                out.extend(code.to_le_bytes());
                out.extend(text.as_bytes());
            }
            Self::Part {
                launch,
                part,
                sequence,
                shape,
                data,
            } => {
                out.push(3);
                out.extend(launch.to_le_bytes());
                out.extend(part.to_le_bytes());
                out.extend(sequence.to_le_bytes());
                out.push(shape.function);
                out.extend(shape.count.to_le_bytes());
                for field in [shape.dtype, shape.operator, shape.root] {
                    out.extend(field.to_le_bytes());
                }
                out.extend(data);
            }
            Self::Outcome { launch, part, data } => {
                out.push(4);
                out.extend(launch.to_le_bytes());
                out.extend(part.to_le_bytes());
                out.extend(data);
            }
            Self::Mismatch { text } => {
                out.push(5);
                out.extend(text.as_bytes());
            }
            Self::Lost { text } => {
                out.push(6);
                out.extend(text.as_bytes());
            }
            Self::Split { number, color, key } => {
                out.push(7);
                out.extend(number.to_le_bytes());
                out.extend(color.to_le_bytes());
                out.extend(key.to_le_bytes());
            }
            Self::SplitDone {
                number,
                rank,
                size,
                magic,
            } => {
                out.push(8);
                out.extend(number.to_le_bytes());
                out.extend(rank.to_le_bytes());
                out.extend(size.to_le_bytes());
                out.extend(magic);
            }
            Self::Finalize => out.push(9),
            Self::Finalized => out.push(10),
        }
        out
    }

    pub(crate) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let body = self.body();
        let mut frame = (body.len() as u64).to_le_bytes().to_vec();
        frame.extend(body);
        to.write_all(&frame)
    }

    pub(crate) fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut length = [0; 8];
        from.read_exact(&mut length)?;
        let length = u64::from_le_bytes(length);
        if length > MESSAGE_MAX {
            return Err(malformed());
        }
        let mut body = vec![0; length as usize];
        from.read_exact(&mut body)?;
        let mut fields = Fields(&body);
        let f = &mut fields;
        Ok(match f.u8()? {
            0 => Self::Hello(Hello {
                magic: f.array()?,
                rank: f.u32()?,
                size: f.u32()?,
                version: f.i32()?,
                uuid: f.array()?,
                may_share: f.u8()? != 0,
            }),
            1 => Self::Welcome,
            2 => Self::Refused {
                code: f.i32()?,
                text: f.text(),
            },
            3 => Self::Part {
                launch: f.u64()?,
                part: f.u32()?,
                sequence: f.u64()?,
                shape: Shape {
                    function: f.u8()?,
                    count: f.u64()?,
                    dtype: f.i32()?,
                    operator: f.i32()?,
                    root: f.i32()?,
                },
                data: f.rest(),
            },
            4 => Self::Outcome {
                launch: f.u64()?,
                part: f.u32()?,
                data: f.rest(),
            },
            5 => Self::Mismatch { text: f.text() },
            6 => Self::Lost { text: f.text() },
            7 => Self::Split {
                number: f.u64()?,
                color: f.i32()?,
                key: f.i32()?,
            },
            8 => Self::SplitDone {
                number: f.u64()?,
                rank: f.u32()?,
                size: f.u32()?,
                magic: f.array()?,
            },
            9 => Self::Finalize,
            10 => Self::Finalized,
            _ => return Err(malformed()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Hello, Message, Shape};

    #[test]
    fn messages_come_back_as_they_were() {
        let shape = Shape {
            function: 3,
            count: 5,
            dtype: 7,
            operator: 0,
            root: -1,
        };
        let messages = [
            Message::Hello(Hello {
                magic: [1; 8],
                rank: 1,
                size: 2,
                version: 23007,
                uuid: [9; 16],
                may_share: true,
            }),
            Message::Welcome,
            Message::Refused {
                code: 5,
                text: "no".to_owned(),
            },
            Message::Part {
                launch: 1,
                part: 2,
                sequence: 3,
                shape,
                data: vec![1, 2],
            },
            Message::Outcome {
                launch: 1,
                part: 2,
                data: vec![],
            },
            Message::Mismatch {
                text: "a".to_owned(),
            },
            Message::Lost {
                text: String::new(),
            },
            Message::Split {
                number: 1,
                color: -1,
                key: 2,
            },
            Message::SplitDone {
                number: 1,
                rank: 0,
                size: 1,
                magic: [3; 8],
            },
            Message::Finalize,
            Message::Finalized,
        ];
        let mut bytes = Vec::new();
        for message in &messages {
            message.write(&mut bytes).unwrap();
        }
        let mut from = bytes.as_slice();
        for message in messages {
            assert_eq!(Message::read(&mut from).unwrap(), message);
        }
        assert!(Message::read(&mut from).is_err());
    }
}

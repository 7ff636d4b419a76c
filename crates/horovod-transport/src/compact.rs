//! The form of messages that are not on the hot path: serde's, in postcard's format, with bounds.
//!
//! A message is bounded by the frame that carries it. A text takes no more memory than its bytes; a list may, so its
//! field names a bound.

use std::ffi::OsString;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::{fmt, mem};

use horovod_protocol::wire::{DecodeError, cut_at};
use horovod_protocol::{ProcessSetId, Rank};
use serde::de::{DeserializeOwned, Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Appends a message.
pub fn encode(message: &impl Serialize, out: &mut Vec<u8>) {
    let written = postcard::to_extend(message, mem::take(out));
    *out = written.expect("lists and texts know their lengths");
}

/// Reads the message at the start of these bytes; and the bytes after it.
pub fn decode_first<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<(T, &'a [u8]), DecodeError> {
    postcard::take_from_bytes(bytes).map_err(|error| match error {
        postcard::Error::DeserializeUnexpectedEnd => DecodeError::Truncated { what: "message" },
        postcard::Error::DeserializeBadUtf8 => DecodeError::NotUtf8 { what: "text" },
        _ => DecodeError::Malformed,
    })
}

/// Reads a message that takes all of these bytes.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, DecodeError> {
    match decode_first(bytes)? {
        (message, []) => Ok(message),
        (_, rest) => Err(DecodeError::Trailing { len: rest.len() }),
    }
}

/// For the attribute `deserialize_with`: a list of at most `MAX` items.
pub fn list<'de, const MAX: usize, T, D>(from: D) -> Result<Vec<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    List::<T, MAX>::deserialize(from).map(|list| list.0)
}

/// For the attribute `serialize_with`: the list; of one that has more than `MAX` items the beginning.
pub fn put_list<const MAX: usize, T: Serialize, S: Serializer>(
    list: &[T],
    to: S,
) -> Result<S::Ok, S::Error> {
    list[..list.len().min(MAX)].serialize(to)
}

/// As [`list`], of a list or an error.
pub fn list_or_error<'de, const MAX: usize, T, E, D>(from: D) -> Result<Result<Vec<T>, E>, D::Error>
where
    T: Deserialize<'de>,
    E: Deserialize<'de>,
    D: Deserializer<'de>,
{
    Result::<List<T, MAX>, E>::deserialize(from).map(|result| result.map(|list| list.0))
}

/// For the attribute `serialize_with`: the text; of one that is longer than `MAX` bytes the beginning.
pub fn put_text<const MAX: usize, S: Serializer>(text: &str, to: S) -> Result<S::Ok, S::Error> {
    cut_at(text, MAX).serialize(to)
}

/// For the attribute `deserialize_with`: a text of at most `MAX` bytes.
pub fn text<'de, const MAX: usize, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let text = <&str>::deserialize(from)?;
    match text.len() <= MAX {
        true => Ok(text.to_owned()),
        false => Err(D::Error::custom("a text is too long")),
    }
}

/// For the attribute `serialize_with`: bytes as one piece.
pub fn put_bytes<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_bytes(bytes)
}

/// For the attribute `deserialize_with`: at most `MAX` bytes.
pub fn bytes<'de, const MAX: usize, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    let bytes = <&[u8]>::deserialize(from)?;
    match bytes.len() <= MAX {
        true => Ok(bytes.to_owned()),
        false => Err(D::Error::custom("there are too many bytes")),
    }
}

/// For the attribute `serialize_with`: a path, also one that is not UTF-8.
pub fn put_path<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    path.as_os_str().serialize(to)
}

/// For the attribute `deserialize_with`: a path, also one that is not UTF-8.
pub fn path<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
    OsString::deserialize(from).map(PathBuf::from)
}

/// For the attribute `deserialize_with`: a number that can be compared and sorted.
pub fn finite<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Finite::deserialize(from).map(|number| number.0)
}

/// As [`finite`], or none.
pub fn finite_if_any<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    Option::<Finite>::deserialize(from).map(|number| number.map(|number| number.0))
}

/// A list of at most `MAX` items.
#[derive(Debug)]
pub struct List<T, const MAX: usize>(pub Vec<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for List<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_seq(Items::<T, MAX>(PhantomData)).map(Self)
    }
}

struct Items<T, const MAX: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Items<T, MAX> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MAX} items")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Self::Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = from.next_element()? {
            if items.len() == MAX {
                return Err(A::Error::custom("a list is too long"));
            }
            items.push(item);
        }
        Ok(items)
    }
}

/// A text of at most `MAX` bytes.
#[derive(Debug)]
pub struct Text<const MAX: usize>(pub String);

impl<'de, const MAX: usize> Deserialize<'de> for Text<MAX> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        text::<MAX, D>(from).map(Self)
    }
}

/// For the attribute `with`: a rank.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Rank")]
pub struct RankNumber(u32);

/// For the attribute `with`: a process set.
#[derive(Serialize, Deserialize)]
#[serde(remote = "ProcessSetId")]
pub struct SetNumber(u32);

struct Finite(f64);

impl<'de> Deserialize<'de> for Finite {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let number = f64::deserialize(from)?;
        match number.is_finite() {
            true => Ok(Self(number)),
            false => Err(D::Error::custom("a number is not finite")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Sample {
        #[serde(
            serialize_with = "put_list::<4, _, _>",
            deserialize_with = "list::<3, _, _>"
        )]
        list: Vec<u32>,
        #[serde(deserialize_with = "list_or_error::<2, _, _, _>")]
        listed: Result<Vec<String>, String>,
        #[serde(serialize_with = "put_text::<4, _>", deserialize_with = "text::<4, _>")]
        text: String,
        #[serde(serialize_with = "put_bytes", deserialize_with = "bytes::<3, _>")]
        bytes: Vec<u8>,
        #[serde(serialize_with = "put_path", deserialize_with = "path")]
        path: PathBuf,
        #[serde(deserialize_with = "finite")]
        number: f64,
        #[serde(deserialize_with = "finite_if_any")]
        other: Option<f64>,
    }

    fn sample() -> Sample {
        Sample {
            list: vec![1, 2, u32::MAX],
            listed: Ok(vec!["a".into(), "b".into()]),
            text: "text".into(),
            bytes: vec![0, 255, 7],
            path: OsString::from_vec(vec![b'/', 0xff]).into(),
            number: -1.5,
            other: Some(0.0),
        }
    }

    fn encoded(sample: &Sample) -> Vec<u8> {
        let mut out = Vec::new();
        encode(sample, &mut out);
        out
    }

    #[test]
    fn a_message_survives_and_no_part_of_it_is_one() {
        let bytes = encoded(&sample());
        assert_eq!(decode(&bytes), Ok(sample()));
        for end in 0..bytes.len() {
            assert!(decode::<Sample>(&bytes[..end]).is_err(), "{end}");
        }
        let longer = [&*bytes, &[0]].concat();
        assert_eq!(
            decode::<Sample>(&longer),
            Err(DecodeError::Trailing { len: 1 })
        );
    }

    #[test]
    fn a_text_is_cut_where_it_is_written() {
        let long = Sample {
            text: "textäs".into(),
            ..sample()
        };
        assert_eq!(decode(&encoded(&long)), Ok(sample()));
    }

    #[test]
    fn each_bound_holds() {
        let listed = Ok(vec![String::new(); 3]);
        let beyond = [
            Sample {
                list: vec![0; 5],
                ..sample()
            },
            Sample { listed, ..sample() },
            Sample {
                bytes: vec![0; 4],
                ..sample()
            },
            Sample {
                number: f64::NAN,
                ..sample()
            },
            Sample {
                other: Some(f64::INFINITY),
                ..sample()
            },
        ];
        for sample in beyond {
            let read = decode::<Sample>(&encoded(&sample));
            assert_eq!(read, Err(DecodeError::Malformed), "{sample:?}");
        }
        // A text of five bytes, where four are allowed.
        #[derive(Serialize)]
        struct Long(&'static str);
        #[derive(Debug, PartialEq, Deserialize)]
        struct Short(#[serde(deserialize_with = "text::<4, _>")] String);
        let mut out = Vec::new();
        encode(&Long("texts"), &mut out);
        assert_eq!(decode::<Short>(&out), Err(DecodeError::Malformed));
    }

    #[test]
    fn a_claimed_length_allocates_nothing() {
        let claims = [0xff, 0xff, 0xff, 0xff, 0x0f];
        assert!(decode::<Vec<u64>>(&claims).is_err());
        assert!(decode::<String>(&claims).is_err());
    }
}

//! The encoding of the doctor's questions and answers: every type writes and reads itself, field after field.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use horovod_protocol::wire::{DecodeError, Reader, Writer};

/// Bytes of one text.
const TEXT_BYTES_MAX: usize = 1 << 20;
/// Items of one list.
const ITEMS_MAX: usize = 1 << 16;

/// Something that travels between launcher and agent.
pub(crate) trait Wire: Sized {
    /// Appends it.
    fn put(&self, w: &mut Writer<'_>);
    /// Reads it.
    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError>;
}

/// Declares a struct whose fields travel in order.
macro_rules! wired {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$doc:meta])* pub $field:ident: $kind:ty,)* }) => {
        $(#[$meta])*
        pub struct $name { $($(#[$doc])* pub $field: $kind,)* }

        impl $crate::wire::Wire for $name {
            fn put(&self, w: &mut horovod_protocol::wire::Writer<'_>) {
                $($crate::wire::Wire::put(&self.$field, w);)*
            }

            fn get(
                r: &mut horovod_protocol::wire::Reader<'_>,
            ) -> Result<Self, horovod_protocol::wire::DecodeError> {
                Ok(Self { $($field: $crate::wire::Wire::get(r)?,)* })
            }
        }
    };
}
pub(crate) use wired;

pub(crate) fn bad<T>(what: &'static str, value: u8) -> Result<T, DecodeError> {
    let value = u64::from(value);
    Err(DecodeError::BadValue { what, value })
}

impl Wire for bool {
    fn put(&self, w: &mut Writer<'_>) {
        w.u8(u8::from(*self));
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(r.u8("flag")? != 0)
    }
}

impl Wire for u32 {
    fn put(&self, w: &mut Writer<'_>) {
        w.varint(u64::from(*self));
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        r.varint_u32("number")
    }
}

impl Wire for u64 {
    fn put(&self, w: &mut Writer<'_>) {
        w.varint(*self);
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        r.varint("number")
    }
}

impl Wire for i64 {
    fn put(&self, w: &mut Writer<'_>) {
        w.signed(*self);
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        r.signed("number")
    }
}

impl Wire for f64 {
    fn put(&self, w: &mut Writer<'_>) {
        w.u64(self.to_bits());
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let bits = r.u64("number")?;
        let number = Self::from_bits(bits);
        // Numbers are compared and sorted.
        match number.is_finite() {
            true => Ok(number),
            false => Err(DecodeError::BadValue {
                what: "number",
                value: bits,
            }),
        }
    }
}

impl Wire for String {
    fn put(&self, w: &mut Writer<'_>) {
        w.str(self);
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(r.str(TEXT_BYTES_MAX, "text")?.to_owned())
    }
}

impl Wire for OsString {
    fn put(&self, w: &mut Writer<'_>) {
        w.bytes(self.as_bytes());
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self::from_vec(r.bytes(TEXT_BYTES_MAX, "word")?.to_vec()))
    }
}

impl Wire for PathBuf {
    fn put(&self, w: &mut Writer<'_>) {
        w.bytes(self.as_os_str().as_bytes());
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(OsString::get(r)?.into())
    }
}

impl<T: Wire> Wire for Vec<T> {
    fn put(&self, w: &mut Writer<'_>) {
        w.varint(self.len() as u64);
        self.iter().for_each(|item| item.put(w));
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let count = r.count(ITEMS_MAX, 1, "list")?;
        (0..count).map(|_| T::get(r)).collect()
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, w: &mut Writer<'_>) {
        w.u8(u8::from(self.is_some()));
        if let Some(value) = self {
            value.put(w);
        }
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(match r.u8("option")? {
            0 => None,
            _ => Some(T::get(r)?),
        })
    }
}

impl<T: Wire, E: Wire> Wire for Result<T, E> {
    fn put(&self, w: &mut Writer<'_>) {
        w.u8(u8::from(self.is_ok()));
        match self {
            Ok(value) => value.put(w),
            Err(error) => error.put(w),
        }
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(match r.u8("result")? {
            0 => Err(E::get(r)?),
            _ => Ok(T::get(r)?),
        })
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    fn put(&self, w: &mut Writer<'_>) {
        self.0.put(w);
        self.1.put(w);
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok((A::get(r)?, B::get(r)?))
    }
}

impl Wire for IpAddr {
    fn put(&self, w: &mut Writer<'_>) {
        match self {
            Self::V4(ip) => {
                w.u8(4);
                w.raw(&ip.octets());
            }
            Self::V6(ip) => {
                w.u8(6);
                w.raw(&ip.octets());
            }
        }
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        match r.u8("address")? {
            4 => Ok(r.array::<4>("address")?.into()),
            6 => Ok(r.array::<16>("address")?.into()),
            other => bad("address", other),
        }
    }
}

impl Wire for SocketAddr {
    fn put(&self, w: &mut Writer<'_>) {
        self.ip().put(w);
        w.varint(u64::from(self.port()));
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let ip = IpAddr::get(r)?;
        let port = r.varint_u32("port")?;
        match u16::try_from(port) {
            Ok(port) => Ok(Self::new(ip, port)),
            Err(_) => bad("port", 0),
        }
    }
}

//! Element types: TensorFlow's codes, those of the core, and their sizes.

/// The attribute that says which element types an operation takes: all that the core knows.
pub(crate) const ATTRIBUTE: &str = "T: {uint8, int8, uint16, int16, uint32, int32, uint64, int64, half, bfloat16, \
    float, double, bool}";

/// An element type that both sides know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dtype {
    tensorflow: i32,
    core: u8,
    bytes: usize,
}

const fn dtype(tensorflow: i32, core: u8, bytes: usize) -> Dtype {
    Dtype {
        tensorflow,
        core,
        bytes,
    }
}

/// `TF_DataType`, the header's `HOROVOD_*`, bytes of an element.
const ALL: [Dtype; 13] = [
    dtype(1, 7, 4),
    dtype(2, 8, 8),
    dtype(3, 4, 4),
    dtype(4, 0, 1),
    dtype(5, 3, 2),
    dtype(6, 1, 1),
    dtype(9, 5, 8),
    dtype(10, 9, 1),
    dtype(14, 10, 2),
    dtype(17, 2, 2),
    dtype(19, 6, 2),
    dtype(22, 11, 4),
    dtype(23, 12, 8),
];

/// 32-bit integers: splits, ranks and sizes.
pub(crate) const INT32: Dtype = dtype(3, 4, 4);

impl Dtype {
    /// By TensorFlow's code.
    pub(crate) fn from_tensorflow(code: i32) -> Option<Self> {
        ALL.into_iter().find(|dtype| dtype.tensorflow == code)
    }

    /// By the core's code.
    pub(crate) fn from_core(code: u8) -> Option<Self> {
        ALL.into_iter().find(|dtype| dtype.core == code)
    }

    /// TensorFlow's code.
    pub(crate) fn tensorflow(self) -> i32 {
        self.tensorflow
    }

    /// The core's code.
    pub(crate) fn core(self) -> u8 {
        self.core
    }

    /// Bytes of a tensor with these dimensions; `None` if no address space holds it.
    pub(crate) fn bytes_of(self, dims: &[i64]) -> Option<usize> {
        dims.iter().try_fold(self.bytes, |bytes, dim| {
            bytes.checked_mul(usize::try_from(*dim).ok()?)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_of_the_core_has_one_of_tensorflow() {
        for code in 0..13 {
            let dtype = Dtype::from_core(code).unwrap();
            assert_eq!(Dtype::from_tensorflow(dtype.tensorflow()), Some(dtype));
        }
        assert_eq!(Dtype::from_core(13), None);
        assert_eq!(Dtype::from_tensorflow(7), None);
        assert_eq!(Dtype::from_tensorflow(3), Some(INT32));
    }

    #[test]
    fn sizes_are_those_of_tensorflows_types() {
        let sizes = [
            (size_of::<f32>(), &[1][..]),
            (size_of::<f64>(), &[2]),
            (size_of::<i32>(), &[3, 22]),
            (size_of::<i64>(), &[9, 23]),
            // 16-bit integers, half and bfloat16.
            (size_of::<i16>(), &[5, 14, 17, 19]),
            // 8-bit integers and bool.
            (size_of::<u8>(), &[4, 6, 10]),
        ];
        for (bytes, codes) in sizes {
            for code in codes {
                let dtype = Dtype::from_tensorflow(*code).unwrap();
                assert_eq!(dtype.bytes_of(&[3]), Some(3 * bytes), "{dtype:?}");
            }
        }
        assert_eq!(
            sizes.map(|(_, codes)| codes.len()).iter().sum::<usize>(),
            ALL.len()
        );
    }

    #[test]
    fn bytes_of_shapes() {
        assert_eq!(INT32.bytes_of(&[]), Some(4));
        assert_eq!(INT32.bytes_of(&[3, 0]), Some(0));
        assert_eq!(INT32.bytes_of(&[3, 2]), Some(24));
        assert_eq!(INT32.bytes_of(&[-1]), None);
        assert_eq!(INT32.bytes_of(&[i64::MAX, 4]), None);
    }
}

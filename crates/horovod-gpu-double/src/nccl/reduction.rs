//! The arithmetic of collectives, in the type of the elements: halves are rounded after every addition.

use horovod_kernels::{Combine, Isa, Source, Spec, reduce_with};
use horovod_protocol::DType;

/// NCCL's number of the average.
pub(crate) const AVERAGE: i32 = 4;
/// From here on operators were made by `ncclRedOpCreatePreMulSum`.
pub(crate) const FIRST_MADE: i32 = 5;

/// NCCL's numbers of element types.
pub(crate) fn dtype_of(code: i32) -> Option<DType> {
    Some(match code {
        0 => DType::I8,
        1 => DType::U8,
        2 => DType::I32,
        3 => DType::U32,
        4 => DType::I64,
        5 => DType::U64,
        6 => DType::F16,
        7 => DType::F32,
        8 => DType::F64,
        9 => DType::BF16,
        _ => return None,
    })
}

/// NCCL's numbers of operators; maximum before minimum. Averages and made operators add up.
fn combine_of(operator: i32) -> Combine {
    match operator {
        1 => Combine::Product,
        2 => Combine::Max,
        3 => Combine::Min,
        _ => Combine::Sum,
    }
}

fn step(spec: &Spec, into: &mut [u8], with: Option<&[u8]>) {
    let elements = into.len() / spec.dtype.size();
    let mut sources = vec![Source::partial(into.as_ptr())];
    if let Some(with) = with {
        debug_assert_eq!(with.len(), into.len());
        sources.push(Source::partial(with.as_ptr()));
    }
    // SAFETY: both hold so many elements; the destination is the first source.
    unsafe {
        reduce_with(
            Isa::Scalar,
            spec,
            &sources,
            into.as_mut_ptr(),
            None,
            elements,
        )
    }
}

/// Combines what the ranks sent, in their order.
pub(crate) fn reduce(dtype: DType, operator: i32, parts: &[Vec<u8>]) -> Vec<u8> {
    let mut result = parts.first().cloned().unwrap_or_default();
    let spec = Spec::plain(dtype, combine_of(operator));
    for part in parts.iter().skip(1) {
        step(&spec, &mut result, Some(part));
    }
    if operator == AVERAGE && !dtype.is_float() {
        let divided = Spec {
            divisor: parts.len() as u32,
            ..Spec::plain(dtype, Combine::Sum)
        };
        step(&divided, &mut result, None);
    }
    result
}

/// Multiplies every element by `scalar`, one element of the type.
pub(crate) fn multiply(dtype: DType, data: &mut [u8], scalar: &[u8]) {
    let repeated = scalar.repeat(data.len() / dtype.size());
    step(&Spec::plain(dtype, Combine::Product), data, Some(&repeated));
}

/// `1 / size` rounded to the type, which must be a float.
pub(crate) fn reciprocal(dtype: DType, size: usize) -> Vec<u8> {
    let mut one = match dtype {
        DType::F16 => 0x3c00_u16.to_le_bytes().to_vec(),
        DType::BF16 => 0x3f80_u16.to_le_bytes().to_vec(),
        DType::F32 => 1f32.to_le_bytes().to_vec(),
        _ => 1f64.to_le_bytes().to_vec(),
    };
    let divided = Spec {
        divisor: size as u32,
        ..Spec::plain(dtype, Combine::Sum)
    };
    step(&divided, &mut one, None);
    one
}

#[cfg(test)]
mod tests {
    use super::{AVERAGE, multiply, reciprocal, reduce};
    use horovod_protocol::DType;

    fn halves(values: &[u16]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    #[test]
    fn halves_are_rounded_after_every_addition() {
        // 2048 + 1 + 1 in f16: 2049 is rounded to 2048 each time; in f32 it would be 2050.
        let (big, one) = (0x6800, 0x3c00);
        let parts = [halves(&[big]), halves(&[one]), halves(&[one])];
        assert_eq!(reduce(DType::F16, 0, &parts), halves(&[big]));
        // 256 + 1 in bf16.
        let parts = [halves(&[0x4380]), halves(&[0x3f80]), halves(&[0x3f80])];
        assert_eq!(reduce(DType::BF16, 0, &parts), halves(&[0x4380]));
    }

    #[test]
    fn integers_wrap_and_averages_truncate() {
        let parts = [vec![200_u8], vec![100_u8]];
        assert_eq!(reduce(DType::U8, 0, &parts), [44]);
        let parts = [vec![7_u8], vec![0_u8], vec![4_u8]];
        assert_eq!(reduce(DType::U8, AVERAGE, &parts), [3]);
        assert_eq!(reduce(DType::U8, 2, &parts), [7]);
        assert_eq!(reduce(DType::U8, 3, &parts), [0]);
    }

    #[test]
    fn a_third_is_rounded_to_the_type() {
        assert_eq!(reciprocal(DType::BF16, 3), halves(&[0x3eab]));
        let mut data = 6f32.to_le_bytes().to_vec();
        multiply(DType::F32, &mut data, &reciprocal(DType::F32, 3));
        assert_eq!(data, (6f32 * (1f32 / 3f32)).to_le_bytes());
    }
}

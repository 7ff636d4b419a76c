//! Every implementation this CPU has against the oracle: bit by bit, but for the bits inside a NaN.

use horovod_kernels::{Combine, Isa, Source, Spec, fill_identity, reduce_with, scale};
use horovod_protocol::DType;
use proptest::prelude::*;

/// Bytes in memory at a chosen distance from an aligned address.
struct Memory {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Memory {
    fn new(content: &[u8], misalignment: usize) -> Self {
        let mut bytes = vec![0xa5; content.len() + 128];
        let start = bytes.as_ptr().align_offset(64) + misalignment;
        bytes[start..start + content.len()].copy_from_slice(content);
        Self {
            bytes,
            start,
            len: content.len(),
        }
    }

    fn at(&mut self) -> *mut u8 {
        self.bytes[self.start..].as_mut_ptr()
    }

    fn content(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    /// Whether only the content was written.
    fn is_intact(&self) -> bool {
        let after = &self.bytes[self.start + self.len..];
        self.bytes[..self.start]
            .iter()
            .chain(after)
            .all(|byte| *byte == 0xa5)
    }
}

/// One reduction with its operands.
struct Case {
    spec: Spec,
    inputs: Vec<Vec<u8>>,
    misalignment: usize,
    /// Write the result over the operand with this index.
    in_place: Option<usize>,
    /// Which operands have had the factor.
    scaled: Vec<bool>,
}

impl Case {
    /// The result, after checking that both destinations hold it and nothing else changed.
    fn run(&self, isa: Isa) -> Vec<u8> {
        let mut memories: Vec<Memory> = self
            .inputs
            .iter()
            .enumerate()
            .map(|(k, input)| Memory::new(input, (self.misalignment + k * 3) % 64))
            .collect();
        let blank = vec![0u8; self.inputs[0].len()];
        let mut dst = Memory::new(&blank, (self.misalignment * 5) % 64);
        let mut second = Memory::new(&blank, (self.misalignment * 7) % 64);
        let sources: Vec<Source> = memories
            .iter_mut()
            .zip(&self.scaled)
            .map(|(memory, scaled)| Source {
                ptr: memory.at(),
                pre: !scaled,
            })
            .collect();
        let target = match self.in_place {
            Some(k) => memories[k].at(),
            None => dst.at(),
        };
        let elems = blank.len() / self.spec.dtype.size();
        // SAFETY: all memories hold `elems` elements; none overlap but for the same.
        unsafe { reduce_with(isa, &self.spec, &sources, target, Some(second.at()), elems) };
        assert!(memories.iter().all(Memory::is_intact) && dst.is_intact() && second.is_intact());
        let result = match self.in_place {
            Some(k) => memories[k].content(),
            None => dst.content(),
        };
        assert_eq!(result, second.content(), "the two destinations differ");
        result.to_vec()
    }

    fn check(&self) {
        let want = canonical(self.spec.dtype, self.run(Isa::Scalar));
        for isa in Isa::available() {
            let got = canonical(self.spec.dtype, self.run(isa));
            assert!(
                got == want,
                "{isa}: {:?} k={} n={}",
                self.spec,
                self.inputs.len(),
                want.len()
            );
        }
    }
}

/// The same with one NaN for all NaNs.
fn canonical(dtype: DType, mut bytes: Vec<u8>) -> Vec<u8> {
    macro_rules! each {
        ($t:ty) => {
            for chunk in bytes.chunks_exact_mut(size_of::<$t>()) {
                if <$t>::from_ne_bytes(chunk.try_into().unwrap()).is_nan() {
                    chunk.copy_from_slice(&<$t>::NAN.to_ne_bytes());
                }
            }
        };
    }
    match dtype {
        DType::F32 => each!(f32),
        DType::F64 => each!(f64),
        DType::F16 => each!(half::f16),
        DType::BF16 => each!(half::bf16),
        _ => {}
    }
    bytes
}

/// Any bytes, with the values that trip arithmetic over mixed in.
fn bytes(dtype: DType, n: usize, seed: u64) -> Vec<u8> {
    let special = special(dtype);
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .flat_map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let random = state >> 24;
            if random.is_multiple_of(4) && !special.is_empty() {
                special[(random / 4) as usize % special.len()].clone()
            } else {
                let mut value = (state.rotate_left(20)).to_ne_bytes()[..dtype.size()].to_vec();
                if dtype == DType::Bool {
                    value[0] &= 1;
                }
                value
            }
        })
        .collect()
}

fn special(dtype: DType) -> Vec<Vec<u8>> {
    macro_rules! all {
        ($($value:expr),*) => { vec![$($value.to_ne_bytes().to_vec()),*] };
    }
    macro_rules! float {
        ($t:ty, $least:expr) => {
            all!(
                <$t>::NAN,
                <$t>::INFINITY,
                <$t>::NEG_INFINITY,
                <$t>::MAX,
                <$t>::MIN,
                <$t>::MIN_POSITIVE,
                $least,
                <$t>::from_bits(0),
                <$t>::from_bits($least.to_bits() + 7),
                (-<$t>::from_bits(0))
            )
        };
    }
    match dtype {
        DType::F16 => float!(half::f16, half::f16::from_bits(1)),
        DType::BF16 => float!(half::bf16, half::bf16::from_bits(1)),
        DType::F32 => float!(f32, f32::from_bits(1)),
        DType::F64 => float!(f64, f64::from_bits(1)),
        DType::I8 => all!(i8::MIN, i8::MAX, -1i8),
        DType::I16 => all!(i16::MIN, i16::MAX, -1i16),
        DType::I32 => all!(i32::MIN, i32::MAX, -1i32),
        DType::I64 => all!(i64::MIN, i64::MAX, -1i64),
        DType::U8 => all!(u8::MAX, 0u8),
        DType::U16 => all!(u16::MAX, 0u16),
        DType::U32 => all!(u32::MAX, 0u32),
        DType::U64 => all!(u64::MAX, 0u64),
        DType::Bool => Vec::new(),
    }
}

fn case(spec: Spec, k: usize, n: usize, seed: u64) -> Case {
    let inputs = (0..k)
        .map(|k| bytes(spec.dtype, n, seed.wrapping_mul(16) + k as u64))
        .collect();
    Case {
        spec,
        inputs,
        misalignment: 0,
        in_place: None,
        scaled: vec![false; k],
    }
}

#[test]
fn every_length_up_to_three_vectors_and_around_a_block() {
    for dtype in DType::ALL {
        for combine in Combine::ALL {
            for n in (0..=3 * 64 / dtype.size() + 1).chain([1023, 1024, 1025, 2051]) {
                for k in [1, 2, 3] {
                    case(Spec::plain(dtype, combine), k, n, n as u64).check();
                }
            }
        }
    }
}

#[test]
fn every_misalignment_in_place_and_not() {
    for dtype in DType::ALL {
        for misalignment in 0..64 {
            for in_place in [None, Some(0), Some(1)] {
                let spec = Spec::plain(dtype, Combine::ALL[misalignment % 4]);
                let case = case(spec, 2, 77, misalignment as u64);
                Case {
                    misalignment,
                    in_place,
                    ..case
                }
                .check();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_reduction_with_any_factors(
        dtype in 0u8..13, combine in 0usize..4, k in 1usize..6, n in 0usize..1500, seed: u64,
        pre in prop_oneof![Just(1.0), -3.0..3.0f64, Just(f64::INFINITY), Just(1e-300)],
        post in prop_oneof![Just(1.0), -3.0..3.0f64, Just(0.0)],
        divisor in prop_oneof![Just(1u32), 2u32..200, Just(u32::MAX)],
        misalignment in 0usize..64, place in 0usize..8, scaled: u8,
    ) {
        let dtype = DType::from_code(dtype).unwrap();
        let spec = Spec { dtype, combine: Combine::ALL[combine], pre, divisor, post };
        let in_place = (place < k).then_some(place);
        let scaled = (0..k).map(|k| scaled >> k & 1 == 1).collect();
        Case { misalignment, in_place, scaled, ..case(spec, k, n, seed) }.check();
    }
}

/// Reduces single values given as bytes.
fn one<const N: usize>(spec: Spec, values: &[[u8; N]]) -> [u8; N] {
    let results: Vec<[u8; N]> = Isa::available()
        .into_iter()
        .map(|isa| {
            let sources: Vec<Source> = values.iter().map(|v| Source::raw(v.as_ptr())).collect();
            let mut out = [0u8; N];
            // SAFETY: every operand is one element.
            unsafe { reduce_with(isa, &spec, &sources, out.as_mut_ptr(), None, 1) };
            out
        })
        .collect();
    assert!(results.iter().all(|result| *result == results[0]));
    results[0]
}

#[test]
fn both_destinations_may_be_operands() {
    for dtype in [DType::F32, DType::F16, DType::I8] {
        for isa in Isa::available() {
            let n = 300;
            let (mut a, mut b) = (bytes(dtype, n, 1), bytes(dtype, n, 2));
            let spec = Spec::plain(dtype, Combine::Sum);
            let mut want = vec![0u8; a.len()];
            let sources = [Source::raw(a.as_ptr()), Source::raw(b.as_ptr())];
            // SAFETY: all hold `n` elements.
            unsafe { reduce_with(Isa::Scalar, &spec, &sources, want.as_mut_ptr(), None, n) };
            let (first, second) = (a.as_mut_ptr(), b.as_mut_ptr());
            let sources = [Source::raw(first), Source::raw(second)];
            // SAFETY: as above; each destination is one of the sources.
            unsafe { reduce_with(isa, &spec, &sources, first, Some(second), n) };
            let want = canonical(dtype, want);
            assert!(
                canonical(dtype, a) == want && canonical(dtype, b) == want,
                "{isa} {dtype:?}"
            );
        }
    }
}

#[test]
fn averages_of_integers_whose_sum_does_not_fit_are_right() {
    fn check<const N: usize>(dtype: DType, extreme: [u8; N]) {
        for n in [2, 3, 300] {
            let spec = Spec {
                divisor: n,
                ..Spec::plain(dtype, Combine::Sum)
            };
            let got = one(spec, &vec![extreme; n as usize]);
            assert_eq!(got, extreme, "{dtype:?} {n}");
        }
    }
    macro_rules! extremes {
        ($($dtype:ident $t:ty),*) => { $(
            check(DType::$dtype, <$t>::MAX.to_ne_bytes());
            check(DType::$dtype, <$t>::MIN.to_ne_bytes());
        )* };
    }
    extremes!(U8 u8, I8 i8, U16 u16, I16 i16, U32 u32, I32 i32, U64 u64, I64 i64);
}

#[test]
fn averages_of_integers_are_exact_and_truncate_toward_zero() {
    let average = |dtype, divisor| Spec {
        divisor,
        ..Spec::plain(dtype, Combine::Sum)
    };
    for n in 1..300u32 {
        // All ones: a reciprocal would give 0 for 49, 98, 103 …
        let ones = vec![1i32.to_ne_bytes(); n as usize];
        assert_eq!(
            i32::from_ne_bytes(one(average(DType::I32, n), &ones)),
            1,
            "{n}"
        );
        for value in [
            i32::MAX,
            i32::MIN,
            -1,
            0,
            7,
            n as i32 * 1000 - 1,
            1 - n as i32 * 1000,
        ] {
            let got = i32::from_ne_bytes(one(average(DType::I32, n), &[value.to_ne_bytes()]));
            assert_eq!(
                i64::from(got),
                i64::from(value) / i64::from(n),
                "{value} / {n}"
            );
        }
        for value in [i64::MAX, i64::MIN, (1 << 53) + 1] {
            let got = i64::from_ne_bytes(one(average(DType::I64, n), &[value.to_ne_bytes()]));
            assert_eq!(got, value / i64::from(n));
        }
        for value in 0..=255u8 {
            let got = one(average(DType::U8, n), &[[value]])[0];
            assert_eq!(u32::from(got), u32::from(value) / n);
            let got = one(average(DType::I8, n), &[[value]])[0].cast_signed();
            assert_eq!(i32::from(got), i32::from(value.cast_signed()) / n as i32);
        }
        for value in [u32::MAX, u32::MAX - 1, n.wrapping_mul(7) - 1] {
            let got = u32::from_ne_bytes(one(average(DType::U32, n), &[value.to_ne_bytes()]));
            assert_eq!(got, value / n);
        }
        for value in [u64::MAX, 1 << 63] {
            let got = u64::from_ne_bytes(one(average(DType::U64, n), &[value.to_ne_bytes()]));
            assert_eq!(got, value / u64::from(n));
        }
    }
}

#[test]
fn averages_of_integers_with_a_factor_truncate_once() {
    fn average<const N: usize>(dtype: DType, post: f64, values: &[[u8; N]]) -> [u8; N] {
        let spec = Spec {
            divisor: values.len() as u32,
            post,
            ..Spec::plain(dtype, Combine::Sum)
        };
        one(spec, values)
    }
    macro_rules! check {
        ($($dtype:ident $t:ty),*) => { $(
            for (post, values, want) in [
                (2.0, &[1, 2][..], 3),
                (0.5, &[7, 8, 9], 4),
                (3.0, &[1, 1, 3], 5),
                (3.0, &[1; 49], 3),
                (1.5, &[0, 5], 3),
                // Saturating, as a factor alone does.
                (2.0, &[<$t>::MAX, <$t>::MAX - 1], <$t>::MAX),
                (-1.0, &[<$t>::MAX; 3], (-(<$t>::MAX as f64)) as $t),
            ] {
                let values: Vec<_> = values.iter().map(|v: &$t| v.to_ne_bytes()).collect();
                let got = <$t>::from_ne_bytes(average(DType::$dtype, post, &values));
                assert_eq!(got, want, "{} times {post}", stringify!($t));
            }
        )* };
    }
    check!(U8 u8, I8 i8, U16 u16, I16 i16, U32 u32, I32 i32, U64 u64, I64 i64);
    let of = |post, values: [i32; 2]| {
        i32::from_ne_bytes(average(DType::I32, post, &values.map(i32::to_ne_bytes)))
    };
    assert_eq!(
        (of(2.0, [-1, -2]), of(0.5, [-3, -4]), of(-2.0, [1, 2])),
        (-3, -1, -3)
    );
}

#[test]
fn scaled_integers_truncate_and_saturate() {
    let scaled = |pre| Spec {
        pre,
        ..Spec::plain(DType::I8, Combine::Sum)
    };
    let of = |pre, value: i8| one(scaled(pre), &[[value.cast_unsigned()]])[0].cast_signed();
    assert_eq!((of(0.5, 3), of(0.5, -3), of(0.99, 1)), (1, -1, 0));
    assert_eq!(
        (of(10.0, 100), of(10.0, -100), of(f64::NAN, 5)),
        (127, -128, 0)
    );
    let exact = (1i64 << 62) + 1;
    let spec = Spec::plain(DType::I64, Combine::Sum);
    assert_eq!(i64::from_ne_bytes(one(spec, &[exact.to_ne_bytes()])), exact);
}

#[test]
fn halves_round_once_at_the_end() {
    // 2048 + 1 is not a half; adding both ones first is. Rounding after each step would lose them.
    let value = |x: f32| half::f16::from_f32(x).to_ne_bytes();
    let sum = one(
        Spec::plain(DType::F16, Combine::Sum),
        &[value(2048.0), value(1.0), value(1.0)],
    );
    assert_eq!(half::f16::from_ne_bytes(sum).to_f32(), 2050.0);
    let value = |x: f32| half::bf16::from_f32(x).to_ne_bytes();
    let sum = one(
        Spec::plain(DType::BF16, Combine::Sum),
        &[value(256.0), value(1.0), value(1.0)],
    );
    assert_eq!(half::bf16::from_ne_bytes(sum).to_f32(), 258.0);
}

#[test]
fn a_nan_on_either_side_wins() {
    let (nan, two) = (f32::NAN.to_ne_bytes(), 2f32.to_ne_bytes());
    for combine in Combine::ALL {
        for values in [[nan, two], [two, nan]] {
            let got = one(Spec::plain(DType::F32, combine), &values);
            assert!(f32::from_ne_bytes(got).is_nan(), "{combine:?}");
        }
    }
}

#[test]
fn bool_is_or_and_and() {
    let of = |combine, a, b| one(Spec::plain(DType::Bool, combine), &[[a], [b]])[0];
    for (a, b) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 4), (0, 255)] {
        let (or, and) = (u8::from(a | b != 0), u8::from(a != 0 && b != 0));
        assert_eq!((of(Combine::Sum, a, b), of(Combine::Max, a, b)), (or, or));
        assert_eq!(
            (of(Combine::Product, a, b), of(Combine::Min, a, b)),
            (and, and)
        );
    }
}

#[test]
fn the_identity_changes_nothing() {
    for dtype in DType::ALL {
        for combine in Combine::ALL {
            let n = 40;
            let data = bytes(dtype, n, 3);
            let mut identity = vec![0xa5; n * dtype.size()];
            // SAFETY: it holds n elements.
            unsafe { fill_identity(dtype, combine, identity.as_mut_ptr(), n) };
            let orders = [
                vec![data.clone(), identity.clone()],
                vec![identity, data.clone()],
            ];
            for inputs in orders {
                let spec = Spec::plain(dtype, combine);
                let got = Case {
                    inputs,
                    ..case(spec, 2, n, 0)
                }
                .run(Isa::Portable);
                let same = |(got, want): (&[u8], &[u8])| {
                    got == want || is_zero(dtype, got) && is_zero(dtype, want)
                };
                let (got, want) = (canonical(dtype, got), canonical(dtype, data.clone()));
                let size = dtype.size();
                assert!(
                    got.chunks(size).zip(want.chunks(size)).all(same),
                    "{dtype:?} {combine:?}"
                );
            }
        }
    }
}

/// -0 + 0 is 0: equal, not the same bits.
fn is_zero(dtype: DType, value: &[u8]) -> bool {
    let (sign, rest) = (value[value.len() - 1], &value[..value.len() - 1]);
    dtype.is_float() && sign & 0x7f == 0 && rest.iter().all(|byte| *byte == 0)
}

#[test]
fn scaling_may_be_in_place() {
    let mut values: Vec<f32> = (0..1000u16).map(f32::from).collect();
    let at = values.as_mut_ptr().cast::<u8>();
    // SAFETY: it holds 1000 elements.
    unsafe { scale(DType::F32, 0.25, at, at, 1000) };
    assert!(
        values
            .iter()
            .zip(0u16..)
            .all(|(value, i)| *value == f32::from(i) * 0.25)
    );
}

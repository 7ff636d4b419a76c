//! The kernels' text: executed and compared with the oracle, compiled for GPUs, and read.

use horovod_kernels::{Combine, Isa, Source, Spec, reduce_with};
use horovod_protocol::DType;

use super::interpreter::{Grid, Memory, Module};
use super::{BATCH, BLOCK, CopyTable, ENTRIES, PTX, blocks};
use crate::testing;

/// Where the memory of the tests begins: a multiple of 16.
const BASE: u64 = 0x7f00_0000_0000;
/// Bytes around and between ranges, which must stay as they are.
const GUARD: usize = 48;
/// Counts of elements around the sizes of vectors, blocks and grids.
const COUNTS: [usize; 11] = [1, 2, 3, 7, 8, 15, 16, 17, 63, 1025, 4099];

fn grid(bytes: u64, most: u32) -> Grid {
    Grid {
        columns: blocks(bytes, most),
        rows: 1,
        block: BLOCK,
    }
}

fn words(values: &[u64]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

/// Bytes that look random, the same every time.
/// Of which come ties, results that become subnormal or infinite, zeros of either sign, and NaNs.
pub(super) const FACTORS: [f64; 7] = [
    1.0 / 3.0,
    0.25,
    1.0 + 1.0 / 256.0,
    1e-39,
    3.0,
    0.0,
    f64::NAN,
];

pub(super) fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// The oracle's result of scaling.
pub(super) fn scaled(dtype: DType, src: &[u8], factor: f64) -> Vec<u8> {
    let mut dst = vec![0; src.len()];
    let spec = Spec {
        post: factor,
        ..Spec::plain(dtype, Combine::Sum)
    };
    let sources = [Source::partial(src.as_ptr())];
    let elements = src.len() / dtype.size();
    // SAFETY: two separate ranges of so many elements.
    unsafe {
        reduce_with(
            Isa::Scalar,
            &spec,
            &sources,
            dst.as_mut_ptr(),
            None,
            elements,
        )
    };
    dst
}

/// Equal but for the bits of NaNs.
pub(super) fn assert_same(dtype: DType, found: &[u8], expected: &[u8], what: &str) {
    let size = dtype.size();
    for (i, (a, b)) in found.chunks(size).zip(expected.chunks(size)).enumerate() {
        assert!(
            a == b || is_nan(dtype, a) && is_nan(dtype, b),
            "{what}: element {i} is {a:x?}, not {b:x?}"
        );
    }
}

fn is_nan(dtype: DType, bytes: &[u8]) -> bool {
    let bits = bytes
        .iter()
        .rev()
        .fold(0u64, |all, &b| all << 8 | u64::from(b));
    match dtype {
        DType::F16 => half::f16::from_bits(bits as u16).is_nan(),
        DType::BF16 => half::bf16::from_bits(bits as u16).is_nan(),
        DType::F32 => f32::from_bits(bits as u32).is_nan(),
        _ => f64::from_bits(bits).is_nan(),
    }
}

/// A memory of noise with `input` at `at`; and that memory as it was.
fn memory_with(length: usize, at: usize, input: &[u8]) -> (Memory, Vec<u8>) {
    let mut bytes = noise(length, 99);
    bytes[at..at + input.len()].copy_from_slice(input);
    (Memory::new(BASE, bytes.clone()), bytes)
}

#[test]
fn scaling_gives_the_bits_of_the_oracle() {
    let module = Module::parse(PTX);
    for (dtype, entry) in [
        (DType::F16, "hvd_scale_f16"),
        (DType::BF16, "hvd_scale_bf16"),
        (DType::F32, "hvd_scale_f32"),
        (DType::F64, "hvd_scale_f64"),
    ] {
        let size = dtype.size();
        for count in COUNTS {
            for (shift, most, factor) in [
                (0, 1, 1.0 / 3.0),
                (0, 3, 0.5),
                (size, 2, -1e-3),
                (0, 8, 1e30),
                (0, 8, f64::INFINITY),
            ] {
                let input = noise(count * size, count as u64);
                let (src, dst) = (
                    GUARD + shift,
                    2 * GUARD + shift + (count * size).next_multiple_of(16),
                );
                let (mut memory, mut expected) =
                    memory_with(dst + count * size + GUARD, src, &input);
                let result = scaled(dtype, &input, factor);
                let parameters = words(&[
                    BASE + dst as u64,
                    BASE + src as u64,
                    count as u64,
                    factor.to_bits(),
                ]);
                module.launch(
                    entry,
                    grid((count * size) as u64, most),
                    &parameters,
                    &mut memory,
                );
                let what = format!("{entry}, {count} elements, shifted by {shift}");
                assert_same(
                    dtype,
                    &memory.bytes[dst..dst + result.len()],
                    &result,
                    &what,
                );
                let end = dst + result.len();
                expected[dst..end].copy_from_slice(&memory.bytes[dst..end]);
                assert!(memory.bytes == expected, "{what}: wrote elsewhere");
                let is_vectorised = shift == 0 && count * size >= 16;
                assert_eq!(memory.widest == 16, is_vectorised, "{what}: bytes at once");
            }
        }
    }
}

#[test]
fn scaling_in_place_gives_the_same() {
    let module = Module::parse(PTX);
    let input = noise(1000 * 4, 5);
    let (mut memory, _) = memory_with(GUARD + 4000 + GUARD, GUARD, &input);
    let at = BASE + GUARD as u64;
    let parameters = words(&[at, at, 1000, 0.1f64.to_bits()]);
    module.launch("hvd_scale_f32", grid(4000, 2), &parameters, &mut memory);
    let result = scaled(DType::F32, &input, 0.1);
    assert_same(
        DType::F32,
        &memory.bytes[GUARD..GUARD + 4000],
        &result,
        "in place",
    );
}

#[test]
fn every_half_is_scaled_as_by_the_oracle() {
    let module = Module::parse(PTX);
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for (dtype, entry) in [
        (DType::F16, "hvd_scale_f16"),
        (DType::BF16, "hvd_scale_bf16"),
    ] {
        for factor in FACTORS {
            let (mut memory, _) = memory_with(all.len(), 0, &all);
            let parameters = words(&[BASE, BASE, 1 << 16, factor.to_bits()]);
            module.launch(entry, grid(1 << 17, 4), &parameters, &mut memory);
            let what = format!("{entry} by {factor}");
            assert_same(dtype, &memory.bytes, &scaled(dtype, &all, factor), &what);
        }
    }
}

#[test]
fn filling_repeats_the_pattern_and_nothing_else() {
    let module = Module::parse(PTX);
    let pattern = 0x8877_6655_4433_2211_u64;
    for (size, entry) in [
        (1, "hvd_fill_b8"),
        (2, "hvd_fill_b16"),
        (4, "hvd_fill_b32"),
        (8, "hvd_fill_b64"),
    ] {
        for (count, shift) in COUNTS
            .into_iter()
            .flat_map(|count| [(count, 0), (count, size)])
        {
            let (start, length) = (GUARD + shift, count * size);
            let (mut memory, mut expected) = memory_with(start + length + GUARD, 0, &[]);
            for one in expected[start..start + length].chunks_mut(size) {
                one.copy_from_slice(&pattern.to_le_bytes()[..size]);
            }
            let parameters = words(&[BASE + start as u64, count as u64, pattern]);
            module.launch(entry, grid(length as u64, 2), &parameters, &mut memory);
            assert!(
                memory.bytes == expected,
                "{entry}, {count} elements, shifted by {shift}"
            );
            let is_vectorised = shift == 0 && length >= 16;
            assert_eq!(
                memory.widest == 16,
                is_vectorised,
                "{entry}, {count} elements"
            );
        }
    }
}

#[test]
fn integers_are_widened_by_their_sign_and_narrowed_modulo() {
    let module = Module::parse(PTX);
    for count in COUNTS {
        for shift in [0, 1] {
            let narrow = noise(count * 2, 3);
            let values = narrow.chunks(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
            let signed: Vec<u8> = values
                .clone()
                .flat_map(|v| i32::from(v as i16).to_le_bytes())
                .collect();
            let unsigned: Vec<u8> = values.flat_map(|v| u32::from(v).to_le_bytes()).collect();
            let wide = noise(count * 4, 4);
            let lower: Vec<u8> = wide.chunks(4).flat_map(|b| [b[0], b[1]]).collect();
            for (entry, input, result, unit) in [
                ("hvd_widen_i16", &narrow, &signed, 2),
                ("hvd_widen_u16", &narrow, &unsigned, 2),
                ("hvd_narrow_16", &wide, &lower, 4),
            ] {
                let src = GUARD + shift * unit;
                let dst = (src + input.len() + GUARD).next_multiple_of(16) + shift * (6 - unit);
                let (mut memory, mut expected) =
                    memory_with(dst + result.len() + GUARD, src, input);
                expected[dst..dst + result.len()].copy_from_slice(result);
                let parameters = words(&[BASE + dst as u64, BASE + src as u64, count as u64]);
                module.launch(entry, grid(count as u64 * 4, 2), &parameters, &mut memory);
                assert!(
                    memory.bytes == expected,
                    "{entry}, {count} elements, shifted by {shift}"
                );
                let is_vectorised = shift == 0 && count >= 4;
                assert_eq!(
                    memory.widest == 16,
                    is_vectorised,
                    "{entry}, {count} elements"
                );
            }
        }
    }
}

#[test]
fn a_batch_copies_ranges_of_every_alignment() {
    let module = Module::parse(PTX);
    let mut table = CopyTable {
        dst: [0; BATCH],
        src: [0; BATCH],
        bytes: [0; BATCH],
        count: BATCH as u64,
    };
    let source = noise(1 << 16, 7);
    let (mut memory, mut expected) = memory_with(3 << 16, 0, &source);
    let mut to = 1 << 16;
    for i in 0..BATCH {
        // Lengths from 1 on, sources and destinations of all alignments modulo 16, some alike.
        let (from, length) = (i * 61 + i % 3, 1 + i * i % 700);
        to += if i % 2 == 0 {
            (16 + from % 16 - to % 16) % 16
        } else {
            i % 5
        };
        table.dst[i] = BASE + to as u64;
        table.src[i] = BASE + from as u64;
        table.bytes[i] = length as u64;
        expected[to..to + length].copy_from_slice(&source[from..from + length]);
        to += length;
    }
    let grid = Grid {
        columns: 2,
        rows: BATCH as u32 + 1, // one too many: it has nothing to do
        block: BLOCK,
    };
    let parameters = words(
        &[
            &table.dst[..],
            &table.src[..],
            &table.bytes[..],
            &[table.count],
        ]
        .concat(),
    );
    module.launch("hvd_copy_batch", grid, &parameters, &mut memory);
    assert!(memory.bytes == expected);
    assert_eq!(memory.widest, 16);
}

#[test]
fn the_text_has_the_entries_that_are_launched_with_their_parameters() {
    let module = Module::parse(PTX);
    let found = module.entries();
    let mut names: Vec<&str> = found.keys().copied().collect();
    let mut expected: Vec<&str> = ENTRIES
        .iter()
        .filter_map(|name| name.to_str().ok())
        .collect();
    names.sort_unstable();
    expected.sort_unstable();
    assert_eq!(names, expected);
    for (name, sizes) in found {
        let parameters: &[u64] = match name {
            "hvd_copy_batch" => &[size_of::<CopyTable>() as u64],
            name if name.starts_with("hvd_scale_") => &[8, 8, 8, 8],
            _ => &[8, 8, 8],
        };
        assert_eq!(sizes, parameters, "{name}");
    }
    assert_eq!(size_of::<CopyTable>(), 3848);
}

#[test]
fn the_text_asks_for_no_more_than_the_oldest_driver_knows() {
    let code: Vec<&str> = PTX.lines().filter(|line| line.starts_with('.')).collect();
    assert_eq!(
        code[..3],
        [".version 6.4", ".target sm_70", ".address_size 64"]
    );
    let directives = code[3..].iter();
    assert!(
        directives
            .clone()
            .all(|line| line.starts_with(".visible") || line.starts_with(".maxntid"))
    );
    assert!(PTX.ends_with('\0') && PTX.is_ascii());
}

#[test]
fn grids_cover_small_inputs_and_end_at_the_bound() {
    assert_eq!(
        [0, 1, 8192, 8193].map(|bytes| blocks(bytes, 100)),
        [0, 1, 1, 2]
    );
    assert_eq!(blocks(u64::MAX, 1056), 1056);
}

#[test]
fn every_gpu_takes_the_text() {
    let library = match testing::wheel_file("nvidia/cu13/lib/libnvJitLink.so.13") {
        Ok(path) => path,
        Err(why) => return testing::skip(&why),
    };
    let linker = testing::NvJitLink::open(&library);
    for architecture in [75, 80, 90, 100, 120] {
        assert_eq!(
            linker.compile(architecture, PTX),
            Ok(()),
            "sm_{architecture}"
        );
    }
    let wrong = PTX.replace("mul.rn.f32 %x0, %x0, %by", "mul.rn.f32 %x0, %x0, %factor");
    assert_ne!(wrong, PTX);
    let text = linker
        .compile(90, &wrong)
        .expect_err("a register of the wrong type");
    assert!(text.contains("error"), "{text}");
}

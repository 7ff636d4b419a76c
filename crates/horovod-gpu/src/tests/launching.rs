//! Launches of the kernels: names, order of parameters, batches, and what is refused.

use horovod_kernels::{Combine, Isa, Source, Spec, reduce_with};
use horovod_protocol::DType;

use super::Double;
use crate::testing::alone;
use crate::{DeviceCopy, Elements, GpuError};

fn bytes_of(values: impl IntoIterator<Item = f32>, dtype: DType) -> Vec<u8> {
    let one = |value: f32| match dtype {
        DType::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
        DType::BF16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
        DType::F32 => value.to_le_bytes().to_vec(),
        _ => f64::from(value).to_le_bytes().to_vec(),
    };
    values.into_iter().flat_map(one).collect()
}

#[test]
fn scaling_is_the_oracles() {
    alone(&[], || {
        let double = Double::start("delay=10");
        let device = Double::adopted(0);
        let stream = device.create_stream().expect("a stream");
        let kernels = device.kernels().expect("the double takes the text");
        assert!(std::ptr::eq(kernels, device.kernels().expect("the same")));
        assert_eq!(double.calls("cuModuleLoadData"), 1);
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            let input = bytes_of((0..1000).map(|i| (i as f32 - 300.0) / 7.0), dtype);
            let bytes = input.len();
            let (src, dst) = (double.alloc(0, bytes), double.alloc(0, bytes));
            double.write(stream.raw(), src, &input);
            for factor in [1.0 / 3.0, 1.0] {
                let mut expected = vec![0; bytes];
                let spec = Spec {
                    post: factor,
                    ..Spec::plain(dtype, Combine::Sum)
                };
                let sources = [Source::partial(input.as_ptr())];
                // SAFETY: two ranges of a thousand elements.
                unsafe {
                    reduce_with(
                        Isa::Scalar,
                        &spec,
                        &sources,
                        expected.as_mut_ptr(),
                        None,
                        1000,
                    );
                }
                // SAFETY: a thousand elements each; all work is in one stream.
                unsafe {
                    kernels.scale(
                        &stream,
                        Elements {
                            dtype,
                            count: 1000,
                            dst,
                            src,
                        },
                        factor,
                    )
                }
                .expect("scaled");
                assert_eq!(double.read(stream.raw(), dst, bytes), expected, "{dtype:?}");
                // SAFETY: as above.
                unsafe { kernels.scale(&stream, Elements::in_place(dtype, 1000, dst), 2.0) }
                    .expect("in place");
                double.read(stream.raw(), dst, bytes);
            }
        }
        let launches = double.calls("cuLaunchKernel");
        // SAFETY: nothing is touched.
        unsafe {
            kernels
                .scale(&stream, Elements::in_place(DType::F32, 9, 16), 1.0)
                .expect("nothing to do");
            kernels
                .scale(&stream, Elements::in_place(DType::F32, 0, 16), 2.0)
                .expect("nothing to do");
            let error = kernels.scale(&stream, Elements::in_place(DType::I32, 9, 16), 2.0);
            let text = "the kernel `scale` is for floats, not int32".to_owned();
            assert_eq!(error, Err(GpuError::Invalid(text)));
        }
        assert_eq!(double.calls("cuLaunchKernel"), launches);
        double.assert_clean();
    });
}

#[test]
fn patterns_of_all_lengths_fill() {
    alone(&[], || {
        let double = Double::start("");
        let device = Double::adopted(0);
        let stream = device.create_stream().expect("a stream");
        let kernels = device.kernels().expect("kernels");
        let memory = double.alloc(0, 8 * 77);
        for pattern in [&[9][..], &[1, 2], &[1, 2, 3, 4], &[8, 7, 6, 5, 4, 3, 2, 1]] {
            // SAFETY: room for 77 patterns.
            unsafe { kernels.fill(&stream, memory, 77, pattern) }.expect("filled");
            let found = double.read(stream.raw(), memory, 77 * pattern.len());
            assert_eq!(found, pattern.repeat(77));
        }
        // SAFETY: refused.
        let error = unsafe { kernels.fill(&stream, memory, 1, &[1, 2, 3]) };
        let text = "a pattern to fill memory with has 1, 2, 4 or 8 bytes, not 3".to_owned();
        assert_eq!(error, Err(GpuError::Invalid(text)));
        double.assert_clean();
    });
}

#[test]
fn any_number_of_ranges_is_copied_in_batches() {
    alone(&[], || {
        let double = Double::start("");
        let device = Double::adopted(0);
        let stream = device.create_stream().expect("a stream");
        let kernels = device.kernels().expect("kernels");
        let input: Vec<u8> = (0..=255).cycle().take(400 * 40).collect();
        let (src, dst) = (double.alloc(0, input.len()), double.alloc(0, input.len()));
        double.write(stream.raw(), src, &input);
        double.write(stream.raw(), dst, &vec![0; input.len()]);
        let mut expected = vec![0; input.len()];
        // Every seventh has no length, so 342 are left; the order of destinations is turned round.
        let copies: Vec<DeviceCopy> = (0..400)
            .map(|i: usize| {
                let (from, to, bytes) = (
                    i * 40,
                    (399 - i) * 40,
                    if i % 7 == 6 { 0 } else { 1 + i % 40 },
                );
                expected[to..to + bytes].copy_from_slice(&input[from..from + bytes]);
                DeviceCopy {
                    dst: dst + to as u64,
                    src: src + from as u64,
                    bytes: bytes as u64,
                }
            })
            .collect();
        // SAFETY: ranges of the two allocations.
        unsafe { kernels.copy_batch(&stream, &copies) }.expect("copied");
        assert_eq!(double.read(stream.raw(), dst, input.len()), expected);
        assert_eq!(double.calls("cuLaunchKernel"), 3);
        // SAFETY: nothing.
        unsafe { kernels.copy_batch(&stream, &[]) }.expect("nothing to do");
        assert_eq!(double.calls("cuLaunchKernel"), 3);
        double.assert_clean();
    });
}

#[test]
fn small_integers_go_to_wide_ones_and_back() {
    alone(&[], || {
        let double = Double::start("");
        let device = Double::adopted(0);
        let stream = device.create_stream().expect("a stream");
        let kernels = device.kernels().expect("kernels");
        let values: Vec<u16> = (0..500).map(|i| i * 131 + 7).collect();
        let narrow: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let (small, wide, back) = (
            double.alloc(0, 1000),
            double.alloc(0, 2000),
            double.alloc(0, 1000),
        );
        double.write(stream.raw(), small, &narrow);
        for (dtype, widened) in [
            (DType::I16, (|v| i32::from(v as i16)) as fn(u16) -> i32),
            (DType::U16, i32::from),
        ] {
            // SAFETY: five hundred elements each.
            unsafe {
                kernels
                    .widen(
                        &stream,
                        Elements {
                            dtype,
                            count: 500,
                            dst: wide,
                            src: small,
                        },
                    )
                    .expect("widened");
                kernels
                    .narrow(
                        &stream,
                        Elements {
                            dtype,
                            count: 500,
                            dst: back,
                            src: wide,
                        },
                    )
                    .expect("narrowed");
            }
            let expected: Vec<u8> = values
                .iter()
                .flat_map(|v| widened(*v).to_le_bytes())
                .collect();
            assert_eq!(double.read(stream.raw(), wide, 2000), expected);
            assert_eq!(double.read(stream.raw(), back, 1000), narrow);
        }
        // SAFETY: refused.
        let results = unsafe {
            [
                kernels.widen(
                    &stream,
                    Elements {
                        dtype: DType::I8,
                        count: 1,
                        dst: wide,
                        src: small,
                    },
                ),
                kernels.narrow(
                    &stream,
                    Elements {
                        dtype: DType::F16,
                        count: 1,
                        dst: back,
                        src: wide,
                    },
                ),
            ]
        };
        for (result, name) in results.into_iter().zip(["widen", "narrow"]) {
            let text = result.expect_err("not this type").to_string();
            assert!(
                text.starts_with(&format!("the kernel `{name}` is for int16 and uint16")),
                "{text}"
            );
        }
        double.assert_clean();
    });
}

#[test]
fn the_oldest_driver_takes_the_kernels() {
    alone(&[], || {
        let double = Double::start("driver_version=12000,cc=70");
        assert!(Double::adopted(0).kernels().is_ok());
        double.assert_clean();
    });
}

#[test]
fn a_failed_load_is_remembered() {
    alone(&[], || {
        let double = Double::start("fail=cuModuleLoadData:1:222");
        let device = Double::adopted(0);
        let error = device.kernels().expect_err("too new");
        assert!(
            error
                .to_string()
                .ends_with("this driver is too old for the kernels"),
            "{error}"
        );
        assert_eq!(device.kernels().err(), Some(error));
        assert_eq!(double.calls("cuModuleLoadData"), 1);
    });
}

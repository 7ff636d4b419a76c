//! Reduction kernels in bytes per second, against a plain copy. `cargo bench -p horovod-kernels`

use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use horovod_kernels::{Combine, Isa, Source, Spec, reduce_with};
use horovod_protocol::DType;

fn main() {
    divan::main();
}

/// A chunk that stays in the second-level cache, and one that does not.
const SIZES: [usize; 2] = [64 << 10, 32 << 20];

#[divan::bench(args = SIZES)]
fn memcpy(bencher: Bencher<'_, '_>, bytes: usize) {
    let src = vec![1u8; bytes];
    let mut dst = vec![0u8; bytes];
    bencher
        .counter(BytesCount::new(2 * bytes))
        .bench_local(|| black_box(&mut dst).copy_from_slice(black_box(&src)));
}

/// `a += b`: bytes read and written, as for memcpy.
fn sum(bencher: Bencher<'_, '_>, isa: Isa, dtype: DType, bytes: usize, divisor: u32) {
    let b = vec![0x11u8; bytes];
    let mut a = vec![0x11u8; bytes];
    let spec = Spec {
        divisor,
        ..Spec::plain(dtype, Combine::Sum)
    };
    bencher.counter(BytesCount::new(3 * bytes)).bench_local(|| {
        let (a, b) = (black_box(a.as_mut_ptr()), black_box(b.as_ptr()));
        let sources = [Source::raw(a), Source::raw(b)];
        // SAFETY: both vectors hold `bytes` bytes.
        unsafe { reduce_with(isa, &spec, &sources, a, None, bytes / dtype.size()) };
    });
}

macro_rules! per_type {
    ($($name:ident $dtype:ident),*) => { $(
        #[divan::bench(args = implementations())]
        fn $name(bencher: Bencher<'_, '_>, Shown(isa, bytes): Shown) {
            sum(bencher, isa, DType::$dtype, bytes, 1);
        }
    )* };
}
per_type!(
    sum_u8 U8, sum_i8 I8, sum_u16 U16, sum_i16 I16, sum_i32 I32, sum_i64 I64, sum_f16 F16, sum_f32 F32,
    sum_f64 F64, sum_bool Bool, sum_bf16 BF16, sum_u32 U32, sum_u64 U64
);

#[divan::bench(args = implementations())]
fn average_f32(bencher: Bencher<'_, '_>, Shown(isa, bytes): Shown) {
    sum(bencher, isa, DType::F32, bytes, 3);
}

/// An implementation and a size, as an argument that divan can print.
#[derive(Clone, Copy)]
struct Shown(Isa, usize);

impl std::fmt::Display for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} KiB", self.0, self.1 >> 10)
    }
}

fn implementations() -> Vec<Shown> {
    let all = Isa::available();
    SIZES
        .iter()
        .flat_map(|bytes| all.iter().map(|isa| Shown(*isa, *bytes)))
        .collect()
}

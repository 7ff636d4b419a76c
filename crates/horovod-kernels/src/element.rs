//! The arithmetic of each element type, one value at a time; everything else repeats it.

/// An element as it lies in memory, and the type it is combined in.
pub(crate) trait Element: Copy {
    /// Values are combined as this: `f32` for halves, else the type itself.
    type Acc: Copy;
    /// Whether memory and accumulator have one representation, so that loading is copying.
    const DIRECT: bool;

    fn sum(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn min(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn max(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn product(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn scale(a: Self::Acc, factor: f64) -> Self::Acc;
    fn divide(a: Self::Acc, divisor: u32) -> Self::Acc;
    /// Both, rounded or truncated to the element's type once if that is an integer.
    #[inline(always)]
    fn divide_and_scale(a: Self::Acc, divisor: u32, factor: f64) -> Self::Acc {
        Self::scale(Self::divide(a, divisor), factor)
    }
}

/// A binary operation as a type, so that each loop is compiled for one.
pub(crate) trait Binary<E: Element> {
    fn apply(a: E::Acc, b: E::Acc) -> E::Acc;
}

pub(crate) struct Sum;
pub(crate) struct Min;
pub(crate) struct Max;
pub(crate) struct Product;

macro_rules! binary {
    ($name:ident, $method:ident) => {
        impl<E: Element> Binary<E> for $name {
            #[inline(always)]
            fn apply(a: E::Acc, b: E::Acc) -> E::Acc {
                E::$method(a, b)
            }
        }
    };
}
binary!(Sum, sum);
binary!(Min, min);
binary!(Max, max);
binary!(Product, product);

/// IEEE half precision, as its bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct F16(pub(crate) u16);

/// bfloat16, as its bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Bf16(pub(crate) u16);

/// A byte that is false when zero, as its byte.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Bool(pub(crate) u8);

macro_rules! float_arithmetic {
    ($acc:ty) => {
        #[inline(always)]
        fn sum(a: $acc, b: $acc) -> $acc {
            a + b
        }
        // Written so that a NaN on either side wins, which `f32::min` and the hardware's minimum
        // do not promise; compiles to two comparisons and a blend.
        #[inline(always)]
        fn min(a: $acc, b: $acc) -> $acc {
            if a < b || a.is_nan() { a } else { b }
        }
        #[inline(always)]
        fn max(a: $acc, b: $acc) -> $acc {
            if a > b || a.is_nan() { a } else { b }
        }
        #[inline(always)]
        fn product(a: $acc, b: $acc) -> $acc {
            a * b
        }
        #[inline(always)]
        fn scale(a: $acc, factor: f64) -> $acc {
            a * (factor as $acc)
        }
        #[inline(always)]
        fn divide(a: $acc, divisor: u32) -> $acc {
            a / (divisor as $acc)
        }
    };
}

impl Element for f32 {
    type Acc = f32;
    const DIRECT: bool = true;
    float_arithmetic!(f32);
}
impl Element for f64 {
    type Acc = f64;
    const DIRECT: bool = true;
    float_arithmetic!(f64);
}
impl Element for F16 {
    type Acc = f32;
    const DIRECT: bool = false;
    float_arithmetic!(f32);
}
impl Element for Bf16 {
    type Acc = f32;
    const DIRECT: bool = false;
    float_arithmetic!(f32);
}

macro_rules! integer {
    ($t:ty, |$a:ident, $n:ident| $divide:expr) => {
        impl Element for $t {
            type Acc = $t;
            const DIRECT: bool = true;
            #[inline(always)]
            fn sum(a: $t, b: $t) -> $t {
                a.wrapping_add(b)
            }
            #[inline(always)]
            fn min(a: $t, b: $t) -> $t {
                a.min(b)
            }
            #[inline(always)]
            fn max(a: $t, b: $t) -> $t {
                a.max(b)
            }
            #[inline(always)]
            fn product(a: $t, b: $t) -> $t {
                a.wrapping_mul(b)
            }
            // `as` from a float truncates toward zero and saturates; NaN becomes 0.
            #[inline(always)]
            fn scale(a: $t, factor: f64) -> $t {
                (a as f64 * factor) as $t
            }
            #[inline(always)]
            fn divide($a: $t, $n: u32) -> $t {
                $divide
            }
            #[inline(always)]
            fn divide_and_scale(a: $t, divisor: u32, factor: f64) -> $t {
                (a as f64 * factor / f64::from(divisor)) as $t
            }
        }
    };
}

// Up to 32 bits the f64 quotient truncates to the exact one: a quotient that is no integer is at least
// 1/n away from one, and the rounding error is below 2^-20/n. Unlike integer division it vectorises.
integer!(u8, |a, n| (f64::from(a) / f64::from(n)) as u8);
integer!(i8, |a, n| (f64::from(a) / f64::from(n)) as i8);
integer!(u16, |a, n| (f64::from(a) / f64::from(n)) as u16);
integer!(i16, |a, n| (f64::from(a) / f64::from(n)) as i16);
integer!(u32, |a, n| (f64::from(a) / f64::from(n)) as u32);
integer!(i32, |a, n| (f64::from(a) / f64::from(n)) as i32);
integer!(u64, |a, n| a / u64::from(n));
integer!(i64, |a, n| a / i64::from(n));

/// An integer whose sum is to be divided: added up in a type that no number of ranks overflows.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Wide<T>(pub(crate) T);

macro_rules! wide {
    ($($t:ty as $acc:ty),*) => { $(
        impl Element for Wide<$t> {
            type Acc = $acc;
            const DIRECT: bool = false;
            #[inline(always)]
            fn sum(a: $acc, b: $acc) -> $acc {
                a.wrapping_add(b)
            }
            #[inline(always)]
            fn min(a: $acc, b: $acc) -> $acc {
                a.min(b)
            }
            #[inline(always)]
            fn max(a: $acc, b: $acc) -> $acc {
                a.max(b)
            }
            #[inline(always)]
            fn product(a: $acc, b: $acc) -> $acc {
                a.wrapping_mul(b)
            }
            // A scaled value is one of the type again: saturated before the sum, and again as result.
            #[inline(always)]
            fn scale(a: $acc, factor: f64) -> $acc {
                <$acc>::from((a as $t as f64 * factor) as $t)
            }
            #[inline(always)]
            fn divide(a: $acc, divisor: u32) -> $acc {
                a / <$acc>::from(divisor)
            }
            // The factor first: a product of up to 53 bits is exact, and so is its quotient if that is an integer.
            #[inline(always)]
            fn divide_and_scale(a: $acc, divisor: u32, factor: f64) -> $acc {
                <$acc>::from((a as f64 * factor / f64::from(divisor)) as $t)
            }
        }
    )* };
}
wide!(
    u8 as u64,
    i8 as i64,
    u16 as u64,
    i16 as i64,
    u32 as u64,
    i32 as i64,
    u64 as u128,
    i64 as i128
);

impl Element for Bool {
    type Acc = Bool;
    const DIRECT: bool = true;
    #[inline(always)]
    fn sum(a: Bool, b: Bool) -> Bool {
        Bool(u8::from(a.0 | b.0 != 0))
    }
    #[inline(always)]
    fn min(a: Bool, b: Bool) -> Bool {
        Self::product(a, b)
    }
    #[inline(always)]
    fn max(a: Bool, b: Bool) -> Bool {
        Self::sum(a, b)
    }
    #[inline(always)]
    fn product(a: Bool, b: Bool) -> Bool {
        Bool(u8::from(a.0 != 0) & u8::from(b.0 != 0))
    }
    #[inline(always)]
    fn scale(a: Bool, factor: f64) -> Bool {
        Bool(u8::from(f64::from(a.0) * factor != 0.0))
    }
    #[inline(always)]
    fn divide(a: Bool, _divisor: u32) -> Bool {
        a
    }
}

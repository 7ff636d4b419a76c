//! 1,797 handwritten digits of 8 by 8 pixels, in a fixed random order: the test part of "Optical Recognition of
//! Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI Machine Learning Repository, CC BY 4.0). A line of `digits.txt`
//! is the digit and its pixels from 0 to g, which is 16.
#![allow(dead_code, reason = "not every example uses all of it")]

/// Pixels of an image.
pub(crate) const PIXELS: usize = 64;
/// Images to train with, a multiple of many numbers of ranks; the others are for the test.
pub(crate) const TRAINING: usize = 1536;

/// One image.
pub(crate) struct Digit {
    /// From 0 to 1.
    pub(crate) pixels: [f32; PIXELS],
    /// From 0 to 9.
    pub(crate) label: usize,
}

/// The images to train with, and those for the test.
pub(crate) fn load() -> (Vec<Digit>, Vec<Digit>) {
    let mut digits: Vec<Digit> = include_str!("digits.txt").lines().map(parse).collect();
    let test = digits.split_off(TRAINING);
    (digits, test)
}

fn parse(line: &str) -> Digit {
    let mut values = line.chars().map(|c| c.to_digit(17).unwrap_or(0));
    let label = values.next().unwrap_or(0) as usize;
    let mut pixels = [0.0; PIXELS];
    for (pixel, value) in pixels.iter_mut().zip(values) {
        *pixel = value as f32 / 16.0;
    }
    Digit { pixels, label }
}

/// A number that is the same for the same bits (FNV-1a).
pub(crate) fn fingerprint(values: &[f32]) -> u64 {
    let bytes = values
        .iter()
        .flat_map(|value| value.to_bits().to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

//! Runs the target `metrics` of crates/horovod-fuzz under libFuzzer.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| horovod_fuzz::run("metrics", bytes));

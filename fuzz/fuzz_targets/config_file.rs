//! Runs the target `config_file` of crates/horovod-fuzz under libFuzzer.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| horovod_fuzz::run("config_file", bytes));

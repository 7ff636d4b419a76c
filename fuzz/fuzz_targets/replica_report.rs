//! Runs the target `replica_report` of crates/horovod-fuzz under libFuzzer.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| horovod_fuzz::run("replica_report", bytes));

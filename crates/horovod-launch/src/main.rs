//! `horovodrun`.
fn main() {}

//! aarch64: NEON is part of the baseline, so the generic loops already use it; only the conversion
//! of IEEE halves has instructions worth naming.

pub(crate) mod neon;

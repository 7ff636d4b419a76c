//! Parsers of bytes from outside, for fuzzing.

use crate::{http, latest_reports};

/// The first byte chooses: 0, a request to the page, which without the secret names nothing; else reports of ranks, in
/// which no rank is one that the job does not have.
///
/// # Panics
/// A promise is broken.
pub fn messages(bytes: &[u8]) {
    const SIZE: u32 = 64;
    const SECRET: &str = "0123456789abcdef";
    match bytes {
        [] => {}
        [0, request @ ..] => {
            let Ok(Some(path)) = http::read_path(&mut &*request) else {
                return;
            };
            let has_secret = path
                .strip_prefix('/')
                .is_some_and(|p| p.starts_with(SECRET));
            assert!(
                has_secret || http::resource(&path, SECRET).is_none(),
                "{path}"
            );
        }
        [_, message @ ..] => {
            if let Ok((_, reports)) = latest_reports::decode(message, SIZE) {
                assert!(reports.iter().all(|report| report.rank < SIZE));
            }
        }
    }
}

//! Requests of browsers and of collectors, as far as they are understood here, and the answers.

use std::io::{self, Read, Write};
use std::time::Duration;

use crate::trace::TRACE_MAX;

/// Bytes of a request that are read at most.
const REQUEST_BYTES_MAX: usize = 8 << 10;

/// The page: one file, which loads nothing from other servers.
static PAGE: &str = include_str!("page.html");

/// A resource of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resource {
    /// The page for people.
    Page,
    /// The document of `hvd.stats()`.
    Stats,
    /// The text for Prometheus.
    Metrics,
    /// The text of `horovodrun --status`.
    Status,
    /// A trace of the time that follows the request.
    Trace(Duration),
}

/// Reads the path of a request, without the query; `None`: it is no GET.
///
/// # Errors
/// The program sends nothing more, or too much.
pub(crate) fn read_path(from: &mut impl Read) -> io::Result<Option<String>> {
    let mut head = Vec::new();
    let mut buffer = [0; 1024];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let n = from.read(&mut buffer)?;
        if n == 0 || head.len() + n > REQUEST_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        head.extend_from_slice(&buffer[..n]);
    }
    Ok(path_of(&head))
}

/// The path in `GET /path?query HTTP/1.1`.
pub(crate) fn path_of(head: &[u8]) -> Option<String> {
    let line = head.split(|byte| *byte == b'\r').next()?;
    let line = std::str::from_utf8(line).ok()?;
    let (target, version) = line.strip_prefix("GET ")?.rsplit_once(' ')?;
    version.strip_prefix("HTTP/1.")?;
    let path = target.split('?').next()?;
    path.starts_with('/').then(|| path.to_owned())
}

/// The resource that a path names below its token; `None` without the token.
pub(crate) fn resource(path: &str, token: &str) -> Option<Resource> {
    let (given, rest) = path.strip_prefix('/')?.split_once('/')?;
    if !is_equal(given.as_bytes(), token.as_bytes()) {
        return None;
    }
    match rest {
        "" => Some(Resource::Page),
        "stats.json" => Some(Resource::Stats),
        "metrics" => Some(Resource::Metrics),
        "status" => Some(Resource::Status),
        _ => rest
            .strip_prefix("trace/")
            .and_then(lasting)
            .map(Resource::Trace),
    }
}

/// A time in milliseconds, as digits.
fn lasting(digits: &str) -> Option<Duration> {
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let time = Duration::from_millis(digits.parse().ok().filter(|_| is_number)?);
    (!time.is_zero() && time <= TRACE_MAX).then_some(time)
}

/// Takes as long wherever the difference is.
fn is_equal(a: &[u8], b: &[u8]) -> bool {
    let differences = a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b));
    a.len() == b.len() && differences == 0
}

/// Answers with the page.
pub(crate) fn answer_page(to: &mut impl Write) -> io::Result<()> {
    answer(to, "200 OK", "text/html; charset=utf-8", PAGE)
}

/// Answers a request for what there is not, or without the token.
pub(crate) fn answer_not_found(to: &mut impl Write) -> io::Result<()> {
    answer(
        to,
        "404 Not Found",
        "text/plain; charset=utf-8",
        "not found\n",
    )
}

/// Answers that what was asked for is not possible now, and why.
pub(crate) fn answer_refusal(to: &mut impl Write, why: &str) -> io::Result<()> {
    answer(to, "409 Conflict", "text/plain; charset=utf-8", why)
}

/// Answers that something failed here, and why.
pub(crate) fn answer_failure(to: &mut impl Write, why: &str) -> io::Result<()> {
    answer(
        to,
        "500 Internal Server Error",
        "text/plain; charset=utf-8",
        why,
    )
}

/// Answers with a body of this type.
pub(crate) fn answer(to: &mut impl Write, status: &str, kind: &str, body: &str) -> io::Result<()> {
    answer_head(to, status, kind, body.len() as u64)?;
    to.write_all(body.as_bytes())
}

/// Begins an answer whose body has this type and length. The address holds the token: no page may pass it on, and
/// nobody keeps a copy.
pub(crate) fn answer_head(
    to: &mut impl Write,
    status: &str,
    kind: &str,
    length: u64,
) -> io::Result<()> {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\
         Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\nX-Content-Type-Options: nosniff\r\n\
         Content-Security-Policy: default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n\r\n"
    );
    to.write_all(head.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_names_a_path() {
        assert_eq!(
            path_of(b"GET /x/metrics?a=1 HTTP/1.1\r\nHost: y\r\n\r\n").as_deref(),
            Some("/x/metrics")
        );
        for other in [
            &b"POST /x/ HTTP/1.1\r\n\r\n"[..],
            b"GET x HTTP/1.1\r\n",
            b"GET /x\r\n",
            b"\xff",
            b"",
            b"GET /x FTP/1.1\r\n",
        ] {
            assert_eq!(path_of(other), None);
        }
    }

    #[test]
    fn nothing_is_named_without_the_token() {
        assert_eq!(resource("/abc/", "abc"), Some(Resource::Page));
        assert_eq!(resource("/abc/metrics", "abc"), Some(Resource::Metrics));
        assert_eq!(resource("/abc/stats.json", "abc"), Some(Resource::Stats));
        let trace = Resource::Trace(Duration::from_millis(500));
        assert_eq!(resource("/abc/trace/500", "abc"), Some(trace));
        for path in [
            "/",
            "/metrics",
            "//metrics",
            "/abd/metrics",
            "/ab/metrics",
            "/abcd/",
            "/abc",
            "/abc/x",
            "/abc/../abc/",
            "/abd/trace/500",
            "/abc/trace/",
            "/abc/trace/0",
            "/abc/trace/+5",
            "/abc/trace/600001",
            "/abc/trace/99999999999999999999999",
        ] {
            assert_eq!(resource(path, "abc"), None, "{path}");
        }
    }

    #[test]
    fn a_request_without_an_end_is_given_up() {
        let endless = vec![b'a'; 2 * REQUEST_BYTES_MAX];
        assert!(read_path(&mut &endless[..]).is_err());
        assert!(read_path(&mut &b"GET / HTTP/1.1\r\n"[..]).is_err());
    }

    #[test]
    fn the_page_asks_nobody_else() {
        for (at, _) in PAGE.match_indices("http") {
            let link = &PAGE[at..PAGE.len().min(at + 40)];
            assert!(
                // The viewer is opened on request, in a window of its own.
                link.starts_with("http-equiv")
                    || link.starts_with("http://www.w3.org/")
                    || link.starts_with("https://ui.perfetto.dev\""),
                "{link}"
            );
        }
        assert!(!PAGE.contains("//cdn") && !PAGE.contains("@import") && !PAGE.contains(" src="));
    }
}

//! Where rank 0 shows the job's figures.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use horovod_metrics::PublishSettings;
use horovod_settings::{self as settings, Environment, SummaryWhen};

use crate::error::Error;

/// Fewest characters of a secret.
const TOKEN_CHARACTERS: usize = 16;

/// Whether this rank measures: because it shall, or because the figures are to be shown.
pub(super) fn is_on(env: &dyn Environment) -> Result<bool, Error> {
    let is_shown = settings::METRICS_PORT.read(env)?.is_some()
        || settings::METRICS_TEXTFILE.read(env)?.is_some()
        || settings::SUMMARY.read(env)? == SummaryWhen::Always;
    Ok(is_shown || settings::METRICS.read(env)?)
}

pub(super) fn publish(env: &dyn Environment) -> Result<PublishSettings, Error> {
    let address = settings::METRICS_ADDRESS.read(env)?;
    let ip: IpAddr = address.parse().map_err(|_| {
        Error::Init(format!(
            "HOROVOD_METRICS_ADDRESS={address}: expected an IP address of rank 0's host, such as 127.0.0.1 or 0.0.0.0"
        ))
    })?;
    let token = settings::METRICS_TOKEN.read(env)?;
    let is_usual = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if let Some(token) = &token
        && (token.len() < TOKEN_CHARACTERS || !token.chars().all(is_usual))
    {
        // A secret is not repeated in messages.
        return Err(Error::Init(format!(
            "HOROVOD_METRICS_TOKEN has {} characters: expected at least {TOKEN_CHARACTERS} letters, digits, - or _. \
             Leave it out for a random one",
            token.chars().count()
        )));
    }
    let port = settings::METRICS_PORT.read(env)?;
    Ok(PublishSettings {
        address: port.map(|port| SocketAddr::new(ip, port)),
        token,
        textfile: settings::METRICS_TEXTFILE
            .read(env)?
            .map(|path| absolute(&path))
            .transpose()?,
    })
}

/// The path as it is meant now: the script may change its folder later.
fn absolute(path: &str) -> Result<PathBuf, Error> {
    std::path::absolute(path).map_err(|e| {
        Error::Init(format!(
            "HOROVOD_METRICS_TEXTFILE={path:?}: expected the path of a file, such as job.prom: {e}"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_meant_from_the_folder_at_init() {
        let here = std::env::current_dir().expect("a folder");
        assert_eq!(absolute("job.prom").ok(), Some(here.join("job.prom")));
        assert_eq!(absolute("/a/job.prom").ok(), Some("/a/job.prom".into()));
        assert!(absolute("").is_err());
    }
}

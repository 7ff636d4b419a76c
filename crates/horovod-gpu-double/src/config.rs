//! Settings of the double: `GPU_DOUBLE`, a comma list of `key=value` and flags.

use std::time::Duration;

/// The k-th call of a function fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fail {
    pub(crate) call: String,
    /// From 1.
    pub(crate) k: u64,
    /// Also every later one (`k+`).
    pub(crate) and_later: bool,
    pub(crate) code: i32,
}

/// Settings of the double; see the crate's documentation.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) seed: u64,
    pub(crate) devices: i32,
    /// The machine's name: part of the devices' uuids.
    pub(crate) host: String,
    pub(crate) nccl_version: i32,
    pub(crate) driver_version: i32,
    pub(crate) compute_capability: i32,
    /// Longest random delay before an operation of a stream.
    pub(crate) delay: Duration,
    pub(crate) log: Option<String>,
    pub(crate) in_progress: u32,
    pub(crate) fails: Vec<Fail>,
    /// The k-th call of a function never returns.
    pub(crate) hangs: Vec<(String, u64)>,
    /// After the k-th collective launched by this process its communicator has this error.
    pub(crate) async_errors: Vec<(u64, i32)>,
    /// The k-th collective of this process is never begun.
    pub(crate) never: Vec<u64>,
    pub(crate) abort: Duration,
    /// Bytes of each device.
    pub(crate) memory: u64,
    /// Result of `cuInit`.
    pub(crate) init: i32,
    /// Whether devices have memory pools (`cuMemAllocAsync`).
    pub(crate) pools: bool,
    /// Whether to pin memory waits for the device.
    pub(crate) pinning_waits: bool,
    /// Whether a lost peer is an error of the others' communicators (6), else they only hang.
    pub(crate) lost_is_error: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            seed: 0,
            devices: 1,
            host: String::new(),
            nccl_version: 23007,
            driver_version: 13020,
            compute_capability: 90,
            delay: Duration::ZERO,
            log: None,
            in_progress: 0,
            fails: Vec::new(),
            hangs: Vec::new(),
            async_errors: Vec::new(),
            never: Vec::new(),
            abort: Duration::ZERO,
            memory: 16 << 30,
            init: 0,
            pools: true,
            pinning_waits: false,
            lost_is_error: true,
        }
    }
}

impl Config {
    pub(crate) fn from_environment() -> Result<Self, String> {
        #[expect(
            clippy::disallowed_methods,
            reason = "the double is no part of the product and has no other place for its settings"
        )]
        match std::env::var("GPU_DOUBLE") {
            Ok(text) => Self::parse(&text),
            Err(_) => Ok(Self::default()),
        }
    }

    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut config = Self::default();
        for entry in text.split(',').map(str::trim).filter(|e| !e.is_empty()) {
            let (key, value) = entry.split_once('=').unwrap_or((entry, ""));
            config
                .set(key, value)
                .ok_or_else(|| format!("GPU_DOUBLE: `{entry}` is no setting of the double"))?;
        }
        Ok(config)
    }

    fn set(&mut self, key: &str, value: &str) -> Option<()> {
        match key {
            "seed" => self.seed = value.parse().ok()?,
            "devices" => self.devices = value.parse().ok().filter(|n| (1..=64).contains(n))?,
            "host" => value.clone_into(&mut self.host),
            "nccl_version" => self.nccl_version = value.parse().ok()?,
            "driver_version" => self.driver_version = value.parse().ok()?,
            "cc" => self.compute_capability = value.parse().ok()?,
            "delay" => self.delay = Duration::from_micros(value.parse().ok()?),
            "log" => self.log = Some(value.replace("%p", &std::process::id().to_string())),
            "in_progress" => self.in_progress = value.parse().ok()?,
            "fail" => self.fails.push(parse_fail(value)?),
            "hang" => {
                let (call, k) = value.split_once(':')?;
                self.hangs.push((call.to_owned(), k.parse().ok()?));
            }
            "async" => {
                let (k, code) = value.split_once(':')?;
                self.async_errors
                    .push((k.parse().ok()?, code.parse().ok()?));
            }
            "never" => self.never.push(value.parse().ok()?),
            "abort_ms" => self.abort = Duration::from_millis(value.parse().ok()?),
            "memory" => self.memory = value.parse().ok()?,
            "init" => self.init = value.parse().ok()?,
            "stub" => self.init = 34,
            "no_device" => self.init = 100,
            "pools" => self.pools = value.parse::<u8>().ok()? != 0,
            "pinning_waits" => self.pinning_waits = true,
            "lost" => {
                self.lost_is_error = match value {
                    "error" => true,
                    "hang" => false,
                    _ => return None,
                }
            }
            _ => return None,
        }
        Some(())
    }
}

fn parse_fail(value: &str) -> Option<Fail> {
    let mut parts = value.split(':');
    let call = parts.next()?.to_owned();
    let k = parts.next()?;
    let code = parts.next()?.parse().ok()?;
    let and_later = k.ends_with('+');
    let k = k.trim_end_matches('+').parse().ok()?;
    (!call.is_empty() && parts.next().is_none()).then_some(Fail {
        call,
        k,
        and_later,
        code,
    })
}

impl Config {
    /// A device's uuid, equal for all processes of one (pretended) machine.
    pub(crate) fn uuid_of(&self, device: i32) -> [u8; 16] {
        // FNV-1a: any function that differs with the name.
        let hash = self
            .host
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
            });
        let mut uuid = *b"GPU-\0\0\0\0\0\0\0\0\0\0\0\0";
        uuid[4..12].copy_from_slice(&hash.to_le_bytes());
        uuid[12..].copy_from_slice(&(device + 1).to_le_bytes());
        uuid
    }
}

#[cfg(test)]
mod tests {
    use super::{Config, Fail};

    #[test]
    fn settings_are_read() {
        let text = "seed=7,devices=2, in_progress=3,fail=cuEventRecord:2+:700,async=4:6,stub,hang=cuInit:3";
        let config = Config::parse(text).unwrap();
        assert_eq!((config.seed, config.devices, config.init), (7, 2, 34));
        assert_eq!(config.async_errors, [(4, 6)]);
        assert_eq!(config.hangs, [("cuInit".to_owned(), 3)]);
        let fail = Fail {
            call: "cuEventRecord".to_owned(),
            k: 2,
            and_later: true,
            code: 700,
        };
        assert_eq!(config.fails, [fail]);
    }

    #[test]
    fn unknown_settings_are_refused() {
        for text in [
            "sede=7",
            "devices=0",
            "fail=cuInit",
            "hang=cuInit",
            "lost=maybe",
        ] {
            assert!(Config::parse(text).unwrap_err().contains(text), "{text}");
        }
    }
}

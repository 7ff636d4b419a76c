//! Why this process can never use its GPU again, if so: only another process can.

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Reason why this process can never use a GPU again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuLoss {
    /// A call has failed in a way in which all later ones will ([`crate::GpuError::is_sticky`]).
    #[error("CUDA's context is lost (error {code})")]
    Context {
        /// `CUresult`.
        code: i32,
    },
    /// Aborted work still uses the GPU.
    #[error("GPU {ordinal} has not come to rest {} s after NCCL was {}{}", after.as_secs_f64(), how(*orderly), of(title.as_deref()))]
    Busy {
        /// Its number in this process.
        ordinal: i32,
        /// The operation that had not ended, if one had not.
        title: Option<Arc<str>>,
        /// How long it was waited for.
        after: Duration,
        /// NCCL was to end in good order.
        orderly: bool,
    },
}

fn how(orderly: bool) -> &'static str {
    match orderly {
        true => "asked to end",
        false => "aborted",
    }
}

fn of(title: Option<&str>) -> String {
    title.map_or_else(String::new, |title| format!(", with {title} under way"))
}

/// Of the first call that has failed because the context is lost; 0: none has.
static CONTEXT: AtomicI32 = AtomicI32::new(0);
static BUSY: OnceLock<GpuLoss> = OnceLock::new();

/// A call has failed with a code that means that the context is lost.
pub(crate) fn context_was_lost(code: i32) {
    let _ = CONTEXT.compare_exchange(0, code, Ordering::Relaxed, Ordering::Relaxed); // the first stays
}

/// A GPU does not come to rest.
pub(crate) fn stays_busy(loss: GpuLoss) {
    let _ = BUSY.set(loss); // the first stays
}

/// Why this process can never use its GPU again; `None`: it can, as far as is known.
pub fn loss() -> Option<GpuLoss> {
    match CONTEXT.load(Ordering::Relaxed) {
        0 => BUSY.get().cloned(),
        code => Some(GpuLoss::Context { code }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_names_the_gpu_the_bound_and_the_operation() {
        let busy = |title: Option<&str>, orderly| {
            GpuLoss::Busy {
                ordinal: 3,
                title: title.map(Into::into),
                after: Duration::from_secs(8),
                orderly,
            }
            .to_string()
        };
        assert_eq!(
            busy(Some("sum"), false),
            "GPU 3 has not come to rest 8 s after NCCL was aborted, with sum under way"
        );
        assert_eq!(
            busy(None, true),
            "GPU 3 has not come to rest 8 s after NCCL was asked to end"
        );
    }
}

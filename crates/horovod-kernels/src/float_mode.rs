//! The floating-point mode that reductions run in: to nearest, with subnormals, whatever the thread has chosen for itself.
//!
//! A caller's thread carries out operations, and frameworks let users change its mode (`torch.set_flush_denormal`, OpenMP
//! runtimes, `-ffast-math` in any library). Results of ranks whose threads differ in it would differ.

use std::marker::PhantomData;

/// While it lives the thread computes in the default mode; then in its own again.
#[must_use]
pub struct DefaultMode {
    own: Option<word::Word>,
    /// The mode is the thread's.
    _not_send: PhantomData<*const ()>,
}

impl DefaultMode {
    /// Costs the reading of one register where the thread is in the default mode already.
    pub fn enter() -> Self {
        let now = word::read();
        let differs = now & word::MODE != word::DEFAULT;
        if differs {
            word::write(word::DEFAULT);
        }
        Self {
            own: differs.then_some(now),
            _not_send: PhantomData,
        }
    }
}

impl Drop for DefaultMode {
    fn drop(&mut self) {
        if let Some(own) = self.own {
            word::write(own);
        }
    }
}

/// MXCSR: the control and status register of SSE and all that came after it.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod word {
    use std::arch::asm;

    pub(super) type Word = u32;
    /// All but the flags that say what has happened: flush to zero, rounding, masks of exceptions, subnormals are zeros.
    pub(super) const MODE: Word = 0xffc0;
    /// All exceptions masked, nothing else.
    pub(super) const DEFAULT: Word = 0x1f80;

    pub(super) fn read() -> Word {
        let mut word: Word = 0;
        // SAFETY: stores the register to `word`.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags)) };
        word
    }

    // Not `nomem`: what is computed from memory before or after this stays before or after it.
    pub(super) fn write(word: Word) {
        // SAFETY: a value that was read from the register, or its default. Rust assumes the default mode: so it is while
        // our arithmetic runs, and what the thread had is only ever put back.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack, preserves_flags)) };
    }
}

/// FPCR: the control register of floating point and NEON.
#[cfg(all(target_arch = "aarch64", not(miri)))]
mod word {
    use std::arch::asm;

    pub(super) type Word = u64;
    /// Status flags are in another register.
    pub(super) const MODE: Word = u64::MAX;
    pub(super) const DEFAULT: Word = 0;

    pub(super) fn read() -> Word {
        let word: Word;
        // SAFETY: reads a register that every thread may read.
        unsafe { asm!("mrs {}, fpcr", out(reg) word, options(nostack, preserves_flags)) };
        word
    }

    // Not `nomem`: what is computed from memory before or after this stays before or after it.
    pub(super) fn write(word: Word) {
        // SAFETY: a value that was read from the register, or its default. Rust assumes the default mode: so it is while
        // our arithmetic runs, and what the thread had is only ever put back.
        unsafe { asm!("msr fpcr, {}", in(reg) word, options(nostack, preserves_flags)) };
    }
}

/// Where there is no such register, or none that is known here.
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod word {
    pub(super) type Word = u32;
    pub(super) const MODE: Word = 0;
    pub(super) const DEFAULT: Word = 0;

    pub(super) fn read() -> Word {
        0
    }

    pub(super) fn write(_word: Word) {}
}

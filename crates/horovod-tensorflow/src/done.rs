//! TensorFlow's `done` callback of an asynchronous kernel, moved out of the stack frame that it dies with.
//!
//! TensorFlow passes the address of a by-value `std::function<void()>`, which is gone when the kernel's function returns:
//! calling it later, as its C API invites to, reads a dead frame. So its four words (libstdc++: 16 bytes of functor, a
//! manager and an invoker) are copied, and the original is made empty, as C++ moves it. That is done only where it looks
//! as expected; where not, the kernel has to wait within the call.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::loaded_objects::is_code;

/// libstdc++'s `std::function<void()>`.
#[repr(C)]
#[derive(Debug)]
struct StdFunction {
    functor: [usize; 2],
    manager: usize,
    invoker: usize,
}

/// Command to the manager to destroy the functor.
const DESTROY: i32 = 3;

/// Frames between TensorFlow's and this one hold no more.
const STACK_BYTES: usize = 1 << 20;

/// A callback of our own: to be run once, from any thread.
#[derive(Debug)]
pub(crate) struct Done(StdFunction);

impl Done {
    /// Moves it out of TensorFlow's frame; `None`, and nothing is changed, if it does not look as expected.
    ///
    /// # Safety
    /// `done` is what TensorFlow has passed to the call of an asynchronous kernel that has not returned.
    pub(crate) unsafe fn take(done: *mut c_void) -> Option<Self> {
        let here = 0_u8;
        let offset = done.addr().wrapping_sub((&raw const here).addr());
        // Elsewhere it may be one that TensorFlow keeps.
        if offset >= STACK_BYTES || !done.addr().is_multiple_of(align_of::<StdFunction>()) {
            return None;
        }
        let original = done.cast::<StdFunction>();
        // SAFETY: it lies on the stack between this frame and TensorFlow's, which is readable.
        let function = unsafe { original.read() };
        if !is_known_code(function.manager) || !is_known_code(function.invoker) {
            return None;
        }
        let empty = StdFunction {
            functor: [0; 2],
            manager: 0,
            invoker: 0,
        };
        // SAFETY: as above; this thread alone uses it. An empty function's destructor does nothing.
        unsafe { original.write(empty) };
        Some(Self(function))
    }

    /// Calls it, by the function of TensorFlow's that is there for it.
    pub(crate) fn run(mut self, runner: unsafe extern "C" fn(*mut c_void)) {
        // SAFETY: the words of a `std::function` that nobody else has.
        unsafe { runner((&raw mut self.0).cast()) };
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        let function = &raw mut self.0;
        // SAFETY: `take` has found code there, and libstdc++ calls it with these arguments.
        unsafe {
            let manager: unsafe extern "C" fn(*mut c_void, *const c_void, i32) -> bool =
                std::mem::transmute::<usize, _>(self.0.manager);
            manager(function.cast(), function.cast_const().cast(), DESTROY);
        }
    }
}

/// [`is_code`], which looks through all libraries, with a memory: callbacks are made in few places.
fn is_known_code(address: usize) -> bool {
    static KNOWN: [AtomicUsize; 16] = [const { AtomicUsize::new(0) }; 16];
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    if address == 0 {
        return false;
    }
    if KNOWN
        .iter()
        .any(|known| known.load(Ordering::Relaxed) == address)
    {
        return true;
    }
    let is = is_code(address);
    if is {
        let slot = NEXT.fetch_add(1, Ordering::Relaxed) % KNOWN.len();
        KNOWN[slot].store(address, Ordering::Relaxed);
    }
    is
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    static RUN: AtomicU32 = AtomicU32::new(0);
    static DESTROYED: AtomicU32 = AtomicU32::new(0);

    unsafe extern "C" fn manager(functor: *mut c_void, _: *const c_void, operation: i32) -> bool {
        assert_eq!(operation, DESTROY);
        // SAFETY: the test's own function.
        let functor = unsafe { functor.cast::<[usize; 2]>().read() };
        assert_eq!(functor, [11, 22]);
        DESTROYED.fetch_add(1, Ordering::SeqCst);
        false
    }

    unsafe extern "C" fn invoker(functor: *const c_void) {
        // SAFETY: the test's own function.
        let functor = unsafe { functor.cast::<[usize; 2]>().read() };
        assert_eq!(functor, [11, 22]);
        RUN.fetch_add(1, Ordering::SeqCst);
    }

    /// As `TF_RunAsyncOpKernelDoneCallback` calls it.
    unsafe extern "C" fn runner(function: *mut c_void) {
        // SAFETY: what `run` passes.
        let function = unsafe { &*function.cast::<StdFunction>() };
        // SAFETY: the invoker above.
        let invoke: unsafe extern "C" fn(*const c_void) =
            unsafe { std::mem::transmute::<usize, _>(function.invoker) };
        // SAFETY: as above.
        unsafe { invoke(function.functor.as_ptr().cast()) };
    }

    fn function() -> StdFunction {
        StdFunction {
            functor: [11, 22],
            manager: manager as *const () as usize,
            invoker: invoker as *const () as usize,
        }
    }

    fn take(function: &mut StdFunction) -> Option<Done> {
        // SAFETY: a function in a frame of this thread.
        unsafe { Done::take((&raw mut *function).cast()) }
    }

    /// One test: it counts calls.
    #[test]
    fn moved_out_run_elsewhere_and_destroyed_once() {
        let mut original = function();
        let done = take(&mut original).unwrap();
        let words = [original.functor[0], original.manager, original.invoker];
        assert_eq!(words, [0; 3], "the original shall do nothing any more");
        let thread = std::thread::spawn(move || done.run(runner));
        thread.join().unwrap();
        let counts = || (RUN.load(Ordering::SeqCst), DESTROYED.load(Ordering::SeqCst));
        assert_eq!(counts(), (1, 1));

        drop(take(&mut function()));
        assert_eq!(counts(), (1, 2));

        // Neither where TensorFlow may keep it, nor what is no such function.
        let mut kept = Box::new(function());
        assert!(take(&mut kept).is_none());
        assert_eq!(kept.functor, [11, 22]);
        let mut empty = StdFunction {
            manager: 0,
            ..function()
        };
        assert!(take(&mut empty).is_none());
        let mut strange = StdFunction {
            invoker: (&raw const RUN).addr(),
            ..function()
        };
        assert!(take(&mut strange).is_none());
        assert_eq!(strange.functor, [11, 22]);
        assert_eq!(counts(), (1, 2));
    }
}

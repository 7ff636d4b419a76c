//! The sleeping word of a rank, and why no wake-up is lost: arm, check again, sleep; publish, then look who sleeps.
//!
//! Sleeper: `arm`, look once more for work, and only then sleep. Waker: publish the work, `publish_fence`, then
//! `must_notify`. The two sequentially consistent fences exclude that the sleeper misses the work
//! *and* the waker misses the sleeper.

use crate::sync::{AtomicU32, Ordering, fence};

/// Announces that the owner of `sleeping` is about to sleep; it must check for work after this.
pub(crate) fn arm(sleeping: &AtomicU32) {
    // A thread that is woken in the owner's place must see the owner's earlier writes.
    sleeping.store(1, Ordering::Release);
    fence(Ordering::SeqCst);
}

/// Takes the announcement back.
pub(crate) fn disarm(sleeping: &AtomicU32) {
    sleeping.store(0, Ordering::Relaxed);
}

/// Work is published; to be called once before it is asked whom to wake, be it one or many: it waits until what
/// was written has left this core.
pub(crate) fn publish_fence() {
    fence(Ordering::SeqCst);
}

/// After [`publish_fence`]: whether the caller, and only it, must wake the owner of `sleeping`.
pub(crate) fn must_notify(sleeping: &AtomicU32) -> bool {
    sleeping.load(Ordering::Relaxed) != 0 && sleeping.swap(0, Ordering::Acquire) != 0
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::{
        sync::{Arc, Condvar, Mutex},
        thread,
    };

    use super::*;
    use crate::sync::AtomicU64;

    /// A notifier as the kernel gives it: notifications are remembered until read.
    #[derive(Default)]
    struct RankNotifier {
        rung: Mutex<bool>,
        changed: Condvar,
    }

    impl RankNotifier {
        fn notify(&self) {
            *self.rung.lock().unwrap() = true;
            self.changed.notify_one();
        }

        fn sleep(&self) {
            let mut rung = self.rung.lock().unwrap();
            while !*rung {
                rung = self.changed.wait(rung).unwrap();
            }
            *rung = false;
        }
    }

    /// Loom reports a deadlock if any interleaving leaves the sleeper asleep.
    fn check(wakers: usize) {
        let mut model = loom::model::Builder::new();
        // Three preemptions find what can go wrong here; without a bound two wakers take hours.
        model.preemption_bound = Some(3);
        model.check(move || {
            let sleeping = Arc::new(AtomicU32::new(0));
            let work = Arc::new(AtomicU64::new(0));
            let notifier = Arc::new(RankNotifier::default());
            let threads: Vec<_> = (0..wakers)
                .map(|_| {
                    let (sleeping, work, notifier) =
                        (sleeping.clone(), work.clone(), notifier.clone());
                    thread::spawn(move || {
                        work.fetch_add(1, Ordering::Release);
                        publish_fence();
                        if must_notify(&sleeping) {
                            notifier.notify();
                        }
                    })
                })
                .collect();
            while work.load(Ordering::Acquire) < wakers as u64 {
                arm(&sleeping);
                if work.load(Ordering::Acquire) < wakers as u64 {
                    notifier.sleep();
                }
                disarm(&sleeping);
            }
            for thread in threads {
                thread.join().unwrap();
            }
        });
    }

    #[test]
    fn no_wake_up_of_one_waker_is_lost() {
        check(1);
    }

    #[test]
    fn no_wake_up_of_two_wakers_is_lost() {
        check(2);
    }
}

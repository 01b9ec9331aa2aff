//! The CPU threads: one rayon pool, made at first use and made anew in a forked child, which inherits no threads.

use std::sync::{Arc, Mutex, PoisonError};

use rayon::ThreadPool;

/// Environment variable that sets the number of CPU threads; unset or 0 = one per core.
pub const NUM_THREADS_VARIABLE: &str = "SPARSE_MLA_NUM_THREADS";

static POOL: Mutex<Option<(u32, Arc<ThreadPool>)>> = Mutex::new(None);

/// Runs `work` on the pool; on the calling thread if no pool can be made.
pub(crate) fn install<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    match pool() {
        Some(pool) => pool.install(work),
        None => work(),
    }
}

/// Number of CPU threads that the next call uses.
pub fn num_threads() -> usize {
    pool().map_or(1, |pool| pool.current_num_threads())
}

fn pool() -> Option<Arc<ThreadPool>> {
    let mut slot = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    match &*slot {
        Some((owner, pool)) if *owner == process => Some(Arc::clone(pool)),
        _ => {
            let threads = std::env::var(NUM_THREADS_VARIABLE).ok().and_then(|n| n.parse().ok()).unwrap_or(0);
            let pool = Arc::new(
                rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .thread_name(|index| format!("sparse-mla-{index}"))
                    .build()
                    .ok()?,
            );
            // A parent's pool has no threads here and waits for them when dropped: keep it.
            std::mem::forget(slot.replace((process, Arc::clone(&pool))));
            Some(pool)
        }
    }
}

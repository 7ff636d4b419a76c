//! Barrier: nobody leaves before everybody came. Dissemination: in round `i` each member tells the one
//! `2^i` after it.

use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::exchange::exchange_bytes;

/// Returns once all members have called it.
pub fn barrier(ctx: &mut Ctx<'_>) -> Result<(), CollectiveError> {
    let (n, me) = (ctx.members.len(), ctx.me);
    let mut distance = 1;
    while distance < n {
        let (to, from) = ((me + distance) % n, (me + n - distance) % n);
        exchange_bytes(ctx, Some((to, &[1])), Some((from, &mut [0])))?;
        distance *= 2;
    }
    Ok(())
}

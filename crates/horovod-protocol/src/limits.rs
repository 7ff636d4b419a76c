//! Every bound of the negotiation, by name: reaching one is a typed error, never growth or a panic.

/// Ranks of one job.
pub const RANKS_MAX: usize = 1 << 16;
/// Bytes of one tensor name (the full key).
pub const NAME_BYTES_MAX: usize = 4096;
/// Tensors of one grouped operation.
pub const GROUP_TENSORS_MAX: usize = 1 << 16;
/// Dimensions of one tensor.
pub const DIMS_MAX: usize = 64;
/// Operations one rank may have pending at a time.
pub const PENDING_MAX: usize = 1 << 18;
/// Process sets that exist at a time, the global one included.
pub const PROCESS_SETS_MAX: usize = 1 << 12;
/// First dimensions (tensors times members) that one allgather may announce.
pub const FIRST_DIMS_MAX: usize = 1 << 20;
/// Encoded bytes of one request.
pub const REQUEST_BYTES_MAX: usize = 8 << 20;
/// Encoded bytes of one message; links carry no longer frames.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// A batch is closed once it has grown this far, so that it stays below [`MESSAGE_BYTES_MAX`].
pub const BATCH_BYTES_MAX: usize = 4 << 20;
/// Submissions or responses of one batch.
pub const BATCH_ITEMS_MAX: usize = 1 << 16;
/// Requests that one execution may fuse.
pub const FUSED_ITEMS_MAX: usize = 1 << 16;
/// Bytes of one error text.
pub const TEXT_BYTES_MAX: usize = 1 << 16;
/// Evicted cache entries kept until every member has confirmed; beyond it nothing new is cached.
pub const RETIRED_SLOTS_MAX: usize = 1 << 14;
/// Values of one announced tuning.
pub const TUNED_VALUES_MAX: usize = 64;
/// Cache entries per process set, whatever the setting says.
pub const CACHE_CAPACITY_MAX: usize = 1 << 20;

/// The largest single items: a request, and the answer to an allgather (ten bytes a number at most).
const ITEM_BYTES_MAX: usize = if REQUEST_BYTES_MAX > 10 * FIRST_DIMS_MAX {
    REQUEST_BYTES_MAX
} else {
    10 * FIRST_DIMS_MAX
};
const _: () = assert!(BATCH_BYTES_MAX + ITEM_BYTES_MAX + NAME_BYTES_MAX < MESSAGE_BYTES_MAX);

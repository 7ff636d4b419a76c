//! temp
use horovod_gpu_double::driver::{context::*, memory::*, stream::*};
use horovod_gpu_double::nccl::{collectives::*, exports::*};
use horovod_gpu_double::testing::*;
use std::ptr::null_mut;
#[test]
fn one() {
    unsafe {
        assert_eq!(cuInit(0), 0);
        let mut ctx = null_mut();
        assert_eq!(cuDevicePrimaryCtxRetain(&mut ctx, 0), 0);
        assert_eq!(cuCtxSetCurrent(ctx), 0);
        let mut s = null_mut();
        assert_eq!(cuStreamCreateWithPriority(&mut s, 1, -5), 0);
        let user = double_stream_create(0);
        let a = double_alloc(0, 16);
        let x = [1f32, 2., 3., 4.];
        assert_eq!(double_stream_write(user, a, x.as_ptr().cast(), 16), 0);
        let mut e = null_mut();
        cuEventCreate(&mut e, 2);
        cuEventRecord(e, user);
        cuStreamWaitEvent(s, e, 0);
        let mut id = UniqueId([0; 128]);
        assert_eq!(ncclGetUniqueId(&mut id), 0);
        let mut c = null_mut();
        assert_eq!(ncclCommInitRank(&mut c, 1, id, 0), 0);
        assert_eq!(ncclAllReduce(a as *const _, a as *mut _, 4, 7, 0, c, s), 0);
        let mut y = [0f32; 4];
        assert_eq!(cuMemcpyDtoHAsync_v2(y.as_mut_ptr().cast(), a, 16, s), 0);
        assert_eq!(y, x);
        assert_eq!(ncclCommFinalize(c), 0);
        assert_eq!(ncclCommDestroy(c), 0);
        let mut text = [0u8; 4096];
        let n = double_violations(text.as_mut_ptr().cast(), 4096);
        assert_eq!(n, 0, "{}", String::from_utf8_lossy(&text));
    }
}

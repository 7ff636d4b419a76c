// The kernels for GPUs of AMD's, which libhiprtc compiles: as those in PTX, by the same names and with the same
// parameters. Never run on such a GPU. The tests run them as C++ on the CPU.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct u128 { u64 low, high; };

// Each thread strides over the grid's first dimension.
#define EACH(i, count) \
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < (count); i += (u64)gridDim.x * blockDim.x)

union Bits { float value; u32 bits; };

// To bfloat16: to the nearest, ties to even; a NaN stays one.
static __device__ u16 rounded(float value) {
    Bits of;
    of.value = value;
    if ((of.bits & 0x7fffffffu) > 0x7f800000u) return (u16)(of.bits >> 16 | 0x40);
    return (u16)((of.bits + 0x7fff + (of.bits >> 16 & 1)) >> 16);
}

static __device__ float widened(u16 half) {
    Bits of;
    of.bits = (u32)half << 16;
    return of.value;
}

extern "C" __global__ void hvd_scale_f16(u64 dst, u64 src, u64 count, double factor) {
    float by = (float)factor;
    EACH(i, count) ((_Float16 *)dst)[i] = (_Float16)((float)((const _Float16 *)src)[i] * by);
}

extern "C" __global__ void hvd_scale_bf16(u64 dst, u64 src, u64 count, double factor) {
    float by = (float)factor;
    EACH(i, count) ((u16 *)dst)[i] = rounded(widened(((const u16 *)src)[i]) * by);
}

extern "C" __global__ void hvd_scale_f32(u64 dst, u64 src, u64 count, double factor) {
    float by = (float)factor;
    EACH(i, count) ((float *)dst)[i] = ((const float *)src)[i] * by;
}

extern "C" __global__ void hvd_scale_f64(u64 dst, u64 src, u64 count, double factor) {
    EACH(i, count) ((double *)dst)[i] = ((const double *)src)[i] * factor;
}

extern "C" __global__ void hvd_fill_b8(u64 dst, u64 count, u64 pattern) {
    EACH(i, count) ((u8 *)dst)[i] = (u8)pattern;
}

extern "C" __global__ void hvd_fill_b16(u64 dst, u64 count, u64 pattern) {
    EACH(i, count) ((u16 *)dst)[i] = (u16)pattern;
}

extern "C" __global__ void hvd_fill_b32(u64 dst, u64 count, u64 pattern) {
    EACH(i, count) ((u32 *)dst)[i] = (u32)pattern;
}

extern "C" __global__ void hvd_fill_b64(u64 dst, u64 count, u64 pattern) {
    EACH(i, count) ((u64 *)dst)[i] = pattern;
}

struct CopyTable { u64 dst[160], src[160], bytes[160], count; };

// A row of the grid for each copy.
extern "C" __global__ void hvd_copy_batch(CopyTable table) {
    if (blockIdx.y >= table.count) return;
    u64 dst = table.dst[blockIdx.y], src = table.src[blockIdx.y], bytes = table.bytes[blockIdx.y];
    u64 whole = (dst | src) % 16 == 0 ? bytes / 16 : 0;
    EACH(i, whole) ((u128 *)dst)[i] = ((const u128 *)src)[i];
    EACH(j, bytes - whole * 16) ((u8 *)dst)[whole * 16 + j] = ((const u8 *)src)[whole * 16 + j];
}

extern "C" __global__ void hvd_widen_i16(u64 dst, u64 src, u64 count) {
    EACH(i, count) ((int *)dst)[i] = ((const short *)src)[i];
}

extern "C" __global__ void hvd_widen_u16(u64 dst, u64 src, u64 count) {
    EACH(i, count) ((int *)dst)[i] = ((const u16 *)src)[i];
}

extern "C" __global__ void hvd_narrow_16(u64 dst, u64 src, u64 count) {
    EACH(i, count) ((u16 *)dst)[i] = (u16)((const u32 *)src)[i];
}

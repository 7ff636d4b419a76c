// What the memory of one machine allows: processes that work on buffers they all see, with nothing in between.
//
//   floor allreduce f32|f16|bf16 RANKS BYTES REPEATS   every rank sums its part of all buffers, in place, everywhere
//   floor gather    -            RANKS BYTES REPEATS   every rank copies all ranks' buffers into memory of its own
//   floor spread    -            RANKS BYTES REPEATS   every rank but the first copies the first one's buffer
//   floor meet      -            RANKS BYTES REPEATS   a thousand barriers; what they take tells how far apart processors are
//
// No collective that must return its result in private memory can be faster than the copies alone, and none that
// reads and writes tensors of its own can be faster than the sum in place. Prints the seconds of each repeat.
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

enum { RANKS_MAX = 64, MEETINGS = 1000, BLOCK = 1024, SPINS_BEFORE_YIELD = 2000 };

static int ranks;
static unsigned char *buffer[RANKS_MAX];
static _Atomic uint64_t *arrived;  // at barriers, by all ranks together
static uint64_t barriers_passed;
static int crowded;  // more ranks than processors: a waiting one must make room

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void barrier(void) {
  uint64_t all = ++barriers_passed * (uint64_t)ranks;
  atomic_fetch_add(arrived, 1);
  for (long spins = 0; atomic_load_explicit(arrived, memory_order_acquire) < all; spins++) {
    if (crowded || spins > SPINS_BEFORE_YIELD) sched_yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

static void *memory(size_t bytes, int sharing) {
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    perror("floor: mmap");
    exit(1);
  }
  return p;
}

// Half types are added in f32, as everybody should; one conversion each way, written for vectors.
static float from_bf16(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}

static uint16_t to_bf16(float wide) {
  uint32_t bits;
  memcpy(&bits, &wide, 4);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to nearest, ties to even
}

static void pair_bf16(uint16_t *restrict a, uint16_t *restrict b, size_t n) {
  for (size_t i = 0; i < n; i++) a[i] = b[i] = to_bf16(from_bf16(a[i]) + from_bf16(b[i]));
}

static void pair_f16(uint16_t *restrict a, uint16_t *restrict b, size_t n) {
  size_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= n; i += 8) {
    __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(a + i)));
    __m256 y = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(b + i)));
    __m128i sum = _mm256_cvtps_ph(_mm256_add_ps(x, y), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i *)(a + i), sum);
    _mm_storeu_si128((__m128i *)(b + i), sum);
  }
#endif
  for (; i < n; i++) {
    _Float16 x, y;
    memcpy(&x, a + i, 2);
    memcpy(&y, b + i, 2);
    x = (_Float16)((float)x + (float)y);
    memcpy(a + i, &x, 2);
    memcpy(b + i, &x, 2);
  }
}

static void add_f16(float *restrict sum, const uint16_t *restrict half, size_t n) {
  size_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= n; i += 8) {
    __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(half + i)));
    _mm256_storeu_ps(sum + i, _mm256_add_ps(_mm256_loadu_ps(sum + i), wide));
  }
#endif
  for (; i < n; i++) {
    _Float16 value;
    memcpy(&value, half + i, 2);
    sum[i] += (float)value;
  }
}

static void store_f16(uint16_t *restrict half, const float *restrict sum, size_t n) {
  size_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i *)(half + i), _mm256_cvtps_ph(_mm256_loadu_ps(sum + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; i++) {
    _Float16 value = (_Float16)sum[i];
    memcpy(half + i, &value, 2);
  }
}

static void add_bf16(float *restrict sum, const uint16_t *restrict half, size_t n) {
  for (size_t i = 0; i < n; i++) sum[i] += from_bf16(half[i]);
}

static void store_bf16(uint16_t *restrict half, const float *restrict sum, size_t n) {
  for (size_t i = 0; i < n; i++) half[i] = to_bf16(sum[i]);
}

static void reduce_halves(size_t from, size_t to, int is_bf16) {
  if (ranks == 2) {
    uint16_t *a = (uint16_t *)buffer[0] + from, *b = (uint16_t *)buffer[1] + from;
    (is_bf16 ? pair_bf16 : pair_f16)(a, b, to - from);
    return;
  }
  float sum[BLOCK];
  for (; from < to; from += BLOCK) {
    size_t n = to - from < BLOCK ? to - from : BLOCK;
    memset(sum, 0, sizeof sum);
    for (int r = 0; r < ranks; r++) (is_bf16 ? add_bf16 : add_f16)(sum, (uint16_t *)buffer[r] + from, n);
    for (int r = 0; r < ranks; r++) (is_bf16 ? store_bf16 : store_f16)((uint16_t *)buffer[r] + from, sum, n);
  }
}

static void reduce_floats(size_t from, size_t to) {
  if (ranks == 2) {
    float *restrict a = (float *)buffer[0], *restrict b = (float *)buffer[1];
    for (size_t i = from; i < to; i++) a[i] = b[i] = a[i] + b[i];
    return;
  }
  float sum[BLOCK];
  for (; from < to; from += BLOCK) {
    size_t n = to - from < BLOCK ? to - from : BLOCK;
    memset(sum, 0, sizeof sum);
    for (int r = 0; r < ranks; r++)
      for (size_t i = 0; i < n; i++) sum[i] += ((float *)buffer[r])[from + i];
    for (int r = 0; r < ranks; r++) memcpy((float *)buffer[r] + from, sum, n * sizeof(float));
  }
}

int main(int count, char **words) {
  if (count != 6) {
    fprintf(stderr, "usage: floor allreduce|gather|spread|meet f32|f16|bf16|- RANKS BYTES REPEATS\n");
    return 2;
  }
  const char *what = words[1], *dtype = words[2];
  ranks = atoi(words[3]);
  size_t bytes = strtoull(words[4], NULL, 10);
  int repeats = atoi(words[5]);
  if (ranks < 1 || ranks > RANKS_MAX || bytes == 0 || repeats < 1) {
    fprintf(stderr, "floor: 1 to %d ranks, at least 1 byte and 1 repeat\n", RANKS_MAX);
    return 2;
  }
  crowded = ranks > sysconf(_SC_NPROCESSORS_ONLN);
  arrived = memory(sizeof *arrived, MAP_SHARED);
  for (int r = 0; r < ranks; r++) {
    buffer[r] = memory(bytes, MAP_SHARED);
    memset(buffer[r], 0, bytes);
  }
  int rank = 0;
  for (int r = 1; r < ranks; r++)
    if (fork() == 0) {
      rank = r;
      break;
    }

  int is_sum = strcmp(what, "allreduce") == 0, is_gather = strcmp(what, "gather") == 0;
  int meets = strcmp(what, "meet") == 0;
  size_t element = strcmp(dtype, "f32") == 0 ? 4 : 2, elements = bytes / element;
  size_t from = elements * (size_t)rank / (size_t)ranks, to = elements * (size_t)(rank + 1) / (size_t)ranks;
  unsigned char *own = is_sum ? NULL : memory(bytes * (size_t)ranks, MAP_PRIVATE);
  if (own) memset(own, 1, bytes * (size_t)ranks);

  for (int repeat = -2; repeat < repeats; repeat++) {
    barrier();
    double start = seconds();
    if (is_sum) {
      if (element == 4) reduce_floats(from, to);
      else reduce_halves(from, to, dtype[0] == 'b');
    } else if (is_gather) {
      for (int r = 0; r < ranks; r++) memcpy(own + bytes * (size_t)r, buffer[r], bytes);
    } else if (meets) {
      for (int i = 0; i < MEETINGS; i++) barrier();
    } else if (rank != 0) {
      memcpy(own, buffer[0], bytes);
    }
    barrier();
    if (rank == 0 && repeat >= 0) printf("%.9f\n", seconds() - start);
  }
  if (rank != 0) _exit(0);
  while (wait(NULL) > 0) {
  }
  return 0;
}

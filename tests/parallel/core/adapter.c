/* A small adapter library: submits through the C functions of the core and checks what it is called with. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "horovod.h"

static __typeof__(horovod_enqueue) *enqueue;
static __typeof__(horovod_result_status) *result_status;
static __typeof__(horovod_result_error) *result_error;
static __typeof__(horovod_result_output) *result_output;
static __typeof__(horovod_result_take) *result_take;
static __typeof__(horovod_buffer_free) *buffer_free;
static __typeof__(horovod_result_received_splits) *received_splits;
static __typeof__(horovod_result_last_joined) *last_joined;
static __typeof__(horovod_rank) *job_rank, *job_size;

static char why[512];

const char *adapter_error(void) { return why; }

int adapter_open(const char *path) {
  void *core = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  if (!core) return snprintf(why, sizeof why, "%s", dlerror());
  __typeof__(horovod_abi_version) *version = dlsym(core, "horovod_abi_version");
  if (!version || version() != HOROVOD_ABI_VERSION) return snprintf(why, sizeof why, "another version");
  enqueue = dlsym(core, "horovod_enqueue");
  result_status = dlsym(core, "horovod_result_status");
  result_error = dlsym(core, "horovod_result_error");
  result_output = dlsym(core, "horovod_result_output");
  result_take = dlsym(core, "horovod_result_take");
  buffer_free = dlsym(core, "horovod_buffer_free");
  received_splits = dlsym(core, "horovod_result_received_splits");
  last_joined = dlsym(core, "horovod_result_last_joined");
  job_rank = dlsym(core, "horovod_rank");
  job_size = dlsym(core, "horovod_size");
  if (!enqueue || !result_status || !result_error || !result_output || !result_take || !buffer_free ||
      !received_splits || !last_joined || !job_rank || !job_size)
    return snprintf(why, sizeof why, "a function is missing");
  return 0;
}

/* Ends that were called so far, and somebody who waits for them. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t called = PTHREAD_COND_INITIALIZER;
static int ends, failures;

static void end_of(horovod_result *result) {
  pthread_mutex_lock(&lock);
  ends++;
  if (result_status(result) != HOROVOD_OK && failures++ == 0)
    snprintf(why, sizeof why, "%d: %s", result_status(result), result_error(result));
  pthread_cond_broadcast(&called);
  pthread_mutex_unlock(&lock);
}

static int await(int count) {
  struct timespec limit;
  clock_gettime(CLOCK_REALTIME, &limit);
  limit.tv_sec += 120;
  pthread_mutex_lock(&lock);
  int late = 0;
  while (ends < count && !late) late = pthread_cond_timedwait(&called, &lock, &limit);
  if (ends != count) snprintf(why, sizeof why, "%d ends instead of %d", ends, count);
  int wrong = ends != count || failures;
  pthread_mutex_unlock(&lock);
  return wrong;
}

static void begin(void) { ends = failures = 0; why[0] = 0; }

static horovod_tensor tensor_of(const void *input, void *output, uint8_t dtype, const uint64_t *dims, size_t ndim) {
  return (horovod_tensor){sizeof(horovod_tensor), dtype, HOROVOD_CPU, input, output, dims, ndim};
}

static horovod_operation operation(uint8_t kind, const char *name, const horovod_tensor *tensors, size_t count) {
  horovod_operation o = {0};
  o.struct_size = sizeof o;
  o.kind = kind;
  o.reduce_op = HOROVOD_SUM;
  o.name = name;
  o.prescale = o.postscale = 1.0;
  o.tensors = tensors;
  o.tensor_count = count;
  return o;
}

static void only_end(void *context, horovod_result *result) {
  (void)context;
  end_of(result);
}

/* So many sums in flight, of which this thread waits for none before all are submitted, or for each as long as it may. */
int adapter_sums(int count, uint64_t elems, int may_wait) {
  begin();
  int size = job_size(), rank = job_rank(), wrong = 0;
  float *data = malloc(count * elems * sizeof(float) + 1);
  for (uint64_t i = 0; i < count * elems; i++) data[i] = rank + 1;
  for (int i = 0; i < count; i++) {
    char name[32];
    snprintf(name, sizeof name, "c.sum.%d", i);
    horovod_tensor t = tensor_of(data + i * elems, data + i * elems, HOROVOD_FLOAT32, &elems, 1);
    horovod_operation o = operation(HOROVOD_ALLREDUCE, name, &t, 1);
    o.done = only_end;
    o.may_wait = may_wait;
    wrong |= enqueue(&o, why, sizeof why);
  }
  wrong |= await(count);
  for (uint64_t i = 0; i < count * elems && !wrong; i++)
    if (data[i] != size * (size + 1) / 2) wrong = snprintf(why, sizeof why, "a sum is %g", data[i]);
  free(data);
  return wrong;
}

/* Each end submits the next. */
struct chain {
  int left;
  float value;
};

static void next(void *context, horovod_result *result);

static int link_of(struct chain *chain) {
  uint64_t one = 1;
  horovod_tensor t = tensor_of(&chain->value, &chain->value, HOROVOD_FLOAT32, &one, 1);
  horovod_operation o = operation(HOROVOD_ALLREDUCE, "c.chain", &t, 1);
  o.reduce_op = HOROVOD_MAX;
  o.done = next;
  o.context = chain;
  return enqueue(&o, why, sizeof why);
}

static void next(void *context, horovod_result *result) {
  struct chain *chain = context;
  chain->value += 1;
  if (--chain->left > 0 && result_status(result) == HOROVOD_OK && link_of(chain) == HOROVOD_OK) return;
  end_of(result);
}

int adapter_chain(int length) {
  begin();
  struct chain chain = {length, job_rank()};
  if (link_of(&chain)) return 1;
  if (await(1)) return 1;
  if (chain.value != job_size() - 1 + length) return snprintf(why, sizeof why, "the chain ends at %g", chain.value);
  return 0;
}

/* Outputs whose size is known late: of the core, or of an allocator. */
struct late {
  int allocates, asked;
  uint64_t rows;
  int64_t *memory;
  horovod_buffer *kept;
  const int64_t *data;
  uint64_t splits[64];
  size_t members;
};

static void *allocate(void *context, size_t index, uint8_t dtype, const uint64_t *dims, size_t ndim) {
  struct late *late = context;
  if (index != 0 || dtype != HOROVOD_INT64 || ndim != 2 || dims[1] != 2) return NULL;
  late->asked++;
  late->rows = dims[0];
  return late->memory = malloc(dims[0] * 2 * sizeof(int64_t) + 1);
}

static void keep(void *context, horovod_result *result) {
  struct late *late = context;
  horovod_output output;
  if (result_output(result, 0, &output) && !result_output(result, 1, &output)) {
    result_output(result, 0, &output);
    late->rows = output.dims[0];
    late->data = output.data;
    late->kept = result_take(result, 0);
    if (output.dims[0] != late->rows || result_output(result, 0, &output)) late->rows = 0;
  }
  size_t count;
  const uint64_t *splits = received_splits(result, &count);
  late->members = splits ? count : 0;
  for (size_t i = 0; i < late->members && i < 64; i++) late->splits[i] = splits[i];
  end_of(result);
}

static int late_of(uint8_t kind, int allocates, uint64_t rows, struct late *late) {
  begin();
  memset(late, 0, sizeof *late);
  int rank = job_rank();
  uint64_t dims[2] = {rows, 2};
  int64_t *input = malloc(rows * 2 * sizeof(int64_t) + 1);
  for (uint64_t i = 0; i < 2 * rows; i++) input[i] = 1000 * rank + i;
  horovod_tensor t = tensor_of(input, NULL, HOROVOD_INT64, dims, 2);
  horovod_operation o = operation(kind, allocates ? "c.late.allocated" : "c.late", &t, 1);
  o.done = keep;
  o.allocate = allocates ? allocate : NULL;
  o.context = late;
  int wrong = enqueue(&o, why, sizeof why) || await(1);
  free(input);
  if (!wrong && allocates != late->asked) wrong = snprintf(why, sizeof why, "asked %d times", late->asked);
  if (!wrong && allocates && late->data != late->memory) wrong = snprintf(why, sizeof why, "written elsewhere");
  return wrong;
}

static void drop(struct late *late) {
  buffer_free(late->kept);
  free(late->memory);
}

/* Rank r brings r + 1 rows. */
int adapter_gather(int allocates) {
  struct late late;
  int size = job_size(), wrong = late_of(HOROVOD_ALLGATHER, allocates, job_rank() + 1, &late);
  uint64_t at = 0;
  for (int rank = 0; rank < size && !wrong; rank++)
    for (int i = 0; i < 2 * (rank + 1) && !wrong; i++)
      if (late.data[at++] != 1000 * rank + i) wrong = snprintf(why, sizeof why, "element %d of rank %d", i, rank);
  if (!wrong && (at != 2 * late.rows || late.members)) wrong = snprintf(why, sizeof why, "%lu rows", late.rows);
  drop(&late);
  return wrong;
}

/* A row from everybody to everybody. */
int adapter_exchange(int allocates) {
  struct late late;
  int size = job_size(), me = job_rank(), wrong = late_of(HOROVOD_ALLTOALL, allocates, size, &late);
  if (!wrong && (late.rows != (uint64_t)size || late.members != (size_t)size))
    wrong = snprintf(why, sizeof why, "%lu rows from %zu", late.rows, late.members);
  for (int rank = 0; rank < size && !wrong; rank++)
    if (late.splits[rank] != 1 || late.data[2 * rank] != 1000 * rank + 2 * me)
      wrong = snprintf(why, sizeof why, "the row of rank %d", rank);
  drop(&late);
  return wrong;
}

/* A group described by a later version, whose tensors are longer. */
struct later {
  horovod_tensor known;
  uint64_t added[2];
};

int adapter_later(void) {
  begin();
  uint64_t elems = 3;
  float data[2][3] = {{1, 1, 1}, {2, 2, 2}};
  struct later tensors[2];
  memset(tensors, 0xff, sizeof tensors);
  for (int i = 0; i < 2; i++) {
    tensors[i].known = tensor_of(data[i], data[i], HOROVOD_FLOAT32, &elems, 1);
    tensors[i].known.struct_size = sizeof(struct later);
  }
  horovod_operation o = operation(HOROVOD_ALLREDUCE, "c.later", &tensors[0].known, 2);
  o.done = only_end;
  if (enqueue(&o, why, sizeof why) || await(1)) return 1;
  int size = job_size();
  if (data[0][2] != size || data[1][0] != 2 * size) return snprintf(why, sizeof why, "%g %g", data[0][2], data[1][0]);
  return 0;
}

static int joined;

static void note_joined(void *context, horovod_result *result) {
  joined = last_joined(result);
  only_end(context, result);
}

int adapter_join(void) {
  begin();
  joined = -2;
  horovod_operation barrier = operation(HOROVOD_BARRIER, NULL, NULL, 0), join = operation(HOROVOD_JOIN, NULL, NULL, 0);
  barrier.done = only_end;
  join.done = note_joined;
  if (enqueue(&barrier, why, sizeof why) || await(1) || enqueue(&join, why, sizeof why) || await(2)) return 1;
  return joined < 0 || joined >= job_size();
}

/* As the first version had it: what came later is not looked at. */
int adapter_earlier(void) {
  begin();
  uint64_t elems = 1;
  float value = 1;
  horovod_tensor t = tensor_of(&value, &value, HOROVOD_FLOAT32, &elems, 1);
  horovod_operation o = operation(HOROVOD_ALLREDUCE, "c.earlier", &t, 1);
  memset(&o.may_wait, 0xff, sizeof o - offsetof(horovod_operation, may_wait));
  o.struct_size = offsetof(horovod_operation, may_wait);
  o.done = only_end;
  if (enqueue(&o, why, sizeof why) || await(1)) return 1;
  return value != job_size();
}

/* What is refused, and that `done` is not called then. */
int adapter_refused(void) {
  begin();
  uint64_t one = 1;
  float value = 1;
  horovod_tensor t = tensor_of(&value, &value, HOROVOD_FLOAT32, &one, 1), bad = t;
  horovod_operation o = operation(HOROVOD_ALLREDUCE, "c.refused", &t, 1);
  int codes = enqueue(NULL, why, sizeof why) == HOROVOD_INVALID;
  codes += enqueue(&o, why, sizeof why) == HOROVOD_INVALID && strstr(why, "done is null");
  o.done = only_end;
  o.struct_size = 8;
  codes += enqueue(&o, why, sizeof why) == HOROVOD_INVALID && strstr(why, "struct_size");
  o.struct_size = sizeof o;
  o.kind = 99;
  codes += enqueue(&o, why, 8) == HOROVOD_INVALID && strcmp(why, "unknown") == 0;
  o.kind = HOROVOD_ALLREDUCE;
  bad.dtype = 200;
  o.tensors = &bad;
  codes += enqueue(&o, NULL, 0) == HOROVOD_INVALID;
  bad = t;
  bad.output = NULL;
  codes += enqueue(&o, why, sizeof why) == HOROVOD_INVALID && strstr(why, "has no memory");
  bad = t;
  bad.device = HOROVOD_GPU;
  codes += enqueue(&o, why, sizeof why) == HOROVOD_INVALID && strstr(why, "GPU");
  bad = t;
  o.kind = HOROVOD_ALLGATHER;
  codes += enqueue(&o, why, sizeof why) == HOROVOD_INVALID && strstr(why, "must be NULL");
  if (codes != 8) return snprintf(why, sizeof why, "%d of 8", codes);
  return ends;
}

/* Ranks bring other shapes: every one is told, by its call. */
int adapter_mismatch(char *text, size_t length) {
  begin();
  uint64_t elems = 1 + job_rank();
  float data[64] = {0};
  horovod_tensor t = tensor_of(data, data, HOROVOD_FLOAT32, &elems, 1);
  horovod_operation o = operation(HOROVOD_ALLREDUCE, "c.mismatch", &t, 1);
  o.done = only_end;
  int wrong = enqueue(&o, why, sizeof why);
  await(1);
  snprintf(text, length, "%s", why);
  return wrong || (job_size() > 1) != (failures == 1);
}

/* C functions of the core, for libraries that frameworks load (custom ops, XLA handlers).
 *
 * Nothing is linked: find the file with `horovod._core.__file__`, dlopen it (the process has it already), and look the
 * functions up with dlsym. Check horovod_abi_version() first. hvd.init() has been called by Python, or whoever runs the
 * job; before that, and after hvd.shutdown(), queries return -1 and nothing can be submitted.
 *
 * Every function may be called from any thread, also from `done`. None waits for another rank, but horovod_enqueue with
 * `may_wait`.
 */
#ifndef HOROVOD_H
#define HOROVOD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HOROVOD_ABI_VERSION 1

/* Ends of an operation, and answers of horovod_enqueue. */
enum {
  HOROVOD_OK = 0,
  HOROVOD_INVALID = 1,         /* the arguments have no meaning, or the ranks' do not fit together */
  HOROVOD_INTERNAL = 2,        /* failed on all ranks: a rank was lost, or they disagree; elastic jobs go on anew */
  HOROVOD_NOT_INITIALIZED = 3, /* there is no job */
  HOROVOD_STALLED = 4,         /* the ranks wait for each other for ever */
  HOROVOD_REPLICAS_DIFFER = 5  /* the ranks began to train with different parameters, and HOROVOD_CHECK_REPLICAS=error is set */
};

enum {
  HOROVOD_ALLREDUCE = 0,
  HOROVOD_ALLGATHER = 1,
  HOROVOD_BROADCAST = 2,
  HOROVOD_ALLTOALL = 3,
  HOROVOD_REDUCESCATTER = 4,
  HOROVOD_BARRIER = 5, /* without tensors */
  HOROVOD_JOIN = 6     /* without tensors, in process set 0 */
};

enum {
  HOROVOD_AVERAGE = 0,
  HOROVOD_SUM = 1,
  HOROVOD_ADASUM = 2,
  HOROVOD_MIN = 3,
  HOROVOD_MAX = 4,
  HOROVOD_PRODUCT = 5
};

enum {
  HOROVOD_UINT8 = 0,
  HOROVOD_INT8 = 1,
  HOROVOD_UINT16 = 2,
  HOROVOD_INT16 = 3,
  HOROVOD_INT32 = 4,
  HOROVOD_INT64 = 5,
  HOROVOD_FLOAT16 = 6,
  HOROVOD_FLOAT32 = 7,
  HOROVOD_FLOAT64 = 8,
  HOROVOD_BOOL = 9,
  HOROVOD_BFLOAT16 = 10,
  HOROVOD_UINT32 = 11,
  HOROVOD_UINT64 = 12
};

enum { HOROVOD_CPU = 0, HOROVOD_GPU = 1 };

/* A dense, row-major tensor. The bytes at `input` must stay, and nobody may write there, until `done` is called;
 * `output` is where the result goes: `input` itself, or memory that overlaps no other tensor; nobody may touch it before
 * `done`. It must be NULL where the size is known late (allgather, alltoall, reducescatter). */
typedef struct {
  uint32_t struct_size; /* sizeof(horovod_tensor) */
  uint8_t dtype;
  uint8_t device;
  const void *input;
  void *output;
  const uint64_t *dims;
  size_t ndim;
} horovod_tensor;

typedef struct horovod_result horovod_result;
typedef struct horovod_buffer horovod_buffer;

typedef struct {
  uint32_t struct_size; /* sizeof(horovod_operation) */
  uint8_t kind;
  uint8_t reduce_op;    /* allreduce, reducescatter */
  uint32_t process_set; /* 0: all ranks */
  uint32_t root;        /* broadcast: the rank in the job */
  const char *prefix;   /* first part of the name, equal on all ranks; NULL: that of the kind */
  const char *name;     /* equal on all ranks; NULL: numbered by the calls so far */
  double prescale;      /* 1.0 for none; 0.0 makes zeros */
  double postscale;
  const horovod_tensor *tensors; /* several: all or none of them, as one operation */
  size_t tensor_count;
  const int64_t *splits; /* alltoall: rows for each member; NULL: as many for each */
  size_t split_count;
  /* Called once with the result, on a thread of the core, while no lock of the core is held. It may take locks (also
   * Python's) and submit again. While it runs no other is called: it must not wait for an operation, nor call
   * hvd.init() or hvd.shutdown(). hvd.shutdown() returns when all have been called, so who calls that must hold no lock
   * that they take. */
  void (*done)(void *context, horovod_result *result);
  /* NULL, or who allocates the outputs that are NULL, when their sizes are known; called as `done` is, before it. The
   * memory must stay until `done`. NULL from it ends the job with an error (but for an output without elements). */
  void *(*allocate)(void *context, size_t index, uint8_t dtype, const uint64_t *dims, size_t ndim);
  void *context;
  /* Not 0: this call may wait for the end itself, for a moment (a millisecond, and one more for each MiB), which saves the
   * wake-up of the core's thread. Then `done` is called on the calling thread before this returns, perhaps while another
   * operation's is called. Not where `allocate` is given, nor amid another `done`. For a thread on which nothing else
   * depends in that moment. */
  uint8_t may_wait;
} horovod_operation;

typedef struct {
  void *data;
  size_t bytes;
  const uint64_t *dims;
  size_t ndim;
} horovod_output;

uint32_t horovod_abi_version(void);

/* HOROVOD_OK: `done` will be called, perhaps before this returns. Otherwise it will not, and `error` (of `length`
 * bytes, or NULL) says why. The structure and what it points to, but for the tensors' bytes, may go when it returns. */
int32_t horovod_enqueue(const horovod_operation *operation, char *error, size_t length);

/* Of the result that `done` is called with, and only until it returns. */
int32_t horovod_result_status(const horovod_result *result);
const char *horovod_result_error(const horovod_result *result); /* "" without one */
/* 1: the ranks disagree, or all ask for what cannot be done: this operation failed on all of them and the job goes on. 0:
 * no error, or another one. */
int32_t horovod_result_refused(const horovod_result *result);
/* Describes output `index`: 1, or 0 if none was allocated for it. */
int32_t horovod_result_output(const horovod_result *result, size_t index, horovod_output *output);
/* Keeps the memory of output `index` after `done`, until horovod_buffer_free; NULL if there is none. */
horovod_buffer *horovod_result_take(horovod_result *result, size_t index);
void horovod_buffer_free(horovod_buffer *buffer);
/* Alltoall: rows received from each member. */
const uint64_t *horovod_result_received_splits(const horovod_result *result, size_t *count);
/* Join: the rank that joined last; -1 for others. */
int32_t horovod_result_last_joined(const horovod_result *result);

/* -1: no job, no such process set, or not a member. */
int32_t horovod_rank(void);
int32_t horovod_size(void);
int32_t horovod_local_rank(void);
int32_t horovod_local_size(void);
int32_t horovod_process_set_rank(uint32_t set);
int32_t horovod_process_set_size(uint32_t set);

#ifdef __cplusplus
}
#endif

#endif

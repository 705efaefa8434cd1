/* A stand-in for the CUDA driver, for machines without a GPU. The device's memory is the host's; but
 * a copy takes place only when its stream is waited for, and only where a context is current, as is
 * true of the driver at its laziest. Compiled with -DHIP it is a stand-in for the runtime of ROCm. */
#include <stdlib.h>
#include <string.h>

#ifdef HIP
#define NAME(cuda, hip) hip
#else
#define NAME(cuda, hip) cuda
#endif

enum { kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201, kFault = 719 };
enum { kMost = 256 };

struct copy {
  void *to;
  const void *from; /* NULL: zeros */
  size_t bytes;
};
static _Thread_local struct copy queue[kMost];
static _Thread_local int queued, contexts;

/* For the tests: copies and bytes to the host, to the device, and on the device; how many blocks are
 * pinned, and how many are on the device. */
long long stand_in_copies[3], stand_in_bytes[3], stand_in_pinned, stand_in_allocated;
long long stand_in_records, stand_in_waits; /* of events */
int stand_in_fails; /* every copy from now on */

#ifdef HIP
static _Thread_local int device;
int hipStreamGetDevice(void *stream, int *its) {
  (void)stream;
  *its = 3;
  return kSuccess;
}
int hipGetDevice(int *its) {
  *its = device;
  return kSuccess;
}
int hipSetDevice(int wanted) {
  device = wanted;
  contexts = wanted == 3;
  return kSuccess;
}
#else
int cuStreamGetCtx(void *stream, void **context) {
  (void)stream;
  *context = &contexts;
  return kSuccess;
}

int cuCtxPushCurrent_v2(void *context) {
  if (context != &contexts) return kInvalidContext;
  ++contexts;
  return kSuccess;
}

int cuCtxPopCurrent_v2(void **context) {
  if (!contexts) return kInvalidContext;
  --contexts;
  *context = &contexts;
  return kSuccess;
}
#endif

int NAME(cuStreamSynchronize, hipStreamSynchronize)(void *stream) {
  (void)stream;
  if (!contexts) return kInvalidContext;
  for (int i = 0; i < queued; ++i)
    if (queue[i].from) memcpy(queue[i].to, queue[i].from, queue[i].bytes);
    else memset(queue[i].to, 0, queue[i].bytes);
  queued = 0;
  return kSuccess;
}

static int copy(void *to, const void *from, size_t bytes, int kind) {
  if (!contexts) return kInvalidContext;
  if (!to || !bytes || queued == kMost) return kInvalidValue;
  if (stand_in_fails) return kFault;
  queue[queued++] = (struct copy){to, from, bytes};
  if (!from) return kSuccess;
  __atomic_fetch_add(&stand_in_copies[kind], 1, __ATOMIC_RELAXED);
  __atomic_fetch_add(&stand_in_bytes[kind], (long long)bytes, __ATOMIC_RELAXED);
  return kSuccess;
}

int NAME(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync)(void *to, unsigned long long from, size_t bytes,
                                                   void *stream) {
  (void)stream;
  return from ? copy(to, (const void *)from, bytes, 0) : kInvalidValue;
}

int NAME(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync)(unsigned long long to, const void *from,
                                                   size_t bytes, void *stream) {
  (void)stream;
  return from ? copy((void *)to, from, bytes, 1) : kInvalidValue;
}

int NAME(cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync)(unsigned long long to, unsigned long long from,
                                                   size_t bytes, void *stream) {
  (void)stream;
  return from ? copy((void *)to, (const void *)from, bytes, 2) : kInvalidValue;
}

int NAME(cuMemsetD8Async, hipMemsetD8Async)(unsigned long long to, unsigned char value, size_t bytes,
                                            void *stream) {
  (void)stream;
  return value ? kInvalidValue : copy((void *)to, NULL, bytes, 0);
}

int NAME(cuMemHostRegister_v2, hipHostRegister)(void *data, size_t bytes, unsigned flags) {
  if (!contexts || flags != 1 || !bytes) return kInvalidContext;
  const char *without = getenv("STAND_IN_WITHOUT_PINNED_MEMORY");
  if (without && *without) return kOutOfMemory;
  memset(data, 0xab, bytes);
  __atomic_fetch_add(&stand_in_pinned, 1, __ATOMIC_RELAXED);
  return kSuccess;
}

int NAME(cuMemHostUnregister, hipHostUnregister)(void *data) {
  if (!data) return kInvalidValue;
  __atomic_fetch_sub(&stand_in_pinned, 1, __ATOMIC_RELAXED);
  return kSuccess;
}

int NAME(cuMemAlloc_v2, hipMalloc)(unsigned long long *address, size_t bytes) {
  if (!contexts) return kInvalidContext;
  const char *most = getenv("STAND_IN_DEVICE_BYTES");
  if (most && *most && bytes > strtoull(most, NULL, 10)) return kOutOfMemory;
  void *data = aligned_alloc(4096, bytes);
  if (!data) return kOutOfMemory;
  memset(data, 0xcd, bytes);
  *address = (unsigned long long)data;
  __atomic_fetch_add(&stand_in_allocated, 1, __ATOMIC_RELAXED);
  return kSuccess;
}

int NAME(cuMemFree_v2, hipFree)(unsigned long long address) {
  if (!contexts) return kInvalidContext;
  free((void *)address);
  __atomic_fetch_sub(&stand_in_allocated, 1, __ATOMIC_RELAXED);
  return kSuccess;
}

/* Events of a stream whose copies take place when the host waits for it need not do anything. */
int NAME(cuEventCreate, hipEventCreateWithFlags)(void **event, unsigned flags) {
  if (!contexts || flags != 2) return kInvalidContext;
  *event = &stand_in_fails;
  return kSuccess;
}

int NAME(cuEventRecord, hipEventRecord)(void *event, void *stream) {
  (void)stream;
  __atomic_fetch_add(&stand_in_records, 1, __ATOMIC_RELAXED);
  return event == &stand_in_fails && contexts ? kSuccess : kInvalidContext;
}

int NAME(cuEventSynchronize, hipEventSynchronize)(void *event) {
  return event == &stand_in_fails && contexts ? kSuccess : kInvalidContext;
}

int NAME(cuStreamWaitEvent, hipStreamWaitEvent)(void *stream, void *event, unsigned flags) {
  (void)stream;
  __atomic_fetch_add(&stand_in_waits, 1, __ATOMIC_RELAXED);
  return event == &stand_in_fails && contexts && !flags ? kSuccess : kInvalidContext;
}

int NAME(cuGetErrorString, hipDrvGetErrorString)(int code, const char **text) {
  *text = code == kFault ? "the stand-in fails" : "misuse of the stand-in";
  return kSuccess;
}

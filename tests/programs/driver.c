/* A stand-in for the CUDA driver, for machines without a GPU. The device's memory is the host's; but
 * a copy takes place only when its stream is waited for, and only where a context is current, as is
 * true of the driver at its laziest. */
#include <stdlib.h>
#include <string.h>

enum { kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201, kFault = 719 };
enum { kMost = 256 };

struct copy {
  void *to;
  const void *from;
  size_t bytes;
};
static _Thread_local struct copy queue[kMost];
static _Thread_local int queued, contexts;

/* For the tests: copies and bytes to the host, and to the device; how many blocks are pinned. */
long long stand_in_copies[2], stand_in_bytes[2], stand_in_pinned;
int stand_in_fails; /* every copy from now on */

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

int cuStreamSynchronize(void *stream) {
  (void)stream;
  if (!contexts) return kInvalidContext;
  for (int i = 0; i < queued; ++i) memcpy(queue[i].to, queue[i].from, queue[i].bytes);
  queued = 0;
  return kSuccess;
}

static int copy(void *to, const void *from, size_t bytes, int kind) {
  if (!contexts) return kInvalidContext;
  if (!to || !from || !bytes || queued == kMost) return kInvalidValue;
  if (stand_in_fails) return kFault;
  queue[queued++] = (struct copy){to, from, bytes};
  __atomic_fetch_add(&stand_in_copies[kind], 1, __ATOMIC_RELAXED);
  __atomic_fetch_add(&stand_in_bytes[kind], (long long)bytes, __ATOMIC_RELAXED);
  return kSuccess;
}

int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t bytes, void *stream) {
  (void)stream;
  return copy(to, (const void *)from, bytes, 0);
}

int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t bytes, void *stream) {
  (void)stream;
  return copy((void *)to, from, bytes, 1);
}

int cuMemHostAlloc(void **data, size_t bytes, unsigned flags) {
  if (!contexts || flags != 1) return kInvalidContext;
  const char *without = getenv("STAND_IN_WITHOUT_PINNED_MEMORY");
  if (without && *without) return kOutOfMemory;
  *data = aligned_alloc(4096, bytes);
  if (!*data) return kOutOfMemory;
  memset(*data, 0xab, bytes);
  __atomic_fetch_add(&stand_in_pinned, 1, __ATOMIC_RELAXED);
  return kSuccess;
}

int cuMemFreeHost(void *data) {
  free(data);
  __atomic_fetch_sub(&stand_in_pinned, 1, __ATOMIC_RELAXED);
  return kSuccess;
}

int cuGetErrorString(int code, const char **text) {
  *text = code == kFault ? "the stand-in fails" : "misuse of the stand-in";
  return kSuccess;
}

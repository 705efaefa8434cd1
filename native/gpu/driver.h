// The functions of a GPU's driver that copies need. They are found at run time, so that neither CUDA
// nor ROCm is needed to build mpigrad.
#pragma once

#include <cstddef>
#include <string>

namespace mpigrad::gpu {

using Stream = void*;
using Event = void*;
using Address = unsigned long long;

enum class Platform { kCUDA, kROCm };

// The name here, in the driver of CUDA, and in HIP, which is the runtime of ROCm. Their arguments have
// the same layout.
#define MPIGRAD_DRIVER_FUNCTIONS(X)                                                             \
  X(synchronize, cuStreamSynchronize, hipStreamSynchronize, Stream)                             \
  X(wait_for, cuStreamWaitEvent, hipStreamWaitEvent, Stream, Event, unsigned)                   \
  X(create_event, cuEventCreate, hipEventCreateWithFlags, Event*, unsigned)                     \
  X(record, cuEventRecord, hipEventRecord, Event, Stream)                                       \
  X(await, cuEventSynchronize, hipEventSynchronize, Event)                                      \
  X(copy_to_host, cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync, void*, Address, size_t, Stream)     \
  X(copy_from_host, cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync, Address, const void*, size_t,     \
    Stream)                                                                                     \
  X(copy_on_device, cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync, Address, Address, size_t, Stream) \
  X(fill, cuMemsetD8Async, hipMemsetD8Async, Address, unsigned char, size_t, Stream)            \
  X(pin, cuMemHostRegister_v2, hipHostRegister, void*, size_t, unsigned)                        \
  X(unpin, cuMemHostUnregister, hipHostUnregister, void*)                                       \
  X(allocate, cuMemAlloc_v2, hipMalloc, Address*, size_t)                                       \
  X(release, cuMemFree_v2, hipFree, Address)                                                    \
  X(error_text, cuGetErrorString, hipDrvGetErrorString, int, const char**)
// Functions without a counterpart: CUDA makes a context current, HIP a device.
#define MPIGRAD_CUDA_FUNCTIONS(X)                                    \
  X(context_of, cuStreamGetCtx, cuStreamGetCtx, Stream, void**)      \
  X(push, cuCtxPushCurrent_v2, cuCtxPushCurrent_v2, void*)           \
  X(pop, cuCtxPopCurrent_v2, cuCtxPopCurrent_v2, void**)
#define MPIGRAD_HIP_FUNCTIONS(X)                                     \
  X(device_of, hipStreamGetDevice, hipStreamGetDevice, Stream, int*) \
  X(current_device, hipGetDevice, hipGetDevice, int*)                \
  X(set_device, hipSetDevice, hipSetDevice, int)

struct Driver {
  // The driver of a platform. Throws if it is not found.
  static const Driver& of(Platform platform);

  // Throws if `code`, which `function` has returned, is not 0.
  void check(int code, const char* function) const;

#define MPIGRAD_DECLARE(name, ...) \
  int (*name)(__VA_ARGS__) = nullptr; \
  const char* name##_name = "";
#define MPIGRAD_DECLARE_SHARED(name, cuda, hip, ...) MPIGRAD_DECLARE(name, __VA_ARGS__)
  MPIGRAD_DRIVER_FUNCTIONS(MPIGRAD_DECLARE_SHARED)
  MPIGRAD_CUDA_FUNCTIONS(MPIGRAD_DECLARE_SHARED)
  MPIGRAD_HIP_FUNCTIONS(MPIGRAD_DECLARE_SHARED)
#undef MPIGRAD_DECLARE_SHARED
#undef MPIGRAD_DECLARE
  Platform platform;

 private:
  explicit Driver(Platform platform);
};
#define MPIGRAD_GPU(driver, name, ...) \
  (driver).check((driver).name(__VA_ARGS__), (driver).name##_name)

// Makes the context, or the device, of a stream current: the thread that calls a handler may have none.
class Current {
 public:
  Current(const Driver& driver, Stream stream);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  // Tells contexts apart, and devices.
  const void* identity() const { return identity_; }

 private:
  const Driver& driver_;
  const void* identity_ = nullptr;
  int before_ = 0;
};

}  // namespace mpigrad::gpu

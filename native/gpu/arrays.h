// Bytes of arrays, which are in the memory of a device if MPI gets device addresses.
#pragma once

#include <cstring>

#include "gpu/driver.h"

namespace mpigrad::gpu {

// The block of device memory that has the arrays of the operation in progress.
struct DeviceBlock {
  const Driver& driver;
  Stream stream;
  char* begin;
  size_t bytes;
  bool has(const void* data) const {
    return data >= begin && data < begin + bytes;
  }
  void copy(void* to, const void* from, size_t n) const;
  void clear(void* to, size_t n) const;
};

// Of the thread that runs the operation, or nullptr.
extern thread_local const DeviceBlock* device_block;

}  // namespace mpigrad::gpu

namespace mpigrad {

// memcpy, and memset with zeros, for memory of the host and for arrays of the operation in progress.
inline void copy_bytes(void* to, const void* from, size_t n) {
  if (gpu::device_block) gpu::device_block->copy(to, from, n);
  else std::memcpy(to, from, n);
}
inline void clear_bytes(void* to, size_t n) {
  if (gpu::device_block) gpu::device_block->clear(to, n);
  else std::memset(to, 0, n);
}

}  // namespace mpigrad

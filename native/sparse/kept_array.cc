// Arrays that live as long as their owner in Python. A compiled program copies one from here. As a
// constant it would be stored in each program, and XLA would compute with it while it compiles.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "ffi.h"
#include "visibility.h"

namespace {

namespace ffi = xla::ffi;

struct Array {
  const void* data;
  int64_t bytes;
};

std::mutex mutex;
std::unordered_map<int64_t, Array> arrays;
// Programs name arrays by number, as they name structures (kernels.cc).
int64_t next_number = 1;

ffi::Error copy(ffi::Result<ffi::AnyBuffer> to, int64_t number) {
  Array from{};
  {
    std::lock_guard<std::mutex> guard(mutex);
    const auto found = arrays.find(number);
    if (found == arrays.end()) {
      return ffi::Error::InvalidArgument(
          "A kept array is missing. Report this as a bug of mpigrad.");
    }
    from = found->second;
  }
  if (static_cast<int64_t>(to->size_bytes()) != from.bytes) {
    return ffi::Error::InvalidArgument(
        "A kept array has another size than its program expects. Report this as a bug of mpigrad.");
  }
  if (from.bytes > 0) std::memcpy(to->untyped_data(), from.data, from.bytes);
  return ffi::Error::Success();
}

}  // namespace

MPIGRAD_EXPORT XLA_FFI_Error* mpigrad_kernels_kept_array(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(mpigrad_kernels_kept_array, copy,
                              ffi::Ffi::Bind().Ret<ffi::AnyBuffer>().Attr<int64_t>("number"));

// The caller keeps the array alive until `forget`.
MPIGRAD_EXPORT int64_t mpigrad_kernels_keep(const void* data, int64_t bytes) {
  std::lock_guard<std::mutex> guard(mutex);
  arrays.emplace(++next_number, Array{data, bytes});
  return next_number;
}

MPIGRAD_EXPORT void mpigrad_kernels_forget(int64_t number) {
  std::lock_guard<std::mutex> guard(mutex);
  arrays.erase(number);
}

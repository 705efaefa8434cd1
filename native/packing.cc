// Packing: the leaves of a pytree become one array, which travels as one message, and the reverse.
//
// XLA compiles a kernel for each slice of an array. One handler copies all leaves, so that the time
// of compiling does not grow with their number. Each array has `rows` rows, its leading axes: a row
// of the packed array is the rows of all leaves, one after another.
#include <cstring>
#include <vector>

#include "ffi.h"
#include "visibility.h"

namespace {

namespace ffi = xla::ffi;

struct Leaf {
  char* data;
  size_t bytes;  // of a row
};

ffi::Error read_leaf(const ffi::AnyBuffer& x, int64_t rows, std::vector<Leaf>& leaves) {
  const size_t bytes = x.size_bytes();
  if (rows > 0 && bytes % rows)
    return ffi::Error::InvalidArgument(
        "pack: the rows of a leaf differ in size. Report this as a bug of mpigrad.");
  leaves.push_back({static_cast<char*>(x.untyped_data()), rows > 0 ? bytes / rows : 0});
  return ffi::Error::Success();
}

// Calls copy(leaf, packed, bytes) for each row of each leaf.
template <class Copy>
ffi::Error copy_rows(const std::vector<Leaf>& leaves, const ffi::AnyBuffer& packed, int64_t rows,
                     Copy copy) {
  size_t row_bytes = 0;
  for (const Leaf& leaf : leaves) row_bytes += leaf.bytes;
  if (row_bytes * rows != packed.size_bytes())
    return ffi::Error::InvalidArgument(
        "pack: the leaves do not fit the packed array. Report this as a bug of mpigrad.");
  char* place = static_cast<char*>(packed.untyped_data());
  for (int64_t row = 0; row < rows; ++row) {
    for (const Leaf& leaf : leaves) {
      if (leaf.bytes) copy(leaf.data + row * leaf.bytes, place, leaf.bytes);
      place += leaf.bytes;
    }
  }
  return ffi::Error::Success();
}

ffi::Error pack(ffi::RemainingArgs operands, ffi::Result<ffi::AnyBuffer> packed, int64_t rows) {
  std::vector<Leaf> leaves;
  leaves.reserve(operands.size());
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto x = operands.get<ffi::AnyBuffer>(i);
    if (x.has_error()) return x.error();
    if (ffi::Error error = read_leaf(*x, rows, leaves); error.failure()) return error;
  }
  return copy_rows(leaves, *packed, rows, [](const char* leaf, char* place, size_t bytes) {
    std::memcpy(place, leaf, bytes);
  });
}

ffi::Error unpack(ffi::AnyBuffer packed, ffi::RemainingRets results, int64_t rows) {
  std::vector<Leaf> leaves;
  leaves.reserve(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    auto y = results.get<ffi::AnyBuffer>(i);
    if (y.has_error()) return y.error();
    if (ffi::Error error = read_leaf(**y, rows, leaves); error.failure()) return error;
  }
  return copy_rows(leaves, packed, rows, [](char* leaf, const char* place, size_t bytes) {
    std::memcpy(leaf, place, bytes);
  });
}

}  // namespace

MPIGRAD_EXPORT XLA_FFI_Error* mpigrad_pack(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    mpigrad_pack, pack,
    ffi::Ffi::Bind().RemainingArgs().Ret<ffi::AnyBuffer>().Attr<int64_t>("rows"));

MPIGRAD_EXPORT XLA_FFI_Error* mpigrad_unpack(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    mpigrad_unpack, unpack,
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().RemainingRets().Attr<int64_t>("rows"));

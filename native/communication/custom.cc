// Operations that the user has written in Python, with calls of mpi4py.
#include "handler.h"

namespace mpigrad {
namespace {

// Runs the function number `id` on the operand; returns 0, or writes what went wrong.
using Callback = int (*)(int64_t id, const void* x, void* y, char* error, int64_t length);
Callback callback = nullptr;

ffi::Error custom(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site, int64_t id) {
  const Call c("custom_operation", comm, site, x.size_bytes());
  if (ffi::Error e = c.messages({}, {}); e.failure()) return e;
  leave_unaccounted();  // nobody knows its messages
  std::vector<char> error(8192);
  if (callback(id, x.untyped_data(), y->untyped_data(), error.data(), error.size()))
    return c.fail(error.data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mpigrad

MPIGRAD_EXPORT void mpigrad_set_custom_callback(mpigrad::Callback callback) {
  mpigrad::callback = callback;
}

MPIGRAD_HANDLER(mpigrad_custom, custom,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(id));

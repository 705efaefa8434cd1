// Calls of Python functions that exchange messages: a user's custom operations, which call mpi4py, and
// solves by PETSc, which petsc4py calls. Reports and traces show them as `operation`.
#include "mpi/handler.h"

namespace mpigrad {
namespace {

// Runs the function with this id on the operands. Returns 0, or writes an error text.
using Callback = int (*)(int64_t id, void* const* xs, void* const* ys, char* error, int64_t length);
Callback callback = nullptr;

ffi::Error custom(Token, ffi::RemainingArgs operands, TokenOut, ffi::RemainingRets results,
                  int64_t comm, int64_t site, int64_t id, std::string_view operation) {
  Call c(interned(operation), comm, site, 0);
  std::vector<void*> xs, ys;
  int64_t bytes = 0;
  for (size_t i = 0; i < operands.size(); ++i) {
    const Buffer x = *operands.get<Buffer>(i);
    xs.push_back(x.untyped_data());
    bytes += x.size_bytes();
  }
  for (size_t i = 0; i < results.size(); ++i)
    ys.push_back((*results.get<Buffer>(i))->untyped_data());
  c.watch.sent(bytes);
  if (ffi::Error e = c.messages({}, {}); e.failure()) return e;
  std::vector<char> error(8192);
  if (callback(id, xs.data(), ys.data(), error.data(), error.size())) return c.fail(error.data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mpigrad

MPIGRAD_EXPORT void mpigrad_set_custom_callback(mpigrad::Callback callback) {
  mpigrad::callback = callback;
}

MPIGRAD_HANDLER(mpigrad_custom, custom,
                MPIGRAD_BIND MPIGRAD_IN.RemainingArgs() MPIGRAD_OUT.RemainingRets() MPIGRAD_WHERE
                    MPIGRAD_ATTR(id).Attr<std::string_view>("operation"));

// Checks inside compiled programs, and the order between programs.
#include "guard/loops.h"
#include "mpi/handler.h"

namespace mpigrad {
namespace {

// Ends the program with a message if `ok` is false. `values` fill the braces of the message.
ffi::Error require(Token, ffi::Buffer<ffi::PRED> ok, ffi::Buffer<ffi::F64> values, TokenOut,
                   int64_t comm, int64_t site, std::string_view message) {
  if (ok.typed_data()[0]) return ffi::Error::Success();
  const Call c("check", comm, site, 0);
  c.post.messages({nullptr, 0}, {nullptr, 0});
  std::string text;
  size_t next = 0;
  for (size_t i = 0; i < message.size(); ++i) {
    if (message[i] == '{' && i + 1 < message.size() && message[i + 1] == '}' &&
        next < values.element_count()) {
      char number[40];
      std::snprintf(number, sizeof number, "%.6g", values.typed_data()[next++]);
      text += number;
      ++i;
    } else {
      text += message[i];
    }
  }
  return c.fail(text);
}

// Tokens order the messages inside a program. A one-byte array orders programs: `enter` takes it
// and `leave` returns it.
ffi::Error enter(Buffer, TokenOut) {
  forget_loops();
  return ffi::Error::Success();
}
ffi::Error leave(Token, ffi::Result<ffi::Buffer<ffi::U8>> ordering_byte) {
  ordering_byte->typed_data()[0] = 0;
  return ffi::Error::Success();
}

// The identity, ordered between two messages: its operand is computed before, users of its result
// after.
ffi::Error in_order(Token, Buffer x, TokenOut, BufferOut y, int64_t) {
  if (x.size_bytes() && y->untyped_data() != x.untyped_data())
    std::memcpy(y->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mpigrad

MPIGRAD_HANDLER(mpigrad_require, require,
                MPIGRAD_BIND MPIGRAD_IN.Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                    .Arg<xla::ffi::Buffer<xla::ffi::F64>>() MPIGRAD_OUT MPIGRAD_WHERE
                    .Attr<std::string_view>("message"));
MPIGRAD_PLAIN_HANDLER(mpigrad_enter, enter, MPIGRAD_BIND MPIGRAD_X MPIGRAD_OUT);
MPIGRAD_PLAIN_HANDLER(mpigrad_leave, leave,
                MPIGRAD_BIND MPIGRAD_IN.Ret<xla::ffi::Buffer<xla::ffi::U8>>());
MPIGRAD_PLAIN_HANDLER(mpigrad_in_order, in_order,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_ATTR(site));

#include "guard/loops.h"

#include <string>
#include <vector>

#include "mpi/handler.h"

namespace mpigrad {
namespace {

struct Loop {
  LoopState state;
  int64_t site, reads;
  double numbers[kLoopNumbers];
};

std::vector<Loop>& loops = *new std::vector<Loop>;

uint64_t hash(uint64_t h, const void* data, size_t bytes) {  // FNV-1a
  for (size_t i = 0; i < bytes; ++i)
    h = (h ^ static_cast<const unsigned char*>(data)[i]) * UINT64_C(0x100000001B3);
  return h;
}

// A step of a loop begins. Its condition reads the numbers x.
ffi::Error enter_loop(Token, ffi::Buffer<ffi::F64> x, TokenOut, int64_t site) {
  const LoopState outer = loop_state();
  const std::string line = call_site(site);
  const int64_t count = x.element_count();
  uint64_t where = hash(outer.where + UINT64_C(0xCBF29CE484222325), line.data(), line.size());
  where = hash(where, &count, sizeof count);
  const uint64_t numbers = hash(outer.numbers, x.typed_data(), x.size_bytes());
  Loop loop{{static_cast<int64_t>(where | 1), static_cast<int64_t>(numbers)},
            site,
            std::min<int64_t>(count, kLoopNumbers),
            {}};
  std::copy_n(x.typed_data(), loop.reads, loop.numbers);
  loops.push_back(loop);
  return ffi::Error::Success();
}

ffi::Error leave_loop(Token, TokenOut) {
  if (!loops.empty()) loops.pop_back();
  return ffi::Error::Success();
}

}  // namespace

LoopState loop_state() { return loops.empty() ? LoopState{} : loops.back().state; }

void show_loop(Slot& slot) {
  put(slot.loop_reads, loops.empty() ? 0 : loops.back().reads);
  if (loops.empty()) return;
  put(slot.loop_site, loops.back().site);
  std::memcpy(slot.loop_numbers, loops.back().numbers, sizeof slot.loop_numbers);
}

void forget_loops() { loops.clear(); }

}  // namespace mpigrad

MPIGRAD_PLAIN_HANDLER(mpigrad_enter_loop, enter_loop,
                      MPIGRAD_BIND MPIGRAD_IN.Arg<xla::ffi::Buffer<xla::ffi::F64>>() MPIGRAD_OUT
                          MPIGRAD_ATTR(site));
MPIGRAD_PLAIN_HANDLER(mpigrad_leave_loop, leave_loop, MPIGRAD_BIND MPIGRAD_IN MPIGRAD_OUT);

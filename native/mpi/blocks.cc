#include "mpi/blocks.h"

#include <memory>

namespace mpigrad {
namespace {

constexpr int kTag = 509 * 64;  // word 0, which no derivative uses (`communicator.py`)

int64_t words_of(const Blocks& all) {
  int64_t n = 0;
  for (const Block& b : all) n += b.words;
  return n;
}

// Blocks that lie one after the other in memory of their own.
struct Packed {
  std::unique_ptr<char[]> memory;
  std::vector<int64_t> words;
  Packed(const Blocks& all, size_t width) : memory(new char[words_of(all) * width + 1]) {
    for (const Block& b : all) words.push_back(b.words);
  }
  Integers counts() const { return {words.data(), words.size()}; }
};

}  // namespace

Blocks blocks(void* data, size_t width, Integers rows, int64_t row) {
  Blocks all;
  char* next = static_cast<char*>(data);
  for (const int64_t n : rows) {
    all.push_back({next, n * row});
    next += n * row * width;
  }
  return all;
}

Blocks equal_blocks(void* data, size_t width, int64_t words, int ranks) {
  const std::vector<int64_t> ones(ranks, 1);
  return blocks(data, width, {ones.data(), ones.size()}, words);
}

int exchange(const Call& c, size_t width, const Blocks& sends, const Blocks& receives) {
  // The communicator of derivatives, on which programs never receive from any source.
  const Communicator& comm = communicator(c.slot | 1);
  const int size = comm.size, me = comm.rank;
  Requests requests(2 * size);
  for (int k = 1; k < size; ++k) {
    const int source = (me + size - k) % size;
    const Block& b = receives[source];
    if (!b.words) continue;
    if (int code = post_receive(requests[k], b.data, b.words, width, source, kTag, comm.handle))
      return code;
  }
  for (int k = 1; k < size; ++k) {
    const int dest = (me + k) % size;
    const Block& b = sends[dest];
    if (!b.words) continue;
    if (int code = post_send(requests[size + k], b.data, b.words, width, dest, kTag, comm.handle))
      return code;
  }
  if (receives[me].words)
    copy_bytes(receives[me].data, sends[me].data, receives[me].words * width);
  Status status;
  for (Request& request : requests)
    if (request.under_way)
      if (int code = await_request(request, status)) return code;
  return 0;
}

Parts::Parts(Integers rows, int64_t row) {
  for (const int64_t n : rows) {
    counts.push_back(static_cast<int>(n * row));
    displacements.push_back(static_cast<int>(total));
    total += n * row;
  }
}

int alltoall_blocks(const Call& c, size_t width, int64_t row, void* in, Integers sends, void* out,
                    Integers receives) {
  // A rank does not know how much others send to each other. But both ranks of a message know
  // whether it is too long, and without such messages no rank has more words than MPI can count.
  const int64_t most = runtime.largest_count / c.comm.size;
  const auto too_long = [&](int64_t rows) { return rows * row > most; };
  if (std::none_of(sends.begin(), sends.end(), too_long) &&
      std::none_of(receives.begin(), receives.end(), too_long)) {
    const Parts to(sends, row), from(receives, row);
    const Handle type = word_type(width);
    return call(runtime.mpi.Alltoallv, static_cast<const void*>(in), to.n(), to.at(), type, out,
                from.n(), from.at(), type, c.comm.handle);
  }
  const Blocks to = blocks(in, width, sends, row), from = blocks(out, width, receives, row);
  Blocks long_to(to.size()), long_from(to.size()), short_to(to), short_from(from);
  for (size_t r = 0; r < to.size(); ++r) {
    if (to[r].words > most) std::swap(long_to[r], short_to[r]);
    if (from[r].words > most) std::swap(long_from[r], short_from[r]);
  }
  // The short blocks go to other memory: here, they may lie too far apart for MPI's displacements.
  const Packed outgoing(short_to, width), incoming(short_from, width);
  const auto copy = [&](const Blocks& all, char* next, bool packs) {
    for (const Block& b : all) {
      const size_t bytes = b.words * width;
      if (bytes) copy_bytes(packs ? next : b.data, packs ? b.data : next, bytes);
      next += bytes;
    }
  };
  copy(short_to, outgoing.memory.get(), true);
  if (int code = alltoall_blocks(c, width, 1, outgoing.memory.get(), outgoing.counts(),
                                 incoming.memory.get(), incoming.counts()))
    return code;
  copy(short_from, incoming.memory.get(), false);
  return exchange(c, width, long_to, long_from);
}

}  // namespace mpigrad

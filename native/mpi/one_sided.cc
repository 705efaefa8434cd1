// One epoch of one-sided operations between two fences. Every rank lists the rows that it gets
// from, puts into and accumulates onto the windows of other ranks. An epoch ends with a fence of
// all ranks, so the ranks first exchange their requests and then send the data in packed messages.
// This needs no remote memory access, sums in the order of ranks, and checks ranges and overlaps.
#include <algorithm>
#include <array>

#include "mpi/blocks.h"

namespace mpigrad {
namespace {

enum Kind { kGet, kPut, kClear, kAccumulate, kKinds };

struct Range {  // rows of a window
  int64_t offset, count;
};

// The ranges that this rank requests from each rank, or that each rank requests from it.
struct Requests {
  explicit Requests(int ranks) : ranges(ranks) {}
  std::vector<std::array<std::vector<Range>, kKinds>> ranges;

  int64_t rows(int rank, Kind kind) const {
    int64_t n = 0;
    for (const Range& r : ranges[rank][kind]) n += r.count;
    return n;
  }
  int64_t written_rows(int rank) const { return rows(rank, kPut) + rows(rank, kAccumulate); }
  std::vector<int64_t> encoded(int rank) const {
    std::vector<int64_t> words;
    for (const auto& kind : ranges[rank]) {
      words.push_back(kind.size());
      for (const Range& r : kind) words.insert(words.end(), {r.offset, r.count});
    }
    return words;
  }
  void decode(int rank, const int64_t* word) {
    for (auto& kind : ranges[rank]) {
      kind.resize(*word++);
      for (Range& r : kind) r.offset = *word++, r.count = *word++;
    }
  }
};

// The data sent to and received from each rank, in words of one width.
struct Exchange {
  std::vector<int64_t> to, from, to_start, from_start;
  std::vector<char> out, in;
  size_t width;

  Exchange(int ranks, size_t width)
      : to(ranks), from(ranks), to_start(ranks), from_start(ranks), width(width) {}
  void prepare() {
    const auto starts = [](const std::vector<int64_t>& counts, std::vector<int64_t>& starts) {
      int64_t n = 0;
      for (size_t i = 0; i < counts.size(); ++i) starts[i] = n, n += counts[i];
      return n;
    };
    out.resize(starts(to, to_start) * width);
    in.resize(starts(from, from_start) * width);
  }
  char* outgoing(int rank) { return out.data() + to_start[rank] * width; }
  const char* incoming(int rank) const { return in.data() + from_start[rank] * width; }
  int run(const Call& c) {
    return alltoall_blocks(c, width, 1, out.data(), {to.data(), to.size()}, in.data(),
                           {from.data(), from.size()});
  }
};

template <class T>
void add_as(char* sum, const char* values, size_t bytes) {
  for (size_t i = 0; i < bytes; i += sizeof(T)) {
    T a, b;
    std::memcpy(&a, sum + i, sizeof(T));
    std::memcpy(&b, values + i, sizeof(T));
    a = static_cast<T>(a + b);
    std::memcpy(sum + i, &a, sizeof(T));
  }
}

using Adder = void (*)(char*, const char*, size_t);

Adder adder(ffi::DataType type) {
  switch (type) {
    case ffi::S8: case ffi::U8: return add_as<uint8_t>;
    case ffi::S16: case ffi::U16: return add_as<uint16_t>;
    case ffi::S32: case ffi::U32: return add_as<uint32_t>;
    case ffi::S64: case ffi::U64: return add_as<uint64_t>;
    case ffi::F32: case ffi::C64: return add_as<float>;
    case ffi::F64: case ffi::C128: return add_as<double>;
    default: return nullptr;
  }
}

std::string place_text(const Call& c, const Range& range) {
  // Unsigned, because an offset may be the largest integer.
  const uint64_t last = static_cast<uint64_t>(range.offset) + range.count - 1;
  return "rows " + std::to_string(range.offset) + " to " + std::to_string(last) +
         " of the window of rank " + std::to_string(c.comm.rank);
}

// Share the fault of the lowest rank that has one, so that all ranks fail and none waits.
int agree(const Call& c, std::string& fault) {
  int64_t first = fault.empty() ? c.comm.size : c.comm.rank;
  std::vector<int64_t> found(c.comm.size);
  int code = call(runtime.mpi.Allgather, static_cast<const void*>(&first), 1,
                  word_type(sizeof first), static_cast<void*>(found.data()), 1,
                  word_type(sizeof first), c.comm.handle);
  if (code) return code;
  first = *std::min_element(found.begin(), found.end());
  if (first == c.comm.size) return 0;
  char text[512];
  copy_text(text, fault.c_str());
  code = call(runtime.mpi.Bcast, static_cast<void*>(text), static_cast<int>(sizeof text),
              word_type(1), static_cast<int>(first), c.comm.handle);
  fault = text;
  return code;
}

// x holds this rank's window of `rows` rows, then the values that it puts, then those that it
// accumulates. y holds the window after the epoch, then the values that this rank gets. Requests
// are triples (rank, offset, count).
ffi::Error one_sided(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                     int64_t rows, int64_t row_bytes, int64_t word_bytes, Integers get,
                     Integers put, Integers clear, Integers accumulate) {
  const Call c("one_sided", comm, site, x.size_bytes());
  if (ffi::Error e = c.collective(x, {{"row", row_bytes}}, Integers()); e.failure()) return e;
  const int ranks = c.comm.size;
  const size_t width = word_bytes;
  const int64_t row_words = row_bytes / word_bytes;
  Requests mine(ranks), theirs(ranks);
  const Integers* lists[kKinds] = {&get, &put, &clear, &accumulate};
  for (int kind = 0; kind < kKinds; ++kind)
    for (size_t i = 0; i + 2 < lists[kind]->size(); i += 3) {
      const int64_t* triple = lists[kind]->begin() + i;
      mine.ranges[triple[0]][kind].push_back({triple[1], triple[2]});
    }

  // Exchange the lengths of the requests and the layout of a row.
  Exchange requests(ranks, sizeof(int64_t));
  struct Head {
    int64_t words, dtype, row_bytes;
  };
  std::vector<Head> here(ranks), there(ranks);
  for (int r = 0; r < ranks; ++r) {
    requests.to[r] = mine.encoded(r).size();
    here[r] = {requests.to[r], static_cast<int64_t>(x.element_type()), row_bytes};
  }
  int code = call(runtime.mpi.Alltoall, static_cast<const void*>(here.data()), 3,
                  word_type(sizeof(int64_t)), static_cast<void*>(there.data()), 3,
                  word_type(sizeof(int64_t)), c.comm.handle);
  if (code) return c.done(code);
  std::string fault;
  for (int r = 0; r < ranks; ++r) {
    requests.from[r] = there[r].words;
    if (there[r].dtype != here[r].dtype || there[r].row_bytes != row_bytes)
      fault = "expected window rows of one length and dtype on all ranks, but rows of rank " +
              std::to_string(r) + " have " + std::to_string(there[r].row_bytes) +
              " bytes and rows of rank " + std::to_string(c.comm.rank) + " have " +
              std::to_string(row_bytes) +
              " bytes. Pass windows with the same row shape and dtype on every rank.";
  }
  requests.prepare();
  for (int r = 0; r < ranks; ++r) {
    const std::vector<int64_t> words = mine.encoded(r);
    std::memcpy(requests.outgoing(r), words.data(), words.size() * sizeof(int64_t));
  }
  if ((code = requests.run(c))) return c.done(code);
  for (int r = 0; r < ranks; ++r)
    theirs.decode(r, reinterpret_cast<const int64_t*>(requests.incoming(r)));

  // The requested rows must lie in the window, and no row may be put twice.
  std::vector<char> taken(rows);
  for (int r = 0; r < ranks; ++r)
    for (int kind = 0; kind < kKinds; ++kind)
      for (const Range& range : theirs.ranges[r][kind]) {
        if (range.offset < 0 || range.offset > rows - range.count) {
          fault = c.name_of(r) + " names " + place_text(c, range) + ", which has " +
                  std::to_string(rows) + " rows. Request rows inside the window.";
          continue;
        }
        if (kind != kPut) continue;
        char* first = taken.data() + range.offset;
        if (std::find(first, first + range.count, 1) != first + range.count)
          fault = c.name_of(r) + " puts into " + place_text(c, range) +
                  ", into which another put of this epoch also writes. Put these rows in another "
                  "epoch.";
        std::fill_n(first, range.count, 1);
      }
  if ((code = agree(c, fault))) return c.done(code);
  if (!fault.empty()) return c.fail(fault);

  const char* from = static_cast<const char*>(x.untyped_data());
  char* window = static_cast<char*>(y->untyped_data());

  // Gets read the window as it was before the epoch.
  Exchange reads(ranks, width);
  for (int r = 0; r < ranks; ++r) {
    reads.to[r] = theirs.rows(r, kGet) * row_words;
    reads.from[r] = mine.rows(r, kGet) * row_words;
  }
  reads.prepare();
  for (int r = 0; r < ranks; ++r) {
    char* to = reads.outgoing(r);
    for (const Range& range : theirs.ranges[r][kGet]) {
      std::memcpy(to, from + range.offset * row_bytes, range.count * row_bytes);
      to += range.count * row_bytes;
    }
  }
  if ((code = reads.run(c))) return c.done(code);

  // Send the values: first those that are put, then those that are accumulated.
  Exchange writes(ranks, width);
  for (int r = 0; r < ranks; ++r) {
    writes.to[r] = mine.written_rows(r) * row_words;
    writes.from[r] = theirs.written_rows(r) * row_words;
  }
  writes.prepare();
  std::vector<char*> next(ranks);
  for (int r = 0; r < ranks; ++r) next[r] = writes.outgoing(r);
  const char* values = from + rows * row_bytes;
  for (const Integers* list : {&put, &accumulate})
    for (size_t i = 0; i + 2 < list->size(); i += 3) {
      const int64_t* triple = list->begin() + i;
      const size_t bytes = triple[2] * row_bytes;
      std::memcpy(next[triple[0]], values, bytes);
      next[triple[0]] += bytes;
      values += bytes;
    }
  if ((code = writes.run(c))) return c.done(code);

  std::memcpy(window, from, rows * row_bytes);
  std::vector<const char*> arrived(ranks);
  for (int r = 0; r < ranks; ++r) {
    arrived[r] = writes.incoming(r);
    for (const Range& range : theirs.ranges[r][kClear])
      std::memset(window + range.offset * row_bytes, 0, range.count * row_bytes);
    for (const Range& range : theirs.ranges[r][kPut]) {
      std::memcpy(window + range.offset * row_bytes, arrived[r], range.count * row_bytes);
      arrived[r] += range.count * row_bytes;
    }
  }
  const Adder add = adder(x.element_type());
  for (int r = 0; r < ranks; ++r)
    for (const Range& range : theirs.ranges[r][kAccumulate]) {
      if (!add)
        return c.fail("this dtype cannot be accumulated. Convert the window first, for example to "
                      "float32.");
      add(window + range.offset * row_bytes, arrived[r], range.count * row_bytes);
      arrived[r] += range.count * row_bytes;
    }

  // The values of the gets, in the order of the requests.
  char* to = window + rows * row_bytes;
  std::vector<const char*> got(ranks);
  for (int r = 0; r < ranks; ++r) got[r] = reads.incoming(r);
  for (size_t i = 0; i + 2 < get.size(); i += 3) {
    const int64_t* triple = get.begin() + i;
    const size_t bytes = triple[2] * row_bytes;
    std::memcpy(to, got[triple[0]], bytes);
    got[triple[0]] += bytes;
    to += bytes;
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mpigrad

MPIGRAD_HANDLER(mpigrad_one_sided, one_sided,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(rows) MPIGRAD_ATTR(row_bytes) MPIGRAD_ATTR(word_bytes)
                        MPIGRAD_ATTRS(get) MPIGRAD_ATTRS(put) MPIGRAD_ATTRS(clear)
                            MPIGRAD_ATTRS(accumulate));

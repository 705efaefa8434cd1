// Redistribution: an array that is divided along one axis becomes divided along another, and its axes
// take another order. Every rank sends one block to every other rank.
#include <memory>
#include <numeric>

#include "mpi/handler.h"
#include "mpi/strided_copy.h"

namespace mpigrad {
namespace {

constexpr int kTag = 510 * 64;  // word 0, which no derivative uses (`communicator.py`)

// The axes of this rank's arrays. The axes before the last `order.size()` are a batch.
struct Shape {
  std::vector<int64_t> extents, strides;

  explicit Shape(ffi::Span<const int64_t> dims, size_t axes) {
    const size_t batch = dims.size() - axes;
    extents.push_back(std::accumulate(dims.begin(), dims.begin() + batch, int64_t{1},
                                      std::multiplies<int64_t>()));
    extents.insert(extents.end(), dims.begin() + batch, dims.end());
    strides = packed(extents);
  }

  static std::vector<int64_t> packed(const std::vector<int64_t>& extents) {
    std::vector<int64_t> strides(extents.size(), 1);
    for (size_t i = extents.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * extents[i];
    return strides;
  }
};

int64_t product(const std::vector<int64_t>& extents) {
  return std::accumulate(extents.begin(), extents.end(), int64_t{1}, std::multiplies<int64_t>());
}

struct Redistribution {
  const Shape in, out;
  const size_t width;
  std::vector<int64_t> place;  // the axis of `out` for each axis of `in`

  Redistribution(const Buffer& x, const ffi::AnyBuffer& y, Integers order)
      : in(x.dimensions(), order.size()),
        out(y.dimensions(), order.size()),
        width(ffi::ByteWidth(x.element_type())),
        place(order.size() + 1) {
    for (size_t i = 0; i < order.size(); ++i) place[order[i] + 1] = i + 1;
  }

  // Copies a block between arrays with these strides along the axes of `in`.
  void copy(const std::vector<int64_t>& extents, const std::vector<int64_t>& from_strides,
            const std::vector<int64_t>& to_strides, const char* from, char* to) const {
    Box box;
    for (size_t i = 0; i < extents.size(); ++i)
      box.add({extents[i], from_strides[i], to_strides[i]});
    copy_box(box, width, from, to);
  }
  // The strides of `out` along the axes of `in`.
  std::vector<int64_t> out_strides() const {
    std::vector<int64_t> strides(place.size());
    for (size_t i = 0; i < place.size(); ++i) strides[i] = out.strides[place[i]];
    return strides;
  }
};

std::unique_ptr<char[]> buffer(size_t bytes) {
  std::unique_ptr<char[]> memory(new char[bytes]);
  advise_huge_pages(memory.get(), bytes);
  return memory;
}

// x is divided along its axis `gather`, with from[i] cells on rank i, and y along `split`, with to[i]
// cells. Axis i of y is axis order[i] of x. Axes are counted without the batch.
ffi::Error redistribute(Token, Buffer x, TokenOut, BufferOut y, int64_t comm, int64_t site,
                        int64_t gather, int64_t split, Integers from, Integers to,
                        Integers order) {
  const Call c("redistribute", comm, site, x.size_bytes());
  const Redistribution r(x, *y, order);
  const size_t size = from.size(), me = c.comm.rank;
  const size_t g = gather + 1, s = split + 1;
  std::vector<int64_t> sent = r.in.extents, received = r.in.extents;
  received[s] = to[me];
  sent[s] = received[g] = 1;
  const int64_t send_row = product(sent), receive_row = product(received);
  std::vector<int64_t> sends(size), receives(size);
  for (size_t i = 0; i < size; ++i) {
    sends[i] = send_row * to[i];
    receives[i] = receive_row * from[i];
  }
  Layout layout = layout_of(x);
  layout.rank = 0;
  const auto listed = [](const std::vector<int64_t>& v) {
    return List{v.data(), static_cast<int64_t>(v.size())};
  };
  if (!c.post.collective({layout, 0, {{"gather", gather}, {"split", split}}, kPairCounts,
                          listed(sends), listed(receives)}))
    return c.done(c.post.refusal);

  const std::vector<int64_t> out_strides = r.out_strides();
  const char* source = static_cast<const char*>(place(x));
  char* target = static_cast<char*>(place(y));
  advise_huge_pages(target, y->size_bytes());
  const size_t word = std::min<size_t>(r.width, 8), words = r.width / word;
  std::vector<int64_t> split_at(size + 1, 0), gather_at(size + 1, 0), out_at(size + 1, 0),
      in_at(size + 1, 0);
  for (size_t i = 0; i < size; ++i) {
    split_at[i + 1] = split_at[i] + to[i];
    gather_at[i + 1] = gather_at[i] + from[i];
    const bool other = i != me;
    out_at[i + 1] = out_at[i] + other * sends[i];
    in_at[i + 1] = in_at[i] + other * receives[i];
  }
  const auto outgoing = buffer(out_at[size] * r.width), incoming = buffer(in_at[size] * r.width);
  Requests in(size), out(size);
  int code = 0;
  for (size_t k = 1; k < size && !code; ++k) {
    const size_t i = (me + size - k) % size;
    if (receives[i])
      code = post_receive(in[i], incoming.get() + in_at[i] * r.width, receives[i] * words, word, i,
                          kTag, c.comm.handle);
  }
  for (size_t k = 1; k < size && !code; ++k) {
    const size_t i = (me + k) % size;
    if (!sends[i]) continue;
    char* packed = outgoing.get() + out_at[i] * r.width;
    sent[s] = to[i];
    r.copy(sent, r.in.strides, Shape::packed(sent),
           source + split_at[i] * r.in.strides[s] * r.width, packed);
    code = post_send(out[i], packed, sends[i] * words, word, i, kTag, c.comm.handle);
  }
  if (code) return c.done(code);
  const auto place_of = [&](size_t i) { return target + gather_at[i] * out_strides[g] * r.width; };
  sent[s] = to[me];
  r.copy(sent, r.in.strides, out_strides, source + split_at[me] * r.in.strides[s] * r.width,
         place_of(me));
  Status status;
  for (size_t k = 1; k < size; ++k) {
    const size_t i = (me + size - k) % size;
    if (!receives[i]) continue;
    if (int error = await_request(in[i], status)) return c.done(error);
    received[g] = from[i];
    r.copy(received, Shape::packed(received), out_strides, incoming.get() + in_at[i] * r.width,
           place_of(i));
  }
  for (Request& request : out)
    if (request.under_way)
      if (int error = await_request(request, status)) return c.done(error);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mpigrad

MPIGRAD_HANDLER(mpigrad_redistribute, redistribute,
                MPIGRAD_BIND MPIGRAD_IN MPIGRAD_X MPIGRAD_OUT MPIGRAD_Y MPIGRAD_WHERE
                    MPIGRAD_ATTR(gather) MPIGRAD_ATTR(split) MPIGRAD_ATTRS(from)
                        MPIGRAD_ATTRS(to) MPIGRAD_ATTRS(order));

// Sparse sums of products as one XLA FFI handler. It links nothing.
//
// A Structure lists the terms of a trilinear form: triples of entries of three arrays, first (the
// values of a matrix), pool (own entries and ghosts, in two buffers, so that they need not be copied
// into one) and last. The sum of first * pool * last over all triples is linear in each array. The
// handler computes its derivative in one of them, given the others. These maps are closed under
// differentiation: products, their adjoints and all their derivatives are the same three loops.
#include <algorithm>
#include <complex>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ffi.h"
#include "visibility.h"

namespace {

namespace ffi = xla::ffi;

// Laid out as the ctypes structure in sparse/matrix/multilinear.py, which keeps the arrays alive.
struct Structure {
  int64_t kind;             // kMatrix: (values, x, y), kPairs: (values, values, values), kSelection
  int64_t first, pool, last;  // lengths (kSelection has no `first`)
  const int32_t* starts;    // kMatrix, kPairs: the start of each row's entries, in row order
  const int32_t* order;     // each entry's position in `first`, null: in row order
  const int32_t* position;  // each entry's position in the pool, kSelection: -1 for zero,
                            // kPairs: the row of the pool
  const int32_t* pool_starts;  // kPairs: the start of each row of the pool
  const int32_t* target;    // kPairs: the position of each product in `last`
  int64_t rows;
};

// Rows in which each entry's position is one larger than in the row before, as in a stencil. Their
// positions need not be read.
struct Run {
  int32_t begin, end;
};
constexpr int64_t kShortestRun = 8, kLongestRow = 32;

struct Kept {
  Structure structure;
  std::vector<Run> runs;
};
enum Kind : int64_t { kMatrix = 0, kPairs = 1, kSelection = 2 };
enum Role : int64_t { kFirst = 0, kPool = 1, kLast = 2 };

std::mutex mutex;
std::unordered_map<int64_t, Kept> structures;
// Programs name structures by id, counted in each process. A program from a cache on disk was stored
// under its whole text with these ids, so it means the structures of the process that looks it up.
int64_t next_number = 1;

template <class T>
inline T times(T a, T b) {
  return a * b;
}
// std::complex's product checks for infinities. This one is four multiplications.
template <class R>
inline std::complex<R> times(std::complex<R> a, std::complex<R> b) {
  return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
}

// One batch of the operands. Pool and last have `width` columns.
template <class T>
struct Operands {
  T *first, *own, *rest, *last;
  int64_t split, width;  // entries in `own`
};

template <class T, bool kSplit>
inline T* at(const Operands<T>& o, int64_t j, int64_t width) {
  if constexpr (kSplit) {
    return j < o.split ? o.own + j * width : o.rest + (j - o.split) * width;
  } else {
    return o.own + j * width;
  }
}

template <class T>
void clear(T* p, int64_t count) {
  if (count) std::memset(static_cast<void*>(p), 0, count * sizeof(T));
}

template <class T>
void clear_pool(const Structure& s, const Operands<T>& o) {
  clear(o.own, o.split * o.width);
  clear(o.rest, (s.pool - o.split) * o.width);
}

template <class T, bool kSplit, bool kOrdered, bool kOne>
void some_rows(const Structure& s, const Operands<T>& o, Role out, int64_t first, int64_t last) {
  const int64_t width = kOne ? 1 : o.width;
  const int32_t *const starts = s.starts, *const position = s.position, *const order = s.order;
  const auto place = [order](int64_t e) -> int64_t { return kOrdered ? e : order[e]; };
  for (int64_t i = first; i < last; ++i) {
    const int64_t begin = starts[i], end = starts[i + 1];
    T* const y = o.last + i * width;
    if (out == kLast) {
      if constexpr (kOne) {
        T sum{};
        for (int64_t e = begin; e < end; ++e) {
          sum += times(o.first[place(e)], *at<T, kSplit>(o, position[e], 1));
        }
        *y = sum;
      } else {
        for (int64_t c = 0; c < width; ++c) y[c] = T{};
        for (int64_t e = begin; e < end; ++e) {
          const T v = o.first[place(e)];
          const T* const p = at<T, kSplit>(o, position[e], width);
          for (int64_t c = 0; c < width; ++c) y[c] += times(v, p[c]);
        }
      }
    } else if (out == kPool) {
      for (int64_t e = begin; e < end; ++e) {
        const T v = o.first[place(e)];
        T* const p = at<T, kSplit>(o, position[e], width);
        for (int64_t c = 0; c < width; ++c) p[c] += times(v, y[c]);
      }
    } else {
      for (int64_t e = begin; e < end; ++e) {
        const T* const p = at<T, kSplit>(o, position[e], width);
        T sum{};
        for (int64_t c = 0; c < width; ++c) sum += times(y[c], p[c]);
        o.first[place(e)] = sum;
      }
    }
  }
}

// The rows of a run, with kWidth entries in each, or `width` if it is 0.
template <class T, int kWidth>
void rows_in_step(T* v, T* const* pool, T* y, int64_t rows, int64_t width, Role out) {
  const int64_t w = kWidth ? kWidth : width;
  if (out == kLast) {
    for (int64_t i = 0; i < rows; ++i, v += w) {
      T sum{};
      for (int64_t t = 0; t < w; ++t) sum += times(v[t], pool[t][i]);
      y[i] = sum;
    }
  } else if (out == kPool) {
    for (int64_t i = 0; i < rows; ++i, v += w) {
      for (int64_t t = 0; t < w; ++t) pool[t][i] += times(v[t], y[i]);
    }
  } else {
    for (int64_t i = 0; i < rows; ++i, v += w) {
      for (int64_t t = 0; t < w; ++t) v[t] = times(y[i], pool[t][i]);
    }
  }
}

// False if the run crosses from own entries to ghosts: then nothing is done.
template <class T, bool kSplit>
bool one_run(const Structure& s, const Operands<T>& o, Role out, Run run) {
  const int64_t begin = s.starts[run.begin], width = s.starts[run.begin + 1] - begin;
  const int64_t rows = run.end - run.begin;
  T* pool[kLongestRow];
  for (int64_t t = 0; t < width; ++t) {
    const int64_t j = s.position[begin + t];
    if (kSplit && j < o.split && j + rows > o.split) return false;
    pool[t] = at<T, kSplit>(o, j, 1);
  }
  T *const v = o.first + begin, *const y = o.last + run.begin;
  switch (width) {
    case 3:
      rows_in_step<T, 3>(v, pool, y, rows, width, out);
      break;
    case 5:
      rows_in_step<T, 5>(v, pool, y, rows, width, out);
      break;
    case 7:
      rows_in_step<T, 7>(v, pool, y, rows, width, out);
      break;
    default:
      rows_in_step<T, 0>(v, pool, y, rows, width, out);
  }
  return true;
}

std::vector<Run> find_runs(const Structure& s) {
  std::vector<Run> runs;
  if (s.kind != kMatrix || s.order) return runs;
  const auto in_step = [&s](int64_t i) {  // row i follows row i - 1
    const int64_t begin = s.starts[i], width = s.starts[i + 1] - begin;
    if (begin - s.starts[i - 1] != width || width > kLongestRow) return false;
    for (int64_t t = 0; t < width; ++t) {
      if (s.position[begin + t] != s.position[begin + t - width] + 1) return false;
    }
    return true;
  };
  for (int64_t i = 0; i < s.rows;) {
    int64_t end = i + 1;
    while (end < s.rows && in_step(end)) ++end;
    if (end - i >= kShortestRun) {
      runs.push_back({static_cast<int32_t>(i), static_cast<int32_t>(end)});
    }
    i = end;
  }
  return runs;
}

template <class T, bool kSplit, bool kOrdered, bool kOne>
void matrix(const Structure& s, const std::vector<Run>& runs, const Operands<T>& o, Role out) {
  if (out == kPool) clear_pool(s, o);
  int64_t row = 0;
  if constexpr (kOrdered && kOne) {
    for (const Run run : runs) {
      some_rows<T, kSplit, kOrdered, kOne>(s, o, out, row, run.begin);
      row = one_run<T, kSplit>(s, o, out, run) ? run.end : run.begin;
    }
  }
  some_rows<T, kSplit, kOrdered, kOne>(s, o, out, row, s.rows);
}

// Entry e of the left matrix is multiplied with each entry of one row of the right one. A row of the
// right matrix is in `own` or in `rest`.
template <class T, bool kSplit, bool kOrdered, bool>
void pairs(const Structure& s, const Operands<T>& o, Role out) {
  const int64_t entries = s.starts[s.rows];
  const int32_t* target = s.target;
  if (out == kLast) clear(o.last, s.last);
  if (out == kPool) clear_pool(s, o);
  for (int64_t e = 0; e < entries; ++e) {
    const int64_t row = s.position[e], begin = s.pool_starts[row];
    const int64_t count = s.pool_starts[row + 1] - begin;
    T* const b = at<T, kSplit>(o, begin, 1);
    T& a = o.first[kOrdered ? e : s.order[e]];
    if (out == kLast) {
      for (int64_t t = 0; t < count; ++t) o.last[target[t]] += times(a, b[t]);
    } else if (out == kPool) {
      for (int64_t t = 0; t < count; ++t) b[t] += times(a, o.last[target[t]]);
    } else {
      T sum{};
      for (int64_t t = 0; t < count; ++t) sum += times(b[t], o.last[target[t]]);
      a = sum;
    }
    target += count;
  }
}

template <class T, bool kSplit, bool, bool kOne>
void selection(const Structure& s, const Operands<T>& o, Role out) {
  const int64_t width = kOne ? 1 : o.width;
  const int32_t* const position = s.position;
  if (out == kLast) {
    for (int64_t i = 0; i < s.last; ++i) {
      const int64_t j = position[i];
      const T* const p = j < 0 ? nullptr : at<T, kSplit>(o, j, width);
      for (int64_t c = 0; c < width; ++c) o.last[i * width + c] = p ? p[c] : T{};
    }
    return;
  }
  clear_pool(s, o);
  for (int64_t i = 0; i < s.last; ++i) {
    const int64_t j = position[i];
    if (j < 0) continue;
    T* const p = at<T, kSplit>(o, j, width);
    for (int64_t c = 0; c < width; ++c) p[c] += o.last[i * width + c];
  }
}

template <class T, bool kSplit, bool kOrdered, bool kOne>
void compute(const Kept& kept, const Operands<T>& o, Role out) {
  const Structure& s = kept.structure;
  if (s.kind == kMatrix) return matrix<T, kSplit, kOrdered, kOne>(s, kept.runs, o, out);
  if (s.kind == kPairs) return pairs<T, kSplit, kOrdered, kOne>(s, o, out);
  return selection<T, kSplit, kOrdered, kOne>(s, o, out);
}

// One buffer: (1 or batches, length, width).
struct View {
  void* data = nullptr;
  int64_t batches = 1, length = 0, width = 1;
  template <class T>
  T* batch(int64_t b) const {
    return static_cast<T*>(data) + (batches > 1 ? b * length * width : 0);
  }
};

template <class T>
void run(const Kept& kept, const View& first, const View& own, const View& rest,
         const View& last, Role out, int64_t batches) {
  for (int64_t b = 0; b < batches; ++b) {
    const Operands<T> o{first.batch<T>(b), own.batch<T>(b),  rest.batch<T>(b),
                        last.batch<T>(b),  own.length, own.width};
    const bool split = rest.length > 0, ordered = !kept.structure.order, one = own.width == 1;
    const auto pick = [](bool flag, auto then) {
      flag ? then(std::true_type{}) : then(std::false_type{});
    };
    pick(split, [&](auto is_split) {
      pick(ordered, [&](auto is_ordered) {
        pick(one, [&](auto is_one) {
          compute<T, is_split.value, is_ordered.value, is_one.value>(kept, o, out);
        });
      });
    });
  }
}

template <class Buffer>
View view(const Buffer& buffer) {
  const auto shape = buffer.dimensions();
  if (shape.size() != 3) return View{nullptr, 1, -1, -1};
  return View{buffer.untyped_data(), shape[0], shape[1], shape[2]};
}

// The operands other than `out`, in the order first, own, rest, last -> the parts of `out`.
ffi::Error contract(ffi::RemainingArgs arguments, ffi::RemainingRets results, int64_t number,
                    int64_t out) {
  const Kept* kept = nullptr;  // its address does not change, and the program keeps it alive
  {
    std::lock_guard<std::mutex> guard(mutex);
    const auto found = structures.find(number);
    if (found == structures.end()) {
      return ffi::Error::InvalidArgument(
          "A @ x: the matrix's pattern was freed, or Python is ending. Keep the pattern.");
    }
    kept = &found->second;
  }
  const Structure& s = kept->structure;
  View views[4];  // first, own, rest, last
  size_t argument = 0, result = 0;
  ffi::DataType type = ffi::DataType::INVALID;
  int64_t batches = 1;
  for (int k = s.kind == kSelection ? 1 : 0; k < 4; ++k) {
    const Role role = k == 0 ? kFirst : k == 3 ? kLast : kPool;
    if (role == out) {
      auto buffer = results.get<ffi::AnyBuffer>(result++);
      if (buffer.has_error()) return buffer.error();
      views[k] = view(**buffer);
    } else {
      auto buffer = arguments.get<ffi::AnyBuffer>(argument++);
      if (buffer.has_error()) return buffer.error();
      views[k] = view(*buffer);
      type = buffer->element_type();
    }
    if (views[k].batches > batches) batches = views[k].batches;
    if (views[k].batches == 0) batches = 0;
  }
  const auto& [first, own, rest, last] = views;
  if ((s.kind != kSelection && first.length != s.first) || own.length + rest.length != s.pool ||
      last.length != s.last || own.width != rest.width ||
      (s.kind != kPairs && own.width != last.width)) {
    return ffi::Error::InvalidArgument("A @ x: the arrays do not fit the pattern. Report this as a bug of mpigrad.");
  }
  const Role role = static_cast<Role>(out);
  switch (type) {
    case ffi::DataType::F32:
      run<float>(*kept, first, own, rest, last, role, batches);
      break;
    case ffi::DataType::F64:
      run<double>(*kept, first, own, rest, last, role, batches);
      break;
    case ffi::DataType::C64:
      run<std::complex<float>>(*kept, first, own, rest, last, role, batches);
      break;
    case ffi::DataType::C128:
      run<std::complex<double>>(*kept, first, own, rest, last, role, batches);
      break;
    default:
      return ffi::Error::InvalidArgument("A @ x: no kernel for this dtype. Report this as a bug of mpigrad.");
  }
  return ffi::Error::Success();
}

}  // namespace

MPIGRAD_EXPORT XLA_FFI_Error* mpigrad_kernels_contract(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(mpigrad_kernels_contract, contract,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("structure")
                                  .Attr<int64_t>("out"));

// The caller keeps the arrays alive until the structure is destroyed.
MPIGRAD_EXPORT int64_t mpigrad_kernels_create(const Structure* structure) {
  Kept kept{*structure, find_runs(*structure)};
  std::lock_guard<std::mutex> guard(mutex);
  structures.emplace(++next_number, std::move(kept));
  return next_number;
}

MPIGRAD_EXPORT void mpigrad_kernels_destroy(int64_t number) {
  std::lock_guard<std::mutex> guard(mutex);
  structures.erase(number);
}

MPIGRAD_EXPORT int64_t mpigrad_kernels_count() {
  std::lock_guard<std::mutex> guard(mutex);
  return static_cast<int64_t>(structures.size());
}

// The entries of a product of matrices. Entry e of the left matrix, in row order, is multiplied with
// the entries of row `position[e]` of the pool, whose columns are pool_columns. Writes the columns of
// the product, sorted in each row, the start of each row, and the target entry of each product, in
// order. `columns` and `target` have room for all products. Returns the number of entries, or -1 if
// 32 bits cannot count them.
MPIGRAD_EXPORT int64_t mpigrad_kernels_multiply_patterns(
    int64_t rows, const int64_t* starts, const int64_t* position, const int64_t* pool_starts,
    const int64_t* pool_columns, int64_t* product_starts, int64_t* columns, int32_t* target) {
  int64_t entries = 0;
  std::vector<int64_t> found;
  product_starts[0] = 0;
  for (int64_t i = 0; i < rows; ++i) {
    found.clear();
    for (int64_t e = starts[i]; e < starts[i + 1]; ++e) {
      found.insert(found.end(), pool_columns + pool_starts[position[e]],
                   pool_columns + pool_starts[position[e] + 1]);
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    if (entries + static_cast<int64_t>(found.size()) > INT32_MAX) return -1;
    for (int64_t e = starts[i]; e < starts[i + 1]; ++e) {
      // The columns of one row are sorted, so each search starts from the last place.
      auto place = found.begin();
      for (int64_t f = pool_starts[position[e]]; f < pool_starts[position[e] + 1]; ++f) {
        place = std::lower_bound(place, found.end(), pool_columns[f]);
        *target++ = static_cast<int32_t>(entries + (place - found.begin()));
      }
    }
    std::copy(found.begin(), found.end(), columns + entries);
    entries += found.size();
    product_starts[i + 1] = entries;
  }
  return entries;
}

// Shared code of all handlers. A handler is one MPI operation between two tokens, which keep
// messages in program order. It is a linear map, and its transpose is another handler.
#pragma once

#include <sys/mman.h>

#include <cstring>
#include <exception>
#include <iterator>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ffi.h"
#include "gpu/arrays.h"
#include "guard/guard.h"
#include "guard/watch.h"
#include "mpi/transfers.h"

namespace mpigrad {

namespace ffi = xla::ffi;

using Token = ffi::Token;
using TokenOut = ffi::Result<ffi::Token>;
using Buffer = ffi::AnyBuffer;
using BufferOut = ffi::Result<ffi::AnyBuffer>;
using Integers = ffi::Span<const int64_t>;

// The address of an array. XLA may give an empty array the address of another array, which MPICH
// rejects.
inline char nowhere[2][8];
inline void* place(const Buffer& x) { return x.size_bytes() ? x.untyped_data() : nowhere[0]; }
inline void* place(BufferOut& y) { return y->size_bytes() ? y->untyped_data() : nowhere[1]; }

// Data that is moved but not reduced, as MPI words. Any dtype, including bfloat16 and bool.
struct Words {
  void* data;
  int64_t count;
  Handle type;
  size_t width;
  Words(void* data, size_t bytes, size_t element_bytes)
      : data(data), width(element_bytes > 8 ? 8 : element_bytes ? element_bytes : 1) {
    count = bytes / width;
    type = word_type(width);
  }
  // The width follows the dtype, for empty arrays too: Open MPI chooses the algorithm of allgatherv
  // by the size of the type, and ranks that choose different algorithms deadlock.
  explicit Words(const Buffer& x)
      : Words(place(x), x.size_bytes(), ffi::ByteWidth(x.element_type())) {}
  explicit Words(BufferOut& y)
      : Words(place(y), y->size_bytes(), ffi::ByteWidth(y->element_type())) {}
};

inline Layout layout_of(const Buffer& x) {
  const auto dims = x.dimensions();
  return {static_cast<int64_t>(x.element_type()), dims.begin(), static_cast<int64_t>(dims.size()),
          static_cast<int64_t>(x.size_bytes())};
}

// A message to or from `peer`: all of x, or `rows` of its rows.
inline Mail mail(int64_t peer, int64_t tag, const Buffer& x, int64_t rows = -1) {
  return {peer, tag, layout_of(x), rows};
}

// The rank in MPI_COMM_WORLD, if it differs from the rank in this communicator.
inline std::string in_the_world(const Slot& it, int64_t rank) {
  const int64_t world = get(it.world_rank);
  return world == rank ? "" : " (rank " + std::to_string(world) + " of the job)";
}

// The error of an operation of this rank.
inline ffi::Error failure(const char* operation, const Communicator& comm, int64_t site,
                          const std::string& what) {
  mark_failure();
  return ffi::Error(ffi::ErrorCode::kInternal,
                    "mpigrad: rank " + std::to_string(comm.rank) + " of " +
                        std::to_string(comm.size) + in_the_world(board.own(), comm.rank) + ": " +
                        operation + " at " + call_site(site) + ": " + what);
}

// One operation in progress. The watchdog sees it while this object lives. `peer` is the root, the
// partner or -1. `bytes` is the amount of data that this rank passes to MPI.
//
// Before it calls MPI, a handler announces its operation, and returns if that is refused:
//     if (ffi::Error e = c.collective(x, {{"root", root}}); e.failure()) return e;
//     if (ffi::Error e = c.messages({mail(dest, tag, x)}, {}); e.failure()) return e;
struct Call {
  const char* operation;
  const Communicator& comm;
  int64_t slot, site;
  mutable Post post;
  mutable Watch watch;

  Call(const char* operation, int64_t space, int64_t site, int64_t bytes, int64_t peer = -1)
      : operation(operation),
        comm(members_of(space)),
        slot(slot_of(space)),
        site(site),
        post(operation, space, site),
        watch(post.standing(), operation, slot, site, bytes, peer),
        word_(derivative_of(space)) {
    if (runtime.alone) begin_waits();
  }

  // The tag that is passed to MPI. Each kind of derivative has its own tags, so that for example
  // messages of an inner gradient are never received as tangents.
  int64_t tag(int64_t given) const {
    const int64_t spaces = runtime.derivative_spaces;
    return slot % 2 && spaces > 1 ? given * spaces + word_ : given;
  }
  // The tag that the program passed.
  int64_t given_tag(int64_t tag) const {
    return slot % 2 && tag >= 0 ? tag / runtime.derivative_spaces : tag;
  }

  // A collective operation without an array.
  ffi::Error collective() const { return success_if(post.collective({})); }
  // A collective without an array, with these numbers.
  ffi::Error collective_with(std::initializer_list<Term> terms) const {
    return success_if(post.collective({{}, 0, terms}));
  }
  // A collective with an array of the same shape and dtype on every rank, and these numbers.
  ffi::Error collective(const Buffer& x, std::initializer_list<Term> terms = {}) const {
    return success_if(post.collective({layout_of(x), 0, terms}));
  }
  // A collective whose number of rows differs between ranks, with the same counts on every rank.
  ffi::Error collective(const Buffer& x, std::initializer_list<Term> terms,
                        Integers counts) const {
    return success_if(post.collective({layout_of(x), 1, terms, kSameCounts, list(counts)}));
  }
  // A collective with counts for each pair of ranks: sends of one are receives of the other.
  ffi::Error collective(const Buffer& x, std::initializer_list<Term> terms, Integers sends,
                        Integers receives) const {
    return success_if(
        post.collective({layout_of(x), 1, terms, kPairCounts, list(sends), list(receives)}));
  }
  // Messages that are sent and received. After a wildcard receive, call
  // post.matched(its index, source, tag).
  template <class Sends = std::initializer_list<Mail>,
            class Receives = std::initializer_list<Mail>>
  ffi::Error messages(const Sends& sends, const Receives& receives) const {
    return success_if(post.messages({std::data(sends), std::size(sends)},
                                {std::data(receives), std::size(receives)}));
  }
  // Call after messages with several parts were posted and before their end is awaited.
  ffi::Error handed_over() const { return success_if(post.handed_over()); }
  // Messages that are posted here and that a later operation waits for.
  ffi::Error posts(std::initializer_list<Mail> sends, std::initializer_list<Mail> receives) const {
    return success_if(
        post.post({std::data(sends), sends.size()}, {std::data(receives), receives.size()}));
  }

  ffi::Error fail(const std::string& what) const { return failure(operation, comm, site, what); }
  // Success for an empty text, else an error with this text.
  ffi::Error done(const std::string& wrong) const {
    if (wrong.empty()) return ffi::Error::Success();
    if (wrong.rfind("mpigrad: ", 0)) return fail(wrong);
    // A verdict is a complete text, the same on every rank.
    mark_failure();
    return ffi::Error(ffi::ErrorCode::kInternal, wrong);
  }
  std::string name_of(int64_t rank) const {
    const Slot* owner;
    return "rank " + std::to_string(rank) +
           (member(slot, rank, &owner) ? in_the_world(*owner, rank) : "");
  }
  ffi::Error done(int code) const {
    if (!code) return ffi::Error::Success();
    if (code == kStopped) post.withdraw();
    const std::string text = error_text(code);
    const bool truncated = text.find("runcated") != std::string::npos;
    return fail(text + (truncated ? ". The ranks disagree about the size of a message. Run with "
                                    "MPIGRAD_GUARD=1 to see how they differ."
                                  : ""));
  }

 private:
  int64_t word_;
  static List list(Integers x) { return {x.begin(), static_cast<int64_t>(x.size())}; }
  ffi::Error success_if(bool allowed) const {
    return allowed ? ffi::Error::Success() : done(post.refusal);
  }
};

constexpr char kSameLayout[] =
    "Make the receive expect the shape and dtype that the sender sends, leaf by leaf.";

// Page faults of small pages cost more than the message: ask for huge pages before the first
// access.
inline void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t page = 2u << 20;
  if (bytes < 2 * page) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) & ~(page - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(page - 1);
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

inline std::string length_error(int64_t got_words, int64_t expected_words, size_t width,
                                     const std::string& sender) {
  return "expected " + std::to_string(expected_words * width) + " bytes from " + sender +
         ", got " + std::to_string(got_words * width) + " bytes. " + kSameLayout;
}

// After a receive. MPI accepts a message that is too short without an error. This is an error here.
inline ffi::Error received(const Call& c, int code, Status& status, const Words& w, int source) {
  if (code) {
    const std::string text = error_text(code);
    const bool truncated = text.find("TRUNC") != std::string::npos ||
                           text.find("trunc") != std::string::npos;
    const std::string sender = source < 0 ? "the sender" : c.name_of(source);
    return c.fail(text + (truncated ? ". Expected at most " + std::to_string(w.count * w.width) +
                                          " bytes, but " + sender + " sent more. " + kSameLayout
                                    : ""));
  }
  int64_t count = 0;
  code = call(runtime.mpi.Get_elements_x, static_cast<const void*>(status.bytes), w.type, &count);
  if (code) return c.done(code);
  if (count != w.count)
    return c.fail(length_error(count, w.count, w.width, c.name_of(source)) +
                  (c.site < 0 ? " In an adjoint, also wait for messages of one rank and tag in the "
                                "order of their posts."
                              : ""));
  return ffi::Error::Success();
}

// The first two integers of a handler's arguments: the space of its communicator, and its site.
struct Place {
  int64_t number[2] = {};
  int count = 0;
  void note(int64_t argument) {
    if (count < 2) number[count++] = argument;
  }
  template <class T>
  void note(const T&) {}
};

// XLA is compiled without exceptions, so none may leave a handler. `function` takes an array for
// which there may be no memory, and returns an error instead.
template <auto function>
struct Guarded;
template <class... Arguments, ffi::Error (*function)(Arguments...)>
struct Guarded<function> {
  static_assert((std::is_same_v<Arguments, int64_t> + ...) >= 2, "a handler with MPIGRAD_WHERE");
  static ffi::Error run(Arguments... arguments) {
    Place at;
    (at.note(arguments), ...);
    // The record keeps the last operation of this rank.
    const auto fail = [&at](const std::string& what) {
      const char* operation = record.operation.load(std::memory_order_relaxed);
      return failure(operation ? operation : "an operation", members_of(at.number[0]),
                     at.number[1], what);
    };
    try {
      return function(std::forward<Arguments>(arguments)...);
    } catch (const std::bad_alloc&) {
      return fail("this rank does not have enough memory for the message. Use more ranks, or send "
                  "smaller arrays.");
    } catch (const std::exception& error) {
      return fail(std::string(error.what()) + ". Report this as a bug of mpigrad.");
    }
  }
};

}  // namespace mpigrad

// Export a handler: MPIGRAD_HANDLER(symbol, function, binding). MPIGRAD_PLAIN_HANDLER is for functions
// that throw nothing, and have no communicator.
#define MPIGRAD_ATTR(name) .Attr<int64_t>(#name)
#define MPIGRAD_ATTRS(name) .Attr<xla::ffi::Span<const int64_t>>(#name)
#define MPIGRAD_BIND xla::ffi::Ffi::Bind()
#define MPIGRAD_IN .Arg<xla::ffi::Token>()
#define MPIGRAD_OUT .Ret<xla::ffi::Token>()
#define MPIGRAD_X .Arg<xla::ffi::AnyBuffer>()
#define MPIGRAD_Y .Ret<xla::ffi::AnyBuffer>()
#define MPIGRAD_WHERE MPIGRAD_ATTR(comm) MPIGRAD_ATTR(site)
#define MPIGRAD_HANDLER(symbol, function, binding) \
  MPIGRAD_PLAIN_HANDLER(symbol, Guarded<&mpigrad::function>::run, binding)
#define MPIGRAD_PLAIN_HANDLER(symbol, function, binding)                                       \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* symbol(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, mpigrad::function, binding)

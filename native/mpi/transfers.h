// Arrays of any length. MPI counts with C integers, so an array that is longer than
// `runtime.largest_count` is passed to MPI
//  - in a message between two ranks: as one item of a datatype that has all its words. It stays one
//    message, as wildcard receives need.
//  - in a broadcast or a reduction: in pieces, one after the other.
//  - in any other collective: as messages between all ranks (mpi/blocks.h).
#pragma once

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "mpi/mpi_runtime.h"

namespace mpigrad {

inline bool is_large(int64_t count) { return count > runtime.largest_count; }

// Words as MPI counts them.
class Items {
 public:
  Items(int64_t words, size_t width) : n(static_cast<int>(words)), type(word_type(width)) {
    if (is_large(words)) make_type(words, width);
  }
  Items(const Items&) = delete;
  Items& operator=(const Items&) = delete;
  // MPI keeps the type until the messages that use it have ended.
  ~Items() {
    if (made_) call(runtime.mpi.Type_free, static_cast<void*>(&type.value));
  }

  int n;
  Handle type;

 private:
  void make_type(int64_t words, size_t width) {
    std::vector<int> lengths;
    std::vector<intptr_t> places;  // MPI_Aint, in bytes
    for (int64_t at = 0; at < words; at += runtime.largest_count) {
      lengths.push_back(static_cast<int>(std::min(runtime.largest_count, words - at)));
      places.push_back(static_cast<intptr_t>(at * width));
    }
    const Handle word = type;
    type = {};
    int code = call(runtime.mpi.Type_create_hindexed, static_cast<int>(lengths.size()),
                    static_cast<const int*>(lengths.data()),
                    static_cast<const intptr_t*>(places.data()), word,
                    static_cast<void*>(&type.value));
    made_ = !code;
    if (!code) code = call(runtime.mpi.Type_commit, static_cast<void*>(&type.value));
    if (code) throw std::runtime_error(error_text(code));
    n = 1;
  }

  bool made_ = false;
};

inline int post_receive(Request& request, void* data, int64_t words, size_t width, int64_t source,
                        int64_t tag, Handle comm) {
  const Items items(words, width);
  return note_post(request, call(runtime.mpi.Irecv, data, items.n, items.type,
                                 static_cast<int>(source), static_cast<int>(tag), comm,
                                 request.address()));
}
inline int post_send(Request& request, const void* data, int64_t words, size_t width, int64_t dest,
                     int64_t tag, Handle comm) {
  const Items items(words, width);
  return note_post(request, call(runtime.mpi.Isend, data, items.n, items.type,
                                 static_cast<int>(dest), static_cast<int>(tag), comm,
                                 request.address()));
}

// Requests that are ended with this object, because MPI must not use the memory after it.
struct Requests : std::vector<Request> {
  using std::vector<Request>::vector;
  ~Requests() {
    for (Request& request : *this) cancel_request(request);
  }
};

// Calls step(offset, count) for the pieces of an array until one returns an error. An empty array
// is one piece.
template <class Step>
int in_pieces(int64_t count, Step&& step) {
  int64_t at = 0;
  do {
    const int64_t n = std::min(runtime.largest_count, count - at);
    if (const int code = step(at, static_cast<int>(n))) return code;
    at += n;
  } while (at < count);
  return 0;
}

}  // namespace mpigrad

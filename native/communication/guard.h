// An operation on the board: announced while it lasts and, with MPIGRAD_GUARD=1, compared with what
// its partners announce before MPI is called.
#pragma once

#include <initializer_list>
#include <string>

#include "board.h"

namespace mpigrad {

// A number that all members must give alike: {"root", 0}.
struct Term {
  const char* name;
  int64_t value;
};

struct Layout {
  int64_t dtype = 0;  // 0: no array
  const int64_t* dims = nullptr;
  int64_t rank = 0, bytes = 0;
};

struct List {
  const int64_t* values = nullptr;
  int64_t size = 0;
};

struct Agreement {
  Layout layout;
  int64_t free_dims = 0;  // leading dimensions that may differ from rank to rank
  std::initializer_list<Term> terms = {};
  CountsKind counts_kind = kNoCounts;
  List sends = {}, receives = {};
};

// A message to or from `peer`: the whole array, or some of its rows.
struct Envelope {
  int64_t peer, tag;
  Layout layout;
  int64_t rows = -1;
};

struct Envelopes {
  const Envelope* first;
  size_t count;
  const Envelope* begin() const { return first; }
  const Envelope* end() const { return first + count; }
};

// The methods return whether the operation may begin. Where not, `refusal` says why, in the same
// words on every rank concerned.
class Post {
 public:
  std::string refusal;

  Post(const char* operation, int64_t slot, int64_t site, int64_t start_ns);
  Post(const Post&) = delete;
  Post& operator=(const Post&) = delete;
  void end(int64_t end_ns);

  bool collective(const Agreement& agreement);
  bool messages(Envelopes sends, Envelopes receives);
  // The actual sender of receive number `i`, where it named none.
  void matched(size_t i, int64_t source, int64_t tag);
  // Whether operations may begin here at all.
  bool allowed();

 private:
  template <class Ready>
  bool wait(const Ready& ready);
  void count_messages(int64_t n);
  bool agree_by_message(const Contract& c);

  bool owner_;  // not so where another thread is in an operation
  int64_t slot_;
};

}  // namespace mpigrad

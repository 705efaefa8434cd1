// An operation on the board: announced while it lasts and, with MPIGRAD_GUARD=1, compared with what
// its partners announce before MPI is called.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "guard/board.h"
#include "guard/watch.h"

namespace mpigrad {

enum CountsKind : int64_t { kNoCounts, kSameCounts, kPairCounts };

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

// A message to or from `peer`: the whole array, or some of its rows. Where an earlier operation has
// posted it, and this one completes it, `number` is what Post::number gave there.
struct Mail {
  int64_t peer, tag;
  Layout layout;
  int64_t rows = -1, number = 0;
};

struct Mails {
  const Mail* first;
  size_t count;
  const Mail* begin() const { return first; }
  const Mail* end() const { return first + count; }
};

// The guard is on, and members of this communicator see no common board.
bool is_guarded_between_hosts(int64_t slot);

// How collectives of the members, of these numbers, differ, in words that are the same on all of them.
std::string disagreement(int64_t slot, const int64_t* sequences);

// Lets MPI move messages, while this rank waits for others elsewhere.
void move_messages(int64_t slot);

// From here on nobody can say which messages of this rank are left over.
void leave_unaccounted();

// The methods return whether the operation may begin. Where not, `refusal` says why, in the same
// words on every rank concerned.
class Post {
 public:
  std::string refusal;

  Post(const char* operation, int64_t slot, int64_t site);
  Post(const Post&) = delete;
  Post& operator=(const Post&) = delete;
  ~Post();

  bool collective(const Agreement& agreement);
  bool messages(Mails sends, Mails receives);
  // Posts messages without waiting for them; their numbers are for the operation that does.
  bool post(Mails sends, Mails receives);
  int64_t number_sent() const, number_received() const;
  // The actual sender of receive number `i`, where it named none.
  void matched(size_t i, int64_t source, int64_t tag);
  // A receive from anyone has been posted, or (-1) is about to end, or has.
  void from_anyone(int posts);
  // Whether operations may begin here at all.
  bool allowed();
  Standing standing() const {
    return owner_ ? Standing::first : nested_ ? Standing::within : Standing::refused;
  }

 private:
  template <class Ready>
  bool wait(const Ready& ready);
  void count_messages(int64_t n);
  bool agree_by_message(const Contract& c);

  bool announce(Mails sends, Mails receives);

  bool owner_;   // not so where another operation is under way
  bool nested_;  // in this thread
  bool completes_ = true;
  int64_t slot_;
  Channel *to_[kParts], *from_[kParts];  // of the messages under way
};

}  // namespace mpigrad

// An operation on the board. It is announced while it lasts. With MPIGRAD_GUARD=1 it is compared
// with the announcements of its partners before MPI is called.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "guard/board.h"
#include "guard/watch.h"

namespace mpigrad {

enum CountsKind : int64_t { kNoCounts, kSameCounts, kPairCounts };

// A number that must be the same on all members: {"root", 0}.
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

// A message to or from `peer`: the whole array, or some of its rows. If this operation completes a
// message that an earlier one posted, `number` is the number that Post returned then. With
// `same_step` both ranks make the exchange at the same step of their loops.
struct Mail {
  int64_t peer, tag;
  Layout layout;
  int64_t rows = -1, number = 0;
  bool same_step = false;
};

struct Mails {
  const Mail* first;
  size_t count;
  const Mail* begin() const { return first; }
  const Mail* end() const { return first + count; }
};

// A source line of a rank of this host, with the leaves of the pytree that is sent there.
std::string line_of(int64_t site, const Slot& owner);

// Whether the guard is on and the members of this communicator do not share a board.
bool is_guarded_between_hosts(int64_t slot);

// The error text for collectives of the members that differ, the same text on all members.
// `sequences` holds the number of each member's collective.
std::string disagreement(int64_t slot, const int64_t* sequences);

// Let MPI make progress while this rank waits outside MPI.
void move_messages(int64_t slot);

// A permanent copy of the name of an operation: watches and traces keep its address only.
const char* interned(std::string_view text);

// Note that an operation failed: unreceived messages of this rank are expected from now on.
MPIGRAD_SHARED void mark_failure();

// The methods return whether the operation may begin. If not, `refusal` has the reason, with the
// same text on every rank concerned.
class MPIGRAD_SHARED Post {
 public:
  std::string refusal;

  Post(const char* operation, int64_t space, int64_t site);  // space -1: unknown
  Post(const Post&) = delete;
  Post& operator=(const Post&) = delete;
  ~Post();

  bool collective(const Agreement& agreement);
  bool messages(Mails sends, Mails receives);
  // Posts messages without waiting. The operation that waits for them needs their numbers.
  bool post(Mails sends, Mails receives);
  int64_t number_sent() const, number_received() const;
  // Finds on the board what the sender has announced of the message that receive number `index` of
  // this operation has received from `source` with `tag`. Returns false if it is not there, and if
  // such a message was compared before.
  bool sent_to_this(int64_t index, int64_t source, int64_t tag, Part& part, std::string& operation,
                    std::string& line);
  // The actual sender and tag of wildcard receive number `i`.
  void matched(size_t i, int64_t source, int64_t tag);
  // Whether a partner needs the messages of this operation before the operation itself can end. It then
  // hands them to MPI without blocking, and waits on the board in handed_over.
  bool needed() const { return needed_; }
  bool handed_over();
  // A wildcard receive has been posted (1), or is about to end or has ended (-1).
  void from_anyone(int posts);
  // The messages that this operation has announced will not come.
  void withdraw();
  // Whether the communicator has not been freed.
  bool usable();
  // Whether it is usable, and this process and thread may begin an operation.
  bool allowed();
  Standing standing() const {
    return owner_ ? Standing::first : nested_ ? Standing::within : Standing::refused;
  }

 private:
  // Waits on the board until the operation is ready. If it is refused, `withdraw` takes back what it
  // has announced.
  template <class Ready, class Withdraw>
  bool wait(const Ready& ready, const Withdraw& withdraw);
  void count_messages(int64_t n);
  bool agree_by_message(const Contract& c);
  bool agree_once(const Contract& c);
  bool agree_between_hosts(const Contract& c);

  bool announce(Mails sends, Mails receives);

  bool owner_;   // false if another operation is in progress
  bool nested_;  // the other operation is in this thread
  bool completes_ = true;
  bool needed_ = false;
  int64_t space_, slot_;
  Channel *to_[kParts], *from_[kParts];  // of the messages in progress
};

}  // namespace mpigrad

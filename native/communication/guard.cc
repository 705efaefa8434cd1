#include "guard.h"

#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "board.h"
#include "mpi_runtime.h"
#include "watch.h"

namespace mpigrad {
namespace {

// Of longer messages it is taken for sure that their sender waits for the receiver; what shorter ones
// do depends on the MPI and on how many are under way, and proves nothing.
constexpr int64_t kEager = 1 << 16;
constexpr int kProbes = 64;

bool guarded = false;
// Python puts the disagreement of `size` ranks into words, of at most `room` bytes.
void (*explain)(const Told* told, int size, char* text, int room) = nullptr;
const char* last_operation = nullptr;
std::atomic<bool> forked{false};
int exit_code = 0;
std::atomic<bool> busy{false};
// This thread is in an operation: what it calls there, as a user's own operation does, is part of it.
// (A byte of the static block of thread-local memory: looked up without a call.)
thread_local bool inside __attribute__((tls_model("initial-exec"))) = false;
thread_local std::vector<std::unique_ptr<Post>> of_python;  // calls that Python itself makes

void copy_layout(const Layout& from, int64_t& dtype, int64_t& rank, int64_t* dims) {
  dtype = from.dtype;
  rank = from.rank;
  for (int64_t i = 0; i < std::min<int64_t>(rank, kDims); ++i) dims[i] = from.dims[i];
}

bool same_layout(int64_t dtype, int64_t rank, const int64_t* dims, int64_t dtype2, int64_t rank2,
                 const int64_t* dims2, int64_t free_dims = 0) {
  return dtype == dtype2 && rank == rank2 &&
         std::equal(dims + std::min(free_dims, rank), dims + std::min<int64_t>(rank, kDims),
                    dims2 + std::min(free_dims, rank));
}

// Whether the contract says all of this already, as it does in a loop.
bool repeats(const Contract& c, int64_t site, const char* operation, const Agreement& a) {
  if (c.site != site || c.dtype != a.layout.dtype || c.rank != a.layout.rank ||
      c.terms != static_cast<int64_t>(a.terms.size()) || c.counts_kind != kNoCounts ||
      a.counts_kind != kNoCounts || c.free_dims != a.free_dims || !operation ||
      c.name != operation)
    return false;
  for (int64_t i = 0; i < std::min<int64_t>(c.rank, kDims); ++i)
    if (c.dims[i] != a.layout.dims[i]) return false;
  const int64_t* value = c.values;
  for (const Term& term : a.terms)
    if (*value++ != term.value) return false;
  return true;
}

void write(Contract& c, int64_t site, const char* operation, const char* text,
           const Agreement& a) {
  c.site = site;
  copy_layout(a.layout, c.dtype, c.rank, c.dims);
  c.free_dims = a.free_dims;
  c.terms = 0;
  for (const Term& term : a.terms) {
    copy_text(c.names[c.terms], term.name);
    c.values[c.terms++] = term.value;
  }
  c.counts_kind = a.sends.size <= kCounts ? a.counts_kind : kNoCounts;
  c.counts = c.counts_kind == kNoCounts ? 0 : a.sends.size;
  for (int64_t i = 0; i < c.counts; ++i) {
    c.sends[i] = a.sends.values[i];
    c.receives[i] = a.receives.size ? a.receives.values[i] : 0;
  }
  std::memcpy(c.operation, text, kName);
  c.name = operation;
}

bool agree(const Contract& a, const Contract& b) {
  if (std::strncmp(a.operation, b.operation, kName) || a.terms != b.terms ||
      a.counts_kind != b.counts_kind || a.counts != b.counts || a.free_dims != b.free_dims ||
      !same_layout(a.dtype, a.rank, a.dims, b.dtype, b.rank, b.dims, a.free_dims))
    return false;
  for (int64_t i = 0; i < a.terms; ++i)
    if (a.values[i] != b.values[i]) return false;
  return a.counts_kind != kSameCounts || std::equal(a.sends, a.sends + a.counts, b.sends);
}

// What each rank sends to each other is what that one receives; all look at all.
bool pairs_agree(int64_t slot, int64_t sequence) {
  const int64_t size = std::min<int64_t>(board.mine().entries[slot].size, kCounts);
  const Slot* owner;
  for (int64_t a = 0; a < size; ++a)
    for (int64_t b = 0; b < size; ++b) {
      const Contract& from = member(slot, a, &owner)->contracts[sequence % 2];
      const Contract& to = member(slot, b, &owner)->contracts[sequence % 2];
      if (from.sequence == sequence && to.sequence == sequence && from.sends[b] != to.receives[a])
        return false;
    }
  return true;
}

uint64_t hash(int64_t id, int64_t peer, int64_t tag) {
  uint64_t h = static_cast<uint64_t>(id) * UINT64_C(0x9E3779B97F4A7C15);
  h ^= static_cast<uint64_t>(peer) * UINT64_C(0xC2B2AE3D27D4EB4F);
  h ^= static_cast<uint64_t>(tag) * UINT64_C(0x165667B19E3779F9);
  return h ^ (h >> 29);
}

const Channel* find_channel(const Slot& s, int64_t id, int64_t peer, int64_t tag) {
  const uint64_t h = hash(id, peer, tag);
  for (int i = 0; i < kProbes; ++i) {
    const Channel& c = s.channels[(h + i) % kChannels];
    const int64_t found = get(c.id);
    if (found == 0) return nullptr;
    if (found == id && c.peer == peer && c.tag == tag) return &c;
  }
  return nullptr;
}

Channel* find_mine(int64_t id, int64_t peer, int64_t tag) {
  Slot& mine = board.mine();
  const uint64_t h = hash(id, peer, tag);
  for (int i = 0; i < kProbes; ++i) {
    Channel& c = mine.channels[(h + i) % kChannels];
    const int64_t found = c.id.load(std::memory_order_relaxed);
    if (found == id && c.peer == peer && c.tag == tag) return &c;
    if (found == 0) {
      c.peer = peer;
      c.tag = tag;
      put(c.id, id);
      return &c;
    }
  }
  put(mine.untracked, 1);
  return nullptr;
}

// The two that were looked for last are those of a loop.
Channel* my_channel(int64_t id, int64_t peer, int64_t tag) {
  static int64_t recent[2] = {};
  Channel* all = board.mine().channels;
  for (const int64_t i : recent) {
    Channel& c = all[i];
    if (c.id.load(std::memory_order_relaxed) == id && c.peer == peer && c.tag == tag) return &c;
  }
  Channel* found = find_mine(id, peer, tag);
  recent[1] = recent[0];
  if (found) recent[0] = found - all;
  return found;
}

const Message* find_message(const Slot& s, int64_t id, int64_t peer, int64_t tag,
                            int64_t ordinal) {
  for (const Message& m : s.message)
    if (get(m.id) == id && m.part.peer == peer && m.part.tag == tag && m.part.ordinal == ordinal)
      return &m;
  return nullptr;
}

bool wild(const Part& p) { return p.peer < 0 || p.tag < 0; }

bool same_layout(const Part& a, const Part& b) {
  return a.dtype == 0 || b.dtype == 0 || same_layout(a.dtype, a.rank, a.dims, b.dtype, b.rank, b.dims);
}

// The oldest announced message from `source` to `rank` that is not received yet, or nullptr.
const Message* next_message(const Slot& sender, int64_t source, const Slot& receiver, int64_t rank,
                            int64_t id, int64_t tag) {
  const int64_t all = get(sender.messages);
  for (int64_t n = std::max<int64_t>(0, all - kMessages); n < all; ++n) {
    const Message& m = sender.message[n % kMessages];
    if (get(m.id) != id || m.part.peer != rank || (tag >= 0 && m.part.tag != tag)) continue;
    const Channel* taken = find_channel(receiver, id, source, m.part.tag);
    if (m.part.ordinal > (taken ? get(taken->received) : 0)) return &m;
  }
  return nullptr;
}

// Whether it is not known which message a receive of any tag or from anyone takes: announcements
// have been overwritten, or a receive that was posted before takes one of them.
bool uncertain(const Slot& sender, int64_t source, const Slot& receiver, int64_t rank, int64_t id,
               int64_t tag) {
  for (const Channel& c : sender.channels) {
    if (get(c.id) != id || c.peer != rank || (tag >= 0 && c.tag != tag)) continue;
    const Channel* taken = find_channel(receiver, id, source, c.tag);
    const int64_t received = taken ? get(taken->received) : 0;
    if (get(c.sent) > received &&
        (get(sender.messages) > kMessages || (taken && get(taken->posted) > received)))
      return true;
  }
  return false;
}

// Whether an operation of messages can take place, seen from one rank of a communicator. Where a
// partner's message belongs to an operation that itself waits on the board, that one must be able
// to take place, too: else this rank would enter MPI and wait there for a message that is refused.
class Exchange {
 public:
  explicit Exchange(int64_t slot)
      : slot_(slot), id_(get(board.mine().entries[slot].id)), seen_(board.mine().entries[slot].size) {}

  bool possible(int64_t rank) {
    if (seen_[rank]) return true;  // in a circle all go together
    seen_[rank] = true;
    const Slot* s;
    if (!member(slot_, rank, &s)) return true;
    for (int64_t i = 0; i < std::min<int64_t>(get(s->receives), kParts); ++i)
      if (!(wild(s->receive[i]) ? any_available(rank, *s, s->receive[i])
                                : available(rank, s->receive[i])))
        return false;
    for (int64_t i = 0; i < std::min<int64_t>(get(s->sends), kParts); ++i)
      if (s->send[i].awaited && !expected(rank, s->send[i])) return false;
    return true;
  }

 private:
  // The operation that rank is in waits on the board, and has this part.
  bool waits(const Slot& s, const Part* parts, const Cell& count, int64_t peer, int64_t tag,
             int64_t ordinal) const {
    if (get(s.state) != kInOperation || get(s.kind) != kMessagesOnly || !get(s.polling) ||
        get(s.entries[get(s.entry)].id) != id_)
      return false;
    for (int64_t i = 0; i < std::min<int64_t>(get(count), kParts); ++i)
      if (parts[i].peer == peer && parts[i].tag == tag && parts[i].ordinal == ordinal) return true;
    return false;
  }

  // The message that `rank` waits for has been handed over, and is what it expects.
  bool available(int64_t rank, const Part& p) {
    const Slot* sender;
    if (!member(slot_, p.peer, &sender) || get(sender->untracked)) return true;
    const Channel* c = find_channel(*sender, id_, rank, p.tag);
    if (!c || get(c->sent) < p.ordinal) return false;
    const Message* m = find_message(*sender, id_, rank, p.tag, p.ordinal);
    if (m && !same_layout(p, m->part)) return false;
    return !waits(*sender, sender->send, sender->sends, rank, p.tag, p.ordinal) ||
           possible(p.peer);
  }

  // Some message has been handed over that a receive from anyone, or of any tag, takes; from one
  // sender it takes the oldest.
  bool any_available(int64_t rank, const Slot& receiver, const Part& p) {
    for (int64_t source = 0; source < static_cast<int64_t>(seen_.size()); ++source) {
      const Slot* sender;
      if (p.peer >= 0 && p.peer != source) continue;
      if (!member(slot_, source, &sender) || get(sender->untracked)) return true;
      const Message* m = next_message(*sender, source, receiver, rank, id_, p.tag);
      if (m && same_layout(p, m->part) &&
          (!waits(*sender, sender->send, sender->sends, rank, m->part.tag, m->part.ordinal) ||
           possible(source)))
        return true;
      if (uncertain(*sender, source, receiver, rank, id_, p.tag)) return true;
    }
    return false;
  }

  // A long message of `rank` meets a receive.
  bool expected(int64_t rank, const Part& p) {
    const Slot* receiver;
    if (!member(slot_, p.peer, &receiver) || get(receiver->untracked)) return true;
    const Channel* c = find_channel(*receiver, id_, rank, p.tag);
    if (c && get(c->posted) >= p.ordinal)
      return !waits(*receiver, receiver->receive, receiver->receives, rank, p.tag, p.ordinal) ||
             possible(p.peer);
    if (get(receiver->kind) != kMessagesOnly || get(receiver->state) != kInOperation) return false;
    for (int64_t i = 0; i < std::min<int64_t>(get(receiver->receives), kParts); ++i)
      if (wild(receiver->receive[i])) return true;
    return false;
  }

  int64_t slot_, id_;
  std::vector<bool> seen_;
};

// The text of a verdict, or "". A verdict that concerns this rank's operation under way comes first
// of all (`now`); one that concerns whatever it does next waits for an operation to `begin`, or
// reaches one that waits for ranks of the same communicator.
enum class When { now, begin, waiting };

std::string take_fault(When when, int64_t id) {
  Slot& mine = board.mine();
  const int64_t all = get(board.header->faults);
  int64_t n = get(mine.faults);
  if (n == all) return "";
  bool later = false;
  for (n = std::max(n, all - kFaults); n < all; ++n) {
    const Fault& fault = board.header->fault[n % kFaults];
    const int64_t serial = fault.serials[board.index];
    const bool same = std::count(fault.ids, fault.ids + kFaultIds, id) > 0;
    if (serial == get(mine.serial) ||
        (serial == -1 && (when == When::begin || (when == When::waiting && same)))) {
      put(mine.faults, n + 1);
      return fault.text;
    }
    later |= serial == -1;
  }
  if (!later) put(mine.faults, all);
  return "";
}

}  // namespace

void leave_unaccounted() {
  if (!forked.load(std::memory_order_relaxed)) put(board.mine().unaccounted, 1);
}

Post::Post(const char* operation, int64_t slot, int64_t site)
    : owner_(watched && !forked.load(std::memory_order_relaxed) &&
             !busy.load(std::memory_order_acquire)),
      nested_(inside || !watched),
      slot_(slot) {
  if (!owner_) return;
  inside = true;
  busy.store(true, std::memory_order_relaxed);  // two threads are told apart well enough
  Slot& mine = board.mine();
  add(mine.serial, 1);
  put(mine.kind, kUnknown);
  put(mine.entry, slot);
  put(mine.site, site);
  if (operation != last_operation) copy_text(mine.operation, last_operation = operation);
  put(mine.state, kInOperation);
}

void Post::end() {
  if (!owner_) return;
  Slot& mine = board.mine();
  if (!refusal.empty()) leave_unaccounted();
  if (get(mine.kind) == kMessagesOnly && !completes_) {
    // What was posted is received by the operation that waits for it.
  } else if (get(mine.kind) == kMessagesOnly && refusal.empty()) {
    const int64_t id = get(mine.entries[slot_].id);
    for (int64_t i = 0; i < std::min<int64_t>(get(mine.receives), kParts); ++i) {
      const Part& p = mine.receive[i];
      if (wild(p)) {
        put(mine.untracked, 1);
      } else if (Channel* c = my_channel(id, p.peer, p.tag)) {
        add(c->received, 1);
      }
    }
  } else if (get(mine.kind) == kUnknown && slot_ >= 0 && refusal.empty()) {
    put(mine.untracked, 1);  // it may have sent messages that nobody has counted
  }
  put(mine.state, kInPython);
  add(mine.serial, 1);
  inside = false;
  busy.store(false, std::memory_order_release);
}

bool Post::allowed() {
  if (owner_ || nested_) return true;
  refusal = forked.load(std::memory_order_relaxed)
                ? "this process was forked from a rank, and is none itself: MPI knows the parent "
                  "only. Send messages from the rank, or start workers with multiprocessing's "
                  "\"spawn\""
                : "another thread of this rank is in an operation: the order of two threads' "
                  "messages is not defined. Issue all operations from one thread";
  return false;
}

template <class Ready>
bool Post::wait(const Ready& ready) {
  Slot& mine = board.mine();
  const int64_t id = get(mine.entries[slot_].id);
  for (int n = 0;; ++n) {
    if (!(refusal = take_fault(When::now, id)).empty()) break;
    if (ready()) {
      refusal = take_fault(When::now, id);
      break;
    }
    if (!(refusal = take_fault(When::waiting, id)).empty()) break;
    // A partner that is in MPI already may need this rank to move its messages. (MPICH 5 moves
    // none where a rank asks for its own.)
    int any = 0;
    Status status;
    const Communicator& comm = communicator(slot_);
    const int other = (comm.rank + 1) % comm.size;
    if (n > 20)
      call(runtime.mpi.Iprobe, other, 0, comm.handle, &any, static_cast<void*>(status.bytes));
    if (n < 500) {
      sched_yield();
    } else {
      const timespec pause{0, n < 2000 ? 50000 : 1000000};
      nanosleep(&pause, nullptr);
    }
  }
  put(mine.polling, 0);
  return refusal.empty();
}

bool Post::collective(const Agreement& a) {
  if (!owner_) return allowed();
  Slot& mine = board.mine();
  Entry& e = mine.entries[slot_];
  if (!get(e.id)) return true;  // nobody counts on it
  put(mine.polling, guarded && all_on_board(slot_));
  if (get(mine.polling) && !(refusal = take_fault(When::begin, 0)).empty()) return false;
  const int64_t sequence = e.sequence.load(std::memory_order_relaxed) + 1;
  Contract& c = e.contracts[sequence % 2];
  c.sequence = sequence;
  const int64_t site = mine.site.load(std::memory_order_relaxed);
  if (!repeats(c, site, last_operation, a)) write(c, site, last_operation, mine.operation, a);
  put(e.sequence, sequence);
  put(mine.kind, kCollective);
  if (!get(mine.polling)) return !guarded || e.size == 1 || agree_by_message(c);
  int64_t next = 0;
  const bool agreed = wait([&] {
    for (; next < e.size; ++next) {
      const Slot* owner;
      const Entry* other = next == e.rank ? nullptr : member(slot_, next, &owner);
      if (!other) continue;
      const int64_t theirs = get(other->sequence);
      if (theirs < sequence) return false;
      const Contract& d = other->contracts[sequence % 2];
      if (d.sequence == sequence && !agree(c, d)) return false;
    }
    return c.counts_kind != kPairCounts || pairs_agree(slot_, sequence);
  });
  if (!agreed) put(e.sequence, sequence - 1);  // it has not taken place
  return agreed;
}

// Members on several hosts see no common board: they tell each other, on the communicator itself.
bool Post::agree_by_message(const Contract& c) {
  const Communicator& comm = communicator(slot_);
  Told mine{c, {}};
  copy_text(mine.site, call_site(c.site).c_str());
  std::vector<Told> all(comm.size);
  if (call(runtime.mpi.Allgather, static_cast<const void*>(&mine), static_cast<int>(sizeof mine), word_type(1),
           static_cast<void*>(all.data()), static_cast<int>(sizeof mine), word_type(1), comm.handle))
    return true;  // the operation itself will say what is wrong
  bool same = true;
  for (const Told& other : all) same &= agree(all[0].contract, other.contract);
  if (c.counts_kind == kPairCounts && same)
    for (int a = 0; a < std::min(comm.size, kCounts); ++a)
      for (int b = 0; b < std::min(comm.size, kCounts); ++b)
        same &= all[a].contract.sends[b] == all[b].contract.receives[a];
  if (same || !explain) return true;
  std::vector<char> text(kFaultText);
  explain(all.data(), comm.size, text.data(), kFaultText);
  refusal = text.data();
  return false;
}

bool Post::announce(Mails sends, Mails receives) {
  if (!owner_) return allowed();
  Slot& mine = board.mine();
  const Entry& e = mine.entries[slot_];
  const int64_t id = get(e.id);
  if (guarded && !(refusal = take_fault(When::begin, 0)).empty()) return false;
  const auto write = [&](const Mails& list, Part* parts, Cell& count) {
    int64_t n = 0;
    for (const Mail& m : list) {
      if (m.peer == runtime.proc_null) continue;
      Part& p = parts[n++];
      p.peer = m.peer;
      p.tag = m.tag;
      copy_layout(m.layout, p.dtype, p.rank, p.dims);
      if (m.rows >= 0) p.dims[0] = m.rows;
      const bool out = parts == mine.send;
      // To itself a rank sends without waiting.
      p.awaited = completes_ && (!out || (m.layout.bytes > kEager && m.peer != e.rank));
      p.counted = m.number == 0;
      p.ordinal = m.number;
      Channel* c = wild(p) || !p.counted ? nullptr : my_channel(id, p.peer, p.tag);
      if (c) p.ordinal = get(out ? c->sent : c->posted) + 1;
      for (int64_t i = 0; c && i + 1 < n; ++i)  // several at once with one partner
        if (parts[i].peer == p.peer && parts[i].tag == p.tag) p.ordinal = parts[i].ordinal + 1;
    }
    put(count, n);
  };
  // First the operation, then its messages: who sees a message sees what it belongs to.
  write(receives, mine.receive, mine.receives);
  write(sends, mine.send, mine.sends);
  put(mine.polling, guarded && completes_);
  put(mine.kind, kMessagesOnly);
  count_messages(1);
  return true;
}

bool Post::messages(Mails sends, Mails receives) {
  Slot& mine = board.mine();
  if (!owner_ || sends.count > kParts || receives.count > kParts ||
      !get(mine.entries[slot_].id))
    return allowed();  // nobody counts them
  if (!announce(sends, receives)) return false;
  if (!guarded) return true;
  const int64_t me = mine.entries[slot_].rank;
  const bool met = wait([&] { return Exchange(slot_).possible(me); });
  if (!met) count_messages(-1);  // it has not taken place
  return met;
}

bool Post::post(Mails sends, Mails receives) {
  completes_ = false;
  return owner_ && get(board.mine().entries[slot_].id) ? announce(sends, receives) : allowed();
}

int64_t Post::number_sent() const {
  return get(board.mine().sends) ? board.mine().send[0].ordinal : 0;
}
int64_t Post::number_received() const {
  return get(board.mine().receives) ? board.mine().receive[0].ordinal : 0;
}

void Post::count_messages(int64_t n) {
  Slot& mine = board.mine();
  const int64_t id = get(mine.entries[slot_].id);
  for (int64_t i = 0; i < get(mine.receives); ++i) {
    const Part& p = mine.receive[i];
    if (wild(p) || !p.counted) continue;
    if (Channel* c = my_channel(id, p.peer, p.tag)) add(c->posted, n);
  }
  for (int64_t i = 0; i < get(mine.sends); ++i) {
    const Part& p = mine.send[i];
    Channel* c = p.counted ? my_channel(id, p.peer, p.tag) : nullptr;
    if (!c) continue;
    if (n > 0) {
      Message& note = mine.message[get(mine.messages) % kMessages];
      put(note.id, 0);
      note.site = get(mine.site);
      std::memcpy(note.operation, mine.operation, kName);
      note.part = p;
      put(note.id, id);
    }
    add(mine.messages, n);
    add(c->sent, n);
  }
}

void Post::matched(size_t i, int64_t source, int64_t tag) {
  Slot& mine = board.mine();
  if (!owner_ || i >= kParts || !wild(mine.receive[i])) return;
  mine.receive[i].peer = source;
  mine.receive[i].tag = tag;
  if (Channel* c = my_channel(get(mine.entries[slot_].id), source, tag)) add(c->posted, 1);
}

}  // namespace mpigrad

using namespace mpigrad;

MPIGRAD_EXPORT void mpigrad_set_guard(int on, void (*explainer)(const Told*, int, char*, int)) {
  guarded = on;
  explain = explainer;
}

// Where another library's operation has failed.
MPIGRAD_EXPORT void mpigrad_leave_unaccounted() { leave_unaccounted(); }

// In a forked child: its slot is the parent's.
MPIGRAD_EXPORT void mpigrad_forked() { forked = true; }

// The exit code of a forked child, as far as Python knows it.
MPIGRAD_EXPORT void mpigrad_set_exit_code(int code) { exit_code = code; }

// Called when all of Python has ended, before mpi4py finalises MPI: which is the parent's.
MPIGRAD_EXPORT void mpigrad_end_child() {
  if (!forked) return;
  std::fflush(nullptr);
  _exit(exit_code);
}

// A blocking call that Python makes itself; `slot` is -1 where the communicator is not known.
// Returns nullptr or why it is refused.
MPIGRAD_EXPORT const char* mpigrad_begin(const char* operation, int64_t slot, int64_t site) {
  static std::string refusal;
  auto post = std::make_unique<Post>(operation, slot, site);
  last_operation = nullptr;  // a text of Python's, which may be another at the same place
  if (slot < 0 ? post->allowed() : post->collective({})) {
    of_python.push_back(std::move(post));
    return nullptr;
  }
  refusal = post->refusal;
  post->end();
  return refusal.c_str();
}

MPIGRAD_EXPORT void mpigrad_end() {
  of_python.back()->end();
  of_python.pop_back();
}

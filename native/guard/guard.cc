#include "guard/guard.h"

#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "guard/contracts.h"
#include "mpi/messages.h"
#include "mpi/mpi_runtime.h"

namespace mpigrad {
namespace {

// Of longer messages it is taken for sure that their sender waits for the receiver; what shorter ones
// do depends on the MPI and on how many are under way, and proves nothing.
constexpr int64_t kEager = 1 << 16;

bool guarded = false;
// Python puts the disagreement of `size` ranks into words, of at most `room` bytes.
void (*explain)(const Told* told, int size, char* text, int room) = nullptr;
const char* last_operation = nullptr;
std::atomic<bool> forked{false};
int exit_code = 0;
double end_limit = 0;
std::string& end_text = *new std::string;
std::atomic<bool> busy{false};
// This thread is in an operation: what it calls there, as a user's own operation does, is part of it.
// (A byte of the static block of thread-local memory: looked up without a call.)
thread_local bool inside __attribute__((tls_model("initial-exec"))) = false;
// Calls that Python itself makes.
struct PythonCall {
  Post post;
  Shown shown;
  const bool before = record.unlimited.load(std::memory_order_relaxed);
  PythonCall(const char* operation, int64_t slot, int64_t site, bool unlimited)
      : post(operation, slot, site), shown(post.standing(), operation, site, now_ns()) {
    if (!shown.refused()) record.unlimited.store(before || unlimited, std::memory_order_relaxed);
  }
  ~PythonCall() {
    if (!shown.refused()) record.unlimited.store(before, std::memory_order_relaxed);
  }
};
thread_local std::vector<std::unique_ptr<PythonCall>> of_python;

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
    if (serial == get(mine.serial) || (serial == -1 && when == When::waiting && same)) {
      put(mine.faults, n + 1);
      return fault.text;
    }
    if (serial == -1 && when == When::begin) {
      put(mine.faults, all);  // of what went wrong while this rank was elsewhere it is told once
      return fault.text;
    }
    later |= serial == -1;
  }
  if (!later) put(mine.faults, all);
  return "";
}

Told told(const Contract& c, const Slot& owner) {
  Told all{get(owner.world_rank), c, {}};
  const int64_t index = c.site < 0 ? -c.site : c.site;
  std::string text = "an unknown line";
  if (index < kSites) {
    text = std::string(c.site < 0 ? "the adjoint of " : "") + owner.sites[index];
    if (const int64_t tree = owner.tree_of[index])
      text += std::string(" (pytree: ") + (owner.trees + tree - 1) + ")";
  } else if (&owner == &board.mine()) {
    text = call_site(c.site);
  }
  copy_text(all.site, text.c_str());
  return all;
}

std::string in_words(const std::vector<Told>& all) {
  if (!explain) return "the ranks do not agree";
  std::vector<char> text(kFaultText);
  explain(all.data(), static_cast<int>(all.size()), text.data(), kFaultText);
  return text.data();
}

}  // namespace

bool is_guarded_between_hosts(int64_t slot) {
  return guarded && get(board.mine().entries[slot].id) && !all_on_board(slot);
}

void move_messages(int64_t slot) {
  int any = 0;
  Status status;
  const Communicator& comm = communicator(slot);
  // MPICH 5 moves none where a rank asks for its own.
  const int other = (comm.rank + 1) % comm.size;
  call(runtime.mpi.Iprobe, other, 0, comm.handle, &any, static_cast<void*>(status.bytes));
}

void leave_unaccounted() {
  if (!forked.load(std::memory_order_relaxed)) put(board.mine().unaccounted, 1);
}

Post::Post(const char* operation, int64_t slot, int64_t site)
    : owner_(noted != kNothing && !forked.load(std::memory_order_relaxed) &&
             !busy.load(std::memory_order_acquire)),
      nested_(inside || noted == kNothing),
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

Post::~Post() {
  if (!owner_) return;
  Slot& mine = board.mine();
  if (!refusal.empty()) leave_unaccounted();
  if (get(mine.kind) == kMessagesOnly && !completes_) {
    // What was posted is received by the operation that waits for it.
  } else if (get(mine.kind) == kMessagesOnly && refusal.empty()) {
    for (int64_t i = 0; i < get(mine.receives); ++i) {
      if (wild(mine.receive[i]))
        put(mine.untracked, 1);
      else if (from_[i])
        add(from_[i]->received, 1);
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
                  "only. Send messages from the rank, or start workers by subprocess, from a file "
                  "that imports neither mpigrad nor mpi4py"
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
    // A partner that is in MPI already may need this rank to move its messages.
    if (n > 20) move_messages(slot_);
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
  if (!owner_ || noted < kAll) return allowed();
  Slot& mine = board.mine();
  Entry& e = mine.entries[slot_];
  if (!get(e.id)) return true;  // nobody counts on it
  put(mine.polling, guarded && all_on_board(slot_));
  if (get(mine.polling) && !(refusal = take_fault(When::begin, 0)).empty()) return false;
  const int64_t sequence = e.sequence.load(std::memory_order_relaxed) + 1;
  Contract& c = e.contracts[sequence % kContracts];
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
      const Contract& d = other->contracts[sequence % kContracts];
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
  const Told mine = told(c, board.mine());
  std::vector<Told> all(comm.size);
  const int bytes = static_cast<int>(sizeof mine);
  if (call(runtime.mpi.Allgather, static_cast<const void*>(&mine), bytes, word_type(1),
           static_cast<void*>(all.data()), bytes, word_type(1), comm.handle))
    return true;  // the operation itself will say what is wrong
  bool same = true;
  for (const Told& other : all) same &= agree(all[0].contract, other.contract);
  if (c.counts_kind == kPairCounts && same)
    for (int a = 0; a < std::min(comm.size, kCounts); ++a)
      for (int b = 0; b < std::min(comm.size, kCounts); ++b)
        same &= all[a].contract.sends[b] == all[b].contract.receives[a];
  if (same || !explain) return true;
  refusal = in_words(all);
  return false;
}

std::string disagreement(int64_t slot, const int64_t* sequences) {
  std::vector<Told> all(communicator(slot).size);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const Slot* owner;
    const Entry* e = member(slot, rank, &owner);
    all[rank] = told(e->contracts[sequences[rank] % kContracts], *owner);
    // One that has caught the error and gone on may have forgotten it.
    if (all[rank].contract.sequence != sequences[rank]) {
      all[rank] = told({}, *owner);
      copy_text(all[rank].contract.operation, "an operation that is over");
    }
  }
  return in_words(all);
}

bool Post::announce(Mails sends, Mails receives) {
  if (!owner_) return allowed();
  Slot& mine = board.mine();
  const Entry& e = mine.entries[slot_];
  const int64_t id = get(e.id);
  if (guarded && !(refusal = take_fault(When::begin, 0)).empty()) return false;
  const int64_t tree = tree_at(get(mine.site));
  const auto enter = [&](const Mails& list, Part* parts, Cell& count, Channel** channels) {
    int64_t n = 0;
    for (const Mail& m : list) {
      if (m.peer == runtime.proc_null) continue;
      Part& p = parts[n];
      p.peer = m.peer;
      p.tag = m.tag;
      copy_layout(m.layout, p.dtype, p.rank, p.dims);
      p.tree = tree;
      if (m.rows >= 0) p.dims[0] = m.rows;
      const bool out = parts == mine.send;
      // To itself a rank sends without waiting.
      p.awaited = completes_ && (!out || (m.layout.bytes > kEager && m.peer != e.rank));
      p.counted = m.number == 0;
      p.ordinal = m.number;
      Channel* c = channels[n] = wild(p) ? nullptr : my_channel(id, p.peer, p.tag);
      if (c && p.counted) {
        p.ordinal = get(out ? c->sent : c->posted) + 1;
        for (int64_t i = 0; i < n; ++i)  // several at once with one partner
          if (channels[i] == c) p.ordinal = parts[i].ordinal + 1;
      }
      ++n;
    }
    put(count, n);
  };
  // First the operation, then its messages: who sees a message sees what it belongs to.
  enter(receives, mine.receive, mine.receives, from_);
  enter(sends, mine.send, mine.sends, to_);
  put(mine.polling, guarded && completes_);
  put(mine.kind, kMessagesOnly);
  count_messages(1);
  return true;
}

bool Post::messages(Mails sends, Mails receives) {
  Slot& mine = board.mine();
  if (!owner_ || noted < kAll || sends.count > kParts || receives.count > kParts ||
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
  if (!owner_ || noted < kAll || !get(board.mine().entries[slot_].id)) return allowed();
  return announce(sends, receives);
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
  for (int64_t i = 0; i < get(mine.receives); ++i)
    if (from_[i] && mine.receive[i].counted) add(from_[i]->posted, n);
  for (int64_t i = 0; i < get(mine.sends); ++i) {
    if (!to_[i] || !mine.send[i].counted) continue;
    if (n > 0) {
      Message& note = mine.message[get(mine.messages) % kMessages];
      put(note.id, 0);
      note.site = get(mine.site);
      std::memcpy(note.operation, mine.operation, kName);
      note.part = mine.send[i];
      put(note.id, id);
    }
    add(mine.messages, n);
    add(to_[i]->sent, n);
  }
}

void Post::from_anyone(int posts) {
  if (owner_ && slot_ >= 0) add(board.mine().entries[slot_].open, posts);
}

void Post::matched(size_t i, int64_t source, int64_t tag) {
  Slot& mine = board.mine();
  if (!owner_ || i >= kParts || !wild(mine.receive[i])) return;
  mine.receive[i].peer = source;
  mine.receive[i].tag = tag;
  from_[i] = my_channel(get(mine.entries[slot_].id), source, tag);
  if (from_[i]) add(from_[i]->posted, 1);
}

}  // namespace mpigrad

using namespace mpigrad;

MPIGRAD_EXPORT void mpigrad_joining(double seconds, const char* text);

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

// How long MPI may take to end, when Python has, and what is said then.
MPIGRAD_EXPORT void mpigrad_limit_end(double seconds, const char* text) {
  end_limit = seconds;
  end_text = text;
}

// Called when all of Python has ended, before mpi4py finalises MPI: of a forked child, the parent's.
MPIGRAD_EXPORT void mpigrad_end_child() {
  if (!forked) {
    if (end_limit > 0) mpigrad_joining(end_limit, end_text.c_str());
    return;
  }
  std::fflush(nullptr);
  _exit(exit_code);
}

// A text of Python's, which goes away there, for good.
static const char* kept(const char* text) {
  static std::mutex several_threads;
  static auto& texts = *new std::set<std::string>;
  const std::lock_guard lock(several_threads);
  return texts.insert(text).first->c_str();
}

// A blocking call that Python makes itself; `slot` is -1 where the communicator is not known.
// Returns nullptr or why it is refused.
MPIGRAD_EXPORT const char* mpigrad_begin(const char* operation, int64_t slot, int64_t site,
                                         bool unlimited) {
  thread_local std::string refusal;
  auto call = std::make_unique<PythonCall>(kept(operation), slot, site, unlimited);
  if (slot < 0 ? call->post.allowed() : call->post.collective({})) {
    of_python.push_back(std::move(call));
    return nullptr;
  }
  refusal = call->post.refusal;
  return refusal.c_str();
}

MPIGRAD_EXPORT void mpigrad_end() { of_python.pop_back(); }

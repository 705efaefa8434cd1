#include "guard/guard.h"

#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "guard/contracts.h"
#include "guard/loops.h"
#include "mpi/messages.h"
#include "mpi/mpi_runtime.h"

namespace mpigrad {
namespace {

// The sender of a longer message is assumed to wait for the receiver. Whether the sender of a
// shorter message waits depends on the MPI and on the load, so it proves nothing.
constexpr int64_t kEager = 1 << 16;

bool guarded = false;
// Set by Python: writes the error text for the differing contracts of `size` ranks, at most `room`
// bytes.
void (*explain)(const Report* reports, int size, char* text, int room) = nullptr;
const char* last_operation = nullptr;
std::atomic<bool> forked{false};
int exit_code = 0;
double end_limit = 0;
std::string& end_text = *new std::string;
std::atomic<bool> busy{false};
// This thread is in an operation. What it calls there, as a user's custom operation does, is part
// of that operation. (initial-exec: read without a function call.)
thread_local bool inside __attribute__((tls_model("initial-exec"))) = false;
// A blocking call that Python makes itself.
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

constexpr int64_t kLate = 500'000'000;  // ns

// The text of a verdict, or "". A verdict about this rank's current operation applies at once
// (`now`). A verdict about its next operation applies when an operation begins (`begin`), or to one
// that is waiting for ranks of the same communicator (`waiting`).
enum class When { now, begin, waiting };

std::string take_fault(When when, int64_t id) {
  Slot& mine = board.own();
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
      put(mine.faults, all);  // faults from before are reported once
      return fault.text;
    }
    later |= serial == -1;
  }
  if (!later) put(mine.faults, all);
  return "";
}

Report report(const Contract& c, const Slot& owner) {
  Report all{get(owner.world_rank), c, {}};
  copy_text(all.site, line_of(c.site, owner).c_str());
  return all;
}

std::string describe(const std::vector<Report>& all) {
  if (!explain) return "the ranks do not agree";
  std::vector<char> text(kFaultText);
  explain(all.data(), static_cast<int>(all.size()), text.data(), kFaultText);
  return text.data();
}

}  // namespace

std::string line_of(int64_t site, const Slot& owner) {
  const int64_t index = site < 0 ? -site : site;
  if (index >= kSites) return &owner == &board.own() ? call_site(site) : "an unknown line";
  const int64_t tree = owner.tree_of[index];
  return std::string(site < 0 ? "the adjoint of " : "") + owner.sites[index] +
         (tree ? std::string(" (pytree: ") + (owner.trees + tree - 1) + ")" : "");
}

bool is_guarded_between_hosts(int64_t slot) {
  return guarded && get(board.own().entries[slot].id) && !all_on_board(slot);
}

void move_messages(int64_t slot) {
  int any = 0;
  Status status;
  const Communicator& comm = communicator(slot);
  // MPICH 5 makes no progress if a rank probes itself.
  const int other = (comm.rank + 1) % comm.size;
  call(runtime.mpi.Iprobe, other, 0, comm.handle, &any, static_cast<void*>(status.bytes));
}

void mark_failure() {
  if (inside) forget_loops();  // not those of another thread, which is in an operation
  if (!forked.load(std::memory_order_relaxed)) put(board.own().failure_seen, 1);
}

Post::Post(const char* operation, int64_t space, int64_t site)
    : owner_(recording != kRecordNothing && !forked.load(std::memory_order_relaxed) &&
             !busy.exchange(true, std::memory_order_acquire)),
      nested_(inside || recording == kRecordNothing),
      space_(space),
      slot_(space < 0 ? -1 : slot_of(space)) {
  if (!owner_) return;
  inside = true;
  Slot& mine = board.own();
  add(mine.serial, 1);
  put(mine.kind, kUnknown);
  put(mine.entry, slot_);
  put(mine.site, site);
  if (guarded) show_loop(mine);
  if (operation != last_operation) copy_text(mine.operation, last_operation = operation);
  put(mine.state, kInOperation);
}

Post::~Post() {
  if (!owner_) return;
  Slot& mine = board.own();
  if (!refusal.empty()) mark_failure();
  if (get(mine.kind) == kMessagesOnly && !completes_) {
    // The operation that waits for a posted message counts it as received.
  } else if (get(mine.kind) == kMessagesOnly && refusal.empty()) {
    for (int64_t i = 0; i < get(mine.receives); ++i) {
      if (wild(mine.receive[i]))
        put(mine.counts_invalid, 1);
      else if (from_[i])
        add(from_[i]->received, 1);
    }
  } else if (get(mine.kind) == kUnknown && slot_ >= 0 && refusal.empty()) {
    put(mine.counts_invalid, 1);  // it may have sent messages that were not counted
  }
  if (needed_) put(mine.polling, kInMpi);  // after an error of MPI
  put(mine.state, kInPython);
  add(mine.serial, 1);
  inside = false;
  busy.store(false, std::memory_order_release);
}

bool Post::usable() {
  if (space_ < 0 || !is_freed(space_)) return true;
  refusal = freed_text(space_);
  return false;
}

bool Post::allowed() {
  if (!usable()) return false;
  if (owner_ || nested_) return true;
  refusal = forked.load(std::memory_order_relaxed)
                ? "this process was forked from a rank and cannot communicate, because MPI knows "
                  "only the parent. Communicate in the rank, or start workers with subprocess from "
                  "a file that imports neither mpigrad nor mpi4py."
                : "another thread of this rank is in an operation, and the order of messages from "
                  "two threads is undefined. Call all operations from one thread.";
  return false;
}

template <class Ready, class Withdraw>
bool Post::wait(const Ready& ready, const Withdraw& withdraw) {
  Slot& mine = board.own();
  const int64_t id = get(mine.entries[slot_].id);
  for (int n = 0;; ++n) {
    if (!(refusal = take_fault(When::now, id)).empty()) break;
    if (ready()) {
      refusal = take_fault(When::now, id);
      break;
    }
    if (!(refusal = take_fault(When::waiting, id)).empty()) break;
    // A partner that is already in MPI may need this rank to make progress.
    if (n > 20) move_messages(slot_);
    if (n < 500) {
      sched_yield();
    } else {
      const timespec pause{0, n < 2000 ? 50000 : 1000000};
      nanosleep(&pause, nullptr);
    }
  }
  // Before `polling`: a partner that finds this rank not waiting takes what it has announced for
  // certain.
  if (!refusal.empty()) withdraw();
  put(mine.polling, refusal.empty() && needed_ ? kHandedOver : kInMpi);
  return refusal.empty();
}

bool Post::collective(const Agreement& a) {
  if (!usable()) return false;
  if (!owner_ || recording < kRecordAll) return allowed();
  Slot& mine = board.own();
  Entry& e = mine.entries[slot_];
  if (!get(e.id)) return true;  // this communicator is not on the board
  put(mine.polling, guarded && all_on_board(slot_));
  if (get(mine.polling) && !(refusal = take_fault(When::begin, 0)).empty()) return false;
  const int64_t sequence = e.sequence.load(std::memory_order_relaxed) + 1;
  Contract& c = e.contracts[sequence % kContracts];
  c.sequence = sequence;
  const int64_t site = mine.site.load(std::memory_order_relaxed);
  const bool repeated = repeats(c, site, last_operation, a);
  if (!repeated) write(c, site, last_operation, mine.operation, a);
  c.loop = loop_state();
  put(e.sequence, sequence);
  put(mine.kind, kCollective);
  if (!get(mine.polling)) {
    if (e.size == 1) return true;
    if (guarded) return agree_by_message(c);
    if (several_hosts && !agree_between_hosts(c)) return false;
    return repeated || agree_once(c);
  }
  int64_t next = 0;
  const auto ready = [&] {
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
  };
  return wait(ready, [&] { put(e.sequence, sequence - 1); });
}

// Members on several hosts do not share a board: they exchange contracts by a message on the
// communicator itself.
bool Post::agree_by_message(const Contract& c) {
  const Communicator& comm = communicator(slot_);
  const Report mine = report(c, board.own());
  std::vector<Report> all(comm.size);
  const int bytes = static_cast<int>(sizeof mine);
  if (call(runtime.mpi.Allgather, static_cast<const void*>(&mine), bytes, word_type(1),
           static_cast<void*>(all.data()), bytes, word_type(1), comm.handle))
    return true;  // the operation itself will report the error
  bool same = true;
  for (const Report& other : all) same &= agree(all[0].contract, other.contract);
  if (c.counts_kind == kPairCounts && same)
    for (int a = 0; a < std::min(comm.size, kCounts); ++a)
      for (int b = 0; b < std::min(comm.size, kCounts); ++b)
        same &= all[a].contract.sends[b] == all[b].contract.receives[a];
  if (same || !explain) return true;
  refusal = describe(all);
  return false;
}

// Without the guard, a contract is compared when it is new. The members of this host have written it
// on the board when they have come, so that no message is needed.
bool Post::agree_once(const Contract& c) {
  Mixed key;
  for (const int64_t word : {c.site, slot_, static_cast<int64_t>(digest(c))}) key(word);
  if (c.counts_kind == kPairCounts) {
    for (int64_t i = 0; i < c.counts; ++i) key(c.sends[i]);
    for (int64_t i = 0; i < c.counts; ++i) key(c.receives[i]);
  }
  if (!is_new(key.sum)) return true;
  const Entry& e = board.own().entries[slot_];
  const int64_t sequence = c.sequence;
  int64_t next = 0;
  const auto ready = [&] {
    for (; next < e.size; ++next) {
      const Slot* owner;
      const Entry* other = member(slot_, next, &owner);
      if (!other) continue;
      if (get(other->sequence) < sequence) return false;
      // Of different operations the watchdog can say more: which exceptions the ranks handle.
      const Contract& d = other->contracts[sequence % kContracts];
      const bool same = !std::strncmp(c.operation, d.operation, kName);
      if (d.sequence == sequence && !same && all_on_board(slot_)) return false;
    }
    return true;
  };
  if (!wait(ready, [] {})) return false;
  bool same = true;
  std::vector<Report> there;
  for (int64_t rank = 0; rank < e.size; ++rank) {
    const Slot* owner;
    const Entry* other = member(slot_, rank, &owner);
    if (!other) continue;
    const Contract& d = other->contracts[sequence % kContracts];
    const Report theirs = report(d, *owner);
    // That rank may be far ahead, and may write another contract there while this one is read.
    std::atomic_thread_fence(std::memory_order_acquire);
    if (theirs.contract.sequence != sequence || relaxed(d.sequence) != sequence) continue;
    same &= agree(c, theirs.contract);
    there.push_back(theirs);
  }
  if (c.counts_kind == kPairCounts && all_on_board(slot_)) same &= pairs_agree(slot_, sequence);
  if (!same) refusal = describe(there);
  return same;
}

// Without the guard, members on several hosts compare all their contracts so far, before the
// operations 1, 2, 4, 8, ….
bool Post::agree_between_hosts(const Contract& c) {
  if (all_on_board(slot_)) return true;
  Ledger& mine = ledger(slot_);
  mine.add(c);
  const int64_t sequence = c.sequence;
  if (sequence & (sequence - 1)) return true;
  const Communicator& comm = communicator(slot_);
  std::vector<Ledger> all(comm.size);
  const int bytes = static_cast<int>(sizeof mine);
  if (call(runtime.mpi.Allgather, static_cast<const void*>(&mine), bytes, word_type(1),
           static_cast<void*>(all.data()), bytes, word_type(1), comm.handle))
    return true;  // the operation itself will report the error
  const auto known = std::find_if(all.begin(), all.end(), [](const Ledger& x) { return x.known; });
  bool same = true, complete = true;
  for (const Ledger& x : all) {
    same &= !x.known || x.sum == known->sum;
    complete &= x.known;
  }
  // The counts of pairs are not in the sums.
  if (same) return !complete || c.counts_kind != kPairCounts || agree_by_message(c);
  mine = {};
  const Contract* const contracts = board.own().entries[slot_].contracts;
  const int64_t kept = std::max<int64_t>(sequence - kContracts, 0);
  for (int64_t n = kept + 1; n <= sequence; ++n)
    if (!agree_by_message(contracts[n % kContracts])) return false;
  refusal = "mpigrad: the ranks do not agree: one of the operations " +
            std::to_string(sequence / 2 + 1) + " to " + std::to_string(kept) +
            " on this communicator differed between ranks of different hosts. Run with "
            "MPIGRAD_GUARD=1 to see which.";
  return false;
}

bool Post::sent_to_this(int64_t index, int64_t source, int64_t tag, Part& part,
                        std::string& operation, std::string& line) {
  const Slot& mine = board.own();
  const Entry& e = mine.entries[slot_];
  if (!owner_ || guarded || recording < kRecordAll || get(mine.kind) != kMessagesOnly ||
      get(mine.receives) <= index || get(mine.counts_invalid))
    return false;
  const Part& p = mine.receive[index];
  Mixed key;
  for (const int64_t word : {get(mine.site), slot_, source, tag, p.dtype, p.rank}) key(word);
  for (int64_t i = 0; i < std::min<int64_t>(p.rank, kDims); ++i) key(p.dims[i]);
  if (!is_new(key.sum)) return false;
  int64_t ordinal = p.ordinal;
  if (wild(p)) {  // it took the message after those of all receives from this rank that were posted
    const Channel* c = my_channel(get(e.id), source, tag);
    if (!c || get(e.open)) return false;
    ordinal = get(c->posted) + 1;
  }
  const Slot* owner;
  const Entry* sender = member(slot_, source, &owner);
  if (!sender || ordinal <= 0 || get(owner->counts_invalid)) return false;
  const int64_t count = get(owner->messages);
  for (int64_t n = std::max<int64_t>(count - kMessages, 0); n < count; ++n) {
    const Message& note = owner->message[n % kMessages];
    const int64_t id = get(note.id);
    if (id != get(sender->id)) continue;
    part = read_part(note.part);
    operation = note.operation;
    line = line_of(note.site, *owner);
    const bool it = part.peer == e.rank && part.tag == tag && part.ordinal == ordinal;
    if (it && get(note.id) == id) return true;
  }
  return false;
}

std::string disagreement(int64_t slot, const int64_t* sequences) {
  std::vector<Report> all(communicator(slot).size);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const Slot* owner;
    const Entry* e = member(slot, rank, &owner);
    all[rank] = report(e->contracts[sequences[rank] % kContracts], *owner);
    // A rank that caught the error and went on may have overwritten the contract.
    if (all[rank].contract.sequence != sequences[rank]) {
      all[rank] = report({}, *owner);
      copy_text(all[rank].contract.operation, "an operation that has already ended");
    }
  }
  return describe(all);
}

bool Post::announce(Mails sends, Mails receives) {
  if (!usable()) return false;
  if (!owner_) return allowed();
  Slot& mine = board.own();
  const Entry& e = mine.entries[slot_];
  const int64_t id = get(e.id);
  if (guarded && !(refusal = take_fault(When::begin, 0)).empty()) return false;
  const int64_t tree = tree_at(get(mine.site));
  const auto enter = [&](const Mails& list, Part* parts, Cell& count, Channel** channels) {
    int64_t n = 0;
    for (const Mail& m : list) {
      if (m.peer == runtime.proc_null) continue;
      Part p{};
      p.peer = m.peer;
      p.tag = m.tag;
      copy_layout(m.layout, p.dtype, p.rank, p.dims);
      p.tree = tree;
      if (m.same_step) p.loop = loop_state();
      if (m.rows >= 0) p.dims[0] = m.rows;
      const bool out = parts == mine.send;
      // A send to the rank itself does not wait.
      p.awaited = completes_ && (!out || (m.layout.bytes > kEager && m.peer != e.rank));
      p.counted = m.number == 0;
      p.ordinal = m.number;
      Channel* c = channels[n] = wild(p) ? nullptr : my_channel(id, p.peer, p.tag);
      if (c && p.counted) {
        p.ordinal = get(out ? c->sent : c->posted) + 1;
        for (int64_t i = 0; i < n; ++i)  // several messages with one partner
          if (channels[i] == c) p.ordinal = parts[i].ordinal + 1;
      }
      copy_part(parts[n], p);
      ++n;
    }
    put(count, n);
  };
  // Announce the operation first, then its messages: a reader of a message finds its operation.
  enter(receives, mine.receive, mine.receives, from_);
  enter(sends, mine.send, mine.sends, to_);
  put(mine.polling, guarded && completes_ ? kWaits : kInMpi);
  put(mine.kind, kMessagesOnly);
  count_messages(1);
  return true;
}

bool Post::messages(Mails sends, Mails receives) {
  if (!usable()) return false;
  Slot& mine = board.own();
  if (!owner_ || recording < kRecordAll || !get(mine.entries[slot_].id)) return allowed();
  if (sends.count > kParts || receives.count > kParts) {
    put(mine.counts_invalid, 1);  // before MPI: partners must not wait for an announcement
    return true;
  }
  if (!announce(sends, receives)) return false;
  if (!guarded) return true;
  const int64_t me = mine.entries[slot_].rank;
  const int64_t start = now_ns();
  const auto ready = [&] {
    if (Exchange(slot_).possible(me)) return true;
    return needed_ = Exchange(slot_).needed(me, now_ns() - start > kLate);
  };
  return wait(ready, [&] { count_messages(-1); });
}

bool Post::handed_over() {
  if (!needed_) return true;
  needed_ = false;
  Slot& mine = board.own();
  const int64_t me = mine.entries[slot_].rank;
  return wait([&] { return Exchange(slot_).possible(me); }, [&] {
    for (int64_t i = 0; i < get(mine.receives); ++i)
      if (from_[i]) add(from_[i]->posted, -1);
  });
}

bool Post::post(Mails sends, Mails receives) {
  completes_ = false;
  if (!owner_ || recording < kRecordAll || !get(board.own().entries[slot_].id)) return allowed();
  return announce(sends, receives);
}

int64_t Post::number_sent() const {
  return get(board.own().sends) ? board.own().send[0].ordinal : 0;
}
int64_t Post::number_received() const {
  return get(board.own().receives) ? board.own().receive[0].ordinal : 0;
}

void Post::count_messages(int64_t n) {
  Slot& mine = board.own();
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
      copy_part(note.part, mine.send[i]);
      put(note.id, id);
    }
    add(mine.messages, n);
    add(to_[i]->sent, n);
  }
}

void Post::withdraw() {
  if (!owner_ || slot_ < 0 || get(board.own().kind) != kMessagesOnly) return;
  count_messages(-1);
  put(board.own().receives, 0);
  put(board.own().sends, 0);
}

void Post::from_anyone(int posts) {
  if (owner_ && slot_ >= 0) add(board.own().entries[slot_].open, posts);
}

void Post::matched(size_t i, int64_t source, int64_t tag) {
  Slot& mine = board.own();
  if (!owner_ || i >= kParts || !wild(mine.receive[i])) return;
  put_relaxed(mine.receive[i].peer, source);
  put_relaxed(mine.receive[i].tag, tag);
  from_[i] = my_channel(get(mine.entries[slot_].id), source, tag);
  if (from_[i]) add(from_[i]->posted, 1);
}

const char* interned(std::string_view text) {
  static std::mutex mutex;
  static auto& texts = *new std::set<std::string, std::less<>>;
  const std::lock_guard lock(mutex);
  const auto found = texts.find(text);
  return (found == texts.end() ? texts.emplace(text).first : found)->c_str();
}

}  // namespace mpigrad

using namespace mpigrad;

MPIGRAD_EXPORT void mpigrad_start_time_limit(double seconds, const char* text);

MPIGRAD_EXPORT void mpigrad_set_guard(int on, void (*explainer)(const Report*, int, char*, int)) {
  guarded = on;
  explain = explainer;
}

// Called when an operation of another native library has failed.
MPIGRAD_EXPORT void mpigrad_mark_failure() { mark_failure(); }

// Called in a forked child, whose slot belongs to the parent.
MPIGRAD_EXPORT void mpigrad_forked() { forked = true; }

// Set the exit code of a forked child.
MPIGRAD_EXPORT void mpigrad_set_exit_code(int code) { exit_code = code; }

// Limit the time of MPI_Finalize at the end of Python. If it is exceeded, `text` is printed.
MPIGRAD_EXPORT void mpigrad_set_finalize_limit(double seconds, const char* text) {
  end_limit = seconds;
  end_text = text;
}

// Called when Python has ended and before mpi4py finalises MPI. In a forked child MPI belongs to
// the parent, so the child exits here.
MPIGRAD_EXPORT void mpigrad_end_child() {
  if (!forked) {
    if (end_limit > 0) mpigrad_start_time_limit(end_limit, end_text.c_str());
    return;
  }
  std::fflush(nullptr);
  _exit(exit_code);
}


// Begin a blocking call that Python makes itself. `slot` is -1 if the communicator is unknown.
// Returns nullptr, or the reason why the call is refused. `begun` says whether mpigrad_end must
// follow: Python may be interrupted before it has read the result.
MPIGRAD_EXPORT const char* mpigrad_begin(const char* operation, int64_t slot, int64_t site,
                                         bool unlimited, bool* begun) {
  thread_local std::string refusal;
  auto call = std::make_unique<PythonCall>(interned(operation), slot, site, unlimited);
  if (slot < 0 ? call->post.allowed() : call->post.collective({})) {
    of_python.push_back(std::move(call));
    *begun = true;
    return nullptr;
  }
  refusal = call->post.refusal;
  return refusal.c_str();
}

// The last operation was not one of the program.
MPIGRAD_EXPORT void mpigrad_forget_operation() {
  last_operation = nullptr;
  copy_text(board.own().operation, "");
}

MPIGRAD_EXPORT void mpigrad_end() {
  if (!of_python.empty()) of_python.pop_back();
}

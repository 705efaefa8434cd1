#include "guard.h"

#include <sched.h>
#include <time.h>

#include <algorithm>

#include "mpi_runtime.h"
#include "watch.h"

namespace mpigrad {
namespace {

// A message of at most this many bytes leaves at once, in every MPI: its sender waits for nobody.
constexpr int64_t kEager = 1024;
constexpr int kProbes = 64;

bool guarded = false;
std::atomic<bool> forked{false};
std::atomic<bool> busy{false};
Post* of_python = nullptr;  // the call that Python itself makes

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

bool agree(const Contract& a, int64_t rank_a, const Contract& b, int64_t rank_b) {
  if (std::strncmp(a.operation, b.operation, kName) || a.terms != b.terms ||
      a.counts_kind != b.counts_kind || a.counts != b.counts || a.free_dims != b.free_dims ||
      !same_layout(a.dtype, a.rank, a.dims, b.dtype, b.rank, b.dims, a.free_dims))
    return false;
  for (int64_t i = 0; i < a.terms; ++i)
    if (a.values[i] != b.values[i]) return false;
  if (a.counts_kind == kSameCounts) return std::equal(a.sends, a.sends + a.counts, b.sends);
  if (a.counts_kind == kPairCounts && rank_a < kCounts && rank_b < kCounts)
    return a.sends[rank_b] == b.receives[rank_a] && b.sends[rank_a] == a.receives[rank_b];
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

Channel* my_channel(int64_t id, int64_t peer, int64_t tag) {
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

const Message* find_message(const Slot& s, int64_t id, int64_t peer, int64_t tag,
                            int64_t ordinal) {
  for (const Message& m : s.message)
    if (get(m.id) == id && m.part.peer == peer && m.part.tag == tag && m.part.ordinal == ordinal)
      return &m;
  return nullptr;
}

bool wild(const Part& p) { return p.peer < 0 || p.tag < 0; }

// Whether the message that this rank waits for has been handed over, and is what it expects.
bool available(int64_t slot, const Part& p) {
  const Slot* sender;
  const int64_t id = get(board.mine().entries[slot].id), me = board.mine().entries[slot].rank;
  if (!member(slot, p.peer, &sender) || get(sender->untracked)) return true;
  const Channel* c = find_channel(*sender, id, me, p.tag);
  if (!c || get(c->sent) < p.ordinal) return false;
  const Message* m = find_message(*sender, id, me, p.tag, p.ordinal);
  return !m || same_layout(p.dtype, p.rank, p.dims, m->part.dtype, m->part.rank, m->part.dims);
}

// Whether some message has been handed over that a receive from anyone, or of any tag, may take.
bool any_available(int64_t slot, const Part& p) {
  Slot& mine = board.mine();
  const int64_t id = get(mine.entries[slot].id), me = mine.entries[slot].rank;
  for (int64_t source = 0; source < mine.entries[slot].size; ++source) {
    const Slot* sender;
    if (p.peer >= 0 && p.peer != source) continue;
    if (!member(slot, source, &sender) || get(sender->untracked)) return true;
    for (const Channel& c : sender->channels) {
      if (get(c.id) != id || c.peer != me || (p.tag >= 0 && c.tag != p.tag)) continue;
      const Channel* taken = find_channel(mine, id, source, c.tag);
      if (get(c.sent) > (taken ? get(taken->received) : 0)) return true;
    }
  }
  return false;
}

// Whether a long message of this rank meets a receive.
bool expected(int64_t slot, const Part& p) {
  const Slot* receiver;
  const int64_t id = get(board.mine().entries[slot].id), me = board.mine().entries[slot].rank;
  if (!member(slot, p.peer, &receiver) || get(receiver->untracked)) return true;
  const Channel* c = find_channel(*receiver, id, me, p.tag);
  if (c && get(c->posted) >= p.ordinal) return true;
  if (get(receiver->kind) != kMessagesOnly || get(receiver->state) != kInOperation) return false;
  for (int64_t i = 0; i < std::min<int64_t>(get(receiver->receives), kParts); ++i)
    if (wild(receiver->receive[i])) return true;
  return false;
}

bool pending_fault() { return get(board.mine().faults) != get(board.header->faults); }

// The next verdict that concerns this rank, or "".
std::string take_fault() {
  Slot& mine = board.mine();
  const int64_t all = get(board.header->faults);
  for (int64_t n = std::max(get(mine.faults), all - kFaults); n < all; ++n) {
    put(mine.faults, n + 1);
    const Fault& fault = board.header->fault[n % kFaults];
    if (fault.concerns[board.index]) return fault.text;
  }
  put(mine.faults, all);
  return "";
}

}  // namespace

Post::Post(const char* operation, int64_t slot, int64_t site, int64_t start_ns)
    : owner_(!forked.load(std::memory_order_relaxed) &&
             !busy.exchange(true, std::memory_order_acquire)),
      slot_(slot) {
  if (!owner_) return;
  Slot& mine = board.mine();
  add(mine.serial, 1);
  put(mine.kind, kUnknown);
  put(mine.entry, slot);
  put(mine.site, site);
  copy_text(mine.operation, operation);
  put(mine.since_ns, start_ns);
  put(mine.state, kInOperation);
}

Post::~Post() {
  if (!owner_) return;
  Slot& mine = board.mine();
  if (get(mine.kind) == kMessagesOnly && !refused_) {
    const int64_t id = get(mine.entries[slot_].id);
    for (int64_t i = 0; i < std::min<int64_t>(get(mine.receives), kParts); ++i) {
      const Part& p = mine.receive[i];
      if (wild(p)) {
        put(mine.untracked, 1);
      } else if (Channel* c = my_channel(id, p.peer, p.tag)) {
        add(c->received, 1);
      }
    }
  } else if (get(mine.kind) == kUnknown && slot_ >= 0) {
    put(mine.untracked, 1);  // it may have sent messages that nobody has counted
  }
  put(mine.since_ns, now_ns());
  put(mine.state, kInPython);
  add(mine.serial, 1);
  busy.store(false, std::memory_order_release);
}

std::string Post::misuse() const {
  if (forked.load(std::memory_order_relaxed))
    return "this process was forked from a rank, and is none itself: MPI knows the parent only. "
           "Send messages from the rank, or start workers with multiprocessing's \"spawn\"";
  if (!owner_)
    return "another thread of this rank is in an operation: the order of two threads' messages is "
           "not defined. Issue all operations from one thread";
  return "";
}

template <class Ready>
std::string Post::wait(const Ready& ready) {
  Slot& mine = board.mine();
  std::string text;
  put(mine.polling, 1);
  for (int n = 0;; ++n) {
    if (pending_fault() && !(text = take_fault()).empty()) break;
    if (ready() && !pending_fault()) break;
    if (n < 500) {
      sched_yield();
    } else {
      const timespec pause{0, n < 2000 ? 50000 : 1000000};
      nanosleep(&pause, nullptr);
    }
  }
  put(mine.polling, 0);
  refused_ = !text.empty();
  return text;
}

std::string Post::collective(const Agreement& a) {
  const std::string wrong = misuse();
  if (!wrong.empty()) return wrong;
  Slot& mine = board.mine();
  Entry& e = mine.entries[slot_];
  const int64_t sequence = e.sequence.load(std::memory_order_relaxed) + 1;
  Contract& c = e.contracts[sequence % 2];
  c.sequence = sequence;
  c.site = get(mine.site);
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
  std::memcpy(c.operation, mine.operation, kName);
  put(e.sequence, sequence);
  put(mine.kind, kCollective);
  if (!guarded || !all_on_board(slot_)) return "";
  int64_t next = 0;
  const std::string text = wait([&] {
    for (; next < e.size; ++next) {
      const Slot* owner;
      const Entry* other = next == e.rank ? nullptr : member(slot_, next, &owner);
      if (!other) continue;
      const int64_t theirs = get(other->sequence);
      if (theirs < sequence) return false;
      const Contract& d = other->contracts[sequence % 2];
      if (d.sequence == sequence && !agree(c, e.rank, d, next)) return false;
    }
    return true;
  });
  if (!text.empty()) put(e.sequence, sequence - 1);  // it has not taken place
  return text;
}

std::string Post::messages(Envelopes sends, Envelopes receives) {
  const std::string wrong = misuse();
  if (!wrong.empty()) return wrong;
  Slot& mine = board.mine();
  const int64_t id = get(mine.entries[slot_].id);
  if (sends.count > kParts || receives.count > kParts) return "";  // of unknown kind: uncounted
  int64_t n = 0;
  for (const Envelope& m : receives) {
    if (m.peer == runtime.proc_null) continue;
    Part& p = mine.receive[n++];
    p.peer = m.peer;
    p.tag = m.tag;
    copy_layout(m.layout, p.dtype, p.rank, p.dims);
    if (m.rows >= 0) p.dims[0] = m.rows;
    Channel* c = wild(p) ? nullptr : my_channel(id, p.peer, p.tag);
    if (c) add(c->posted, 1);
    p.ordinal = c ? get(c->posted) : 0;
    p.awaited = 1;
  }
  put(mine.receives, n);
  n = 0;
  for (const Envelope& m : sends) {
    if (m.peer == runtime.proc_null) continue;
    Part& p = mine.send[n++];
    p.peer = m.peer;
    p.tag = m.tag;
    copy_layout(m.layout, p.dtype, p.rank, p.dims);
    if (m.rows >= 0) p.dims[0] = m.rows;
    Channel* c = my_channel(id, p.peer, p.tag);
    p.ordinal = c ? get(c->sent) + 1 : 0;
    p.awaited = m.layout.bytes > kEager;
    Message& note = mine.message[get(mine.messages) % kMessages];
    put(note.id, 0);
    note.site = get(mine.site);
    std::memcpy(note.operation, mine.operation, kName);
    note.part = p;
    put(note.id, id);
    add(mine.messages, 1);
    if (c) add(c->sent, 1);
  }
  put(mine.sends, n);
  put(mine.kind, kMessagesOnly);
  if (!guarded) return "";
  const int64_t parts = get(mine.receives);
  const std::string text = wait([&] {
    for (int64_t i = 0; i < parts; ++i)
      if (!(wild(mine.receive[i]) ? any_available(slot_, mine.receive[i])
                                  : available(slot_, mine.receive[i])))
        return false;
    for (int64_t i = 0; i < n; ++i)
      if (mine.send[i].awaited && !expected(slot_, mine.send[i])) return false;
    return true;
  });
  if (!text.empty()) {  // it has not taken place
    for (int64_t i = 0; i < parts; ++i)
      if (!wild(mine.receive[i]))
        if (Channel* c = my_channel(id, mine.receive[i].peer, mine.receive[i].tag))
          add(c->posted, -1);
    for (int64_t i = 0; i < n; ++i)
      if (Channel* c = my_channel(id, mine.send[i].peer, mine.send[i].tag)) add(c->sent, -1);
  }
  return text;
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

MPIGRAD_EXPORT void mpigrad_set_guard(int on) { guarded = on; }

// In a forked child: its slot is the parent's.
MPIGRAD_EXPORT void mpigrad_forked() { forked = true; }

// A blocking call that Python makes itself; `slot` is -1 where the communicator is not known.
// Returns nullptr or why it is refused.
MPIGRAD_EXPORT const char* mpigrad_begin(const char* operation, int64_t slot, int64_t site) {
  static std::string text;
  auto* post = new Post(operation, slot, site, now_ns());
  text = slot < 0 ? post->misuse() : post->collective({});
  if (!text.empty()) {
    delete post;
    return text.c_str();
  }
  of_python = post;
  return nullptr;
}

MPIGRAD_EXPORT void mpigrad_end() {
  delete of_python;
  of_python = nullptr;
}

#include "mpi/messages.h"

#include <algorithm>

#include "guard/contracts.h"

namespace mpigrad {
namespace {

constexpr int kProbes = 64;

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
  Slot& mine = board.own();
  const uint64_t h = hash(id, peer, tag);
  Channel* free = nullptr;
  for (int i = 0; i < kProbes; ++i) {
    Channel& c = mine.channels[(h + i) % kChannels];
    const int64_t found = c.id.load(std::memory_order_relaxed);
    if (found == id && c.peer == peer && c.tag == tag) return &c;
    if (!free && (found == 0 || found == kFreedChannel)) free = &c;
    if (found == 0) break;
  }
  if (!free) {
    put(mine.counts_invalid, 1);
    return nullptr;
  }
  free->peer = peer;
  free->tag = tag;
  for (Cell* count : {&free->sent, &free->posted, &free->received}) put(*count, 0);
  put(free->id, id);
  return free;
}

bool is(const Part& p, int64_t peer, int64_t tag, int64_t ordinal) {
  return relaxed(p.peer) == peer && relaxed(p.tag) == tag && relaxed(p.ordinal) == ordinal;
}

// Whether a wildcard receive may take a message of this sender and tag.
bool takes(const Part& receive, int64_t sender, int64_t tag) {
  const int64_t peer = relaxed(receive.peer), its_tag = relaxed(receive.tag);
  return (peer < 0 || its_tag < 0) && (peer < 0 || peer == sender) && (its_tag < 0 || its_tag == tag);
}

const Message* find_message(const Slot& s, int64_t id, int64_t peer, int64_t tag,
                            int64_t ordinal) {
  for (const Message& m : s.message)
    if (get(m.id) == id && is(m.part, peer, tag, ordinal)) return &m;
  return nullptr;
}

bool fits(const Part& expected, const Message& m) {
  const Part sent = read_part(m.part);
  const bool known = sent.dtype && expected.dtype;
  return same_message(sent, expected, get(m.site) < 0) &&
         !(known && steps_differ(sent.loop, expected.loop));
}

// The oldest announced message from `source` to `rank` that was not received yet, or nullptr.
const Message* next_message(const Slot& sender, int64_t source, const Slot& receiver, int64_t rank,
                            int64_t id, int64_t tag) {
  const int64_t all = get(sender.messages);
  for (int64_t n = std::max<int64_t>(0, all - kMessages); n < all; ++n) {
    const Message& m = sender.message[n % kMessages];
    const int64_t its_tag = relaxed(m.part.tag);
    if (get(m.id) != id || relaxed(m.part.peer) != rank || (tag >= 0 && its_tag != tag)) continue;
    const Channel* taken = find_channel(receiver, id, source, its_tag);
    if (relaxed(m.part.ordinal) > (taken ? get(taken->received) : 0)) return &m;
  }
  return nullptr;
}

// Whether it is unknown which message a wildcard receive takes: announcements were overwritten, or
// a receive that was posted earlier takes one of them.
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

}  // namespace

// A loop usually needs the two channels that were looked up last.
Channel* my_channel(int64_t id, int64_t peer, int64_t tag) {
  static int64_t recent[2] = {};
  Channel* all = board.own().channels;
  for (const int64_t i : recent) {
    Channel& c = all[i];
    if (c.id.load(std::memory_order_relaxed) == id && c.peer == peer && c.tag == tag) return &c;
  }
  Channel* found = find_mine(id, peer, tag);
  recent[1] = recent[0];
  if (found) recent[0] = found - all;
  return found;
}

Exchange::Exchange(int64_t slot)
    : slot_(slot), id_(get(board.own().entries[slot].id)), seen_(board.own().entries[slot].size) {}

bool Exchange::possible(int64_t rank) {
  if (seen_[rank]) return seen_[rank] > 0;  // in a cycle all take place together
  const int64_t look = seen_[rank] = ++looks_;
  if (partners_possible(rank)) return true;
  // What was found since then may hold only if this rank's operation is possible.
  for (int64_t& seen : seen_)
    if (seen >= look) seen = 0;
  seen_[rank] = kImpossible;
  return false;
}

bool Exchange::partners_possible(int64_t rank) {
  const Slot* s;
  const Entry* e = member(slot_, rank, &s);
  if (!e) return true;
  const int64_t receives = get(e->open) ? 0 : std::min<int64_t>(get(s->receives), kParts);
  for (int64_t i = 0; i < receives; ++i) {
    const Part p = read_part(s->receive[i]);
    if (!(wild(p) ? any_available(rank, *s, p) : available(rank, p))) return false;
  }
  for (int64_t i = 0; i < std::min<int64_t>(get(s->sends), kParts); ++i) {
    const Part p = read_part(s->send[i]);
    if (p.awaited && !expected(rank, p)) return false;
  }
  return true;
}

bool Exchange::needed(int64_t rank, bool late) {
  const Slot& mine = board.own();
  std::fill(seen_.begin(), seen_.end(), 1);  // the others hand over all that they have announced
  bool found = false;
  for (int64_t other = 0; other < static_cast<int64_t>(seen_.size()) && !found; ++other)
    found = other != rank && (waits_for(other, rank, mine.send, mine.sends, false) ||
                              waits_for(other, rank, mine.receive, mine.receives, true));
  const bool lacking = lacks(mine.receive, mine.receives, rank, true, late) ||
                       lacks(mine.send, mine.sends, rank, false, late);
  return found && lacking;
}

bool Exchange::lacks(const Part* parts, const Cell& count, int64_t rank, bool receives,
                     bool late) const {
  for (int64_t i = 0; i < std::min<int64_t>(get(count), kParts); ++i) {
    const Part p = read_part(parts[i]);
    const Slot* s;
    if (wild(p) || !p.awaited || !member(slot_, p.peer, &s)) continue;
    if (!late && (get(s->state) != kInOperation || get(s->kind) == kUnknown)) continue;
    const Part* theirs = receives ? s->send : s->receive;
    const bool here = in_messages(*s);
    bool found = false;
    for (int64_t k = 0; here && k < std::min<int64_t>(get(receives ? s->sends : s->receives), kParts); ++k)
      found |= is(theirs[k], rank, p.tag, p.ordinal) || takes(theirs[k], rank, p.tag);
    const Channel* c = find_channel(*s, id_, rank, p.tag);
    if (!found && (!c || get(receives ? c->sent : c->posted) < p.ordinal)) return true;
  }
  return false;
}

bool Exchange::waits_for(int64_t other, int64_t rank, const Part* parts, const Cell& count,
                         bool receives) {
  const Slot* s;
  if (!member(slot_, other, &s) || !in_messages(*s)) return false;
  const Part* theirs = receives ? s->send : s->receive;
  const int64_t n = std::min<int64_t>(get(receives ? s->sends : s->receives), kParts);
  for (int64_t i = 0; i < std::min<int64_t>(get(count), kParts); ++i) {
    const Part p = read_part(parts[i]);
    if (p.peer != other || p.tag < 0) continue;
    for (int64_t k = 0; k < n; ++k)
      if (is(theirs[k], rank, p.tag, p.ordinal) || takes(theirs[k], rank, p.tag))
        return get(s->polling) == kInMpi || partners_possible(other);
  }
  return false;
}

bool Exchange::in_messages(const Slot& s) const {
  return get(s.state) == kInOperation && get(s.kind) == kMessagesOnly &&
         get(s.entries[get(s.entry)].id) == id_;
}

bool Exchange::waits(const Slot& s, const Part* parts, const Cell& count, int64_t peer,
                     int64_t tag, int64_t ordinal) const {
  if (!in_messages(s) || get(s.polling) != kWaits) return false;
  for (int64_t i = 0; i < std::min<int64_t>(get(count), kParts); ++i)
    if (is(parts[i], peer, tag, ordinal)) return true;
  return false;
}

bool Exchange::available(int64_t rank, const Part& p) {
  const Slot* sender;
  if (!member(slot_, p.peer, &sender) || get(sender->counts_invalid)) return true;
  const Channel* c = find_channel(*sender, id_, rank, p.tag);
  const auto announced = [&] { return c && get(c->sent) >= p.ordinal; };
  if (!announced()) return false;
  const Message* m = find_message(*sender, id_, rank, p.tag, p.ordinal);
  if (m && !fits(p, *m)) return false;
  // A refused sender withdraws its message before it stops waiting, so look again.
  return waits(*sender, sender->send, sender->sends, rank, p.tag, p.ordinal) ? possible(p.peer)
                                                                            : announced();
}

bool Exchange::any_available(int64_t rank, const Slot& receiver, const Part& p) {
  for (int64_t source = 0; source < static_cast<int64_t>(seen_.size()); ++source) {
    const Slot* sender;
    if (p.peer >= 0 && p.peer != source) continue;
    if (!member(slot_, source, &sender) || get(sender->counts_invalid)) return true;
    const auto next = [&] { return next_message(*sender, source, receiver, rank, id_, p.tag); };
    const Message* m = next();
    if (m && fits(p, *m)) {
      const bool waiting =
          waits(*sender, sender->send, sender->sends, rank, m->part.tag, m->part.ordinal);
      // A refused sender withdraws its message before it stops waiting.
      if (waiting ? possible(source) : next() == m) return true;
    }
    if (uncertain(*sender, source, receiver, rank, id_, p.tag)) return true;
  }
  return false;
}

bool Exchange::expected(int64_t rank, const Part& p) {
  const Slot* receiver;
  const Entry* e = member(slot_, p.peer, &receiver);
  if (!e || get(receiver->counts_invalid) || get(e->open)) return true;
  const Channel* c = find_channel(*receiver, id_, rank, p.tag);
  const auto announced = [&] { return c && get(c->posted) >= p.ordinal; };
  if (announced() &&
      (waits(*receiver, receiver->receive, receiver->receives, rank, p.tag, p.ordinal)
           ? possible(p.peer)
           : announced()))
    return true;
  if (!in_messages(*receiver)) return false;
  for (int64_t i = 0; i < std::min<int64_t>(get(receiver->receives), kParts); ++i)
    if (wild(receiver->receive[i])) return true;
  return false;
}

}  // namespace mpigrad

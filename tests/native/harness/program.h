// Random programs of operations, and an oracle that says where each rank stops.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <string>
#include <vector>

enum Kind { kSend, kRecv, kSendrecv, kIsend, kIrecv, kWaitSend, kWaitRecv, kAllreduce, kBcast, kBarrier };
inline const char* const kKindNames[] = {"send",     "recv",     "sendrecv",  "isend", "irecv",
                                         "waitsend", "waitrecv", "allreduce", "bcast", "barrier"};

// Messages go to `to` and come from `from`. `request` joins a wait and its post.
struct Op {
  Kind kind;
  int comm = 0, to = -1, from = -1, tag = 0, n = 0, root = 0, request = -1;
  std::string text() const {
    return std::string(kKindNames[kind]) + "(comm " + std::to_string(comm) + ", to " +
           std::to_string(to) + ", from " + std::to_string(from) + ", tag " + std::to_string(tag) +
           ", n " + std::to_string(n) + ", root " + std::to_string(root) + ")";
  }
};

using Code = std::vector<Op>;  // of one rank

struct Program {
  int size;
  std::vector<Code> ranks;
  std::vector<std::vector<int>> members;  // of each communicator
  std::string text() const {
    std::string all;
    for (int r = 0; r < size; ++r)
      for (size_t i = 0; i < ranks[r].size(); ++i)
        all += "  " + std::to_string(r) + "." + std::to_string(i) + " " + ranks[r][i].text() + "\n";
    return all;
  }
};

// More bytes than this make a sender wait for its receiver (kEager of guard.cc).
constexpr int kEagerBytes = 1 << 16;

// A program without deadlocks in MPI: its events happen in one order on all ranks.
inline Program random_program(std::mt19937& random, int size) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  Program p{size, std::vector<Code>(size), {{}, {0, 1}}};
  for (int r = 0; r < size; ++r) p.members[0].push_back(r);
  int requests = 0;
  std::vector<std::pair<int, Op>> waits;  // rank, and the wait that is still to come
  const int events = 4 + below(12);
  for (int i = 0; i < events; ++i) {
    const int a = below(size), b = (a + 1 + below(size - 1)) % size, tag = below(2);
    const int lengths[] = {1, 7, 1000, kEagerBytes / 4 + 1, kEagerBytes};
    const int n = lengths[below(5)];
    const int comm = a < 2 && b < 2 ? below(2) : 0;
    switch (below(8)) {
      case 0:
      case 1:
        p.ranks[a].push_back({kSend, comm, b, -1, tag, n});
        p.ranks[b].push_back({kRecv, comm, -1, a, tag, n});
        break;
      case 2:
        for (int r = 0; r < size; ++r)
          p.ranks[r].push_back({kSendrecv, 0, (r + 1) % size, (r + size - 1) % size, tag, n});
        break;
      case 3:  // two ranks, in one operation each or in two
        p.ranks[a].push_back({kSendrecv, comm, b, b, tag, n});
        if (below(2)) {
          p.ranks[b].push_back({kSendrecv, comm, a, a, tag, n});
        } else {
          p.ranks[b].push_back({kRecv, comm, -1, a, tag, n});
          p.ranks[b].push_back({kSend, comm, a, -1, tag, n});
        }
        break;
      case 4:
        p.ranks[b].push_back({kIrecv, comm, -1, a, tag, n, 0, requests});
        p.ranks[a].push_back({kSend, comm, b, -1, tag, n});
        waits.push_back({b, {kWaitRecv, comm, -1, a, tag, n, 0, requests++}});
        break;
      case 5:
        p.ranks[a].push_back({kIsend, comm, b, -1, tag, n, 0, requests});
        p.ranks[b].push_back({kRecv, comm, -1, a, tag, n});
        waits.push_back({a, {kWaitSend, comm, b, -1, tag, n, 0, requests++}});
        break;
      default: {
        const int group = below(2), root = below(2);
        const Kind kinds[] = {kAllreduce, kAllreduce, kBcast, kBarrier};
        const Kind kind = kinds[below(4)];
        for (const int r : p.members[group])
          p.ranks[r].push_back({kind, group, -1, -1, 0, kind == kBarrier ? 0 : n,
                                kind == kBcast ? root : 0});
      }
    }
    while (!waits.empty() && below(2)) {
      p.ranks[waits.front().first].push_back(waits.front().second);
      waits.erase(waits.begin());
    }
  }
  for (const auto& [r, op] : waits) p.ranks[r].push_back(op);
  return p;
}

// Sums of one or two pieces on two communicators, which use the same shared memory. Some programs have
// many longer ones, so that the two members of the second communicator try MPI and shared memory.
inline Program random_sums(std::mt19937& random, int size) {
  Program p{size, std::vector<Code>(size), {{}, {0, 1}}};
  for (int r = 0; r < size; ++r) p.members[0].push_back(r);
  const bool trials = random() % 4 == 0;
  for (int i = 0; i < (trials ? 80 : 40); ++i) {
    const int longest = trials ? 40000 : 20000;
    const int comm = static_cast<int>(random() % 2), lengths[] = {1, trials ? longest : 7, 1000, longest};
    const int n = lengths[random() % 4];
    for (const int r : p.members[comm]) p.ranks[r].push_back({kAllreduce, comm, -1, -1, 0, n});
  }
  return p;
}

// A mistake, as users make them: an operation too few, two in another order, another tag, shape or root.
inline void mutate(std::mt19937& random, Program& p) {
  Code& code = p.ranks[random() % p.size];
  if (code.size() < 2) return;
  const size_t i = random() % (code.size() - 1);
  Op& op = code[i];
  const bool joined = op.request >= 0;
  switch (random() % 4) {
    case 0:
      if (!joined) code.erase(code.begin() + i);
      break;
    case 1:
      if (!joined || op.request != code[i + 1].request) std::swap(code[i], code[i + 1]);
      break;
    case 2:
      if (op.kind == kAllreduce || op.kind == kBarrier) break;
      if (op.kind == kBcast)
        op.root = 1 - op.root;
      else if (!joined)
        op.tag = 1 - op.tag;
      break;
    default:
      if (op.n && !joined) op.n += 3;
  }
}

// For each rank the number of operations that it completes. Messages are counted by channel, and the
// k-th message meets the k-th receive. Operations take place together: the greatest set of ranks in
// which each one finds what it needs, either done before or in the current operation of the set. If there
// is none, a sendrecv that waits for a rank in another operation hands its message over.
class Oracle {
 public:
  explicit Oracle(const Program& p) : p_(p), at_(p.size, 0), handed_(p.size) {
    for (;;) {
      std::vector<bool> going(p.size);
      for (int r = 0; r < p.size; ++r) going[r] = at_[r] < p.ranks[r].size();
      for (bool changed = true; changed;) {
        changed = false;
        for (int r = 0; r < p.size; ++r)
          if (going[r] && !ready(r, going)) {
            going[r] = false;
            changed = true;
          }
      }
      if (std::none_of(going.begin(), going.end(), [](bool g) { return g; }) && !hand_over())
        return;
      for (int r = 0; r < p.size; ++r)
        if (going[r]) advance(r);
    }
  }
  size_t stop(int r) const { return at_[r]; }
  // A long message meets a posted receive of another length. Whether its sender goes on depends on what
  // it sees first: the receive, or the wait for it, which is refused.
  bool ambiguous() const { return ambiguous_; }

 private:
  using Channel = std::array<int, 4>;  // communicator, from, to, tag

  // The number of the message of rank r's operation, which is counted already if it was posted.
  int number(std::map<Channel, int>& counts, const Channel& c, const Op& op) {
    return op.kind == kWaitSend || op.kind == kWaitRecv ? numbers_[op.request] : counts[c] + 1;
  }

  bool ready(int r, const std::vector<bool>& going) {
    const Op& op = p_.ranks[r][at_[r]];
    if (op.kind >= kAllreduce) {
      for (const int m : p_.members[op.comm]) {
        if (!going[m]) return false;
        const Op& other = p_.ranks[m][at_[m]];
        if (other.kind != op.kind || other.comm != op.comm || other.n != op.n ||
            other.root != op.root)
          return false;
      }
      return true;
    }
    if (op.kind == kIsend || op.kind == kIrecv) return true;
    if (op.from >= 0) {
      const Channel c{op.comm, op.from, r, op.tag};
      const int k = number(received_, c, op);
      if (sent_[c] < k) {
        const Op* other = current(op.from, going);
        if (!other || sent_[c] + 1 != k || !sends(*other, op.comm, r, op.tag) || other->n != op.n)
          return false;
      } else if (lengths_[c][k] != op.n) {
        return false;
      }
    }
    if (op.to >= 0 && op.n * 4 > kEagerBytes) {
      const Channel c{op.comm, r, op.to, op.tag};
      const int k = number(sent_, c, op);
      if (received_[c] < k) {
        const Op* other = current(op.to, going);
        if (!other || received_[c] + 1 != k || !receives(*other, op.comm, r, op.tag)) return false;
        ambiguous_ |= other->n != op.n;
      } else {
        ambiguous_ |= taken_[c][k] != op.n;
      }
    }
    return true;
  }
  const Op* current(int r, const std::vector<bool>& going) const {
    return going[r] || handed_[r] ? &p_.ranks[r][at_[r]] : nullptr;
  }
  // One rank hands its message over, if that lets another one go on.
  bool hand_over() {
    std::vector<bool> all(p_.size);
    for (int r = 0; r < p_.size; ++r) all[r] = at_[r] < p_.ranks[r].size();
    for (int r = 0; r < p_.size; ++r) {
      if (!all[r] || handed_[r]) continue;
      const Op& op = p_.ranks[r][at_[r]];
      if (op.kind != kSendrecv || !needed(r, op, all)) continue;
      if (lacks(r, op, all)) return handed_[r] = true;
      // Its partner has ended, or sends another length. It was handed over if that came later.
      ambiguous_ = true;
    }
    return false;
  }
  bool needed(int r, const Op& op, const std::vector<bool>& all) {
    for (int q = 0; q < p_.size; ++q) {
      if (q == r || !all[q]) continue;
      const Op& other = p_.ranks[q][at_[q]];
      if (other.kind >= kAllreduce || other.comm != op.comm) continue;
      if (((op.to == q && receives(other, op.comm, r, op.tag)) || (op.from == q && sends(other, op.comm, r, op.tag))) &&
          ready(q, all))
        return true;
    }
    return false;
  }
  bool lacks(int r, const Op& op, const std::vector<bool>& all) {
    const Channel in{op.comm, op.from, r, op.tag}, out{op.comm, r, op.to, op.tag};
    return (op.from >= 0 && all[op.from] && sent_[in] <= received_[in] &&
            !sends(p_.ranks[op.from][at_[op.from]], op.comm, r, op.tag)) ||
           (op.to >= 0 && all[op.to] && op.n * 4 > kEagerBytes && received_[out] <= sent_[out] &&
            !receives(p_.ranks[op.to][at_[op.to]], op.comm, r, op.tag));
  }
  static bool sends(const Op& op, int comm, int to, int tag) {
    return op.comm == comm && (op.kind == kSend || op.kind == kSendrecv || op.kind == kIsend) && op.to == to &&
           op.tag == tag;
  }
  static bool receives(const Op& op, int comm, int from, int tag) {
    return op.comm == comm && (op.kind == kRecv || op.kind == kSendrecv || op.kind == kIrecv) && op.from == from &&
           op.tag == tag;
  }
  void advance(int r) {
    const Op& op = p_.ranks[r][at_[r]++];
    handed_[r] = false;
    if (op.kind >= kAllreduce || op.kind == kWaitSend || op.kind == kWaitRecv) return;
    if (op.to >= 0) {
      const Channel c{op.comm, r, op.to, op.tag};
      lengths_[c][++sent_[c]] = op.n;
      if (op.request >= 0) numbers_[op.request] = sent_[c];
    }
    if (op.from >= 0) {
      const Channel c{op.comm, op.from, r, op.tag};
      taken_[c][++received_[c]] = op.n;
      if (op.request >= 0) numbers_[op.request] = received_[c];
    }
  }

  const Program& p_;
  std::vector<size_t> at_;
  std::vector<bool> handed_;  // the message of the current operation
  std::map<Channel, int> sent_, received_;  // announced and posted
  std::map<Channel, std::map<int, int>> lengths_, taken_;  // of messages and of receives
  std::map<int, int> numbers_;  // of posted messages
  bool ambiguous_ = false;
};

// The board: shared memory in which each rank of this host writes its current operation. A rank
// writes its own slot. The watchdog of any rank, and guarded operations, read the slots of the
// others. Python reads the board too (guard/board.py), so it holds only 64-bit integers and texts
// of fixed length.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "visibility.h"

namespace mpigrad {

constexpr int kText = 160, kName = 32, kDims = 8, kTerms = 4, kCounts = 32;
constexpr int kParts = 32, kSites = 4096, kEntries = 1 << 14, kChannels = 1024, kMessages = 128;
constexpr int kTrees = 1 << 18, kLoopNumbers = 4;
constexpr int kContracts = 8, kRanks = 512, kFaults = 4, kFaultIds = 8, kFaultText = 16384;

using Cell = std::atomic<int64_t>;

enum State : int64_t { kAbsent, kInPython, kInOperation, kEnded, kFailed };
// The kind of an operation decides what the wait graph can prove about it.
// Where the messages of an operation are while it waits on the board.
enum Polling : int64_t { kInMpi, kWaits, kHandedOver };
enum OperationKind : int64_t { kUnknown, kCollective, kMessagesOnly };

// The while loops that an operation is in, if their conditions read numbers (loops.h). `where` says
// which loops they are (0: none), and `numbers` what their conditions read in this step.
struct LoopState {
  int64_t where, numbers;
};

// Whether two ranks are in the same loops, and in steps with different numbers.
inline bool steps_differ(const LoopState& a, const LoopState& b) {
  return a.where && a.where == b.where && a.numbers != b.numbers;
}

// The arguments of one collective operation that must be the same on all members.
struct Contract {
  int64_t sequence, site, dtype, rank, free_dims, terms, counts_kind, counts, tree;
  LoopState loop;
  int64_t dims[kDims];
  int64_t values[kTerms];
  int64_t sends[kCounts], receives[kCounts];
  char names[kTerms][8];
  char operation[kName];
  const char* name;  // the operation's name, in the memory of this process
};

// A contract as it is sent to ranks that do not see the board.
struct Report {
  int64_t world_rank;
  Contract contract;
  char site[kText];
};

// One communicator of a rank. Its collectives are numbered. A member can be one operation ahead of
// another, never two. A few more contracts are kept, to report a mismatch that was noticed late.
struct Entry {
  Cell id;  // the same on all members, and different from every other communicator of the job
  int64_t rank, size;
  Cell sequence;
  Cell open;  // posted wildcard receives: until they end, it is unknown what other receives take
  Contract contracts[kContracts];
};

// A message that an operation sends or receives. The peer is a rank of the communicator. The
// message is `awaited` if the operation cannot end before its partner arrives. It is `counted`
// unless this operation completes a message that an earlier operation posted.
struct Part {
  int64_t peer, tag, ordinal, awaited, counted, dtype, rank, tree;
  LoopState loop;  // of exchanges that both ranks make at the same step
  int64_t dims[kDims];
};

// Other ranks read parts while the next operation may write them. Each number is read and written as a
// whole, so that a reader finds a number of the old part or of the new one.
inline int64_t relaxed(const int64_t& x) { return __atomic_load_n(&x, __ATOMIC_RELAXED); }
inline void put_relaxed(int64_t& x, int64_t value) { __atomic_store_n(&x, value, __ATOMIC_RELAXED); }
inline void copy_part(Part& to, const Part& from) {
  const auto in = reinterpret_cast<const int64_t*>(&from);
  const auto out = reinterpret_cast<int64_t*>(&to);
  const size_t used = offsetof(Part, dims) / sizeof(int64_t) + std::min<int64_t>(relaxed(from.rank), kDims);
  for (size_t i = 0; i < used; ++i) put_relaxed(out[i], relaxed(in[i]));
}
inline Part read_part(const Part& part) {
  Part copy{};
  copy_part(copy, part);
  return copy;
}

// The id of a channel whose communicator was freed. Channels behind it in the table are still found.
constexpr int64_t kFreedChannel = -1;

// Message counts for one peer and tag: sent (handed to MPI), posted (a receive waits), received.
struct Channel {
  Cell id;  // of the communicator (0: never used)
  int64_t peer, tag;
  Cell sent, posted, received;
};

// The announcement of a message, which its receiver compares.
struct Message {
  Cell id;
  int64_t site;
  char operation[kName];
  Part part;
};

struct Slot {
  Cell world_rank, pid, namespace_;
  Cell entries_used, sites_used;
  Cell state;
  Cell since_ns;   // written by the watchdog when it sees a new `serial`
  Cell serial;     // incremented when an operation begins and when it ends
  Cell kind;
  Cell polling;    // unless kInMpi, the operation waits on the board, so it can be refused
  Cell entry;      // index of its communicator's entry, or -1
  Cell site;
  Cell counts_invalid;  // some messages were not counted, so nothing is proved about messages
  // An operation has failed, so unreceived messages are expected.
  Cell failure_seen;
  Cell sends, receives;
  Cell messages;   // announced so far
  Cell faults;     // number of verdicts that this rank has read
  char operation[kName];
  char handling[kText];  // the exception that this rank handles while it waits
  Cell line_ns;          // when the watchdog last saw this rank outside operations
  char line[kText];      // the line of the program that it executed then
  Cell line_waits;       // it waited for a thread, a lock or an event of its own
  Cell watched_ns;       // when the watchdog last looked at the board
  Cell loop_site, loop_reads;  // the innermost of the while loops, and how many numbers are below
  int64_t loop_numbers[kLoopNumbers];  // the bits of float64 numbers
  Part send[kParts], receive[kParts];
  Entry entries[kEntries];
  Channel channels[kChannels];
  Message message[kMessages];
  char sites[kSites][kText];
  // The texts of pytrees that are sent as one array, and for each site 1 + the offset of its text.
  Cell trees_used;
  int64_t tree_of[kSites];
  char trees[kTrees];
};
// A constructor would write zeros to every page of a slot as it is loaded: 100 MB of each rank.
static_assert(std::is_trivially_default_constructible_v<Slot>);

// A verdict: the same error for every rank that it concerns. `serials` holds for each rank 0 (not
// concerned), the serial number of the refused operation, or -1 (refuse the next operation).
struct Fault {
  int64_t serials[kRanks];
  int64_t ids[kFaultIds];  // of the communicators
  char text[kFaultText];
};

struct Header {
  Cell ranks;
  Cell cause;   // who reports the end of the job: 1 + slot, or -1 - index of another host
  Cell faults;  // number of verdicts so far: verdict n is in fault[n % kFaults]
  Fault fault[kFaults];
};

struct Shared;  // shared_sum.h

struct Board {
  Header* header;
  Slot* slots;
  int index;  // of this rank
  Shared* shared;  // one per rank, as the slots (nullptr while the board is private)
  Slot& own() const { return slots[index]; }
};

MPIGRAD_SHARED extern Board board;  // private to this process until it is shared

// The entry of another member of a communicator, or nullptr if it is on another host.
const Entry* member(int64_t slot, int64_t rank, const Slot** owner);
bool all_on_board(int64_t slot);
extern bool several_hosts;  // there is a communicator whose members are not all on this board
// Clears this rank's entry of a communicator that all members have freed, before the next one has it.
void forget_members(int64_t slot);
// The index of a member on the board, and the slot of the communicator there.
void place(int64_t slot, int64_t rank, int64_t& host_index, int64_t& its_slot);

// An id for the arrays of a pytree that are sent as one, by which ranks compare pytrees. It comes
// from a text that is registered with the source line. A text that starts with '?' matches any
// pytree. 0: no pytree.
constexpr int64_t kUnknownTree = -1;
int64_t tree_at(int64_t site);
inline bool same_tree(int64_t a, int64_t b) { return a == b || a < 0 || b < 0; }
// For two ranks, one of which may receive as a pytree what the other sends as one array.
inline bool tree_fits(int64_t a, int64_t b) { return a == b || a <= 0 || b <= 0; }

// The beginning of a text, without half a character of UTF-8.
template <size_t N>
void copy_text(char (&to)[N], const char* from) {
  size_t i = 0;
  for (; i + 1 < N && from[i]; ++i) to[i] = from[i];
  while (i && (from[i] & 0xC0) == 0x80) --i;  // in the middle of a character
  to[i] = 0;
}

inline int64_t get(const Cell& x) { return x.load(std::memory_order_acquire); }
inline void put(Cell& x, int64_t value) { x.store(value, std::memory_order_release); }
inline void add(Cell& x, int64_t n) { put(x, x.load(std::memory_order_relaxed) + n); }

}  // namespace mpigrad

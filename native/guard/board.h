// What every rank of this host is doing, in memory that all of them see: each rank writes its own
// slot, and any rank's watchdog, or a guarded operation, reads the others'. Read from Python
// (guard/board.py): 64-bit integers and texts of fixed length only.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

namespace mpigrad {

constexpr int kText = 160, kName = 32, kDims = 8, kTerms = 4, kCounts = 32;
constexpr int kParts = 32, kSites = 4096, kEntries = 1024, kChannels = 1024, kMessages = 128;
constexpr int kTrees = 1 << 18;
constexpr int kContracts = 8, kRanks = 512, kFaults = 4, kFaultIds = 8, kFaultText = 16384;

using Cell = std::atomic<int64_t>;

enum State : int64_t { kAbsent, kInPython, kInOperation, kEnded, kFailed };
// What is known of an operation decides what can be proved about it.
enum OperationKind : int64_t { kUnknown, kCollective, kMessagesOnly };

// What the members of a communicator agree on in one collective operation.
struct Contract {
  int64_t sequence, site, dtype, rank, free_dims, terms, counts_kind, counts, tree;
  int64_t dims[kDims];
  int64_t values[kTerms];
  int64_t sends[kCounts], receives[kCounts];
  char names[kTerms][8];
  char operation[kName];
  const char* name;  // the same, in this process's memory
};

// A contract as it is told to ranks that do not see the board.
struct Told {
  int64_t world_rank;
  Contract contract;
  char site[kText];
};

// One communicator of a rank: its collectives are numbered. A member can be one operation ahead of
// another, never two; a few more contracts are kept, for the disagreement that was not noticed then.
struct Entry {
  Cell id;  // the same number on all members, and on no other communicator of the job
  int64_t rank, size;
  Cell sequence;
  Cell open;  // receives from anyone that are posted: meanwhile nobody knows what other ones take
  Contract contracts[kContracts];
};

// A message that an operation sends or receives; the peer is a rank of the communicator. It is
// `awaited` where the operation does not end before its partner has come, and `counted` where it is
// not the end of one that has begun before.
struct Part {
  int64_t peer, tag, ordinal, awaited, counted, dtype, rank, tree;
  int64_t dims[kDims];
};

// Messages by peer and tag, counted: sent when handed over, posted when waited for, received.
struct Channel {
  Cell id;  // of the communicator; 0: free
  int64_t peer, tag;
  Cell sent, posted, received;
};

// An announced message, for its receiver to compare.
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
  Cell since_ns;   // written by the watchdog, when it sees another `serial`
  Cell serial;     // changes when an operation begins and when it ends
  Cell kind;
  Cell polling;    // the operation waits for others on the board, not in MPI: it can be refused
  Cell entry;      // number of its communicator's entry, or -1
  Cell site;
  Cell untracked;  // messages were left uncounted: nothing is proved about messages any more
  // Set where an operation has failed: messages may well be left over.
  Cell unaccounted;
  Cell sends, receives;
  Cell messages;   // announced so far
  Cell faults;     // verdicts that this rank has seen
  char operation[kName];
  // Where the watchdog finds this rank in a call that no handler announces.
  Cell elsewhere_since_ns, elsewhere_site;
  char elsewhere[kName];
  char handling[kText];  // the exception that this rank handles while it waits
  Cell line_ns;          // when the watchdog has seen this rank outside of operations
  char line[kText];      // and at which line of the program
  Cell line_waits;       // for a thread, a lock or an event of its own
  Part send[kParts], receive[kParts];
  Entry entries[kEntries];
  Channel channels[kChannels];
  Message message[kMessages];
  char sites[kSites][kText];
  // Pytrees that travel as one, one text after the other, and where that of a site begins, plus 1.
  Cell trees_used;
  int64_t tree_of[kSites];
  char trees[kTrees];
};

// A verdict: the same error for every rank it concerns. `serials` are 0 where it does not, the
// serial number of the operation that is refused, or -1: the next one.
struct Fault {
  int64_t serials[kRanks];
  int64_t ids[kFaultIds];  // of the communicators
  char text[kFaultText];
};

struct Header {
  Cell ranks;
  Cell cause;   // of the job's end: 1 + the slot that says it, -1 - the number of another host
  Cell faults;  // verdicts so far; number n is in fault[n % kFaults]
  Fault fault[kFaults];
};

struct Shared;  // shared_sum.h

struct Board {
  Header* header;
  Slot* slots;
  int index;  // of this rank
  Shared* shared;  // by rank, as the slots are; nullptr while the board is private
  Slot& mine() const { return slots[index]; }
};

extern Board board;  // private to this process until it is shared

// Another member's entry of a communicator, or nullptr where it is on another host.
const Entry* member(int64_t slot, int64_t rank, const Slot** owner);
bool all_on_board(int64_t slot);
// Where such a member is on the board, and the slot of the communicator there.
void place(int64_t slot, int64_t rank, int64_t& host_index, int64_t& its_slot);

// The arrays of a pytree that travel as one, as a number by which ranks compare them: told with the
// source line, by a text that starts with '?' where nobody can say. 0: no pytree.
constexpr int64_t kUnknownTree = -1;
int64_t tree_at(int64_t site);
inline bool same_tree(int64_t a, int64_t b) { return a == b || a < 0 || b < 0; }
// Between two ranks, where one may take a pytree that the other sends as one array.
inline bool tree_fits(int64_t a, int64_t b) { return a == b || a <= 0 || b <= 0; }

template <size_t N>
void copy_text(char (&to)[N], const char* from) {
  size_t i = 0;
  for (; i + 1 < N && from[i]; ++i) to[i] = from[i];
  to[i] = 0;
}

inline int64_t get(const Cell& x) { return x.load(std::memory_order_acquire); }
inline void put(Cell& x, int64_t value) { x.store(value, std::memory_order_release); }
inline void add(Cell& x, int64_t n) { put(x, x.load(std::memory_order_relaxed) + n); }

}  // namespace mpigrad

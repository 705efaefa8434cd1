#include "guard/board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <vector>

#include "guard/contracts.h"
#include "mpi/mpi_runtime.h"
#include "mpi/shared_sum.h"

namespace mpigrad {

namespace {

Header own_header;
Slot own_slot;  // pages that are never touched use no memory

struct Member {
  int host_index, slot;  // -1: on another host
};
static_assert(kEntries == kCommunicators);
struct Members : std::vector<Member> {
  bool on_board = false;  // all of them
};
std::array<Members, kEntries> members;
std::array<Cell, kSites> trees;

int64_t shared_offset(int ranks) {
  const int64_t end = sizeof(Header) + ranks * sizeof(Slot), page = alignof(Shared);
  return (end + page - 1) / page * page;
}

int64_t number(const char* tree) {
  if (*tree == '?') return kUnknownTree;
  uint64_t hash = UINT64_C(0xCBF29CE484222325);  // FNV-1a
  for (const char* c = tree; *c; ++c)
    hash = (hash ^ static_cast<unsigned char>(*c)) * UINT64_C(0x100000001B3);
  return *tree ? static_cast<int64_t>(hash >> 2) + 1 : 0;
}

}  // namespace

Board board{&own_header, &own_slot, 0, nullptr};
bool several_hosts = false;

const Entry* member(int64_t slot, int64_t rank, const Slot** owner) {
  const auto& list = members[slot];
  if (rank < 0 || rank >= static_cast<int64_t>(list.size()) || list[rank].host_index < 0)
    return nullptr;
  *owner = &board.slots[list[rank].host_index];
  return &(*owner)->entries[list[rank].slot];
}

int64_t tree_at(int64_t site) {
  const int64_t index = site < 0 ? -site : site;
  return index < kSites ? get(trees[index]) : kUnknownTree;
}

bool all_on_board(int64_t slot) { return members[slot].on_board; }

void forget_members(int64_t slot) {
  Entry& e = board.own().entries[slot];
  const int64_t id = get(e.id);
  put(e.id, 0);
  put(e.sequence, 0);
  put(e.open, 0);
  for (Contract& c : e.contracts) c.sequence = 0;
  for (Channel& c : board.own().channels)
    if (id && get(c.id) == id) put(c.id, kFreedChannel);
  members[slot] = {};
  forget_sums(slot);
}

void place(int64_t slot, int64_t rank, int64_t& host_index, int64_t& its_slot) {
  host_index = members[slot][rank].host_index;
  its_slot = members[slot][rank].slot;
}

}  // namespace mpigrad

using namespace mpigrad;

MPIGRAD_EXPORT int64_t mpigrad_header_bytes() { return sizeof(Header); }
// The size of a board of this many ranks: header, slots, and the memory for shared sums.
MPIGRAD_EXPORT int64_t mpigrad_board_bytes(int ranks) {
  return shared_offset(ranks) + ranks * static_cast<int64_t>(sizeof(Shared));
}
MPIGRAD_EXPORT int64_t mpigrad_slot_bytes() { return sizeof(Slot); }

// Maps a file until the process ends. Returns nullptr on failure.
MPIGRAD_EXPORT void* mpigrad_map_board(const char* path, int64_t bytes) {
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return memory == MAP_FAILED ? nullptr : memory;
}

// Use this zeroed memory, shared by all ranks of this host, as the board. With a null pointer the
// board stays private.
MPIGRAD_EXPORT void* mpigrad_use_board(void* memory, int index, int ranks, int64_t world_rank,
                                        int64_t pid_namespace) {
  if (memory)
    board = {static_cast<Header*>(memory),
             reinterpret_cast<Slot*>(static_cast<Header*>(memory) + 1), index,
             reinterpret_cast<Shared*>(static_cast<char*>(memory) + shared_offset(ranks))};
  Slot& mine = board.own();
  const int64_t sites = get(own_slot.sites_used);
  if (memory) {
    std::memcpy(mine.sites, own_slot.sites, sites * kText);
    std::memcpy(mine.tree_of, own_slot.tree_of, sizeof mine.tree_of);
    std::memcpy(mine.trees, own_slot.trees, get(own_slot.trees_used));
    put(mine.trees_used, get(own_slot.trees_used));
  }
  put(mine.sites_used, sites);
  put(mine.world_rank, world_rank);
  put(mine.pid, getpid());
  put(mine.namespace_, pid_namespace);
  put(mine.entry, -1);
  put(mine.state, kInPython);
  put(board.header->ranks, ranks);
  return board.header;
}

// Register a source line, and the arrays of the pytree that is sent there as one ("": no pytree).
MPIGRAD_EXPORT void mpigrad_set_call_site(int64_t site, const char* text, const char* tree) {
  set_call_site(site, text);
  if (site >= kSites) return;
  Slot& mine = board.own();
  copy_text(mine.sites[site], text);
  const int64_t used = get(mine.trees_used), room = std::strlen(tree) + 1;
  if (*tree && *tree != '?' && used + room <= kTrees) {
    std::memcpy(mine.trees + used, tree, room);
    mine.tree_of[site] = used + 1;
    put(mine.trees_used, used + room);
  }
  put(trees[site], number(tree));
  put(mine.sites_used, site + 1);
}

MPIGRAD_EXPORT void* mpigrad_slots() { return board.slots; }

// Show the next verdict, which Python has written in its place, to the ranks of this host. A rank that
// sees the new count sees the whole verdict.
MPIGRAD_EXPORT void mpigrad_publish_verdict(void* count) { add(*static_cast<Cell*>(count), 1); }

// Register the members of the communicator of `slot`: for each its host index (-1: another host)
// and its slot there.
MPIGRAD_EXPORT void mpigrad_set_members(int64_t slot, int64_t id, int rank, int size,
                                        const int* host_indices, const int* slots) {
  auto& list = members[slot];
  list.clear();
  list.on_board = size > 0;
  for (int i = 0; i < size; ++i) {
    list.push_back({host_indices[i], slots[i]});
    list.on_board &= host_indices[i] >= 0;
  }
  several_hosts |= !list.on_board;
  forget_agreements(slot);
  Entry& e = board.own().entries[slot];
  e.rank = rank;
  e.size = size;
  put(e.sequence, 0);
  for (Contract& c : e.contracts) c.name = nullptr;  // those of an earlier communicator
  put(e.id, id);
  put(board.own().entries_used, std::max(get(board.own().entries_used), slot + 1));
}


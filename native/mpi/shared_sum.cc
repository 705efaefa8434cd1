#include "mpi/shared_sum.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "guard/guard.h"
#include "guard/watch.h"
#include "mpi/mpi_runtime.h"
#include "mpi/sum_trials.h"
#include "processor.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mpigrad {
namespace {

// Every member reads the pieces of all members, so MPI is faster for longer arrays or more ranks.
// Sums up to kCertain, times the other members, were faster on all processors that were measured.
// Two members try longer ones (docs/decisions/0076-tried-not-tuned.md).
constexpr int kMembers = 4, kLengths = 5;
constexpr size_t kCertain = 1 << 17, kLongest = kCertain << kLengths;

// The trials of sums whose lengths have the same power of 2.
struct Length {
  SumTrials trials;
  int64_t took = -1;  // nanoseconds of this rank's last trial. -1: there was none
};

struct Group {
  int size = 0;  // 0: MPI computes the sums
  int rank = 0;
  Shared* shared[kMembers];
  Progress* progress[kMembers];
  Length lengths[kLengths];
};
std::array<Group, kSummed> groups;
int64_t last = 0;  // the last communicator, whose members may still read this rank's pieces

bool crowded = false;  // the ranks of this host are more than the processors that they may use

// Waits until all members have reached `n`. MPI makes progress meanwhile, because a member that is
// late may wait for a message of this rank.
void await(int64_t slot, Cell Progress::* which, int64_t n) {
  const Group& g = groups[slot];
  for (int i = 0; i < g.size; ++i)
    for (int64_t turn = 1; get(g.progress[i]->*which) < n; ++turn) {
      if (turn % (crowded ? 8 : 128) == 0) {
        move_messages(slot);
        if (turn > 20000 || crowded) sched_yield();
      }
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
}

// (For generic x86-64, GCC compiles __builtin_prefetch(p, 1) to a prefetch for reading. Old
// processors ignore this instruction.)
inline void prefetch_for_writing(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p, 1);
#endif
}

// Another core has read the lines that are written here. Requesting them early saves a third.
void copy(char* to, const char* from, size_t bytes) {
  constexpr size_t line = 64, ahead = 1024;
  run_on_this_processor([=] {
    size_t i = 0;
    for (; i + line <= bytes; i += line) {
      prefetch_for_writing(to + i + ahead);
      std::memcpy(to + i, from + i, line);
    }
    std::memcpy(to + i, from + i, bytes - i);
  });
}

// The sum may overwrite a summand.
template <class T>
void add(const T* a, const T* b, T* sum, size_t n) {
  run_on_this_processor([=] {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) sum[i] = a[i] + b[i];
  });
}

template <class T>
void add_all(int size, const char* const* summands, char* to, size_t bytes) {
  const auto x = [&](int i) { return reinterpret_cast<const T*>(summands[i]); };
  T* const sum = reinterpret_cast<T*>(to);
  add(x(0), x(1), sum, bytes / sizeof(T));
  for (int i = 2; i < size; ++i) add(sum, x(i), sum, bytes / sizeof(T));
}

Length& length_of(int64_t slot, size_t bytes) {
  int i = 0;
  while (bytes > kCertain << (i + 1)) ++i;
  return groups[slot].lengths[i];
}

// The number of this rank's next piece on a communicator.
int64_t next_piece(int64_t slot) {
  const Group& g = groups[slot];
  return g.progress[g.rank]->written.load(std::memory_order_relaxed) + 1;
}

// Before this rank writes pieces of another communicator.
void change_to(int64_t slot) {
  if (slot == last) return;
  await(last, &Progress::read, get(board.shared[board.index].progress[last].written));
  last = slot;
}

// Shows piece n, which this rank has written, and waits for those of all members. Returns "", or an
// error text. After it, the caller reads the pieces and stores Progress::read.
std::string show(int64_t slot, int64_t n, const Summand& x) {
  const Group& g = groups[slot];
  Progress& mine = *g.progress[g.rank];
  put(mine.arrays[n % 2], x.kind());
  put(mine.sequences[n % 2], get(board.own().entries[slot].sequence));
  put(mine.written, n);
  await(slot, &Progress::written, n);
  // All members compare all arrays, so they all find the same mismatch.
  for (int i = 0; i < g.size; ++i)
    if (get(g.progress[i]->arrays[n % 2]) != get(g.progress[0]->arrays[n % 2])) {
      int64_t sequences[kMembers];
      for (int k = 0; k < g.size; ++k) sequences[k] = get(g.progress[k]->sequences[n % 2]);
      put(mine.read, n);
      return disagreement(slot, sequences);
    }
  return "";
}

}  // namespace

void forget_sums(int64_t slot) {
  if (slot >= kSummed) return;
  groups[slot] = {};
  if (!board.shared) return;
  Progress& mine = board.shared[board.index].progress[slot];
  for (Cell* c : {&mine.written, &mine.arrays[0], &mine.arrays[1], &mine.sequences[0],
                  &mine.sequences[1], &mine.took[0], &mine.took[1], &mine.read})
    put(*c, 0);
}

Way way_of_sum(int64_t slot, size_t bytes) {
  const int size = slot < kSummed ? groups[slot].size : 0;
  if (!size || !bytes) return Way::kMPI;
  if (bytes * (size - 1) <= kCertain) return Way::kShared;
  // If processors are shared, the time depends on which rank the system runs.
  if (size > 2 || crowded || bytes > kLongest) return Way::kMPI;
  const SumTrials& trials = length_of(slot, bytes).trials;
  return !trials.over() ? Way::kTrial : trials.shares() ? Way::kShared : Way::kMPI;
}

SumTrial::SumTrial(int64_t slot, const Summand& x) : slot_(slot), bytes_(x.bytes) {
  const Group& g = groups[slot];
  Progress& mine = *g.progress[g.rank];
  Length& length = length_of(slot, x.bytes);
  change_to(slot);
  const int64_t n = next_piece(slot);  // without numbers
  put(mine.took[n % 2], length.took);
  error = show(slot, n, x);
  if (!error.empty()) return;
  int64_t slowest = -1;
  for (int i = 0; i < g.size; ++i) slowest = std::max(slowest, get(g.progress[i]->took[n % 2]));
  put(mine.read, n);
  if (slowest >= 0) length.trials.add(slowest);
  if (length.trials.shares()) way = Way::kShared;
  begin_ns_ = now_ns();
}

SumTrial::~SumTrial() {
  if (error.empty()) length_of(slot_, bytes_).took = now_ns() - begin_ns_;
}

std::string shared_sum(int64_t slot, const Summand& x) {
  const Group& g = groups[slot];
  change_to(slot);
  for (size_t at = 0; at < x.bytes; at += kPiece) {
    const size_t bytes = std::min(kPiece, x.bytes - at);
    const int64_t n = next_piece(slot);
    // A rank that has written piece n - 1 has read piece n - 2, which was in this place.
    const auto piece = [&](int i) { return g.shared[i]->piece[n % 2].data; };
    const char* const own = static_cast<const char*>(x.data) + at;
    copy(piece(g.rank), own, bytes);
    if (std::string error = show(slot, n, x); !error.empty()) return error;
    const char* summands[kMembers];
    for (int i = 0; i < g.size; ++i) summands[i] = piece(i);
    if (g.size == 2) summands[g.rank] = own;  // overwritten by the sum after it was read
    char* const sum = static_cast<char*>(x.sum) + at;
    x.wide ? add_all<double>(g.size, summands, sum, bytes)
           : add_all<float>(g.size, summands, sum, bytes);
    put(g.progress[g.rank]->read, n);
  }
  return "";
}

}  // namespace mpigrad

using namespace mpigrad;

MPIGRAD_EXPORT void mpigrad_set_crowded(bool is_crowded) { crowded = is_crowded; }

// 0: MPI, 1: shared memory, 2: both ways are being tried.
MPIGRAD_EXPORT int mpigrad_way_of_sum(int64_t slot, int64_t bytes) {
  return static_cast<int>(way_of_sum(slot_of(slot), static_cast<size_t>(bytes)));
}

// Call after mpigrad_set_members: use shared memory for sums of this communicator, if `wanted` and
// possible.
MPIGRAD_EXPORT void mpigrad_share_sums(int64_t slot, int wanted) {
  slot = slot_of(slot);
  if (slot >= kSummed) return;
  const Communicator& comm = communicator(slot);
  Group& g = groups[slot] = {};
  if (!wanted || comm.size < 2 || comm.size > kMembers || !board.shared || !all_on_board(slot))
    return;
  for (int i = 0; i < comm.size; ++i) {
    int64_t host_index, its_slot;
    place(slot, i, host_index, its_slot);
    if (its_slot >= kSummed) return;  // all members see it
    g.shared[i] = &board.shared[host_index];
    g.progress[i] = &g.shared[i]->progress[its_slot];
  }
  g.rank = comm.rank;
  g.size = comm.size;
}

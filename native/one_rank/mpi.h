// What the files of the MPI of one rank share: MPICH's numbers, the lock, and what they call of
// each other. It is for programs that no launcher has started on machines where MPI is not installed
// or cannot start: a library with MPICH's binary interface (libmpi.so.12), which mpi4py loads.
// Messages go from the rank to itself, collectives copy. Communication with other processes, one-sided
// communication, topologies and files are not there: these functions return
// MPI_ERR_UNSUPPORTED_OPERATION (unsupported.def).
//
// One lock guards everything, as threads may call at the same time (MPI_THREAD_MULTIPLE). Functions
// whose data do not change in a run do without.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <string>

#include "one_rank/types.h"

#define MPI_FUNCTION extern "C" __attribute__((visibility("default")))

struct MPI_Status {
  int count_low, count_high_and_cancelled, source, tag, error;
};

namespace one_rank {

enum Error {
  kSuccess = 0, kType = 3, kTag = 4, kComm = 5, kRank = 6, kRoot = 7, kGroup = 8, kOp = 9,
  kDims = 11, kArg = 12, kTruncate = 14, kOther = 15, kInStatus = 17, kRequest = 19, kInfo = 28,
  kUnsupported = 44, kKeyval = 48,
};

constexpr int kProcNull = -1, kAnySource = -2, kAnyTag = -1, kUndefined = -32766;
// MPICH's handles. Those of objects that are made begin with bits that say so.
constexpr int made(unsigned kind) { return static_cast<int>(kind << 24 | 0x80000000); }
constexpr int kNoComm = 0x04000000, kWorld = 0x44000000, kSelf = 0x44000001, kMadeComm = made(4);
constexpr int kNoGroup = 0x08000000, kEmpty = 0x48000000, kAlone = made(8);  // two groups
constexpr int kNoRequest = 0x2c000000, kMadeRequest = made(0x2c);
constexpr int kNoMessage = 0x2c000000, kNullMessage = 0x6c000000;
constexpr int kNoType = 0x0c000000, kNoOp = 0x18000000, kMadeOp = made(0x18);
constexpr int kNoHandler = 0x14000000, kReturn = 0x54000001, kMadeHandler = made(0x14);
constexpr int kNoInfo = 0x1c000000, kMadeInfo = made(0x1c);
constexpr int kNoKeyval = 0x24000000, kMadeKeyval = made(0x24) + 0x400000;
constexpr int kTagLimit = 0x64400001, kHost = 0x64400003, kIo = 0x64400005;
constexpr int kGlobalTime = 0x64400007, kUniverse = 0x64400009, kLastCode = 0x6440000b;
constexpr int kApplication = 0x6440000d;
constexpr int kMultiple = 3;
inline void* const kInPlace = reinterpret_cast<void*>(-1);

inline MPI_Status* const kIgnored = reinterpret_cast<MPI_Status*>(1);

inline std::recursive_mutex lock;
using Lock = std::unique_lock<std::recursive_mutex>;

inline int text_to(const std::string& text, char* out, int* length) {
  std::memcpy(out, text.c_str(), text.size() + 1);
  *length = static_cast<int>(text.size());
  return kSuccess;
}

// communicators.cc. `check_comm` also checks a root, if there is one.
bool has_comm(int comm);
int check_comm(int comm, int root = 0);
void delete_attributes(int comm);

// messages.cc. `done_request` makes the request of an operation that has ended with this code.
int done_request(int code, int* request);
void forget_messages(int comm);

}  // namespace one_rank

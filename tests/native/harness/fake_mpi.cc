// An MPI whose ranks are threads of one process. A message of more than kEager bytes waits for its
// receiver. Calls may be delayed, and the k-th call of a rank may fail.
#include "fake_mpi.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace {

constexpr int kEager = 1 << 16, kTruncated = 15, kInjected = 16, kAborted = 17, kMismatch = 18;
enum { kSource = 0, kTag = 1, kBytes = 2 };  // the integers of a status

struct Transfer {  // a message, or a receive
  int comm, from, to, tag;
  char* data;  // of a receive
  int bytes;
  bool receives, matched = false;
  int code = 0;
  int sent = 0;  // bytes that a receive got
  std::vector<char> copy;
};
using Shared = std::shared_ptr<Transfer>;

struct Member {
  const void* in;
  void* out;
  int bytes, root;
};
struct Round {  // a collective
  const char* name = "";
  int arrived = 0, leaving = 0, code = 0;
  int bytes = 0;
  int64_t number = 0;
  Member members[kRanks];
};

std::mutex lock;
std::condition_variable changed;
std::list<Shared> waiting;  // messages and receives without a partner, oldest first
std::map<int, Shared> requests;
std::map<int, Round> rounds;
std::vector<std::vector<int>> communicators;  // the ranks of each
bool aborted = false;

thread_local int me = 0;
thread_local uint64_t random_state = 1;
thread_local int calls = 0, failing_call = 0;

int size_of(int type) { return type % 16; }
int rank_in(int comm) {
  const auto& all = communicators[comm];
  return static_cast<int>(std::find(all.begin(), all.end(), me) - all.begin());
}

// Begins a call: it may be late, or fail.
bool fails() {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  const auto n = random_state >> 40;
  if (n % 16 == 0) usleep(n % 300);
  if (n % 16 == 1) sched_yield();
  return ++calls == failing_call;
}

bool fit(const Transfer& message, const Transfer& receive) {
  return message.comm == receive.comm && message.to == receive.to &&
         (receive.from < 0 || receive.from == message.from) &&
         (receive.tag < 0 || receive.tag == message.tag);
}

void deliver(Transfer& message, Transfer& receive) {
  const int bytes = std::min(message.bytes, receive.bytes);
  if (bytes) std::memcpy(receive.data, message.copy.data(), bytes);
  receive.code = message.bytes > receive.bytes ? kTruncated : 0;
  receive.sent = bytes;
  receive.from = message.from;
  receive.tag = message.tag;
  message.matched = receive.matched = true;
}

Shared start(Transfer&& transfer) {
  auto mine = std::make_shared<Transfer>(std::move(transfer));
  for (auto other = waiting.begin(); other != waiting.end(); ++other) {
    if ((*other)->receives == mine->receives) continue;
    Transfer& message = mine->receives ? **other : *mine;
    Transfer& receive = mine->receives ? *mine : **other;
    if (!fit(message, receive)) continue;
    deliver(message, receive);
    waiting.erase(other);
    changed.notify_all();
    return mine;
  }
  waiting.push_back(mine);
  return mine;
}

bool complete(const Transfer& t) { return t.matched || (!t.receives && t.bytes <= kEager); }

Shared send(const void* data, int count, int type, int to, int tag, int comm) {
  const int bytes = count * size_of(type);
  const char* first = static_cast<const char*>(data);
  return start({comm, rank_in(comm), to, tag, nullptr, bytes, false, false, 0, 0,
                std::vector<char>(first, first + bytes)});
}

Shared receive(void* data, int count, int type, int from, int tag, int comm) {
  return start({comm, from, rank_in(comm), tag, static_cast<char*>(data), count * size_of(type),
                true, false, 0, 0, {}});
}

int finish(std::unique_lock<std::mutex>& held, const Shared& t, int* status) {
  changed.wait(held, [&] { return aborted || complete(*t); });
  if (!complete(*t)) {
    waiting.remove(t);  // its memory will be freed
    return kAborted;
  }
  if (t->receives && status) {
    status[kSource] = t->from;
    status[kTag] = t->tag;
    status[kBytes] = t->sent;
  }
  return t->code;
}

int keep(const Shared& t, int* request) {
  static int last = 0;
  requests[*request = ++last] = t;
  return 0;
}

// All members of the communicator meet. The last one computes all results.
template <class Compute>
int meet(const char* name, int comm, const Member& own, const Compute& compute) {
  if (fails()) return kInjected;
  std::unique_lock<std::mutex> held(lock);
  Round& round = rounds[comm];
  const int size = static_cast<int>(communicators[comm].size());
  changed.wait(held, [&] { return aborted || round.leaving == 0; });
  if (aborted) return kAborted;
  if (round.arrived == 0) {
    round.name = name;
    round.bytes = own.bytes;
    round.code = 0;
  }
  if (std::strcmp(round.name, name) || round.bytes != own.bytes) round.code = kMismatch;
  round.members[rank_in(comm)] = own;
  const int64_t number = round.number;
  if (++round.arrived == size) {
    if (!round.code) compute(round.members, size);
    round.leaving = size;
    round.arrived = 0;
    ++round.number;
    changed.notify_all();
  }
  changed.wait(held, [&] { return aborted || round.number != number; });
  if (round.number == number) return kAborted;
  if (--round.leaving == 0) changed.notify_all();
  return round.code;
}

template <class T>
void sum(Member* members, int size) {
  const int n = members[0].bytes / static_cast<int>(sizeof(T));
  std::vector<T> total(n);
  for (int r = 0; r < size; ++r) {
    const void* in = members[r].in ? members[r].in : members[r].out;  // MPI_IN_PLACE
    for (int i = 0; i < n; ++i) total[i] += static_cast<const T*>(in)[i];
  }
  for (int r = 0; r < size; ++r) std::memcpy(members[r].out, total.data(), members[0].bytes);
}

}  // namespace

namespace fake_mpi {

void reset(const std::vector<std::vector<int>>& all) {
  const std::lock_guard<std::mutex> held(lock);
  waiting.clear();
  requests.clear();
  rounds.clear();
  communicators = all;
  aborted = false;
}

void be_rank(int rank, uint64_t seed, int failing) {
  me = rank;
  random_state = seed;
  calls = 0;
  failing_call = failing;
}

void abort() {
  const std::lock_guard<std::mutex> held(lock);
  aborted = true;
  changed.notify_all();
}

}  // namespace fake_mpi

extern "C" {

int MPI_Send(const void* data, int count, int type, int to, int tag, int comm) {
  if (fails()) return kInjected;
  std::unique_lock<std::mutex> held(lock);
  return finish(held, send(data, count, type, to, tag, comm), nullptr);
}
int MPI_Recv(void* data, int count, int type, int from, int tag, int comm, int* status) {
  if (fails()) return kInjected;
  std::unique_lock<std::mutex> held(lock);
  return finish(held, receive(data, count, type, from, tag, comm), status);
}
int MPI_Sendrecv(const void* out, int out_count, int out_type, int to, int out_tag, void* in,
                 int in_count, int in_type, int from, int in_tag, int comm, int* status) {
  if (fails()) return kInjected;
  std::unique_lock<std::mutex> held(lock);
  const Shared taken = receive(in, in_count, in_type, from, in_tag, comm);
  const int sent = finish(held, send(out, out_count, out_type, to, out_tag, comm), nullptr);
  const int code = finish(held, taken, status);
  return sent ? sent : code;
}
int MPI_Isend(const void* data, int count, int type, int to, int tag, int comm, int* request) {
  if (fails()) return kInjected;
  const std::lock_guard<std::mutex> held(lock);
  return keep(send(data, count, type, to, tag, comm), request);
}
int MPI_Irecv(void* data, int count, int type, int from, int tag, int comm, int* request) {
  if (fails()) return kInjected;
  const std::lock_guard<std::mutex> held(lock);
  return keep(receive(data, count, type, from, tag, comm), request);
}
int MPI_Wait(int* request, int* status) {
  const bool failed = fails();
  std::unique_lock<std::mutex> held(lock);
  const Shared t = requests[*request];
  const int code = finish(held, t, status);
  requests.erase(*request);
  *request = 0;
  return failed ? kInjected : code;
}
int MPI_Test(int* request, int* flag, int*) {
  const std::lock_guard<std::mutex> held(lock);
  *flag = complete(*requests[*request]);
  if (*flag) requests.erase(*request);
  return 0;
}
int MPI_Cancel(int* request) {
  const std::lock_guard<std::mutex> held(lock);
  const Shared t = requests[*request];
  if (t->matched) return 0;
  waiting.remove(t);
  t->matched = true;
  return 0;
}
// Takes no lock, which would order what the library itself must order.
int MPI_Iprobe(int, int, int, int* flag, int*) {
  *flag = 0;
  return 0;
}
int MPI_Get_elements_x(const int* status, int type, int64_t* count) {
  *count = status[kBytes] / size_of(type);
  return 0;
}
int MPI_Error_string(int code, char* text, int* length) {
  const char* said = code == kTruncated  ? "MPI_ERR_TRUNCATE: message truncated"
                     : code == kInjected ? "an injected error"
                     : code == kMismatch ? "the collectives do not match"
                                         : "the job was aborted";
  std::strcpy(text, said);
  *length = static_cast<int>(std::strlen(said));
  return 0;
}
int MPI_Barrier(int comm) {
  return meet("barrier", comm, {nullptr, nullptr, 0, 0}, [](Member*, int) {});
}
int MPI_Bcast(void* data, int count, int type, int root, int comm) {
  return meet("bcast", comm, {data, data, count * size_of(type), root}, [](Member* all, int size) {
    for (int r = 0; r < size; ++r)
      if (r != all[r].root) std::memcpy(all[r].out, all[all[r].root].in, all[r].bytes);
  });
}
int MPI_Allreduce(const void* in, void* out, int count, int type, int, int comm) {
  const auto compute = size_of(type) == 8 ? sum<double> : sum<float>;
  return meet("allreduce", comm, {in, out, count * size_of(type), 0}, compute);
}
int MPI_Allgather(const void* in, int count, int type, void* out, int, int, int comm) {
  return meet("allgather", comm, {in, out, count * size_of(type), 0}, [](Member* all, int size) {
    for (int r = 0; r < size; ++r)
      for (int q = 0; q < size; ++q)
        std::memcpy(static_cast<char*>(all[r].out) + q * all[q].bytes, all[q].in, all[q].bytes);
  });
}

// Functions that the harness does not call.
#define UNUSED(name) \
  int MPI_##name() { return kMismatch; }
UNUSED(Allgatherv) UNUSED(Alltoall) UNUSED(Alltoallv) UNUSED(Exscan) UNUSED(Gather) UNUSED(Gatherv)
UNUSED(Op_create) UNUSED(Reduce) UNUSED(Reduce_scatter) UNUSED(Reduce_scatter_block) UNUSED(Scan)
UNUSED(Scatter) UNUSED(Scatterv) UNUSED(Type_commit) UNUSED(Type_create_hindexed) UNUSED(Type_free)

}  // extern "C"

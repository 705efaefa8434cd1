// Native code without Python: ranks are threads, each with a copy of the library of its own, on one
// board and on the MPI of fake_mpi.cc. Random programs run, and an oracle says what must happen.
//
//     harness LIBRARY FIRST_SEED COUNT
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <thread>

#include "fake_mpi.h"
#include "frame.h"
#include "guard/board.h"
#include "guard/guard.h"
#include "mpi/shared_sum.h"
#include "program.h"

namespace {

using namespace mpigrad;
using Handler = XLA_FFI_Error* (*)(XLA_FFI_CallFrame*);

constexpr int kSize = 3, kSlots[] = {2, 4};  // ranks, and the slots of the communicators
constexpr double kLimit = 30;                // seconds in which something must happen
constexpr char kVerdict[] = "mpigrad: a verdict of the harness";

struct Library {
  void* handle;
  template <class F>
  F* get(const char* name) const {
    void* found = dlsym(handle, name);
    if (!found) std::fprintf(stderr, "harness: %s\n", dlerror()), std::exit(2);
    return reinterpret_cast<F*>(found);
  }
};

std::vector<Library> libraries;
char* memory;  // the board
int64_t bytes;
Header& header() { return *reinterpret_cast<Header*>(memory); }
Slot& slot(int r) { return reinterpret_cast<Slot*>(memory + sizeof(Header))[r]; }

void explain(const Report*, int, char* text, int room) {
  std::snprintf(text, room, "mpigrad: the ranks do not agree");
}

// One copy of the library for each rank: their global variables are those of separate processes.
void load(const std::string& path, const std::string& fake) {
  for (int r = 0; r < kSize; ++r) {
    const std::string copy = path + "." + std::to_string(r);
    std::ofstream(copy, std::ios::binary) << std::ifstream(path, std::ios::binary).rdbuf();
    void* handle = dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) std::fprintf(stderr, "harness: %s\n", dlerror()), std::exit(2);
    libraries.push_back({handle});
    const Library& l = libraries.back();
    const char* error = l.get<const char*(const char*, int, int64_t, int)>("mpigrad_start")(
        fake.c_str(), 4, 0, -2);
    if (error) std::fprintf(stderr, "harness: %s\n", error), std::exit(2);
    l.get<void(int, int)>("mpigrad_set_status_layout")(0, 4);
    for (int i = 0; i < 4; ++i) l.get<void(int, int64_t)>("mpigrad_set_word_type")(i, 1 << i);
    l.get<void(int, int64_t)>("mpigrad_set_arithmetic_type")(XLA_FFI_DataType_F32, 4);
    l.get<void(int64_t, int64_t)>("mpigrad_set_reduction")(0, 0);
    for (int site = 0; site < 64; ++site)
      l.get<void(int64_t, const char*, const char*)>("mpigrad_set_call_site")(
          site, ("line " + std::to_string(site)).c_str(), "");
  }
  bytes = libraries[0].get<int64_t(int)>("mpigrad_board_bytes")(kSize);
  memory = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                   MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  for (int r = 0; r < kSize; ++r)
    libraries[r].get<void*(void*, int, int, int64_t, int64_t)>("mpigrad_use_board")(memory, r,
                                                                                   kSize, r, 0);
}

// A new job on the same board.
void set_up(const Program& p, bool guarded, bool shared_sums) {
  std::vector<std::vector<int>> all(8);
  for (size_t c = 0; c < p.members.size(); ++c) all[c] = p.members[c];
  fake_mpi::reset(all);
  put(header().faults, 0);
  Shared* shared = reinterpret_cast<Shared*>(memory + bytes - kSize * sizeof(Shared));
  for (int r = 0; r < kSize; ++r) {
    Slot& s = slot(r);
    for (auto& c : s.channels) put(c.id, 0), put(c.sent, 0), put(c.posted, 0), put(c.received, 0);
    for (auto& m : s.message) put(m.id, 0);
    for (Cell* c : {&s.messages, &s.counts_invalid, &s.faults, &s.sends, &s.receives, &s.kind,
                    &s.polling, &s.failure_seen})
      put(*c, 0);
    for (const int at : kSlots) {
      std::memset(static_cast<void*>(s.entries[at].contracts), 0, sizeof s.entries[at].contracts);
      put(shared[r].progress[at].written, 0);
      put(shared[r].progress[at].read, 0);
    }
  }
  static int64_t id = 100;
  id += 2;
  for (size_t c = 0; c < p.members.size(); ++c) {
    const auto& list = p.members[c];
    const int size = static_cast<int>(list.size());
    for (int i = 0; i < size; ++i) {
      const Library& l = libraries[list[i]];
      const std::vector<int> slots(size, kSlots[c]);
      l.get<void(int64_t, int64_t, int64_t, int, int)>("mpigrad_set_communicator")(
          kSlots[c], static_cast<int64_t>(c), static_cast<int64_t>(c), i, size);
      l.get<void(int64_t, int64_t, int, int, const int*, const int*)>("mpigrad_set_members")(
          kSlots[c], id + static_cast<int64_t>(c), i, size, list.data(), slots.data());
      l.get<void(int64_t, int)>("mpigrad_share_sums")(kSlots[c], shared_sums);
      l.get<void(int, void (*)(const Report*, int, char*, int))>("mpigrad_set_guard")(guarded,
                                                                                    explain);
    }
  }
}

// What a rank writes while it runs a program.
struct Run {
  std::atomic<size_t> at{0};
  std::atomic<bool> ended{false};
  std::string error, wrong;  // of the operation that failed, and a wrong result
};

float value(int from, int to, int tag, int number) { return 1000.f * from + 100.f * to + 10.f * tag + number; }

void run_rank(const Program& p, int me, Run& run, uint64_t seed, int failing_call) {
  fake_mpi::be_rank(me, seed + me, failing_call);
  std::map<std::array<int, 3>, int> sent, received;
  std::map<int, std::pair<int, int>> requests;  // token and number
  std::map<int, int> sums;                      // of each communicator
  const Library& l = libraries[me];
  for (const Op& op : p.ranks[me]) {
    std::vector<float> x(op.n), y(op.n, -1);
    int token = 0, number = 0;
    Frame frame;
    frame.attribute("comm", kSlots[op.comm]);
    frame.attribute("site", static_cast<int64_t>(run.at % 60 + 1));
    const auto in = [&] { frame.operand(XLA_FFI_DataType_F32, x.data(), {op.n}); };
    const auto out = [&] { frame.result(XLA_FFI_DataType_F32, y.data(), {op.n}); };
    const char* handler = "";
    if (op.to >= 0 && op.kind != kWaitSend) {
      const float v = value(me, op.to, op.tag, ++sent[{op.to, op.tag}]);
      for (int i = 0; i < op.n; ++i) x[i] = v + static_cast<float>(i % 7) / 8;
    }
    if (op.from >= 0) number = op.kind == kWaitRecv ? requests[op.request].second
                                                    : ++received[{op.from, op.tag}];
    if (op.kind == kWaitSend || op.kind == kWaitRecv) {
      token = requests[op.request].first;
      frame.operand(XLA_FFI_DataType_S32, &token, {});
    }
    switch (op.kind) {
      case kSend:
      case kIsend:
        handler = op.kind == kSend ? "mpigrad_send" : "mpigrad_isend";
        in();
        frame.attribute("dest", op.to);
        frame.attribute("tag", op.tag);
        break;
      case kRecv:
        handler = "mpigrad_recv";
        out();
        frame.attribute("source", op.from);
        frame.attribute("tag", op.tag);
        break;
      case kIrecv:
        handler = "mpigrad_irecv";
        frame.attribute("source", op.from);
        frame.attribute("tag", op.tag);
        frame.attribute("bytes", op.n * 4);
        frame.attribute("element_bytes", 4);
        break;
      case kSendrecv:
        handler = "mpigrad_sendrecv";
        in();
        out();
        frame.attribute("dest", op.to);
        frame.attribute("sendtag", op.tag);
        frame.attribute("source", op.from);
        frame.attribute("recvtag", op.tag);
        break;
      case kWaitSend:
        handler = "mpigrad_sent";
        frame.attribute("dest", op.to);
        break;
      case kWaitRecv:
        handler = "mpigrad_arrive";
        out();
        frame.attribute("source", op.from);
        break;
      case kAllreduce:
        handler = "mpigrad_allreduce";
        std::fill(x.begin(), x.end(), static_cast<float>(me + ++sums[op.comm]));
        in();
        out();
        frame.attribute("op", 0);
        frame.attribute("root", -1);
        break;
      case kBcast:
        handler = "mpigrad_bcast";
        std::fill(x.begin(), x.end(), static_cast<float>(me + 1));
        in();
        out();
        frame.attribute("root", op.root);
        break;
      case kBarrier:
        handler = "mpigrad_barrier";
    }
    if (op.kind == kIsend || op.kind == kIrecv) frame.result(XLA_FFI_DataType_S32, &token, {});
    run.error = frame.call(l.get<XLA_FFI_Error*(XLA_FFI_CallFrame*)>(handler));
    if (!run.error.empty()) break;
    if (op.kind == kIsend || op.kind == kIrecv) requests[op.request] = {token, number};
    float expected = 0;
    if (op.from >= 0) expected = value(op.from, me, op.tag, number);
    if (op.kind == kAllreduce)
      for (const int r : p.members[op.comm]) expected += static_cast<float>(r + sums[op.comm]);
    if (op.kind == kBcast) expected = static_cast<float>(p.members[op.comm][op.root] + 1);
    const bool message = op.from >= 0;
    if (op.kind != kIrecv && op.kind != kSend && op.kind != kIsend && op.kind != kWaitSend)
      for (int i = 0; i < op.n; ++i)
        if (y[i] != expected + (message ? static_cast<float>(i % 7) / 8 : 0.f) && run.wrong.empty())
          run.wrong = "element " + std::to_string(i) + " of " + op.text();
    ++run.at;
  }
  run.ended = true;
}

// As the watchdog: refuses the operations of `stuck`, and the next operation of the other ranks.
void publish(const std::vector<int>& stuck, const std::vector<std::unique_ptr<Run>>& runs,
             const int64_t* serials) {
  const int64_t n = get(header().faults);
  Fault& fault = header().fault[n % kFaults];
  for (int r = 0; r < kSize; ++r) fault.serials[r] = runs[r]->ended ? 0 : -1;
  for (const int r : stuck) fault.serials[r] = serials[r];
  const int64_t id = get(slot(0).entries[kSlots[0]].id);
  fault.ids[0] = id;
  fault.ids[1] = id + 1;
  copy_text(fault.text, kVerdict);
  put(header().faults, n + 1);
}

enum Mode { kLate, kEarly, kUnguarded, kFailing, kTruncated, kSums, kModes };
const char* const kModeNames[] = {"late verdict", "early verdict", "unguarded", "failing call",
                                  "truncated", "sums"};

bool polls(int r) { return get(slot(r).state) == kInOperation && get(slot(r).polling); }

struct Totals {
  size_t operations = 0, refused = 0, errors = 0;  // of all ranks
} totals;

// Returns "", or what went wrong.
std::string run_program(unsigned seed) {
  std::mt19937 random(seed);
  const Mode mode = static_cast<Mode>(seed % kModes);
  Program p = mode == kSums ? random_sums(random, kSize) : random_program(random, kSize);
  if (mode == kLate || mode == kEarly)
    for (unsigned i = random() % 3; i; --i) mutate(random, p);
  int shorter = -1;  // the receiver of a message of another length
  if (mode == kTruncated)
    for (int r = 0; r < kSize && shorter < 0; ++r)
      for (Op& op : p.ranks[r])
        if (op.kind == kRecv) {
          op.n += op.n > 3 && random() % 2 ? -3 : 3;
          shorter = r;
          break;
        }
  const Oracle oracle(p);
  if (oracle.ambiguous() && mode != kTruncated) return "";
  const bool guarded = mode == kLate || mode == kEarly || (mode == kFailing && seed % 2);
  set_up(p, guarded, mode != kFailing && mode != kTruncated && (mode == kSums || seed % 4));
  std::vector<std::unique_ptr<Run>> runs;
  std::vector<std::thread> threads;
  for (int r = 0; r < kSize; ++r) runs.push_back(std::make_unique<Run>());
  const int failing = mode == kFailing ? static_cast<int>(random() % kSize) : -1;
  const int failing_call = 1 + static_cast<int>(random() % 8);
  for (int r = 0; r < kSize; ++r)
    threads.emplace_back(
        [&, r] { run_rank(p, r, *runs[r], seed, r == failing ? failing_call : 0); });

  std::vector<int> stuck;
  for (int r = 0; r < kSize; ++r)
    if (oracle.stop(r) < p.ranks[r].size()) stuck.push_back(r);
  std::string wrong;
  const auto now = [] { return std::chrono::steady_clock::now(); };
  auto moved = now();
  int64_t seen[kSize] = {};
  bool published = false, aborted = false;
  for (;;) {
    bool all = true, changed = false, waits = true;
    int64_t serials[kSize];
    std::vector<int> open;
    for (int r = 0; r < kSize; ++r) {
      serials[r] = get(slot(r).serial);
      changed |= serials[r] != seen[r];
      seen[r] = serials[r];
      if (runs[r]->ended) continue;
      all = false;
      waits &= polls(r);
      open.push_back(r);
    }
    if (all) break;
    if (changed) moved = now();
    const double quiet = std::chrono::duration<double>(now() - moved).count();
    if (!published && !stuck.empty() && (mode == kEarly || open == stuck)) {
      bool there = true;
      for (const int r : stuck)
        there &= !runs[r]->ended && runs[r]->at == oracle.stop(r) && polls(r);
      for (const int r : stuck) there &= get(slot(r).serial) == serials[r];
      if (there) {
        publish(stuck, runs, serials);
        published = true;
      }
    } else if (published && quiet > 0.3 && waits) {
      publish(open, runs, serials);
      moved = now();
    }
    bool failed = false;
    for (const auto& run : runs) failed |= run->ended && !run->error.empty();
    if (failed && !aborted && (mode == kFailing || mode == kTruncated)) {
      fake_mpi::abort();
      aborted = true;
    }
    // The fake MPI lets everybody go after an abort. Without the guard, ranks compare what is new,
    // and wait on the board without `polling`.
    if (aborted && quiet > 0.3 && (waits || !guarded)) {
      publish(open, runs, serials);
      moved = now();
    }
    if (quiet > kLimit) {
      wrong = "nothing happens any more:";
      for (int r = 0; r < kSize; ++r)
        wrong += "\n  rank " + std::to_string(r) +
                 (runs[r]->ended ? " has ended" : polls(r) ? " waits on the board" : " is in MPI") +
                 " at operation " + std::to_string(runs[r]->at) + ", expected to stop at " +
                 std::to_string(oracle.stop(r));
      std::printf("seed %u: %s, %s\n%s", seed, kModeNames[mode], wrong.c_str(), p.text().c_str());
      std::fflush(stdout);
      std::_Exit(1);
    }
    usleep(2000);
  }
  for (std::thread& t : threads) t.join();

  for (int r = 0; r < kSize; ++r) {
    const Run& run = *runs[r];
    totals.operations += run.at;
    totals.refused += run.error == kVerdict;
    totals.errors += !run.error.empty() && run.error != kVerdict;
    const std::string who = "rank " + std::to_string(r) + " ";
    const bool ends = oracle.stop(r) == p.ranks[r].size();
    if (!run.wrong.empty() && mode != kTruncated) wrong += who + "received wrong data: " + run.wrong + "\n";
    if ((mode == kUnguarded || mode == kSums) && !run.error.empty()) wrong += who + "failed: " + run.error + "\n";
    if (mode == kLate && (run.at != oracle.stop(r) || run.error.empty() != ends))
      wrong += who + "stopped at operation " + std::to_string(run.at) + ", expected " +
               std::to_string(oracle.stop(r)) + ": " + run.error + "\n";
    if (mode == kEarly && (run.at > oracle.stop(r) || (run.error.empty() && !ends)))
      wrong += who + "went on to operation " + std::to_string(run.at) + "\n";
    if (guarded && mode != kFailing && !run.error.empty() && run.error != kVerdict)
      wrong += who + "has another error: " + run.error + "\n";
    if (mode == kFailing && r == failing && !run.error.empty() &&
        run.error.find("an injected error") == std::string::npos && run.error != kVerdict)
      wrong += who + "does not report the error of MPI: " + run.error + "\n";
    if (mode == kTruncated && r == shorter &&
        run.error.find("Make the receive expect") == std::string::npos && !run.error.empty() &&
        run.error.find("aborted") == std::string::npos && run.error != kVerdict)
      wrong += who + "does not report the wrong length: " + run.error + "\n";
  }
  if (mode == kTruncated && shorter >= 0) {
    bool any = false;
    for (const auto& run : runs) any |= !run->error.empty();
    if (!any) wrong += "nobody reports a message of the wrong length\n";
  }
  return wrong.empty() ? "" : kModeNames[mode] + ("\n" + wrong) + p.text();
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) return std::fprintf(stderr, "harness LIBRARY FIRST_SEED COUNT\n"), 2;
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&fake_mpi::abort), &info);  // the library of the fake MPI
  load(arguments[1], info.dli_fname);
  const unsigned first = static_cast<unsigned>(std::atoi(arguments[2]));
  const unsigned last = first + static_cast<unsigned>(std::atoi(arguments[3]));
  int failures = 0;
  for (unsigned seed = first; seed < last; ++seed) {
    const std::string wrong = run_program(seed);
    if (wrong.empty()) continue;
    std::printf("seed %u: %s", seed, wrong.c_str());
    ++failures;
  }
  std::printf("harness: seeds %u to %u: %zu operations, %zu refused, %zu other errors, %d failures\n",
              first, last - 1, totals.operations, totals.refused, totals.errors, failures);
  return failures != 0;
}

#include "guard/trace.h"

#include <array>
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "guard/watch.h"
#include "mpi/mpi_runtime.h"

namespace mpigrad {

bool trace_on = false;

namespace {

constexpr int64_t kChunk = 1 << 14;  // events. A chunk never moves, so that readers need no lock

// Calls, bytes and nanoseconds of one operation on one line. Python reads it as six words.
struct Totals {
  const char* operation;
  int64_t site, calls, bytes, ns, longest_ns;
};

using Chunk = std::array<TraceEvent, kChunk>;
std::vector<std::unique_ptr<Chunk>> chunks;  // reserved for the limit, filled in order
std::atomic<int64_t> count{0};               // events that are complete
int64_t limit = 0, calls = 0, written = 0;
std::mutex totals_lock;
std::map<std::pair<const char*, int64_t>, Totals> totals;

bool is_rooted(const char* name) {
  for (const char* rooted : {"bcast", "reduce", "gather", "scatter", "gatherv", "scatterv"})
    if (!std::strcmp(name, rooted)) return true;
  return false;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + '"';
}

}  // namespace

void trace_event(const TraceEvent& event) {
  {
    const std::lock_guard<std::mutex> guard(totals_lock);
    Totals& t = totals[{event.operation, event.site}];
    const int64_t ns = event.end_ns - event.start_ns;
    t.operation = event.operation;
    t.site = event.site;
    t.calls += 1;
    t.bytes += event.bytes;
    t.ns += ns;
    if (ns > t.longest_ns) t.longest_ns = ns;
  }
  // XLA runs the operations of a process one at a time, so there is one writer.
  calls += 1;
  const int64_t i = count.load(std::memory_order_relaxed);
  if (i >= limit) return;
  auto& chunk = chunks[i / kChunk];
  if (!chunk) chunk = std::make_unique<Chunk>();
  (*chunk)[i % kChunk] = event;
  count.store(i + 1, std::memory_order_release);
}

}  // namespace mpigrad

using namespace mpigrad;

// Start to record: keep the first `most` events, and the totals of all events.
MPIGRAD_EXPORT void mpigrad_trace_start(int64_t most) {
  limit = most;
  chunks.resize((most + kChunk - 1) / kChunk);
  timed = true;
  trace_on = true;
}

MPIGRAD_EXPORT int64_t mpigrad_trace_calls() { return calls; }
MPIGRAD_EXPORT int64_t mpigrad_trace_count() { return count.load(std::memory_order_acquire); }

// Copy the first `n` events.
MPIGRAD_EXPORT void mpigrad_trace_events(TraceEvent* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = (*chunks[i / kChunk])[i % kChunk];
}

// Copy at most `n` totals. Returns how many there are.
MPIGRAD_EXPORT int64_t mpigrad_trace_totals(void* out, int64_t n) {
  const std::lock_guard<std::mutex> guard(totals_lock);
  int64_t i = 0;
  for (const auto& [key, value] : totals)
    if (i++ < n) static_cast<Totals*>(out)[i - 1] = value;
  return static_cast<int64_t>(totals.size());
}

MPIGRAD_EXPORT int64_t mpigrad_trace_communicator(int64_t slot) {
  return communicator(slot).handle.value;
}

// Append the events since the last call to a file, one per line. Returns 0, or -1 on failure.
MPIGRAD_EXPORT int mpigrad_trace_write(const char* path, int64_t rank, int64_t zero_ns) {
  const int64_t end = count.load(std::memory_order_acquire);
  if (written == end) return 0;
  std::FILE* file = std::fopen(path, "a");
  if (!file) return -1;
  for (; written < end; ++written) {
    const TraceEvent& e = (*chunks[written / kChunk])[written % kChunk];
    const bool adjoint = e.site < 0;
    std::string partner;
    if (e.peer >= 0)
      partner = std::string(is_rooted(e.operation) ? "\"root\":" : "\"partner\":") +
                std::to_string(e.peer) + ",";
    std::fprintf(file,
                 "{\"name\":\"%s%s\",\"cat\":\"%s\",\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,"
                 "\"pid\":%" PRId64 ",\"tid\":0,\"args\":{\"line\":%s,\"bytes\":%" PRId64
                 ",%s\"communicator\":%" PRId64 ",\"ranks\":%d}},\n",
                 e.operation, adjoint ? " (adjoint)" : "", adjoint ? "adjoint" : "forward",
                 (e.start_ns - zero_ns) * 1e-3, (e.end_ns - e.start_ns) * 1e-3, rank,
                 quoted(call_site(adjoint ? -e.site : e.site)).c_str(), e.bytes, partner.c_str(),
                 e.slot, communicator(e.slot).size);
  }
  return std::fclose(file) ? -1 : 0;
}

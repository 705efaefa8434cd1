#include "mpi/mpi_runtime.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <vector>

#include "guard/board.h"

namespace mpigrad {

Runtime runtime;

namespace {

constexpr int kTypes = 64;  // XLA's element types are numbered below this
// Tables of fixed size: a handler on another thread may read them while Python registers entries.
std::array<Communicator, kCommunicators> communicators;
std::array<std::atomic<int64_t>, kCommunicators> freed_before;
std::map<std::pair<int64_t, int64_t>, int64_t> freed_at;  // (slot, freed before) -> call site
std::array<Handle, kReductions> reductions;
std::array<Handle, kTypes> arithmetic_types;
std::array<bool, kTypes> arithmetic_known;
std::array<Handle, 4> word_types;
std::vector<std::string> call_sites;
std::mutex call_sites_lock;

}  // namespace

const Communicator& communicator(int64_t slot) { return communicators[slot_of(slot)]; }

bool is_freed(int64_t space) {
  return freed_before[slot_of(space)].load(std::memory_order_relaxed) != space >> 32;
}

std::string freed_text(int64_t space) {
  int64_t site = -1;
  {
    std::lock_guard<std::mutex> lock(call_sites_lock);
    const auto found = freed_at.find({slot_of(space), space >> 32});
    if (found != freed_at.end()) site = found->second;
  }
  return "the communicator was freed" + (site < 0 ? "" : " at " + call_site(site)) +
         ". Free it after its last operation, or make another one.";
}
Handle reduction(int64_t slot) { return reductions[slot]; }

Handle arithmetic_type(int xla_type, bool& known) {
  known = xla_type >= 0 && xla_type < kTypes && arithmetic_known[xla_type];
  return known ? arithmetic_types[xla_type] : Handle{};
}

Handle word_type(size_t bytes) {
  return word_types[bytes == 1 ? 0 : bytes == 2 ? 1 : bytes == 4 ? 2 : 3];
}

std::string call_site(int64_t site) {
  std::lock_guard<std::mutex> lock(call_sites_lock);
  const size_t index = site < 0 ? -site : site;
  const std::string text = index < call_sites.size() ? call_sites[index] : "an unknown line";
  return site < 0 ? "the adjoint of " + text : text;
}

void set_call_site(int64_t site, const char* text) {
  std::lock_guard<std::mutex> lock(call_sites_lock);
  if (call_sites.size() <= static_cast<size_t>(site)) call_sites.resize(site + 1);
  call_sites[site] = text;
}

std::string error_text(int code) {
  if (code == kStopped) return stop_text();
  char text[8192];
  int length = 0;
  if (call(runtime.mpi.Error_string, code, static_cast<char*>(text), &length)) length = 0;
  return length > 0 ? std::string(text, length) : "MPI error " + std::to_string(code);
}

}  // namespace mpigrad

using mpigrad::runtime;

// Returns nullptr, or an error text. `library` is the path of the MPI library in this process.
MPIGRAD_EXPORT const char* mpigrad_start(const char* library, int handle_bytes, int64_t in_place,
                                         int proc_null) {
  static std::string error;
  void* opened = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  if (!opened) {
    const char* reason = dlerror();
    error = reason ? reason : "the library is not loaded";
    return error.c_str();
  }
  auto& f = runtime.mpi;
  const std::pair<const char*, void**> names[] = {
#define MPIGRAD_NAME(name) {"MPI_" #name, &f.name},
      MPIGRAD_MPI_FUNCTIONS(MPIGRAD_NAME)
#undef MPIGRAD_NAME
  };
  for (const auto& [name, pointer] : names) {
    *pointer = dlsym(opened, name);
    if (!*pointer) {
      error = std::string(name) + " is not in " + library;
      return error.c_str();
    }
  }
  runtime.pointer_handles = handle_bytes == sizeof(void*);
  runtime.in_place = reinterpret_cast<void*>(in_place);
  runtime.proc_null = proc_null;
  return nullptr;
}

MPIGRAD_EXPORT void mpigrad_set_status_layout(int source_offset, int tag_offset) {
  runtime.source_offset = source_offset;
  runtime.tag_offset = tag_offset;
}

MPIGRAD_EXPORT void mpigrad_set_world_size(int size) { runtime.alone = size == 1; }

MPIGRAD_EXPORT void mpigrad_set_derivative_spaces(int n) { runtime.derivative_spaces = n; }

MPIGRAD_EXPORT void mpigrad_set_largest_count(int n) { runtime.largest_count = n; }

MPIGRAD_EXPORT int mpigrad_communicator_limit() { return mpigrad::kCommunicators; }

MPIGRAD_EXPORT void mpigrad_set_communicator(int64_t slot, int64_t handle, int64_t reversed,
                                             int rank, int size) {
  mpigrad::communicators[slot] = {{handle}, {reversed}, rank, size};
}

// Programs that use the communicator of this space are refused from now on. `site` is the call of `free`,
// and `null` is MPI_COMM_NULL.
MPIGRAD_EXPORT void mpigrad_free_communicator(int64_t space, int64_t site, int64_t null) {
  const int64_t slot = mpigrad::slot_of(space);
  {
    std::lock_guard<std::mutex> lock(mpigrad::call_sites_lock);
    mpigrad::freed_at[{slot, space >> 32}] = site;
  }
  mpigrad::forget_members(slot);
  mpigrad::freed_before[slot] = (space >> 32) + 1;
  mpigrad::communicators[slot].handle = mpigrad::communicators[slot].reversed = {null};
}

MPIGRAD_EXPORT void mpigrad_set_reduction(int64_t slot, int64_t handle) {
  mpigrad::reductions[slot] = {handle};
}

MPIGRAD_EXPORT void mpigrad_set_arithmetic_type(int xla_type, int64_t handle) {
  mpigrad::arithmetic_types[xla_type] = {handle};
  mpigrad::arithmetic_known[xla_type] = true;
}

// `index` 0, 1, 2, 3: unsigned integers of 1, 2, 4, 8 bytes.
MPIGRAD_EXPORT void mpigrad_set_word_type(int index, int64_t handle) {
  mpigrad::word_types[index] = {handle};
}

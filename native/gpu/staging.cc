// Handlers for arrays on a GPU. Each wraps a handler for CPUs, which gets copies in host memory.
//
// XLA calls a handler while it queues work on a stream. The operands are copied to the host after
// the work that is already queued, the host waits for them, the handler runs, and its results are
// copied back before the call returns. The build needs no CUDA: the functions are looked up in the
// driver at the first call.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "ffi.h"
#include "mpi/mpi_runtime.h"

namespace mpigrad {
namespace {

namespace ffi = xla::ffi;

// ---- the driver ----

using Stream = void*;
using Context = void*;
using DeviceAddress = unsigned long long;

#define MPIGRAD_DRIVER_FUNCTIONS(X)                                                  \
  X(cuStreamGetCtx, Stream, Context*)                                                \
  X(cuCtxPushCurrent_v2, Context)                                                    \
  X(cuCtxPopCurrent_v2, Context*)                                                    \
  X(cuStreamSynchronize, Stream)                                                     \
  X(cuMemcpyDtoHAsync_v2, void*, DeviceAddress, size_t, Stream)                      \
  X(cuMemcpyHtoDAsync_v2, DeviceAddress, const void*, size_t, Stream)                \
  X(cuMemHostAlloc, void**, size_t, unsigned)                                        \
  X(cuMemFreeHost, void*)                                                            \
  X(cuGetErrorString, int, const char**)

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value && std::string_view(value) == "1";
}

struct Driver {
#define MPIGRAD_DECLARE(name, ...) int (*name)(__VA_ARGS__);
  MPIGRAD_DRIVER_FUNCTIONS(MPIGRAD_DECLARE)
#undef MPIGRAD_DECLARE

  Driver() {
    const char* given = std::getenv("MPIGRAD_CUDA_LIBRARY");
    const std::string path = given && *given ? given : "libcuda.so.1";
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(std::string("no CUDA driver: ") + dlerror());
#define MPIGRAD_FIND(name, ...)                                            \
  name = reinterpret_cast<int (*)(__VA_ARGS__)>(dlsym(library, #name));    \
  if (!name) throw std::runtime_error(std::string(#name " is not in ") + path);
    MPIGRAD_DRIVER_FUNCTIONS(MPIGRAD_FIND)
#undef MPIGRAD_FIND
  }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

void check(int code, const char* function) {
  if (!code) return;
  const char* text = nullptr;
  driver().cuGetErrorString(code, &text);
  throw std::runtime_error(std::string(function) + ": " +
                           (text ? text : "error " + std::to_string(code)));
}
#define MPIGRAD_CUDA(function, ...) check(driver().function(__VA_ARGS__), #function)

// The stream that XLA queues this program's work on.
Stream stream_of(const XLA_FFI_CallFrame& frame) {
  XLA_FFI_Stream_Get_Args get{XLA_FFI_Stream_Get_Args_STRUCT_SIZE, nullptr, frame.ctx, nullptr};
  XLA_FFI_Error* error = frame.api->XLA_FFI_Stream_Get(&get);
  if (!error) return get.stream;
  XLA_FFI_Error_Destroy_Args destroy{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
  frame.api->XLA_FFI_Error_Destroy(&destroy);
  // Tests that stage CPU arrays run without a stream.
  static const bool on_cpu = is_set("MPIGRAD_STAGE");
  if (!on_cpu) throw std::runtime_error("XLA provides no stream");
  return nullptr;
}

// Makes the context of the stream current: the thread that calls a handler may lack one.
class Current {
 public:
  explicit Current(Stream stream) {
    Context context = nullptr;
    MPIGRAD_CUDA(cuStreamGetCtx, stream, &context);
    MPIGRAD_CUDA(cuCtxPushCurrent_v2, context);
  }
  ~Current() {
    Context context = nullptr;
    driver().cuCtxPopCurrent_v2(&context);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

// ---- memory of the host ----

// Pinned if the driver can, and reused between calls: pinning takes longer than copying.
class Memory {
 public:
  explicit Memory(size_t bytes) {
    {
      const std::lock_guard<std::mutex> lock(mutex());
      if (!idle().empty()) {
        block_ = idle().back();
        idle().pop_back();
      }
    }
    if (block_.bytes >= bytes) return;
    block_.release();
    block_ = Block::of((bytes + kRound - 1) / kRound * kRound);
  }
  ~Memory() {
    const std::lock_guard<std::mutex> lock(mutex());
    idle().push_back(block_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* data() const { return block_.data; }

 private:
  static constexpr size_t kRound = 1 << 20;
  struct Block {
    char* data = nullptr;
    size_t bytes = 0;
    bool pinned = false;

    static Block of(size_t bytes) {
      constexpr unsigned kForAllContexts = 1;
      void* data = nullptr;
      if (!driver().cuMemHostAlloc(&data, bytes, kForAllContexts))
        return {static_cast<char*>(data), bytes, true};
      data = std::aligned_alloc(4096, bytes);
      if (!data)
        throw std::runtime_error("no memory for copies of " + std::to_string(bytes) + " bytes");
      return {static_cast<char*>(data), bytes, false};
    }
    void release() {
      if (pinned) driver().cuMemFreeHost(data);
      else std::free(data);
      *this = Block();
    }
  };
  // Never destroyed: at the end of the process the driver may be unloaded first.
  static std::vector<Block>& idle() {
    static auto& blocks = *new std::vector<Block>;
    return blocks;
  }
  static std::mutex& mutex() {
    static auto& m = *new std::mutex;
    return m;
  }
  Block block_;
};

// ---- a call whose arrays are in host memory ----

struct Area {
  void* device;
  size_t bytes, offset;  // offset of the copy in host memory
};

class HostCall {
 public:
  // If an operand and a result are one array on the device, they are one array on the host.
  explicit HostCall(const XLA_FFI_CallFrame& outer) : frame_(outer) {
    buffers_.reserve(outer.args.size + outer.rets.size);
    add(outer.args.args, outer.args.size, args_, from_);
    add(outer.rets.rets, outer.rets.size, rets_, to_);
    frame_.args.args = args_.data();
    frame_.rets.rets = rets_.data();
  }

  XLA_FFI_Error* run(XLA_FFI_Handler* handler, Stream stream) {
    const Memory memory(bytes_);
    for (const auto& [buffer, area] : placed_) buffer->data = memory.data() + areas_[area].offset;
    for (size_t i : from_)
      MPIGRAD_CUDA(cuMemcpyDtoHAsync_v2, memory.data() + areas_[i].offset, address(areas_[i]),
                   areas_[i].bytes, stream);
    MPIGRAD_CUDA(cuStreamSynchronize, stream);
    if (XLA_FFI_Error* error = handler(&frame_)) return error;
    for (size_t i : to_)
      MPIGRAD_CUDA(cuMemcpyHtoDAsync_v2, address(areas_[i]), memory.data() + areas_[i].offset,
                   areas_[i].bytes, stream);
    if (!to_.empty()) MPIGRAD_CUDA(cuStreamSynchronize, stream);  // other calls reuse the memory
    return nullptr;
  }

 private:
  static DeviceAddress address(const Area& area) {
    return reinterpret_cast<DeviceAddress>(area.device);
  }

  // Copies descriptions of arrays. `used` gets the areas of arrays that have data.
  void add(void* const* outer, int64_t count, std::vector<void*>& inner,
           std::vector<size_t>& used) {
    for (int64_t i = 0; i < count; ++i) {
      XLA_FFI_Buffer& buffer = buffers_.emplace_back(*static_cast<XLA_FFI_Buffer*>(outer[i]));
      inner.push_back(&buffer);
      if (buffer.dtype == XLA_FFI_DataType_TOKEN) continue;
      const size_t bytes = ffi::AnyBuffer(&buffer).size_bytes();
      if (!bytes) continue;
      const size_t area = area_of(buffer.data, bytes);
      placed_.emplace_back(&buffer, area);
      if (std::find(used.begin(), used.end(), area) == used.end()) used.push_back(area);
    }
  }

  size_t area_of(void* device, size_t bytes) {
    constexpr size_t kAlign = 64;  // XLA's alignment of arrays on CPUs
    for (size_t i = 0; i < areas_.size(); ++i)
      if (areas_[i].device == device && areas_[i].bytes == bytes) return i;
    areas_.push_back({device, bytes, bytes_});
    bytes_ += (bytes + kAlign - 1) / kAlign * kAlign;
    return areas_.size() - 1;
  }

  XLA_FFI_CallFrame frame_;
  std::vector<XLA_FFI_Buffer> buffers_;
  std::vector<void*> args_, rets_;
  std::vector<Area> areas_;
  std::vector<size_t> from_, to_;  // the areas of operands, and of results
  std::vector<std::pair<XLA_FFI_Buffer*, size_t>> placed_;
  size_t bytes_ = 0;
};

// ---- the handlers ----

// How a handler itself uses its arrays, apart from MPI.
enum class Use { kReads, kNothing, kNothingInPlace };

// In these only MPI reads and writes the arrays, so a CUDA-aware MPI can use device addresses.
constexpr std::string_view kMPIAlone[] = {
    "mpigrad_allgather",  "mpigrad_allgatherv",      "mpigrad_allreduce",
    "mpigrad_alltoall",   "mpigrad_alltoallv",       "mpigrad_neighbor_alltoallv",
    "mpigrad_scatter",    "mpigrad_scatterv",        "mpigrad_reduce_scatter",
    "mpigrad_reduce_scatterv",
};
// These do nothing if their result is their operand: they only keep an order.
constexpr std::string_view kOnlyOrder[] = {"mpigrad_enter", "mpigrad_in_order"};

template <size_t n>
bool among(const std::string_view (&names)[n], std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

struct Target {
  XLA_FFI_Handler* handler = nullptr;
  std::string name;
  Use use = Use::kReads;
};

bool results_are_operands(const XLA_FFI_CallFrame& frame) {
  const auto data = [](void* buffer) { return static_cast<XLA_FFI_Buffer*>(buffer)->data; };
  for (int64_t i = 0; i < frame.rets.size; ++i) {
    const auto* result = static_cast<XLA_FFI_Buffer*>(frame.rets.rets[i]);
    if (result->dtype == XLA_FFI_DataType_TOKEN) continue;
    void** end = frame.args.args + frame.args.size;
    if (std::none_of(frame.args.args, end, [&](void* x) { return data(x) == result->data; }))
      return false;
  }
  return true;
}

XLA_FFI_Error* staged(const Target& target, XLA_FFI_CallFrame* frame) {
  const auto* extension = frame->extension_start;
  const bool asks = extension && extension->type == XLA_FFI_Extension_Metadata;
  if (asks || frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return target.handler(frame);
  if (target.use == Use::kNothingInPlace && results_are_operands(*frame))
    return target.handler(frame);
  try {
    const Stream stream = stream_of(*frame);
    const Current current(stream);
    static const bool mpi_knows_the_device = is_set("MPIGRAD_CUDA_AWARE");
    if (target.use == Use::kNothing && mpi_knows_the_device) {
      MPIGRAD_CUDA(cuStreamSynchronize, stream);
      return target.handler(frame);
    }
    return HostCall(*frame).run(target.handler, stream);
  } catch (const std::exception& fault) {
    const std::string text = "mpigrad: " + target.name + " on a GPU array: " + fault.what();
    XLA_FFI_Error_Create_Args create{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, text.c_str(),
                                     XLA_FFI_Error_Code_INTERNAL};
    return frame->api->XLA_FFI_Error_Create(&create);
  }
}

// XLA calls a handler without data of its own, so there is one function for each place in this
// table.
constexpr size_t kTargets = 128;
std::array<Target, kTargets> targets;

template <size_t i>
XLA_FFI_Error* place(XLA_FFI_CallFrame* frame) {
  return staged(targets[i], frame);
}
template <size_t... i>
constexpr std::array<XLA_FFI_Handler*, kTargets> all_places(std::index_sequence<i...>) {
  return {place<i>...};
}
constexpr auto places = all_places(std::make_index_sequence<kTargets>());

}  // namespace
}  // namespace mpigrad

// The GPU handler `name`, made from the handler for CPUs. nullptr: there are too many handlers.
MPIGRAD_EXPORT XLA_FFI_Handler* mpigrad_staged(XLA_FFI_Handler* handler, const char* name) {
  using namespace mpigrad;
  for (size_t i = 0; i < kTargets; ++i) {
    Target& target = targets[i];
    if (!target.handler)
      target = {handler, name,
                among(kMPIAlone, name)    ? Use::kNothing
                : among(kOnlyOrder, name) ? Use::kNothingInPlace
                                          : Use::kReads};
    if (target.handler == handler) return places[i];
  }
  return nullptr;
}

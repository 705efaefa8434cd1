// Handlers for arrays on a GPU. Each wraps a handler for CPUs, which gets copies of the arrays.
//
// XLA calls a handler while it queues work on a stream. The operands are copied after the work that is
// already queued, to pinned memory of the host or, for an MPI that takes device addresses, to a block of
// device memory. XLA's own memory is not given to MPI: since JAX 0.11, UCX cannot share it between
// processes. The host waits for the copies, the handler runs, and the results are copied back on the
// stream. Nobody waits for that copy. The next user of the block does, by an event.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "ffi.h"
#include "gpu/arrays.h"
#include "gpu/driver.h"
#include "mpi/handler.h"

namespace mpigrad::gpu {

thread_local const DeviceBlock* device_block = nullptr;

void DeviceBlock::copy(void* to, const void* from, size_t n) const {
  const auto address = [](const void* data) { return reinterpret_cast<Address>(data); };
  if (!n) return;
  if (has(to) && has(from)) MPIGRAD_GPU(driver, copy_on_device, address(to), address(from), n, stream);
  else if (has(to)) MPIGRAD_GPU(driver, copy_from_host, address(to), from, n, stream);
  else if (has(from)) MPIGRAD_GPU(driver, copy_to_host, to, address(from), n, stream);
  else std::memcpy(to, from, n);
  if (has(to) || has(from)) MPIGRAD_GPU(driver, synchronize, stream);
}

void DeviceBlock::clear(void* to, size_t n) const {
  if (!n) return;
  if (!has(to)) {
    std::memset(to, 0, n);
    return;
  }
  MPIGRAD_GPU(driver, fill, reinterpret_cast<Address>(to), 0, n, stream);
  MPIGRAD_GPU(driver, synchronize, stream);
}

namespace {

namespace ffi = xla::ffi;

std::string setting(const char* variable) {
  const char* value = std::getenv(variable);
  return value ? value : "";
}

// Tests run this code on CPUs. Then XLA has no stream, and does not wait for copies.
bool on_cpu() {
  static const bool staged = !setting("MPIGRAD_STAGE").empty();
  return staged;
}

// The stream that XLA queues this program's work on.
Stream stream_of(const XLA_FFI_CallFrame& frame) {
  XLA_FFI_Stream_Get_Args get{XLA_FFI_Stream_Get_Args_STRUCT_SIZE, nullptr, frame.ctx, nullptr};
  XLA_FFI_Error* error = frame.api->XLA_FFI_Stream_Get(&get);
  if (!error) return get.stream;
  XLA_FFI_Error_Destroy_Args destroy{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
  frame.api->XLA_FFI_Error_Destroy(&destroy);
  if (!on_cpu()) throw std::runtime_error("XLA provides no stream");
  return nullptr;
}

// ---- blocks of memory for copies ----

enum class Where { kHost, kDevice };

struct Block {
  char* data = nullptr;
  size_t bytes = 0;
  Where where = Where::kHost;
  bool pinned = false;
  const void* context = nullptr;
  Event event = nullptr;  // recorded after the last copy from this block
};

struct NoDeviceMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A block that is reused between calls: to pin memory takes longer than to copy it, and MPI keeps what it
// has found out about a device address.
class Memory {
 public:
  Memory(const Driver& driver, const Current& current, Where where, size_t bytes)
      : driver_(driver) {
    {
      const std::lock_guard<std::mutex> lock(mutex());
      for (size_t i = idle().size(); i-- > 0;) {
        const Block& b = idle()[i];
        if (b.where != where || b.context != current.identity()) continue;
        block_ = b;
        idle().erase(idle().begin() + static_cast<std::ptrdiff_t>(i));
        break;
      }
    }
    block_.where = where;
    block_.context = current.identity();
    if (block_.bytes < bytes) replace((bytes + kRound - 1) / kRound * kRound);
  }
  ~Memory() {
    const std::lock_guard<std::mutex> lock(mutex());
    idle().push_back(block_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* data() const { return block_.data; }
  size_t bytes() const { return block_.bytes; }

  // Work that is queued from now on begins after the last copy from this block.
  void await_last_copy(Stream stream) const {
    if (block_.event) MPIGRAD_GPU(driver_, wait_for, stream, block_.event, 0);
  }
  void note_copy(Stream stream) {
    constexpr unsigned kWithoutTiming = 2;
    if (!block_.event) MPIGRAD_GPU(driver_, create_event, &block_.event, kWithoutTiming);
    MPIGRAD_GPU(driver_, record, block_.event, stream);
  }

 private:
  static constexpr size_t kRound = 2 << 20;  // the size of a huge page

  void replace(size_t bytes) {
    if (block_.event) MPIGRAD_GPU(driver_, await, block_.event);
    if (block_.where == Where::kDevice) {
      if (block_.data) driver_.release(reinterpret_cast<Address>(block_.data));
      block_.data = nullptr;
      block_.bytes = 0;
      Address address = 0;
      if (driver_.allocate(&address, bytes))
        throw NoDeviceMemory("no memory of the device for copies of " + std::to_string(bytes) +
                             " bytes. Leave more to others than JAX's allocator, for example by "
                             "XLA_PYTHON_CLIENT_MEM_FRACTION=0.6");
      block_.data = reinterpret_cast<char*>(address);
    } else {
      // Memory that the driver itself allocates cannot be read by another process, and MPI copies it
      // once more.
      constexpr unsigned kForAllContexts = 1;
      if (block_.pinned) driver_.unpin(block_.data);
      std::free(block_.data);
      block_.data = static_cast<char*>(std::aligned_alloc(kRound, bytes));
      block_.bytes = 0;
      block_.pinned = false;
      if (!block_.data)
        throw std::runtime_error("no memory for copies of " + std::to_string(bytes) + " bytes");
      advise_huge_pages(block_.data, bytes);
      block_.pinned = !driver_.pin(block_.data, bytes, kForAllContexts);
    }
    block_.bytes = bytes;
  }

  // Never destroyed: at the end of the process the driver may be unloaded first.
  static std::vector<Block>& idle() {
    static auto& blocks = *new std::vector<Block>;
    return blocks;
  }
  static std::mutex& mutex() {
    static auto& m = *new std::mutex;
    return m;
  }
  const Driver& driver_;
  Block block_;
};

// ---- a call whose arrays are in such a block ----

struct Area {
  void* device;
  size_t bytes, offset;  // offset of the copy in the block
};

class CopiedCall {
 public:
  // If an operand and a result are one array on the device, they have one copy.
  explicit CopiedCall(const XLA_FFI_CallFrame& outer) : frame_(outer) {
    buffers_.reserve(outer.args.size + outer.rets.size);
    add(outer.args.args, outer.args.size, args_, from_);
    add(outer.rets.rets, outer.rets.size, rets_, to_);
    frame_.args.args = args_.data();
    frame_.rets.rets = rets_.data();
  }

  XLA_FFI_Error* run(XLA_FFI_Handler* handler, const Driver& driver, Stream stream, Where where) {
    const Current current(driver, stream);
    Memory memory(driver, current, where, bytes_);
    try {
      return run_in(memory, handler, driver, stream, where);
    } catch (...) {  // the block must not be reused while a copy is under way
      device_block = nullptr;
      driver.synchronize(stream);
      throw;
    }
  }

 private:
  XLA_FFI_Error* run_in(Memory& memory, XLA_FFI_Handler* handler, const Driver& driver,
                        Stream stream, Where where) {
    const auto copy_of = [&](size_t area) { return memory.data() + areas_[area].offset; };
    for (const auto& [buffer, area] : placed_) buffer->data = copy_of(area);
    memory.await_last_copy(stream);
    for (size_t i : from_) {
      const Area& a = areas_[i];
      if (where == Where::kHost)
        MPIGRAD_GPU(driver, copy_to_host, copy_of(i), address(a.device), a.bytes, stream);
      else
        MPIGRAD_GPU(driver, copy_on_device, address(copy_of(i)), address(a.device), a.bytes, stream);
    }
    MPIGRAD_GPU(driver, synchronize, stream);
    const DeviceBlock block{driver, stream, memory.data(), memory.bytes()};
    if (where == Where::kDevice) device_block = &block;
    XLA_FFI_Error* error = handler(&frame_);
    device_block = nullptr;
    if (error) return error;
    for (size_t i : to_) {
      const Area& a = areas_[i];
      if (where == Where::kHost)
        MPIGRAD_GPU(driver, copy_from_host, address(a.device), copy_of(i), a.bytes, stream);
      else
        MPIGRAD_GPU(driver, copy_on_device, address(a.device), address(copy_of(i)), a.bytes, stream);
    }
    if (to_.empty()) return nullptr;
    memory.note_copy(stream);
    if (on_cpu()) MPIGRAD_GPU(driver, synchronize, stream);
    return nullptr;
  }

  static Address address(const void* data) { return reinterpret_cast<Address>(data); }

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
    constexpr size_t kAlign = 256;  // at least XLA's alignment of arrays
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

// What a handler does with its arrays.
enum class Use {
  kReads,      // it reads or writes them by itself, on the CPU
  kMessages,   // it passes them to sends and receives of MPI
  kCollective, // it passes them to collectives of MPI, which may compute
  kOrder,      // nothing, if its result is its operand: it only keeps an order
};

struct Kind {
  std::string_view name;
  Use use;
};
constexpr Kind kKinds[] = {
    {"mpigrad_send", Use::kMessages},
    {"mpigrad_recv", Use::kMessages},
    {"mpigrad_sendrecv", Use::kMessages},
    {"mpigrad_neighbor_alltoallv", Use::kMessages},
    {"mpigrad_allgather", Use::kCollective},
    {"mpigrad_allgatherv", Use::kCollective},
    {"mpigrad_allreduce", Use::kCollective},
    {"mpigrad_alltoall", Use::kCollective},
    {"mpigrad_alltoallv", Use::kCollective},
    {"mpigrad_bcast", Use::kCollective},
    {"mpigrad_exscan", Use::kCollective},
    {"mpigrad_gather", Use::kCollective},
    {"mpigrad_gatherv", Use::kCollective},
    {"mpigrad_reduce", Use::kCollective},
    {"mpigrad_reduce_scatter", Use::kCollective},
    {"mpigrad_reduce_scatterv", Use::kCollective},
    {"mpigrad_scan", Use::kCollective},
    {"mpigrad_scatter", Use::kCollective},
    {"mpigrad_scatterv", Use::kCollective},
    {"mpigrad_enter", Use::kOrder},
    {"mpigrad_in_order", Use::kOrder},
    {"mpigrad_leave_loop", Use::kOrder},
};

Use use_of(std::string_view name) {
  for (const Kind& kind : kKinds)
    if (kind.name == name) return kind.use;
  return Use::kReads;
}

// Whether the arrays of a handler are passed to MPI on the device (MPIGRAD_GPU_AWARE, which Python has
// checked).
bool stays_on_device(Use use) {
  static const std::string aware = setting("MPIGRAD_GPU_AWARE");
  return (use == Use::kMessages && (aware == "p2p" || aware == "all")) ||
         (use == Use::kCollective && aware == "all");
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

// The attribute `site` of a call, 0 if it has none.
int64_t site_of(const XLA_FFI_CallFrame& frame) {
  const XLA_FFI_Attrs& attrs = frame.attrs;
  for (int64_t i = 0; i < attrs.size; ++i) {
    const std::string_view name(attrs.names[i]->ptr, attrs.names[i]->len);
    if (name == "site" && attrs.types[i] == XLA_FFI_AttrType_SCALAR)
      return *static_cast<const int64_t*>(static_cast<XLA_FFI_Scalar*>(attrs.attrs[i])->value);
  }
  return 0;
}

XLA_FFI_Error* staged(const Target& target, XLA_FFI_CallFrame* frame, Platform platform) {
  const auto* extension = frame->extension_start;
  const bool asks = extension && extension->type == XLA_FFI_Extension_Metadata;
  if (asks || frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return target.handler(frame);
  if (target.use == Use::kOrder && results_are_operands(*frame)) return target.handler(frame);
  try {
    const Driver& driver = Driver::of(platform);
    const Stream stream = stream_of(*frame);
    if (stays_on_device(target.use)) {
      try {
        return CopiedCall(*frame).run(target.handler, driver, stream, Where::kDevice);
      } catch (const NoDeviceMemory&) {
        if (target.use == Use::kCollective) throw;  // MPI may need device addresses on all ranks
      }
    }
    return CopiedCall(*frame).run(target.handler, driver, stream, Where::kHost);
  } catch (const std::exception& fault) {
    mark_failure();
    const int64_t site = site_of(*frame);
    const std::string text = "mpigrad: rank " + std::to_string(get(board.own().world_rank)) + ": " +
                             target.name.substr(std::string_view("mpigrad_").size()) +
                             (site ? " at " + call_site(site) : "") +
                             ": an array on the GPU cannot be passed on: " + fault.what();
    XLA_FFI_Error_Create_Args create{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, text.c_str(),
                                     XLA_FFI_Error_Code_INTERNAL};
    return frame->api->XLA_FFI_Error_Create(&create);
  }
}

// XLA calls a handler without data of its own, so there is one function for each place in this
// table, and for each platform.
constexpr size_t kTargets = 128;
std::array<Target, kTargets> targets;

template <Platform platform, size_t i>
XLA_FFI_Error* place(XLA_FFI_CallFrame* frame) {
  return staged(targets[i], frame, platform);
}
template <Platform platform, size_t... i>
constexpr std::array<XLA_FFI_Handler*, kTargets> all_places(std::index_sequence<i...>) {
  return {place<platform, i>...};
}
constexpr auto kPlaces = std::make_index_sequence<kTargets>();
constexpr auto cuda_places = all_places<Platform::kCUDA>(kPlaces);
constexpr auto rocm_places = all_places<Platform::kROCm>(kPlaces);

}  // namespace
}  // namespace mpigrad::gpu

// The handler `name` for arrays on GPUs of CUDA, or of ROCm, made from the handler for CPUs. nullptr:
// there are too many handlers.
MPIGRAD_EXPORT XLA_FFI_Handler* mpigrad_staged(XLA_FFI_Handler* handler, const char* name,
                                               int is_rocm) {
  using namespace mpigrad::gpu;
  for (size_t i = 0; i < kTargets; ++i) {
    Target& target = targets[i];
    if (!target.handler) target = {handler, name, use_of(name)};
    if (target.handler == handler) return (is_rocm ? rocm_places : cuda_places)[i];
  }
  return nullptr;
}

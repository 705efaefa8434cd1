// States of time loops in files, from the forward run to its gradient. A state has a ticket. Its place in
// the file is used again when its adjoint was computed, or its tangent in a program without adjoints. A
// state whose place was used again cannot be read. A thread writes the states, and reads those that come
// next.
#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ffi.h"
#include "storage/quiet_thread.h"
#include "storage/scratch_file.h"
#include "visibility.h"

namespace {

namespace ffi = xla::ffi;
using mpigrad::storage::ScratchFile;

using Pieces = std::vector<std::pair<char*, int64_t>>;  // the arrays of a state, and their bytes

// The states of one size.
class States {
 public:
  States(const std::string& directory, int64_t bytes, std::atomic<int32_t>& last)
      : last_(last),
        file_(directory, "state", "Give another directory, or store fewer states.", bytes, 0),
        broken_(file_.error()),
        error_(broken_) {
    for (Buffer& buffer : buffers_) buffer.data.resize(bytes);
    if (!error_.empty()) return;
    mover_ = mpigrad::storage::start_quiet_thread([this] { move_states(); });
    if (!mover_.joinable())
      error_ = broken_ = "cannot start a thread that writes states. Raise the limit of threads (ulimit -u).";
  }
  ~States() {
    if (!mover_.joinable()) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      jobs_.clear();
      ended_ = true;
    }
    changed_.notify_all();
    mover_.join();
  }

  // Stores a state of a loop. The last `own` states are of the same loop, and new places are made for `count`
  // states at a time. An error is returned as a text.
  std::string put(const Pieces& pieces, int64_t own, int64_t count, int32_t* ticket) {
    const std::lock_guard<std::mutex> turn(turn_);
    std::unique_lock<std::mutex> lock(mutex_);
    int64_t place = 0;
    if (error_.empty()) error_ = find_place(lock, own, count, &place);
    if (!error_.empty()) return std::exchange(error_, broken_);
    Buffer& buffer = idle_buffer(lock);
    buffer.ticket = 0;
    char* to = buffer.data.data();
    for (const auto& [from, bytes] : pieces) {
      std::memcpy(to, from, bytes);
      to += bytes;
    }
    place_of_.erase(places_[place].ticket);
    buffer.ticket = *ticket = ++last_;
    places_[place] = {*ticket, false};
    place_of_[*ticket] = place;
    post(buffer, true);
    return "";
  }

  // Frees the place of a state, and returns whether it is here.
  bool pass(int32_t ticket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = place_of_.find(ticket);
    if (found != place_of_.end()) places_[found->second].free = true;
    return found != place_of_.end();
  }

  std::string get(const Pieces& pieces, int32_t ticket) {
    const std::lock_guard<std::mutex> turn(turn_);
    std::unique_lock<std::mutex> lock(mutex_);
    Buffer* buffer = find_buffer(ticket);
    if (!buffer) {
      if (!place_of_.count(ticket))
        return "a stored state is needed again, but its place in the file was given to another one. Give "
               "checkpoints=loops.Budget, or a disk with more space.";
      buffer = &idle_buffer(lock);
      buffer->ticket = ticket;
      post(*buffer, false);
    }
    // A state that is being written can be read already.
    changed_.wait(lock, [&] { return !buffer->reads; });
    if (!error_.empty()) return std::exchange(error_, broken_);
    const char* from = buffer->data.data();
    for (const auto& [to, bytes] : pieces) {
      std::memcpy(to, from, bytes);
      from += bytes;
    }
    const int32_t next = ticket + (ticket < previous_ ? -1 : 1);
    previous_ = ticket;
    if (place_of_.count(next) && !find_buffer(next))
      if (Buffer* const free = oldest_idle(ticket)) {
        free->ticket = next;
        post(*free, false);
      }
    return "";
  }

 private:
  struct Place {
    int32_t ticket = 0;
    bool free = true;
  };
  struct Buffer {
    std::vector<char> data;
    int32_t ticket = 0;
    int64_t used = 0;
    bool busy = false;   // a job moves it, or will
    bool reads = false;  // from the file
  };
  struct Job {
    Buffer* buffer;
    int64_t place;
    bool writes;
  };

  // A free place, or else a new one. On a full disk that of the oldest state of an earlier loop: it may have
  // failed, or no gradient comes.
  std::string find_place(std::unique_lock<std::mutex>& lock, int64_t own, int64_t count, int64_t* found) {
    const auto oldest = [&](auto may_go) {
      int64_t best = -1;
      for (int64_t i = 0; i < file_.items(); ++i)
        if (may_go(places_[i]) && (best < 0 || places_[i].ticket < places_[best].ticket)) best = i;
      return best;
    };
    *found = oldest([](const Place& place) { return place.free; });
    if (*found >= 0) return "";
    changed_.wait(lock, [this] { return jobs_.empty() && !moving_; });
    const std::string error = file_.grow(file_.items() + std::max<int64_t>(count, 1));
    if (error.empty()) {
      *found = static_cast<int64_t>(places_.size());
      places_.resize(file_.items());
      return "";
    }
    const int64_t last = last_ - own;
    if (file_.is_full()) *found = oldest([&](const Place& place) { return place.ticket <= last; });
    return *found < 0 ? error : "";
  }

  Buffer* find_buffer(int32_t ticket) {
    for (Buffer& buffer : buffers_)
      if (buffer.ticket == ticket) return &buffer;
    return nullptr;
  }
  Buffer* oldest_idle(int32_t kept) {
    Buffer* best = nullptr;
    for (Buffer& buffer : buffers_)
      if (!buffer.busy && (!buffer.ticket || buffer.ticket != kept) && (!best || buffer.used < best->used))
        best = &buffer;
    return best;
  }
  Buffer& idle_buffer(std::unique_lock<std::mutex>& lock) {
    Buffer* found = nullptr;
    changed_.wait(lock, [&] { return (found = oldest_idle(0)) != nullptr; });
    return *found;
  }

  void post(Buffer& buffer, bool writes) {
    buffer.busy = true;
    buffer.reads = !writes;
    buffer.used = ++uses_;
    jobs_.push_back({&buffer, place_of_[buffer.ticket], writes});
    changed_.notify_all();
  }

  void move_states() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return ended_ || !jobs_.empty(); });
      if (ended_) return;
      const Job job = jobs_.front();
      jobs_.pop_front();
      moving_ = true;
      lock.unlock();
      char* const data = job.buffer->data.data();
      const std::string error = job.writes ? file_.write(job.place, data) : file_.read(job.place, data);
      lock.lock();
      moving_ = false;
      job.buffer->busy = job.buffer->reads = false;
      if (!error.empty()) {
        job.buffer->ticket = 0;
        if (error_.empty()) error_ = error;
      }
      changed_.notify_all();
    }
  }

  std::atomic<int32_t>& last_;  // ticket
  std::mutex turn_;             // of the program's calls
  std::mutex mutex_;            // of all below
  ScratchFile file_;
  std::string broken_, error_;  // for good, and of the next call
  std::vector<Place> places_;
  std::unordered_map<int32_t, int64_t> place_of_;  // by ticket
  std::array<Buffer, 3> buffers_;
  int64_t uses_ = 0;
  int32_t previous_ = 0;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool moving_ = false, ended_ = false;
  std::thread mover_;
};

// The files of one loop of a program: one for each size of its state, which `vmap` changes.
struct Folder {
  std::string directory;
  std::atomic<int32_t> last{0};  // ticket
  std::map<int64_t, std::shared_ptr<States>> files;
};

std::mutex mutex;
std::unordered_map<int64_t, std::shared_ptr<Folder>> folders;
// Programs name folders by number, as they name structures (sparse/kernels.cc).
int64_t next_number = 1;

std::shared_ptr<States> states_of(int64_t number, int64_t bytes) {
  const std::lock_guard<std::mutex> guard(mutex);
  const auto folder = folders.find(number);
  if (folder == folders.end()) return nullptr;
  std::shared_ptr<States>& states = folder->second->files[bytes];
  if (!states) states = std::make_shared<States>(folder->second->directory, bytes, folder->second->last);
  return states;
}

int64_t size_of(const Pieces& pieces) {
  int64_t bytes = 0;
  for (const auto& piece : pieces) bytes += piece.second;
  return bytes;
}

// `head` names the operation and its line.
ffi::Error result(std::string_view head, const std::string& error) {
  if (error.empty()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(head) + error);
}

// A batch has one state. Where a batched choice did not take the loop, the ticket is 0.
ffi::Error one_of(ffi::Buffer<ffi::S32> tickets, int32_t* ticket) {
  *ticket = 0;
  for (size_t i = 0; i < tickets.element_count(); ++i) {
    const int32_t other = tickets.typed_data()[i];
    if (other && *ticket && other != *ticket)
      return ffi::Error::InvalidArgument(
          "A batch has several states in files. Loop over it by jax.lax.map, or give "
          "checkpoints=loops.Budget.");
    if (other) *ticket = other;
  }
  return ffi::Error::Success();
}

ffi::Error missing() {
  return ffi::Error::InvalidArgument("Files of states are missing. Report this as a bug of mpigrad.");
}

ffi::Error put(ffi::Buffer<ffi::S32> own, ffi::RemainingArgs arrays,
               ffi::Result<ffi::Buffer<ffi::S32>> ticket, int64_t number, int64_t count,
               std::string_view head) {
  const bool agrees = head.empty();  // the program looks at the ticket, and raises an error on all ranks
  Pieces pieces;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const auto array = arrays.get<ffi::AnyBuffer>(i);
    if (!array) return array.error();
    pieces.emplace_back(static_cast<char*>(array->untyped_data()), array->size_bytes());
  }
  const auto states = states_of(number, size_of(pieces));
  if (!states) return missing();
  const std::string error = states->put(pieces, *own.typed_data(), count, ticket->typed_data());
  if (!error.empty() && agrees) *ticket->typed_data() = -1;
  return agrees ? ffi::Error::Success() : result(head, error);
}

ffi::Error get(ffi::Buffer<ffi::S32> tickets, ffi::RemainingRets arrays, int64_t number, std::string_view head) {
  Pieces pieces;
  for (size_t i = 0; i < arrays.size(); ++i) {
    auto array = arrays.get<ffi::AnyBuffer>(i);
    if (!array) return array.error();
    pieces.emplace_back(static_cast<char*>((*array)->untyped_data()), (*array)->size_bytes());
  }
  const auto states = states_of(number, size_of(pieces));
  if (!states) return missing();
  int32_t ticket;
  if (const ffi::Error error = one_of(tickets, &ticket); error.failure()) return error;
  if (ticket) return result(head, states->get(pieces, ticket));
  for (const auto& [to, bytes] : pieces) std::memset(to, 0, bytes);  // nothing uses them
  return ffi::Error::Success();
}

ffi::Error pass(ffi::Buffer<ffi::S32> tickets, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                int64_t number) {
  int32_t ticket;
  if (const ffi::Error error = one_of(tickets, &ticket); error.failure()) return error;
  {
    const std::lock_guard<std::mutex> guard(mutex);
    const auto folder = folders.find(number);
    if (folder == folders.end()) return missing();
    for (const auto& file : folder->second->files)
      if (file.second->pass(ticket)) break;
  }
  if (y->untyped_data() != x.untyped_data())
    std::memcpy(y->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}

}  // namespace

MPIGRAD_EXPORT XLA_FFI_Error* mpigrad_kernels_pass_state(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(mpigrad_kernels_pass_state, pass,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("number"));

MPIGRAD_EXPORT XLA_FFI_Error* mpigrad_kernels_put_state(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(mpigrad_kernels_put_state, put,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Attr<int64_t>("number")
                                  .Attr<int64_t>("count")
                                  .Attr<std::string_view>("head"));

MPIGRAD_EXPORT XLA_FFI_Error* mpigrad_kernels_get_state(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    mpigrad_kernels_get_state, get,
    ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::S32>>().RemainingRets().Attr<int64_t>("number").Attr<
        std::string_view>("head"));

// Files in a directory, until `close`.
MPIGRAD_EXPORT int64_t mpigrad_kernels_open_states(const char* directory) {
  const std::lock_guard<std::mutex> guard(mutex);
  const auto folder = std::make_shared<Folder>();
  folder->directory = directory;
  folders.emplace(++next_number, folder);
  return next_number;
}

MPIGRAD_EXPORT void mpigrad_kernels_close_states(int64_t number) {
  std::shared_ptr<Folder> folder;  // destroyed after the lock
  const std::lock_guard<std::mutex> guard(mutex);
  if (const auto found = folders.find(number); found != folders.end()) {
    std::swap(folder, found->second);
    folders.erase(found);
  }
}

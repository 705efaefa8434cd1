// States of time loops in files, from the forward run to its gradient. A state has a ticket, and its place
// in the file is used again after so many reads as a gradient takes. If a later derivative still needs a
// state whose place was used again, that is an error. A thread writes the states, and reads those that
// come next.
#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <pthread.h>
#include <signal.h>

#include "ffi.h"
#include "storage/scratch_file.h"
#include "visibility.h"

namespace {

namespace ffi = xla::ffi;
using mpigrad::storage::ScratchFile;

using Pieces = std::vector<std::pair<char*, int64_t>>;  // the arrays of a state, and their bytes

// The states of one size.
class States {
 public:
  States(const std::string& directory, int64_t bytes)
      : file_(directory, "state", "Give another directory, or store fewer states.", bytes, 0),
        error_(file_.error()) {
    for (Buffer& buffer : buffers_) buffer.data.resize(bytes);
    if (!error_.empty()) return;
    sigset_t all, old;  // signals are for the threads of the program
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    try {
      mover_ = std::thread([this] { move_states(); });
    } catch (const std::system_error&) {
      error_ = "cannot start a thread that writes states. Raise the limit of threads (ulimit -u).";
    }
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
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

  // Stores a state of a loop that stores `count` of them. Its place is free after `reads` reads. An error is
  // returned as a text.
  std::string put(const Pieces& pieces, int64_t count, int64_t reads, int32_t* ticket) {
    const std::lock_guard<std::mutex> turn(turn_);
    std::unique_lock<std::mutex> lock(mutex_);
    int64_t place = 0;
    if (error_.empty()) error_ = find_place(lock, count, &place);
    if (!error_.empty()) return std::exchange(error_, file_.error());
    Buffer& buffer = idle_buffer(lock);
    buffer.ticket = 0;
    char* to = buffer.data.data();
    for (const auto& [from, bytes] : pieces) {
      std::memcpy(to, from, bytes);
      to += bytes;
    }
    place_of_.erase(places_[place].ticket);
    last_ = last_ % 0x7ffffff0 + 1;
    places_[place] = {last_, reads, 0};
    place_of_[last_] = place;
    buffer.ticket = *ticket = last_;
    post(buffer, true);
    return "";
  }

  std::string get(const Pieces& pieces, int32_t ticket) {
    const std::lock_guard<std::mutex> turn(turn_);
    std::unique_lock<std::mutex> lock(mutex_);
    Buffer* buffer = find_buffer(ticket);
    const auto place = place_of_.find(ticket);
    if (!buffer) {
      if (place == place_of_.end())
        return "the place of a stored state was used again. Free space on the disk of the directory.";
      buffer = &idle_buffer(lock);
      buffer->ticket = ticket;
      post(*buffer, false);
    }
    // A state that is being written can be read already.
    changed_.wait(lock, [&] { return !buffer->reads; });
    if (!error_.empty()) return std::exchange(error_, file_.error());
    const char* from = buffer->data.data();
    for (const auto& [to, bytes] : pieces) {
      std::memcpy(to, from, bytes);
      from += bytes;
    }
    if (place != place_of_.end()) ++places_[place->second].reads;
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
    int64_t needed = 0, reads = 0;
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

  // An unused place, that of the oldest state that was read by a gradient, or else a new one. On a full disk,
  // that of the oldest state of an earlier loop that was read: perhaps no gradient will need it.
  std::string find_place(std::unique_lock<std::mutex>& lock, int64_t count, int64_t* found) {
    const auto oldest = [&](bool free, int32_t newest) {
      int64_t best = -1;
      for (int64_t i = 0; i < file_.items(); ++i) {
        const Place& place = places_[i];
        const int64_t needed = free ? place.needed : 1;
        if (place.ticket && (place.reads < needed || place.ticket > newest)) continue;
        if (best < 0 || place.ticket < places_[best].ticket) best = i;
      }
      return best;
    };
    *found = oldest(true, last_);
    if (*found >= 0) return "";
    changed_.wait(lock, [this] { return jobs_.empty() && !moving_; });
    const std::string error = file_.grow(file_.items() + std::max<int64_t>(count, 1));
    if (error.empty()) {
      *found = static_cast<int64_t>(places_.size());
      places_.resize(file_.items());
      return "";
    }
    if (file_.is_full()) *found = oldest(false, static_cast<int32_t>(last_ - count));
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

  std::mutex turn_;   // of the program's calls
  std::mutex mutex_;  // of all below
  ScratchFile file_;
  std::string error_;
  std::vector<Place> places_;
  std::unordered_map<int32_t, int64_t> place_of_;  // by ticket
  std::array<Buffer, 3> buffers_;
  int64_t uses_ = 0;
  int32_t last_ = 0, previous_ = 0;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool moving_ = false, ended_ = false;
  std::thread mover_;
};

// The files of one loop of a program: one for each size of its state, which `vmap` changes.
struct Folder {
  std::string directory;
  std::map<int64_t, std::shared_ptr<States>> files;
};

std::mutex mutex;
std::unordered_map<int64_t, Folder> folders;
// Programs name folders by number, as they name structures (sparse/kernels.cc).
int64_t next_number = 1;

std::shared_ptr<States> states_of(int64_t number, int64_t bytes) {
  const std::lock_guard<std::mutex> guard(mutex);
  const auto folder = folders.find(number);
  if (folder == folders.end()) return nullptr;
  std::shared_ptr<States>& states = folder->second.files[bytes];
  if (!states) states = std::make_shared<States>(folder->second.directory, bytes);
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

ffi::Error missing() {
  return ffi::Error::InvalidArgument("Files of states are missing. Report this as a bug of mpigrad.");
}

ffi::Error put(ffi::RemainingArgs arrays, ffi::Result<ffi::Buffer<ffi::S32>> ticket, int64_t number,
               int64_t count, int64_t reads, std::string_view head) {
  const bool agrees = head.empty();  // the program looks at the ticket, and raises an error on all ranks
  Pieces pieces;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const auto array = arrays.get<ffi::AnyBuffer>(i);
    if (!array) return array.error();
    pieces.emplace_back(static_cast<char*>(array->untyped_data()), array->size_bytes());
  }
  const auto states = states_of(number, size_of(pieces));
  if (!states) return missing();
  const std::string error = states->put(pieces, count, reads, ticket->typed_data());
  if (!error.empty() && agrees) *ticket->typed_data() = -1;
  return agrees ? ffi::Error::Success() : result(head, error);
}

ffi::Error get(ffi::Buffer<ffi::S32> ticket, ffi::RemainingRets arrays, int64_t number, std::string_view head) {
  Pieces pieces;
  for (size_t i = 0; i < arrays.size(); ++i) {
    auto array = arrays.get<ffi::AnyBuffer>(i);
    if (!array) return array.error();
    pieces.emplace_back(static_cast<char*>((*array)->untyped_data()), (*array)->size_bytes());
  }
  const auto states = states_of(number, size_of(pieces));
  if (!states) return missing();
  return result(head, states->get(pieces, *ticket.typed_data()));
}

}  // namespace

MPIGRAD_EXPORT XLA_FFI_Error* mpigrad_kernels_put_state(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(mpigrad_kernels_put_state, put,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Attr<int64_t>("number")
                                  .Attr<int64_t>("count")
                                  .Attr<int64_t>("reads")
                                  .Attr<std::string_view>("head"));

MPIGRAD_EXPORT XLA_FFI_Error* mpigrad_kernels_get_state(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    mpigrad_kernels_get_state, get,
    ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::S32>>().RemainingRets().Attr<int64_t>("number").Attr<
        std::string_view>("head"));

// Files in a directory, until `close`.
MPIGRAD_EXPORT int64_t mpigrad_kernels_open_states(const char* directory) {
  const std::lock_guard<std::mutex> guard(mutex);
  folders[++next_number].directory = directory;
  return next_number;
}

MPIGRAD_EXPORT void mpigrad_kernels_close_states(int64_t number) {
  Folder folder;
  const std::lock_guard<std::mutex> guard(mutex);
  if (const auto found = folders.find(number); found != folders.end()) {
    std::swap(folder, found->second);
    folders.erase(found);
  }
}

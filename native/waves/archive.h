// Items of a run that its gradient reads: the histories of steps, or states. They are kept in memory as
// they are, or packed (packing.h), or in a file (scratch_file.h). The run works on items in `slots`: item n
// is in slot n modulo their number. If there is a file, a thread writes items after the run has left them,
// and reads the items before those that the run is at.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "storage/quiet_thread.h"
#include "storage/scratch_file.h"
#include "waves/packing.h"
#include "waves/parallel.h"

namespace mpigrad::waves {

using storage::ScratchFile;

template <class T>
class Archive {
 public:
  // Items are in `file`, or at `data`. The run works on `used` items at a time, which follow each other.
  Archive(const Packing<T>& packing, int64_t threads, void* data, ScratchFile* file, int64_t used)
      : packing_(packing), threads_(threads), data_(static_cast<char*>(data)), file_(file) {
    if (is_direct()) return;
    slots_.resize(file_ ? 2 * used : used);
    ahead_ = used;
    for (Slot& slot : slots_) {
      slot.memory = Memory(packing.size() * sizeof(T));
      // Steps leave out some cells, which would decide about the scale of a block, and go to files.
      std::memset(slot.memory.data(), 0, slot.memory.bytes());
    }
    if (!file_) return;
    if (!packing.is_full()) packed_ = Memory(packing.bytes());
    // Other ranks would wait for an error of one rank here: without a thread, the run moves items itself.
    mover_ = storage::start_quiet_thread([this] { move_items(); });
  }
  ~Archive() {
    if (!mover_.joinable()) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      jobs_.clear();
      ended_ = true;
    }
    changed_.notify_all();
    mover_.join();
  }
  Archive(const Archive&) = delete;
  Archive& operator=(const Archive&) = delete;

  bool in_file() const { return file_; }

  void begin_writing() { begin(true, 0); }
  // Items are read backwards, down to `first`.
  void begin_reading(int64_t first) { begin(false, first); }

  // An item, to be written or read.
  T* at(int64_t item) {
    if (is_direct()) return reinterpret_cast<T*>(data_) + item * packing_.size();
    Slot& slot = of(item);
    T* const values = static_cast<T*>(slot.memory.data());
    if (slot.item == item && (writing_ || slot.settled)) return values;
    if (writing_) {
      settle(slot);
      slot.item = item;
      return values;
    }
    if (slot.item != item) {
      settle(slot);
      fetch(slot, item);
    }
    for (int64_t next = item - 1; file_ && next >= std::max(first_, item - ahead_); --next)
      if (Slot& other = of(next); other.item != next && !is_busy(other)) fetch(other, next);
    settle(slot);
    return values;
  }

  // After an item was written.
  void put(int64_t item) {
    if (is_direct()) return;
    Slot& slot = of(item);
    if (file_) return post({&slot, item, true});
    char* const to = data_ + item * packing_.bytes();
    in_blocks([&](int64_t begin, int64_t end) {
      packing_.pack(static_cast<const T*>(slot.memory.data()), to, begin, end);
    });
  }

  // Waits until all items are in the file.
  void finish() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return jobs_.empty() && !moving_; });
  }
  // The first error of the file so far, or an empty text.
  std::string error() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }

 private:
  struct Slot {
    Memory memory;
    int64_t item = -1;
    bool settled = true;  // for the run: nothing moves the slot
    bool busy = false;    // a job moves it, or will
  };
  struct Job {
    Slot* slot;
    int64_t item;
    bool writes;
  };

  bool is_direct() const { return packing_.is_full() && !file_; }
  Slot& of(int64_t item) { return slots_[item % static_cast<int64_t>(slots_.size())]; }

  void begin(bool writing, int64_t first) {
    writing_ = writing;
    first_ = first;
    if (is_direct()) return;
    finish();
    for (Slot& slot : slots_) slot.item = -1, slot.settled = true;
  }

  template <class F>
  void in_blocks(const F& work) const {
    in_parallel(threads_, {0, packing_.blocks(), 0, 1},
                [&](const Box& part) { work(part.i0, part.i1); });
  }

  void fetch(Slot& slot, int64_t item) {
    slot.item = item;
    if (file_) return post({&slot, item, false});
    const char* const from = data_ + item * packing_.bytes();
    in_blocks([&](int64_t begin, int64_t end) {
      packing_.unpack(from, static_cast<T*>(slot.memory.data()), begin, end);
    });
  }

  // ---- the jobs of the thread ----

  void post(const Job& job) {
    if (!mover_.joinable()) {
      const std::string error = move(job);
      if (error_.empty()) error_ = error;
      return;
    }
    job.slot->settled = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job.slot->busy = true;
      jobs_.push_back(job);
    }
    changed_.notify_all();
  }
  bool is_busy(const Slot& slot) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return slot.busy;
  }
  void settle(Slot& slot) {
    if (slot.settled) return;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return !slot.busy; });
    slot.settled = true;
  }

  void move_items() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return ended_ || !jobs_.empty(); });
      if (ended_) return;
      const Job job = jobs_.front();
      jobs_.pop_front();
      moving_ = true;
      lock.unlock();
      const std::string error = move(job);
      lock.lock();
      moving_ = false;
      job.slot->busy = false;
      if (error_.empty()) error_ = error;
      changed_.notify_all();
    }
  }

  std::string move(const Job& job) {
    T* const values = static_cast<T*>(job.slot->memory.data());
    const bool full = packing_.is_full();
    char* const bytes = full ? reinterpret_cast<char*>(values) : static_cast<char*>(packed_.data());
    if (job.writes) {
      if (!full) packing_.pack(values, bytes, 0, packing_.blocks());
      return file_->write(job.item, bytes);
    }
    const std::string error = file_->read(job.item, bytes);
    if (!error.empty())
      std::memset(values, 0, job.slot->memory.bytes());  // the run ends with this error
    else if (!full)
      packing_.unpack(bytes, values, 0, packing_.blocks());
    return error;
  }

  const Packing<T> packing_;
  const int64_t threads_;
  char* data_;
  ScratchFile* file_;
  int64_t ahead_ = 0;  // items that are read before the run asks for them
  bool writing_ = true;
  int64_t first_ = 0;
  std::vector<Slot> slots_;
  Memory packed_;

  std::mutex mutex_;  // of all below, and of Slot::busy
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool moving_ = false, ended_ = false;
  std::string error_;
  std::thread mover_;
};

}  // namespace mpigrad::waves

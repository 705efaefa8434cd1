// A file of items of one size in a directory of the user, with a checksum of each item. It is unlinked as
// soon as it is open, so nothing is left however the process ends. `what` names the content in errors.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

namespace mpigrad::storage {

// "1.23 GB"
inline std::string size_text(double bytes) {
  const char* const units[] = {"bytes", "kB", "MB", "GB", "TB"};
  int unit = 0;
  for (; bytes >= 999.5 && unit < 4; ++unit) bytes /= 1000;
  char text[40];
  std::snprintf(text, sizeof text, "%.3g %s", bytes, units[unit]);
  return text;
}

// Each word is mixed by a one-to-one map, so a change of one word always changes the sum.
inline uint64_t checksum(const char* data, int64_t bytes, uint64_t seed) {
  constexpr int kLanes = 4;
  constexpr uint64_t kFactor = 0x9e3779b97f4a7c15;
  uint64_t lanes[kLanes];
  for (int k = 0; k < kLanes; ++k) lanes[k] = seed + k;
  const auto mix = [&](uint64_t& lane, uint64_t word) {
    lane ^= word;
    lane = (lane << 29 | lane >> 35) * kFactor;
  };
  int64_t at = 0;
  for (; at + 8 * kLanes <= bytes; at += 8 * kLanes) {
    uint64_t words[kLanes];
    std::memcpy(words, data + at, sizeof words);
    for (int k = 0; k < kLanes; ++k) mix(lanes[k], words[k]);
  }
  for (; at < bytes; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, data + at, bytes - at < 8 ? bytes - at : 8);
    mix(lanes[0], word);
  }
  for (int k = 1; k < kLanes; ++k) mix(lanes[0], lanes[k]);
  return lanes[0];
}

class ScratchFile {
 public:
  ScratchFile(std::string directory, const char* what, const char* remedy, int64_t item_bytes, int64_t items)
      : directory_(std::move(directory)),
        what_(what),
        remedy_(remedy),
        item_bytes_(item_bytes),
        pitch_((item_bytes + kPage - 1) / kPage * kPage) {
    std::string path = directory_ + "/mpigrad-" + what_ + "-XXXXXX";
    file_ = mkostemp(path.data(), O_CLOEXEC);
    if (file_ < 0) {
      error_ = "cannot create a file in '" + directory_ + "': " + std::strerror(errno) +
               ". Give an existing directory in which you may write.";
      return;
    }
    unlink(path.c_str());
    error_ = grow(items);
  }
  ~ScratchFile() {
    if (file_ >= 0) close(file_);
  }
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  // Of the constructor.
  const std::string& error() const { return error_; }
  bool is_full() const { return full_; }
  bool fits(const std::string& directory, int64_t item_bytes, int64_t items) const {
    return error_.empty() && directory == directory_ && item_bytes == item_bytes_ &&
           items == this->items();
  }

  int64_t items() const { return static_cast<int64_t>(checksums_.size()); }

  // These return an error, or an empty text.

  // Reserves the space of so many items, if the file system can. After an error there are as many as before.
  std::string grow(int64_t items) {
    std::string error = reserve(items);
    if (error.empty()) checksums_.resize(items);
    return error;
  }
  std::string write(int64_t item, const char* data) {
    checksums_[item] = checksum(data, item_bytes_, item);
    for (int64_t done = 0; done < item_bytes_;) {
      const ssize_t n = pwrite(file_, data + done, item_bytes_ - done, item * pitch_ + done);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0)
        return "cannot write a " + what_ + " to a file in '" + directory_ +
               "': " + std::strerror(n ? errno : ENOSPC) + ". Free space, or give another directory.";
      done += n;
    }
    return "";
  }
  std::string read(int64_t item, char* data) const {
    for (int64_t done = 0; done < item_bytes_;) {
      const ssize_t n = pread(file_, data + done, item_bytes_ - done, item * pitch_ + done);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0)
        return "cannot read a " + what_ + " from a file in '" + directory_ +
               "': " + (n ? std::strerror(errno) : "the file is too short") + ". Run again.";
      done += n;
    }
    if (checksum(data, item_bytes_, item) == checksums_[item]) return "";
    return "a " + what_ + " in a file in '" + directory_ +
           "' was damaged: the checksum of an item differs. Check the disk, or give another directory.";
  }

 private:
  static constexpr int64_t kPage = 4096;
  static constexpr int kTries = 16;

  std::string reserve(int64_t items) {
    const int64_t begin = pitch_ * this->items(), needed = pitch_ * items - begin;
    int code = 0;
    full_ = false;
    if (needed <= 0) return "";
#ifdef __linux__
    // A call that a signal interrupts begins again. Under a profiler's timer a long one would never end.
    for (int i = 0; i < kTries; ++i) {
      code = fallocate(file_, 0, begin, needed) ? errno : 0;
      if (code != EINTR) break;
    }
#else
    code = EOPNOTSUPP;
#endif
    if (!code) return "";
    if (ftruncate(file_, begin)) code = errno;  // gives back a part
    struct statvfs there;
    const bool known = fstatvfs(file_, &there) == 0;
    const double free = known ? static_cast<double>(there.f_bavail) * there.f_frsize : 0;
    const bool unsupported =
        code == EOPNOTSUPP || code == ENOSYS || code == EINVAL || code == EINTR;
    if (unsupported && (!known || free >= needed)) return "";
    full_ = unsupported || code == ENOSPC || code == EDQUOT || code == EFBIG;
    return "needs " + size_text(needed) + " (" + std::to_string(needed) + " bytes) in '" + directory_ +
           "' for its file, and " + size_text(free) + " are free there" +
           (full_ && code != EFBIG ? "" : std::string(": ") + std::strerror(code)) + ". " + remedy_;
  }

  std::string directory_, what_, remedy_, error_;
  int64_t item_bytes_, pitch_;
  std::vector<uint64_t> checksums_;
  int file_ = -1;
  bool full_ = false;
};

}  // namespace mpigrad::storage

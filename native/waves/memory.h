// Memory in huge pages, kept from call to call: first touches cost more than a step of a wave.
#pragma once

#include <cstdlib>
#include <cstring>
#include <list>
#include <vector>
#include <new>
#include <utility>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "mpi/handler.h"
#include "waves/tile.h"

namespace mpigrad::waves {

template <class T>
using Arrays = std::vector<T*>;  // of a model or a state

// The same cells of all fields would share cache sets, and loads would wait for stores whose addresses end in
// the same 12 bits: each field begins 17 cache lines further than the last one. (A gradient of acoustic waves
// has 14.) Under AddressSanitizer every field is an allocation of its own, so that it finds each overrun.
#ifdef __SANITIZE_ADDRESS__
constexpr size_t kColors = 1, kShift = 0;
constexpr size_t kBlock = 64;
#else
constexpr size_t kColors = 16, kShift = 1088;
constexpr size_t kBlock = 2u << 20;  // a huge page
#endif

class Memory;

// Unused blocks.
class Pool {
 public:
  void* take(size_t bytes) {
    for (auto block = idle_.begin(); block != idle_.end(); ++block)
      if (block->second == bytes) {
        void* data = block->first;
        idle_.erase(block);
        idle_bytes_ -= bytes;
        return data;
      }
    void* data = std::aligned_alloc(kBlock, bytes);
    if (!data) {
      trim(0);
      data = std::aligned_alloc(kBlock, bytes);
    }
    if (!data) throw std::bad_alloc();
#ifdef __SANITIZE_ADDRESS__
    std::memset(data, 0xff, bytes);  // NaN
#else
    advise_huge_pages(data, bytes);
#endif
    return data;
  }
  void give(void* data, size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
    return std::free(data);
#endif
    idle_.emplace_back(data, bytes);
    idle_bytes_ += bytes;
  }
  // Frees blocks, oldest first, until at most `bytes` are left.
  void trim(size_t bytes) {
    while (idle_bytes_ > bytes) {
      std::free(idle_.front().first);
      idle_bytes_ -= idle_.front().second;
      idle_.pop_front();
    }
  }
  static size_t rounded(size_t bytes) { return (bytes + kBlock - 1) / kBlock * kBlock; }

 private:
  std::list<std::pair<void*, size_t>> idle_;
  size_t idle_bytes_ = 0;
};

inline Pool pool;  // one handler runs at a time

class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes) : bytes_(Pool::rounded(bytes)), data_(pool.take(bytes_)) {}
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Memory() {
    if (data_) pool.give(data_, bytes_);
  }
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void swap(Memory& other) {
    std::swap(bytes_, other.bytes_);
    std::swap(data_, other.data_);
  }
  size_t bytes_ = 0;
  void* data_ = nullptr;
};

// Stores past the caches, if the processor supports it. `end_streams` must follow.
template <class T>
void stream(T* to, const T* from, int64_t n) {
#ifdef __SSE2__
#ifdef __AVX512F__
  using Register = __m512i;
  const auto load = [](const T* p) { return _mm512_loadu_si512(p); };
  const auto store = [](T* p, Register x) { _mm512_stream_si512(reinterpret_cast<Register*>(p), x); };
#else
  using Register = __m128i;
  const auto load = [](const T* p) { return _mm_loadu_si128(reinterpret_cast<const Register*>(p)); };
  const auto store = [](T* p, Register x) { _mm_stream_si128(reinterpret_cast<Register*>(p), x); };
#endif
  constexpr int64_t width = sizeof(Register) / sizeof(T);
  for (; n > 0 && reinterpret_cast<uintptr_t>(to) % sizeof(Register); --n) *to++ = *from++;
  for (; n >= width; n -= width, to += width, from += width) store(to, load(from));
#endif
  std::memcpy(to, from, std::max<int64_t>(n, 0) * sizeof(T));
}

inline void end_streams() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

// A field on a tile with its margin. Converts to the pointer to cell (0, 0).
template <class T>
class Field {
 public:
  Field() = default;
  explicit Field(const Tile& tile) : memory_(tile.padded() * sizeof(T) + kColors * kShift) {
    char* data = static_cast<char*>(memory_.data()) + next_color++ % kColors * kShift;
    data_ = reinterpret_cast<T*>(data) + tile.origin();
  }
  void clear() { std::memset(memory_.data(), 0, memory_.bytes()); }
  operator T*() const { return data_; }
  friend void swap(Field& a, Field& b) {
    std::swap(a.memory_, b.memory_);
    std::swap(a.data_, b.data_);
  }

 private:
  static inline size_t next_color = 0;
  Memory memory_;
  T* data_ = nullptr;
};

}  // namespace mpigrad::waves

// Values of a history in 16 bits. bfloat16 is the upper half of a float32. float16 has a scale for each
// block of values, a power of two that brings the largest one just below 2^15. Both round to the nearest,
// to even in a tie. Values that are not finite stay so.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "waves/memory.h"

namespace mpigrad::waves {

// As in mpigrad/waves/options.py.
enum class Precision : int64_t { kFull, kBfloat16, kFloat16 };

namespace half {

inline uint32_t bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}
inline float real(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

inline uint16_t to_bfloat16(float x) {
  const uint32_t u = bits(x), rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  const bool nan = (u & 0x7fffffff) > 0x7f800000;  // rounding could make it infinite
  return static_cast<uint16_t>(nan ? u >> 16 | 0x40 : rounded);
}
inline float from_bfloat16(uint16_t h) { return real(uint32_t{h} << 16); }

// For magnitudes below 65520, and values that are not finite.
inline uint16_t to_float16(float x) {
  const uint32_t u = bits(x), sign = u >> 16 & 0x8000, m = u & 0x7fffffff;
  const uint32_t normal = (m + 0xfff + (m >> 13 & 1) - (112u << 23)) >> 13;
  const uint32_t tiny = bits(real(m) + 0.5f) - bits(0.5f);  // 0.5f has the spacing of subnormal halves
  const uint32_t other = m > 0x7f800000 ? 0x7e00 : 0x7c00;
  return static_cast<uint16_t>(sign | (m >= 0x7f800000 ? other : m < (113u << 23) ? tiny : normal));
}
inline float from_float16(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, m = h & 0x7fff;
  const float tiny = static_cast<float>(static_cast<int32_t>(m)) * 0x1p-24f;
  const uint32_t normal = (m << 13) + (112u << 23), other = m << 13 | 0x7f800000;
  return real(sign | (m >= 0x7c00 ? other : m < 0x400 ? bits(tiny) : normal));
}

}  // namespace half

// Items of `size` values, each in bytes() bytes. They are converted in blocks.
template <class T>
class Packing {
 public:
  static constexpr int64_t kBlock = 256;

  Packing(Precision precision, int64_t size) : precision_(precision), size_(size) {}

  bool is_full() const { return precision_ == Precision::kFull; }
  int64_t size() const { return size_; }
  int64_t blocks() const { return (size_ + kBlock - 1) / kBlock; }
  int64_t bytes() const {
    if (is_full()) return size_ * static_cast<int64_t>(sizeof(T));
    return scale_bytes() + (2 * size_ + kLine - 1) / kLine * kLine;
  }

  // Converts blocks `begin` to `end` of an item.
  void pack(const T* from, char* to, int64_t begin, int64_t end) const {
    int16_t* exponents = reinterpret_cast<int16_t*>(to);
    uint16_t* halves = reinterpret_cast<uint16_t*>(to + scale_bytes());
    alignas(kLine) uint16_t line[kBlock];
    for (int64_t b = begin; b < end; ++b) {
      const T* x = from + b * kBlock;
      const int64_t n = std::min(kBlock, size_ - b * kBlock);
      if (precision_ == Precision::kBfloat16) {
#pragma omp simd
        for (int64_t k = 0; k < n; ++k) line[k] = half::to_bfloat16(static_cast<float>(x[k]));
      } else {
        const int exponent = exponent_of(x, n);
        exponents[b] = static_cast<int16_t>(exponent);
        to_halves(x, power(exponent), line, n);
      }
      stream(halves + b * kBlock, line, n);  // only the adjoint reads it
    }
    end_streams();
  }
  void unpack(const char* from, T* to, int64_t begin, int64_t end) const {
    const int16_t* exponents = reinterpret_cast<const int16_t*>(from);
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(from + scale_bytes());
    for (int64_t b = begin; b < end; ++b) {
      T* x = to + b * kBlock;
      const uint16_t* h = halves + b * kBlock;
      const int64_t n = std::min(kBlock, size_ - b * kBlock);
      if (precision_ == Precision::kBfloat16) {
#pragma omp simd
        for (int64_t k = 0; k < n; ++k) x[k] = static_cast<T>(half::from_bfloat16(h[k]));
      } else {
        from_halves(h, power(-exponents[b]), x, n);
      }
    }
  }

 private:
  static constexpr int64_t kLine = 64;  // bytes

  int64_t scale_bytes() const {
    return precision_ == Precision::kFloat16 ? (2 * blocks() + kLine - 1) / kLine * kLine : 0;
  }

  // Exponents of scales whose powers, and their inverses, are normal numbers of type T.
  static constexpr int kLargest = std::numeric_limits<T>::max_exponent - 2;
  static T power(int exponent) { return std::ldexp(T(1), exponent); }
  // The exponent of the scale of a block, 0 if it has no value but zeros, or one that is not finite.
  static int exponent_of(const T* x, int64_t n) {
    using Bits = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
    constexpr Bits kMagnitude = std::numeric_limits<Bits>::max();
    Bits most = 0;
#pragma omp simd reduction(max : most)
    for (int64_t k = 0; k < n; ++k) {
      Bits u;
      std::memcpy(&u, x + k, sizeof u);
      u &= kMagnitude;
      most = u > most ? u : most;
    }
    T largest;
    std::memcpy(&largest, &most, sizeof largest);
    if (most == 0 || !std::isfinite(largest)) return 0;
    return std::clamp(14 - std::ilogb(largest), -kLargest, kLargest);
  }

  static void to_halves(const T* x, T scale, uint16_t* h, int64_t n) {
    int64_t k = 0;
#ifdef __F16C__
    for (; k + 8 <= n; k += 8) {
      __m256 wide;
      if constexpr (sizeof(T) == 4) {
        wide = _mm256_mul_ps(_mm256_loadu_ps(x + k), _mm256_set1_ps(scale));
      } else {
        const __m256d s = _mm256_set1_pd(scale);
        const __m128 low = _mm256_cvtpd_ps(_mm256_mul_pd(_mm256_loadu_pd(x + k), s));
        const __m128 high = _mm256_cvtpd_ps(_mm256_mul_pd(_mm256_loadu_pd(x + k + 4), s));
        wide = _mm256_set_m128(high, low);
      }
      _mm_storeu_si128(reinterpret_cast<__m128i*>(h + k),
                       _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT));
    }
#endif
#pragma omp simd
    for (int64_t j = k; j < n; ++j) h[j] = half::to_float16(static_cast<float>(x[j] * scale));
  }
  static void from_halves(const uint16_t* h, T scale, T* x, int64_t n) {
    int64_t k = 0;
#ifdef __F16C__
    for (; k + 8 <= n; k += 8) {
      const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(h + k)));
      if constexpr (sizeof(T) == 4) {
        _mm256_storeu_ps(x + k, _mm256_mul_ps(wide, _mm256_set1_ps(scale)));
      } else {
        const __m256d s = _mm256_set1_pd(scale);
        _mm256_storeu_pd(x + k, _mm256_mul_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(wide)), s));
        _mm256_storeu_pd(x + k + 4, _mm256_mul_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(wide, 1)), s));
      }
    }
#endif
#pragma omp simd
    for (int64_t j = k; j < n; ++j) x[j] = static_cast<T>(half::from_float16(h[j])) * scale;
  }

  Precision precision_;
  int64_t size_;
};

}  // namespace mpigrad::waves

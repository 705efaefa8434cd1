// Sizes of the processor's caches, as the system says them.
#pragma once

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

#include <unistd.h>

namespace mpigrad::waves {

// Bytes of the second level, which one core uses, or 1 MiB if the system does not say.
inline int64_t core_cache() {
  static const int64_t bytes = [] {
    long found = 0;
#ifdef _SC_LEVEL2_CACHE_SIZE
    found = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    return found > 0 ? int64_t{found} : int64_t{1} << 20;
  }();
  return bytes;
}

// The length of a list such as 0-3,8.
inline int64_t count_processors(const std::string& list) {
  std::istringstream parts(list);
  int64_t count = 0;
  for (std::string part; std::getline(parts, part, ',');) {
    std::istringstream text(part);
    int64_t first, last;
    char dash;
    if (!(text >> first)) return 0;
    count += text >> dash >> last ? last - first + 1 : 1;
  }
  return count;
}

// Bytes of the third level for each processor that shares it, or 0 if the system does not say. (sysconf
// knows the caches of all processors together only.)
inline int64_t cache_share() {
  static const int64_t bytes = [] {
    const std::string cache = "/sys/devices/system/cpu/cpu0/cache/index3/";
    std::ifstream size(cache + "size"), shared(cache + "shared_cpu_list");
    int64_t kilobytes = 0;
    std::string processors;
    if (!(size >> kilobytes) || size.get() != 'K' || !(shared >> processors)) return int64_t{0};
    const int64_t count = count_processors(processors);
    return count > 0 ? kilobytes * 1024 / count : 0;
  }();
  return bytes;
}

}  // namespace mpigrad::waves

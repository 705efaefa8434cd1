#include "gpu/driver.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>

namespace mpigrad::gpu {
namespace {

// The library that JAX's plugin has loaded, if there is one.
void* open_library(std::initializer_list<const char*> names, std::string& name) {
  const char* given = std::getenv("MPIGRAD_GPU_LIBRARY");
  if (given && *given) return dlopen((name = given).c_str(), RTLD_NOW | RTLD_LOCAL);
  for (const int mode : {RTLD_NOLOAD, 0})
    for (const char* one : names)
      if (void* library = dlopen((name = one).c_str(), RTLD_NOW | RTLD_LOCAL | mode)) return library;
  return nullptr;
}

}  // namespace

Driver::Driver(Platform platform) : platform(platform) {
  const bool cuda = platform == Platform::kCUDA;
  std::string path;
  void* library =
      cuda ? open_library({"libcuda.so.1"}, path)
           : open_library({"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"}, path);
  if (!library)
    throw std::runtime_error(std::string(cuda ? "no CUDA driver: " : "no HIP runtime: ") + dlerror());
#define MPIGRAD_FIND(name, cuda_name, hip_name, ...)                                   \
  name##_name = cuda ? #cuda_name : #hip_name;                                         \
  name = reinterpret_cast<int (*)(__VA_ARGS__)>(dlsym(library, name##_name));          \
  if (!name) throw std::runtime_error(std::string(name##_name) + " is not in " + path);
  MPIGRAD_DRIVER_FUNCTIONS(MPIGRAD_FIND)
  if (cuda) {
    MPIGRAD_CUDA_FUNCTIONS(MPIGRAD_FIND)
  } else {
    MPIGRAD_HIP_FUNCTIONS(MPIGRAD_FIND)
  }
#undef MPIGRAD_FIND
}

const Driver& Driver::of(Platform platform) {
  if (platform == Platform::kCUDA) {
    static const Driver cuda(Platform::kCUDA);
    return cuda;
  }
  static const Driver hip(Platform::kROCm);
  return hip;
}

void Driver::check(int code, const char* function) const {
  if (!code) return;
  const char* text = nullptr;
  error_text(code, &text);
  throw std::runtime_error(std::string(function) + ": " +
                           (text ? text : "error " + std::to_string(code)));
}

Current::Current(const Driver& driver, Stream stream) : driver_(driver) {
  if (driver.platform == Platform::kCUDA) {
    void* context = nullptr;
    MPIGRAD_GPU(driver, context_of, stream, &context);
    MPIGRAD_GPU(driver, push, context);
    identity_ = context;
  } else {
    int device = 0;
    MPIGRAD_GPU(driver, current_device, &before_);
    MPIGRAD_GPU(driver, device_of, stream, &device);
    MPIGRAD_GPU(driver, set_device, device);
    identity_ = reinterpret_cast<const void*>(static_cast<uintptr_t>(device) + 1);
  }
}

Current::~Current() {
  void* context = nullptr;
  if (driver_.platform == Platform::kCUDA) driver_.pop(&context);
  else driver_.set_device(before_);
}

}  // namespace mpigrad::gpu

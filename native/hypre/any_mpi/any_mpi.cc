// The functions of any_mpi/mpi.h, looked up at run time in the MPI library that mpi4py has loaded.
#include "hypre/any_mpi/any_mpi.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "mpi.h"

mpigrad_mpi_constants mpigrad_mpi;

namespace {

struct {
#define MPIGRAD_FORWARDED(name, ...) void* name;
#define MPIGRAD_CONVERTED MPIGRAD_FORWARDED
#include "functions.def"
#undef MPIGRAD_CONVERTED
#undef MPIGRAD_FORWARDED
  void *Wtime, *Wtick;
} functions;

bool pointer_handles = false;
mpigrad::hypre::StatusLayout layout;

char* native_bytes(MPI_Status* status) {
  thread_local MPI_Status ignored;
  return reinterpret_cast<char*>((status ? status : &ignored)->native);
}

// An argument in the layout of the MPI in this process, whose handles have the type H.
template <class H, class T>
auto as_native(T x) {
  if constexpr (std::is_same_v<T, long long>) {
    if constexpr (std::is_pointer_v<H>)
      return reinterpret_cast<H>(x);
    else
      return static_cast<H>(x);
  } else if constexpr (std::is_same_v<T, long long*>) {
    return reinterpret_cast<H*>(x);
  } else if constexpr (std::is_same_v<T, MPI_Status*>) {
    return static_cast<void*>(native_bytes(x));
  } else {
    return x;
  }
}

// After a call: 32-bit handles fill the lower half of ours (little-endian processors).
template <class T>
void read_back(T x) {
  if constexpr (std::is_same_v<T, long long*>) {
    if (!pointer_handles) *x = static_cast<uint32_t>(*x);
  } else if constexpr (std::is_same_v<T, MPI_Status*>) {
    if (!x) return;
    std::memcpy(&x->MPI_SOURCE, native_bytes(x) + layout.source, sizeof(int));
    std::memcpy(&x->MPI_TAG, native_bytes(x) + layout.tag, sizeof(int));
  }
}

template <class H, class... Args>
int call_as(void* function, Args... args) {
  using Signature = int (*)(decltype(as_native<H>(args))...);
  return reinterpret_cast<Signature>(function)(as_native<H>(args)...);
}

template <class... Args>
int call(void* function, Args... args) {
  const int code = pointer_handles ? call_as<void*>(function, args...) : call_as<int>(function, args...);
  (read_back(args), ...);
  return code;
}

// An array of handles in the layout of the MPI in this process. `update` copies it back.
class Handles {
 public:
  Handles(int n, const long long* ours) : ours_(ours) {
    if (!pointer_handles) narrow_.assign(ours, ours + n);
  }
  void* data() {
    return pointer_handles ? const_cast<long long*>(ours_) : static_cast<void*>(narrow_.data());
  }
  void update(long long* ours) const {
    for (size_t i = 0; i < narrow_.size(); ++i) ours[i] = narrow_[i];
  }

 private:
  const long long* ours_;
  std::vector<uint32_t> narrow_;
};

// An array of statuses in this layout. `update` copies it back, unless the caller ignores them.
class Statuses {
 public:
  explicit Statuses(int n) : bytes_(static_cast<size_t>(n) * layout.size) {}
  void* data() { return bytes_.data(); }
  void update(int n, MPI_Status* ours) const {
    for (int i = 0; ours && i < n; ++i) {
      std::memcpy(native_bytes(ours + i), bytes_.data() + static_cast<size_t>(i) * layout.size, layout.size);
      read_back(ours + i);
    }
  }

 private:
  std::vector<char> bytes_;
};

}  // namespace

extern "C" {

#define MPIGRAD_FORWARDED(name, parameters, ...) \
  int MPI_##name parameters { return call(functions.name __VA_OPT__(, ) __VA_ARGS__); }
#define MPIGRAD_CONVERTED(name, ...)
#include "functions.def"
#undef MPIGRAD_CONVERTED
#undef MPIGRAD_FORWARDED

double MPI_Wtime() { return reinterpret_cast<double (*)()>(functions.Wtime)(); }
double MPI_Wtick() { return reinterpret_cast<double (*)()>(functions.Wtick)(); }

int MPI_Startall(int n, MPI_Request* requests) {
  Handles handles(n, requests);
  const int code = call(functions.Startall, n, handles.data());
  handles.update(requests);
  return code;
}

int MPI_Testall(int n, MPI_Request* requests, int* flag, MPI_Status* statuses) {
  Handles handles(n, requests);
  Statuses found(n);
  const int code = call(functions.Testall, n, handles.data(), flag, found.data());
  handles.update(requests);
  if (*flag) found.update(n, statuses);
  return code;
}

int MPI_Waitall(int n, MPI_Request* requests, MPI_Status* statuses) {
  Handles handles(n, requests);
  Statuses found(n);
  const int code = call(functions.Waitall, n, handles.data(), found.data());
  handles.update(requests);
  found.update(n, statuses);
  return code;
}

int MPI_Waitany(int n, MPI_Request* requests, int* index, MPI_Status* status) {
  Handles handles(n, requests);
  const int code = call(functions.Waitany, n, handles.data(), index, status);
  handles.update(requests);
  return code;
}

int MPI_Type_create_struct(int n, const int* lengths, const MPI_Aint* starts,
                           const MPI_Datatype* types, MPI_Datatype* made) {
  Handles handles(n, types);
  return call(functions.Type_create_struct, n, lengths, starts, handles.data(), made);
}

}  // extern "C"

namespace mpigrad::hypre {

const char* constant_names() {
#define MPIGRAD_NAME(name) #name " "
  return MPIGRAD_MPI_CONSTANTS(MPIGRAD_NAME);
#undef MPIGRAD_NAME
}

const char* find_mpi(const char* library, bool pointers, const StatusLayout& status,
                     const int64_t* constants) {
  static std::string error;
  void* opened = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  if (!opened) {
    const char* reason = dlerror();
    error = reason ? reason : "the library is not loaded";
    return error.c_str();
  }
  if (status.size > sizeof(MPI_Status::native)) {
    error = "its MPI_Status has " + std::to_string(status.size) + " bytes";
    return error.c_str();
  }
  const struct {
    const char* name;
    void** pointer;
  } names[] = {
#define MPIGRAD_FORWARDED(name, ...) {"MPI_" #name, &functions.name},
#define MPIGRAD_CONVERTED MPIGRAD_FORWARDED
#include "functions.def"
#undef MPIGRAD_CONVERTED
#undef MPIGRAD_FORWARDED
      {"MPI_Wtime", &functions.Wtime}, {"MPI_Wtick", &functions.Wtick}};
  for (const auto& [name, pointer] : names) {
    *pointer = dlsym(opened, name);
    if (!*pointer) {
      error = std::string(name) + " is not in " + library;
      return error.c_str();
    }
  }
  pointer_handles = pointers;
  layout = status;
#define MPIGRAD_VALUE(name) mpigrad_mpi.name = *constants++;
  MPIGRAD_MPI_CONSTANTS(MPIGRAD_VALUE)
#undef MPIGRAD_VALUE
  return nullptr;
}

}  // namespace mpigrad::hypre

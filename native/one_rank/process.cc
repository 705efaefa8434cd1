// The start and end of the MPI of one rank, its name, its clock and its errors.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "one_rank/mpi.h"

using namespace one_rank;

namespace {

bool initialized = false, finalized = false;
std::thread::id main_thread;

}  // namespace

MPI_FUNCTION int MPI_Init_thread(int*, char***, int, int* provided) {
  Lock hold(lock);
  if (initialized) return kOther;
  initialized = true;
  main_thread = std::this_thread::get_id();
  if (provided) *provided = kMultiple;
  return kSuccess;
}
MPI_FUNCTION int MPI_Init(int* argc, char*** argv) {
  return MPI_Init_thread(argc, argv, kMultiple, nullptr);
}
MPI_FUNCTION int MPI_Finalize() {
  Lock hold(lock);
  delete_attributes(kSelf);  // as MPI says: before anything else ends
  delete_attributes(kWorld);
  finalized = true;
  return kSuccess;
}
MPI_FUNCTION int MPI_Initialized(int* flag) { return *flag = initialized, kSuccess; }
MPI_FUNCTION int MPI_Finalized(int* flag) { return *flag = finalized, kSuccess; }
MPI_FUNCTION int MPI_Query_thread(int* provided) { return *provided = kMultiple, kSuccess; }
MPI_FUNCTION int MPI_Is_thread_main(int* flag) {
  return *flag = std::this_thread::get_id() == main_thread, kSuccess;
}
MPI_FUNCTION int MPI_Abort(int, int code) {
  std::fflush(nullptr);
  _exit(code);
}
MPI_FUNCTION int MPI_Get_version(int* version, int* subversion) {
  return *version = 4, *subversion = 0, kSuccess;
}
MPI_FUNCTION int MPI_Get_library_version(char* text, int* length) {
  return text_to("mpigrad's MPI of one rank", text, length);
}
MPI_FUNCTION int MPI_Get_processor_name(char* name, int* length) {
  char host[128] = "";
  gethostname(host, sizeof host - 1);
  return text_to(host, name, length);
}
MPI_FUNCTION double MPI_Wtime() {
  using Seconds = std::chrono::duration<double>;
  return Seconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}
MPI_FUNCTION double MPI_Wtick() { return 1e-9; }
MPI_FUNCTION int MPI_Error_class(int code, int* kind) { return *kind = code, kSuccess; }
MPI_FUNCTION int MPI_Error_string(int code, char* text, int* length) {
  static const std::map<int, const char*> texts = {
      {kSuccess, "no error"}, {kType, "invalid datatype"}, {kTag, "invalid tag"},
      {kComm, "invalid communicator"}, {kRank, "invalid rank: there is one rank, 0"},
      {kRoot, "invalid root: there is one rank, 0"}, {kGroup, "invalid group"},
      {kOp, "invalid operation"}, {kDims, "invalid dims"}, {kArg, "invalid argument"},
      {kTruncate, "message truncated"}, {kRequest, "invalid request"}, {kInfo, "invalid info"},
      {kKeyval, "invalid key"}, {kInStatus, "the error is in a status"},
      {kUnsupported, "mpigrad's MPI of one rank does not have this function. Install an MPI"}};
  const auto entry = texts.find(code);
  return text_to(entry == texts.end() ? "error " + std::to_string(code) : entry->second, text,
                 length);
}
MPI_FUNCTION int MPI_Alloc_mem(Aint bytes, int, void* pointer) {
  void* memory = std::malloc(bytes ? bytes : 1);
  std::memcpy(pointer, &memory, sizeof memory);
  return memory ? kSuccess : kOther;
}
MPI_FUNCTION int MPI_Free_mem(void* memory) { return std::free(memory), kSuccess; }
MPI_FUNCTION int MPI_Get_address(const void* location, Aint* address) {
  return *address = reinterpret_cast<Aint>(location), kSuccess;
}

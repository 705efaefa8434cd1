// An MPI of one rank, for programs that no launcher has started on machines where MPI is not
// installed or cannot start. It is a library with MPICH's binary interface (libmpi.so.12), which
// mpi4py loads. Messages go from the rank to itself, collectives copy. Communication with other
// processes, one-sided communication, topologies and files are not there: these functions return
// MPI_ERR_UNSUPPORTED_OPERATION (unsupported.def).
//
// One lock guards everything, as threads may call at the same time (MPI_THREAD_MULTIPLE). Functions
// whose data do not change in a run do without.

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "one_rank/types.h"

#define MPI_FUNCTION extern "C" __attribute__((visibility("default")))

using one_rank::Aint;
using one_rank::new_handle;
using one_rank::pack;
using one_rank::Shared;
using one_rank::Type;
using one_rank::type_of;
using one_rank::TypeBuilder;
using one_rank::unpack;

namespace {

enum Error {
  kSuccess = 0, kType = 3, kTag = 4, kComm = 5, kRank = 6, kRoot = 7, kGroup = 8, kOp = 9,
  kDims = 11, kArg = 12, kTruncate = 14, kOther = 15, kInStatus = 17, kRequest = 19, kInfo = 28,
  kUnsupported = 44, kKeyval = 48,
};

constexpr int kProcNull = -1, kAnySource = -2, kAnyTag = -1, kUndefined = -32766;
// MPICH's handles. Those of objects that are made begin with bits that say so.
constexpr int made(unsigned kind) { return static_cast<int>(kind << 24 | 0x80000000); }
constexpr int kNoComm = 0x04000000, kWorld = 0x44000000, kSelf = 0x44000001, kMadeComm = made(4);
constexpr int kNoGroup = 0x08000000, kEmpty = 0x48000000, kAlone = made(8);  // two groups
constexpr int kNoRequest = 0x2c000000, kMadeRequest = made(0x2c);
constexpr int kNoMessage = 0x2c000000, kNullMessage = 0x6c000000;
constexpr int kNoType = 0x0c000000, kNoOp = 0x18000000, kMadeOp = made(0x18);
constexpr int kNoHandler = 0x14000000, kReturn = 0x54000001, kMadeHandler = made(0x14);
constexpr int kNoInfo = 0x1c000000, kMadeInfo = made(0x1c);
constexpr int kNoKeyval = 0x24000000, kMadeKeyval = made(0x24) + 0x400000;
constexpr int kTagLimit = 0x64400001, kHost = 0x64400003, kIo = 0x64400005;
constexpr int kGlobalTime = 0x64400007, kUniverse = 0x64400009, kLastCode = 0x6440000b;
constexpr int kApplication = 0x6440000d;
constexpr int kMultiple = 3;
void* const kInPlace = reinterpret_cast<void*>(-1);
const char kName[] = "mpigrad's MPI of one rank";

}  // namespace

struct MPI_Status {
  int count_low, count_high_and_cancelled, source, tag, error;
};

namespace {

MPI_Status* const kIgnored = reinterpret_cast<MPI_Status*>(1);

using Copy = int (*)(int comm, int keyval, void* extra, void* in, void* out, int* flag);
using Delete = int (*)(int comm, int keyval, void* value, void* extra);

struct Keyval {
  Copy copy;
  Delete remove;
  void* extra;
};
struct Comm {
  std::map<int, void*> attributes;
  int handler = kReturn;
  std::string name;
};
struct Message {
  int comm, tag;
  std::vector<char> data;
  bool taken = false;
};
struct Operation {  // a request
  bool receives = false, persistent = false, active = true, done = false;
  int comm = 0, tag = 0, rank = 0;
  void* buffer = nullptr;
  Aint count = 0;
  Shared type;
  MPI_Status status{0, 0, kAnySource, kAnyTag, 0};
  std::shared_ptr<Message> sent;  // done when it is taken, if not null
};

std::recursive_mutex lock;
std::condition_variable_any changed;
bool initialized = false, finalized = false;
std::thread::id main_thread;
std::map<int, Comm> comms = {{kWorld, {{}, kReturn, "MPI_COMM_WORLD"}},
                             {kSelf, {{}, kReturn, "MPI_COMM_SELF"}}};
std::map<int, Keyval> keyvals;
std::map<int, bool> ops;  // whether they commute
std::map<int, std::map<std::string, std::string>> infos;
std::map<int, std::shared_ptr<Operation>> requests;
std::list<std::shared_ptr<Message>> messages;     // not received yet, oldest first
std::map<int, std::shared_ptr<Message>> probed;    // taken out by Improbe
std::list<std::shared_ptr<Operation>> receivers;  // without a message, oldest first

using Lock = std::unique_lock<std::recursive_mutex>;

void set_status(MPI_Status* status, int source, int tag, Aint bytes) {
  if (status == kIgnored || !status) return;
  status->source = source;
  status->tag = tag;
  status->count_low = static_cast<int>(bytes & 0xffffffff);
  status->count_high_and_cancelled = static_cast<int>(bytes >> 32) << 1;
}
Aint bytes_of(const MPI_Status& status) {
  return static_cast<Aint>(static_cast<uint32_t>(status.count_low)) |
         static_cast<Aint>(status.count_high_and_cancelled >> 1) << 32;
}
void copy_status(MPI_Status* to, const MPI_Status& from) {
  if (to == kIgnored || !to) return;
  const int error = to->error;  // as MPI says: only calls that complete several requests set it
  *to = from;
  to->error = error;
}

bool matches(const Operation& receive, const Message& message) {
  return receive.comm == message.comm && (receive.tag == kAnyTag || receive.tag == message.tag);
}

void finish(Operation& receive, Message& message) {
  const bool fits = unpack(message.data, receive.buffer, receive.count, *receive.type);
  set_status(&receive.status, 0, message.tag, message.data.size());
  receive.status.error = fits ? kSuccess : kTruncate;
  receive.done = message.taken = true;
  changed.notify_all();
}

int check(int comm, int type, int rank, int tag, bool receives) {
  if (!comms.count(comm)) return kComm;
  if (!type_of(type)) return kType;
  if (rank != 0 && rank != kProcNull && !(receives && rank == kAnySource)) return kRank;
  return tag < 0 && rank != kProcNull && !(receives && tag == kAnyTag) ? kTag : kSuccess;
}

// Sends or receives a request's message, as soon as its partner is there.
void start(const std::shared_ptr<Operation>& operation, bool synchronous = false) {
  Operation& o = *operation;
  o.active = true;
  o.done = false;
  o.status = {0, 0, kAnySource, kAnyTag, 0};
  if (o.rank == kProcNull) {
    set_status(&o.status, kProcNull, kAnyTag, 0);
    o.done = true;
    return;
  }
  if (!o.receives) {
    auto message = std::make_shared<Message>();
    *message = {o.comm, o.tag, pack(o.buffer, o.count, *o.type)};
    const auto receiver = std::find_if(receivers.begin(), receivers.end(), [&](const auto& r) {
      return matches(*r, *message);
    });
    if (receiver == receivers.end()) {
      messages.push_back(message);
    } else {
      finish(**receiver, *message);
      receivers.erase(receiver);
    }
    if (synchronous && !message->taken) o.sent = message;
    o.done = !o.sent;
    changed.notify_all();
    return;
  }
  const auto message = std::find_if(messages.begin(), messages.end(), [&](const auto& m) {
    return matches(o, *m);
  });
  if (message == messages.end()) {
    receivers.push_back(operation);
  } else {
    finish(o, **message);
    messages.erase(message);
  }
}

bool is_done(Operation& o) {
  if (o.sent && o.sent->taken) o.sent.reset(), o.done = true;
  return o.done;
}

std::shared_ptr<Operation> transfer(bool receives, const void* buffer, int count, int type,
                                    int rank, int tag, int comm) {
  auto operation = std::make_shared<Operation>();
  Operation& o = *operation;
  o.receives = receives, o.buffer = const_cast<void*>(buffer);
  o.count = count, o.type = type_of(type);
  o.rank = rank, o.tag = tag, o.comm = comm;
  return operation;
}

int post(bool receives, const void* buffer, int count, int type, int rank, int tag, int comm,
         int* request, bool synchronous = false) {
  Lock hold(lock);
  if (const int code = check(comm, type, rank, tag, receives)) return code;
  const auto operation = transfer(receives, buffer, count, type, rank, tag, comm);
  start(operation, synchronous);
  requests[*request = new_handle(kMadeRequest, requests)] = operation;
  return kSuccess;
}

int prepare(bool receives, const void* buffer, int count, int type, int rank, int tag, int comm,
            int* request) {
  Lock hold(lock);
  if (const int code = check(comm, type, rank, tag, receives)) return code;
  const auto operation = transfer(receives, buffer, count, type, rank, tag, comm);
  operation->persistent = true;
  operation->active = false;
  requests[*request = new_handle(kMadeRequest, requests)] = operation;
  return kSuccess;
}

int await(Lock& hold, const std::shared_ptr<Operation>& operation, MPI_Status* status) {
  changed.wait(hold, [&] { return is_done(*operation); });
  copy_status(status, operation->status);
  return operation->status.error;
}

// Ends a request that is done, and returns its error.
int complete(int* request, MPI_Status* status) {
  const auto operation = requests[*request];
  copy_status(status, operation->status);
  if (operation->persistent) {
    operation->active = false;
  } else {
    requests.erase(*request);
    *request = kNoRequest;
  }
  return operation->status.error;
}

// A request that is null, unknown or not active counts as done with an empty status.
bool is_idle(int request) {
  const auto at = requests.find(request);
  return at == requests.end() || !at->second->active;
}
void set_empty(MPI_Status* status) { copy_status(status, {0, 0, kAnySource, kAnyTag, 0}); }

int done_request(int code, int* request) {
  if (code) return code;
  Lock hold(lock);
  auto operation = std::make_shared<Operation>();
  operation->done = true;
  requests[*request = new_handle(kMadeRequest, requests)] = operation;
  return kSuccess;
}

int check_comm(int comm, int root = 0) {
  Lock hold(lock);
  return !comms.count(comm) ? kComm : root ? kRoot : kSuccess;
}

// What collectives do on one rank. `in` and `out` may be MPI_IN_PLACE.
int copy(const void* in, Aint n, int in_type, void* out, Aint m, int out_type, int comm) {
  Lock hold(lock);
  if (!comms.count(comm)) return kComm;
  if (in == kInPlace || out == kInPlace) return kSuccess;
  const Shared from = type_of(in_type), to = type_of(out_type);
  if (!from || !to) return kType;
  if (from->is_dense() && to->is_dense() && n * from->size <= m * to->size) {
    if (n > 0 && from->size > 0) std::memmove(out, in, n * from->size);
    return kSuccess;
  }
  return unpack(pack(in, n, *from), out, m, *to) ? kSuccess : kTruncate;
}
char* at(const void* buffer, Aint offset, int type) {
  Lock hold(lock);
  const Shared t = type_of(type);
  const bool moves = buffer != kInPlace && t;
  return const_cast<char*>(static_cast<const char*>(buffer)) + (moves ? offset * t->extent() : 0);
}

template <class Build>
int make_type(int* made, Build build) {
  Lock hold(lock);
  TypeBuilder builder;
  if (const int code = build(builder)) return code;
  *made = one_rank::add_type(builder.take());
  return kSuccess;
}

// A type of blocks of one old type: the length of block i, and its displacement in bytes.
template <class Length, class Place>
int make_blocks(int n, int old, int* made, Length length, Place place) {
  Shared t;
  {
    Lock hold(lock);
    t = type_of(old);
  }
  if (!t) return kType;
  return make_type(made, [&](TypeBuilder& builder) {
    for (int i = 0; i < n; ++i) builder.add(*t, length(i), place(i, t->extent()));
    return kSuccess;
  });
}

void delete_attributes(int handle) {
  auto attributes = std::move(comms[handle].attributes);
  for (const auto& [key, value] : attributes) {
    const auto keyval = keyvals.find(key);
    if (keyval != keyvals.end() && keyval->second.remove)
      keyval->second.remove(handle, key, value, keyval->second.extra);
  }
}

int text_to(const std::string& text, char* out, int* length) {
  std::memcpy(out, text.c_str(), text.size() + 1);
  *length = static_cast<int>(text.size());
  return kSuccess;
}

}  // namespace

// ---- The library and the process ----

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
  return text_to(kName, text, length);
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

// ---- Communicators, groups, attributes and error handlers ----

MPI_FUNCTION int MPI_Comm_size(int comm, int* size) { return *size = 1, check_comm(comm); }
MPI_FUNCTION int MPI_Comm_rank(int comm, int* rank) { return *rank = 0, check_comm(comm); }
MPI_FUNCTION int MPI_Comm_test_inter(int comm, int* flag) { return *flag = 0, check_comm(comm); }
MPI_FUNCTION int MPI_Topo_test(int comm, int* kind) {
  return *kind = kUndefined, check_comm(comm);
}
MPI_FUNCTION int MPI_Comm_get_parent(int* parent) { return *parent = kNoComm, kSuccess; }
MPI_FUNCTION int MPI_Comm_compare(int a, int b, int* result) {
  return *result = a == b ? 0 : 1, check_comm(a) ? kComm : check_comm(b);
}
MPI_FUNCTION int MPI_Comm_dup(int comm, int* made) {
  Lock hold(lock);
  if (!comms.count(comm)) return kComm;
  Comm copied;
  copied.handler = comms[comm].handler;
  for (const auto& [key, value] : comms[comm].attributes) {
    const auto keyval = keyvals.find(key);
    if (keyval == keyvals.end() || !keyval->second.copy) continue;
    void* out = nullptr;
    int flag = 0;
    if (const int code = keyval->second.copy(comm, key, keyval->second.extra, value, &out, &flag))
      return code;
    if (flag) copied.attributes[key] = out;
  }
  comms[*made = new_handle(kMadeComm, comms)] = std::move(copied);
  return kSuccess;
}
MPI_FUNCTION int MPI_Comm_dup_with_info(int comm, int, int* made) {
  return MPI_Comm_dup(comm, made);
}
MPI_FUNCTION int MPI_Comm_idup(int comm, int* made, int* request) {
  return done_request(MPI_Comm_dup(comm, made), request);
}
MPI_FUNCTION int MPI_Comm_split(int comm, int color, int, int* made) {
  Lock hold(lock);
  if (!comms.count(comm)) return kComm;
  *made = kNoComm;
  if (color == kUndefined) return kSuccess;
  const int handler = comms[comm].handler;
  comms[*made = new_handle(kMadeComm, comms)].handler = handler;
  return kSuccess;
}
MPI_FUNCTION int MPI_Comm_split_type(int comm, int kind, int key, int, int* made) {
  return MPI_Comm_split(comm, kind, key, made);
}
MPI_FUNCTION int MPI_Comm_create(int comm, int group, int* made) {
  return MPI_Comm_split(comm, group == kEmpty ? kUndefined : 0, 0, made);
}
MPI_FUNCTION int MPI_Comm_create_group(int comm, int group, int, int* made) {
  return MPI_Comm_create(comm, group, made);
}
MPI_FUNCTION int MPI_Comm_free(int* comm) {
  Lock hold(lock);
  if (!comms.count(*comm)) return kComm;
  delete_attributes(*comm);
  messages.remove_if([=](const auto& message) { return message->comm == *comm; });
  comms.erase(*comm);
  *comm = kNoComm;
  return kSuccess;
}
MPI_FUNCTION int MPI_Comm_disconnect(int* comm) { return MPI_Comm_free(comm); }
MPI_FUNCTION int MPI_Comm_set_name(int comm, const char* name) {
  Lock hold(lock);
  if (!comms.count(comm)) return kComm;
  comms[comm].name = std::string(name).substr(0, 127);
  return kSuccess;
}
MPI_FUNCTION int MPI_Comm_get_name(int comm, char* name, int* length) {
  Lock hold(lock);
  if (!comms.count(comm)) return kComm;
  return text_to(comms[comm].name, name, length);
}

// There are two groups: with this rank, and without.
MPI_FUNCTION int MPI_Comm_group(int comm, int* group) {
  return *group = kAlone, check_comm(comm);
}
MPI_FUNCTION int MPI_Group_size(int group, int* size) {
  return *size = group == kAlone, kSuccess;
}
MPI_FUNCTION int MPI_Group_rank(int group, int* rank) {
  return *rank = group == kAlone ? 0 : kUndefined, kSuccess;
}
MPI_FUNCTION int MPI_Group_free(int* group) { return *group = kNoGroup, kSuccess; }
MPI_FUNCTION int MPI_Group_compare(int a, int b, int* result) {
  return *result = a == b ? 0 : 3, kSuccess;
}
MPI_FUNCTION int MPI_Group_incl(int group, int n, const int* ranks, int* made) {
  if (n > 1 || (n == 1 && (ranks[0] != 0 || group != kAlone))) return kRank;
  return *made = n ? kAlone : kEmpty, kSuccess;
}
MPI_FUNCTION int MPI_Group_excl(int group, int n, const int*, int* made) {
  return *made = n ? kEmpty : group, kSuccess;
}
MPI_FUNCTION int MPI_Group_union(int a, int b, int* made) {
  return *made = a == kAlone || b == kAlone ? kAlone : kEmpty, kSuccess;
}
MPI_FUNCTION int MPI_Group_intersection(int a, int b, int* made) {
  return *made = a == kAlone && b == kAlone ? kAlone : kEmpty, kSuccess;
}
MPI_FUNCTION int MPI_Group_difference(int a, int b, int* made) {
  return *made = a == kAlone && b != kAlone ? kAlone : kEmpty, kSuccess;
}
MPI_FUNCTION int MPI_Group_translate_ranks(int, int n, const int* ranks, int to, int* result) {
  for (int i = 0; i < n; ++i)
    result[i] = ranks[i] == kProcNull ? kProcNull : to == kAlone ? ranks[i] : kUndefined;
  return kSuccess;
}

MPI_FUNCTION int MPI_Comm_create_keyval(Copy copy, Delete remove, int* keyval, void* extra) {
  Lock hold(lock);
  keyvals[*keyval = new_handle(kMadeKeyval, keyvals)] = {copy, remove, extra};
  return kSuccess;
}
MPI_FUNCTION int MPI_Comm_free_keyval(int* keyval) { return *keyval = kNoKeyval, kSuccess; }
MPI_FUNCTION int MPI_Comm_set_attr(int comm, int keyval, void* value) {
  Lock hold(lock);
  if (!comms.count(comm)) return kComm;
  const auto entry = keyvals.find(keyval);
  if (entry == keyvals.end()) return kKeyval;
  const auto old = comms[comm].attributes.find(keyval);
  if (old != comms[comm].attributes.end() && entry->second.remove)
    entry->second.remove(comm, keyval, old->second, entry->second.extra);
  comms[comm].attributes[keyval] = value;
  return kSuccess;
}
MPI_FUNCTION int MPI_Comm_get_attr(int comm, int keyval, void* value, int* flag) {
  Lock hold(lock);
  if (!comms.count(comm)) return kComm;
  static int tags = 0x7fffffff, none = kProcNull, io = 0, yes = 1, one = 1, last = 0x3fffffff;
  static int application = 0;
  const std::map<int, void*> predefined = {
      {kTagLimit, &tags}, {kHost, &none}, {kIo, &io}, {kGlobalTime, &yes},
      {kUniverse, &one}, {kLastCode, &last}, {kApplication, &application}};
  const auto& known = predefined.count(keyval) ? predefined : comms[comm].attributes;
  const auto entry = known.find(keyval);
  *flag = entry != known.end();
  if (*flag) std::memcpy(value, &entry->second, sizeof(void*));
  return kSuccess;
}
MPI_FUNCTION int MPI_Comm_delete_attr(int comm, int keyval) {
  Lock hold(lock);
  if (!comms.count(comm)) return kComm;
  const auto entry = comms[comm].attributes.find(keyval);
  if (entry == comms[comm].attributes.end()) return kKeyval;
  void* value = entry->second;
  comms[comm].attributes.erase(entry);
  const Keyval& key = keyvals[keyval];
  return key.remove ? key.remove(comm, keyval, value, key.extra) : kSuccess;
}

// Functions return their errors. Handlers are stored, and not called.
MPI_FUNCTION int MPI_Comm_create_errhandler(void*, int* handler) {
  Lock hold(lock);
  return *handler = kMadeHandler, kSuccess;
}
MPI_FUNCTION int MPI_Comm_set_errhandler(int comm, int handler) {
  Lock hold(lock);
  if (!comms.count(comm)) return kComm;
  return comms[comm].handler = handler, kSuccess;
}
MPI_FUNCTION int MPI_Comm_get_errhandler(int comm, int* handler) {
  Lock hold(lock);
  if (!comms.count(comm)) return kComm;
  return *handler = comms[comm].handler, kSuccess;
}
MPI_FUNCTION int MPI_Comm_call_errhandler(int, int) { return kSuccess; }
MPI_FUNCTION int MPI_Errhandler_free(int* handler) { return *handler = kNoHandler, kSuccess; }

MPI_FUNCTION int MPI_Dims_create(int nodes, int n, int* dims) {
  int left = nodes, free_axis = -1;
  for (int i = 0; i < n; ++i) {
    if (dims[i] < 0 || (dims[i] && left % dims[i])) return kDims;
    if (dims[i]) left /= dims[i];
    if (!dims[i] && free_axis < 0) free_axis = i;
  }
  if (free_axis < 0) return left == 1 ? kSuccess : kDims;
  for (int i = 0; i < n; ++i)
    if (!dims[i]) dims[i] = i == free_axis ? left : 1;
  return kSuccess;
}

MPI_FUNCTION int MPI_Info_create(int* info) {
  Lock hold(lock);
  infos[*info = new_handle(kMadeInfo, infos)];
  return kSuccess;
}
MPI_FUNCTION int MPI_Info_dup(int info, int* made) {
  Lock hold(lock);
  if (!infos.count(info)) return kInfo;
  const auto copied = infos[info];
  infos[*made = new_handle(kMadeInfo, infos)] = copied;
  return kSuccess;
}
MPI_FUNCTION int MPI_Info_set(int info, const char* key, const char* value) {
  Lock hold(lock);
  if (!infos.count(info)) return kInfo;
  infos[info][key] = value;
  return kSuccess;
}
MPI_FUNCTION int MPI_Info_get_nkeys(int info, int* n) {
  Lock hold(lock);
  if (!infos.count(info)) return kInfo;
  return *n = static_cast<int>(infos[info].size()), kSuccess;
}
MPI_FUNCTION int MPI_Info_get_nthkey(int info, int n, char* key) {
  Lock hold(lock);
  if (!infos.count(info) || n < 0 || n >= static_cast<int>(infos[info].size())) return kInfo;
  int length;
  return text_to(std::next(infos[info].begin(), n)->first, key, &length);
}
MPI_FUNCTION int MPI_Info_get_valuelen(int info, const char* key, int* length, int* flag) {
  Lock hold(lock);
  if (!infos.count(info)) return kInfo;
  *flag = infos[info].count(key) > 0;
  if (*flag) *length = static_cast<int>(infos[info][key].size());
  return kSuccess;
}
MPI_FUNCTION int MPI_Info_get(int info, const char* key, int room, char* value, int* flag) {
  Lock hold(lock);
  if (!infos.count(info)) return kInfo;
  *flag = infos[info].count(key) > 0;
  int length;
  return *flag ? text_to(infos[info][key].substr(0, room), value, &length) : kSuccess;
}
MPI_FUNCTION int MPI_Info_free(int* info) {
  Lock hold(lock);
  infos.erase(*info);
  return *info = kNoInfo, kSuccess;
}

// ---- Datatypes and operations ----

MPI_FUNCTION int MPI_Type_size_x(int type, long long* size) {
  Lock hold(lock);
  const Shared t = type_of(type);
  return t ? (*size = t->size, kSuccess) : kType;
}
MPI_FUNCTION int MPI_Type_size(int type, int* size) {
  long long bytes = 0;
  const int code = MPI_Type_size_x(type, &bytes);
  return *size = static_cast<int>(bytes), code;
}
MPI_FUNCTION int MPI_Type_get_extent(int type, Aint* lower, Aint* extent) {
  Lock hold(lock);
  const Shared t = type_of(type);
  return t ? (*lower = t->lower, *extent = t->extent(), kSuccess) : kType;
}
MPI_FUNCTION int MPI_Type_get_extent_x(int type, long long* lower, long long* extent) {
  Aint low = 0, size = 0;
  const int code = MPI_Type_get_extent(type, &low, &size);
  return *lower = low, *extent = size, code;
}
MPI_FUNCTION int MPI_Type_get_true_extent(int type, Aint* lower, Aint* extent) {
  Lock hold(lock);
  const Shared t = type_of(type);
  if (!t) return kType;
  Aint low = 0, high = 0;
  for (const auto& block : t->blocks) {
    const bool first = &block == t->blocks.data();
    low = first ? block.offset : std::min(low, block.offset);
    high = first ? block.offset + block.bytes : std::max(high, block.offset + block.bytes);
  }
  return *lower = low, *extent = high - low, kSuccess;
}
MPI_FUNCTION int MPI_Type_get_true_extent_x(int type, long long* lower, long long* extent) {
  Aint low = 0, size = 0;
  const int code = MPI_Type_get_true_extent(type, &low, &size);
  return *lower = low, *extent = size, code;
}
MPI_FUNCTION int MPI_Type_get_envelope(int type, int* n, int* places, int* types, int* kind) {
  // MPI_COMBINER_NAMED, or of made types MPI_COMBINER_DUP, whose contents nobody asks for.
  *n = *places = *types = 0;
  *kind = (type & one_rank::kKind) == one_rank::kMade ? 2 : 1;
  return kSuccess;
}
MPI_FUNCTION int MPI_Type_commit(int* type) {
  Lock hold(lock);
  return type_of(*type) ? kSuccess : kType;
}
MPI_FUNCTION int MPI_Type_free(int* type) {
  Lock hold(lock);
  const bool is_made = (*type & one_rank::kKind) == one_rank::kMade;
  if (!is_made || !one_rank::made_types().erase(*type)) return kType;
  return *type = kNoType, kSuccess;
}
MPI_FUNCTION int MPI_Type_contiguous(int n, int old, int* made) {
  return make_blocks(1, old, made, [=](int) { return n; }, [](int, Aint) { return Aint(0); });
}
MPI_FUNCTION int MPI_Type_dup(int old, int* made) {
  Lock hold(lock);
  const Shared t = type_of(old);
  return t ? (*made = one_rank::add_type(*t), kSuccess) : kType;
}
MPI_FUNCTION int MPI_Type_create_resized(int old, Aint lower, Aint extent, int* made) {
  Lock hold(lock);
  const Shared t = type_of(old);
  if (!t) return kType;
  Type type = *t;
  type.lower = lower, type.upper = lower + extent;
  return *made = one_rank::add_type(std::move(type)), kSuccess;
}
MPI_FUNCTION int MPI_Type_vector(int n, int length, int stride, int old, int* made) {
  return make_blocks(n, old, made, [=](int) { return length; },
                     [=](int i, Aint extent) { return Aint(i) * stride * extent; });
}
MPI_FUNCTION int MPI_Type_create_hvector(int n, int length, Aint stride, int old, int* made) {
  return make_blocks(n, old, made, [=](int) { return length; },
                     [=](int i, Aint) { return i * stride; });
}
MPI_FUNCTION int MPI_Type_indexed(int n, const int* lengths, const int* places, int old,
                                  int* made) {
  return make_blocks(n, old, made, [=](int i) { return lengths[i]; },
                     [=](int i, Aint extent) { return places[i] * extent; });
}
MPI_FUNCTION int MPI_Type_create_hindexed(int n, const int* lengths, const Aint* places, int old,
                                          int* made) {
  return make_blocks(n, old, made, [=](int i) { return lengths[i]; },
                     [=](int i, Aint) { return places[i]; });
}
MPI_FUNCTION int MPI_Type_create_indexed_block(int n, int length, const int* places, int old,
                                               int* made) {
  return make_blocks(n, old, made, [=](int) { return length; },
                     [=](int i, Aint extent) { return places[i] * extent; });
}
MPI_FUNCTION int MPI_Type_create_hindexed_block(int n, int length, const Aint* places, int old,
                                                int* made) {
  return make_blocks(n, old, made, [=](int) { return length; },
                     [=](int i, Aint) { return places[i]; });
}
MPI_FUNCTION int MPI_Type_create_struct(int n, const int* lengths, const Aint* places,
                                        const int* types, int* made) {
  return make_type(made, [&](TypeBuilder& builder) {
    for (int i = 0; i < n; ++i) {
      const Shared t = type_of(types[i]);
      if (!t) return kType;
      builder.add(*t, lengths[i], places[i]);
    }
    return kSuccess;
  });
}

MPI_FUNCTION int MPI_Op_create(void*, int commutes, int* op) {
  Lock hold(lock);
  ops[*op = new_handle(kMadeOp, ops)] = commutes != 0;
  return kSuccess;
}
MPI_FUNCTION int MPI_Op_free(int* op) {
  Lock hold(lock);
  ops.erase(*op);
  return *op = kNoOp, kSuccess;
}
MPI_FUNCTION int MPI_Op_commutative(int op, int* flag) {
  Lock hold(lock);
  const auto made = ops.find(op);
  return *flag = made == ops.end() || made->second, kSuccess;
}

// ---- Messages of the rank to itself ----

MPI_FUNCTION int MPI_Isend(const void* x, int n, int type, int to, int tag, int comm, int* r) {
  return post(false, x, n, type, to, tag, comm, r);
}
MPI_FUNCTION int MPI_Issend(const void* x, int n, int type, int to, int tag, int comm, int* r) {
  return post(false, x, n, type, to, tag, comm, r, true);
}
MPI_FUNCTION int MPI_Ibsend(const void* x, int n, int type, int to, int tag, int comm, int* r) {
  return MPI_Isend(x, n, type, to, tag, comm, r);
}
MPI_FUNCTION int MPI_Irsend(const void* x, int n, int type, int to, int tag, int comm, int* r) {
  return MPI_Isend(x, n, type, to, tag, comm, r);
}
MPI_FUNCTION int MPI_Irecv(void* y, int n, int type, int from, int tag, int comm, int* r) {
  return post(true, y, n, type, from, tag, comm, r);
}
MPI_FUNCTION int MPI_Send_init(const void* x, int n, int type, int to, int tag, int comm, int* r) {
  return prepare(false, x, n, type, to, tag, comm, r);
}
MPI_FUNCTION int MPI_Recv_init(void* y, int n, int type, int from, int tag, int comm, int* r) {
  return prepare(true, y, n, type, from, tag, comm, r);
}
MPI_FUNCTION int MPI_Start(int* request) {
  Lock hold(lock);
  const auto entry = requests.find(*request);
  if (entry == requests.end() || !entry->second->persistent) return kRequest;
  start(entry->second);
  return kSuccess;
}
MPI_FUNCTION int MPI_Startall(int n, int* all) {
  for (int i = 0; i < n; ++i)
    if (const int code = MPI_Start(all + i)) return code;
  return kSuccess;
}
MPI_FUNCTION int MPI_Send(const void* x, int n, int type, int to, int tag, int comm) {
  Lock hold(lock);
  if (const int code = check(comm, type, to, tag, false)) return code;
  start(transfer(false, x, n, type, to, tag, comm));
  return kSuccess;
}
MPI_FUNCTION int MPI_Bsend(const void* x, int n, int type, int to, int tag, int comm) {
  return MPI_Send(x, n, type, to, tag, comm);
}
// Every send is buffered.
MPI_FUNCTION int MPI_Buffer_attach(void*, int) { return kSuccess; }
MPI_FUNCTION int MPI_Buffer_detach(void* buffer, int* size) {
  void* const none = nullptr;
  std::memcpy(buffer, &none, sizeof none);
  return *size = 0, kSuccess;
}
MPI_FUNCTION int MPI_Rsend(const void* x, int n, int type, int to, int tag, int comm) {
  return MPI_Send(x, n, type, to, tag, comm);
}
MPI_FUNCTION int MPI_Ssend(const void* x, int n, int type, int to, int tag, int comm) {
  Lock hold(lock);
  if (const int code = check(comm, type, to, tag, false)) return code;
  const auto operation = transfer(false, x, n, type, to, tag, comm);
  start(operation, true);
  return await(hold, operation, kIgnored);
}
MPI_FUNCTION int MPI_Recv(void* y, int n, int type, int from, int tag, int comm,
                          MPI_Status* status) {
  Lock hold(lock);
  if (const int code = check(comm, type, from, tag, true)) return code;
  const auto operation = transfer(true, y, n, type, from, tag, comm);
  start(operation);
  return await(hold, operation, status);
}
MPI_FUNCTION int MPI_Sendrecv(const void* x, int n, int type, int to, int tag, void* y, int m,
                              int other, int from, int other_tag, int comm, MPI_Status* status) {
  const int code = MPI_Send(x, n, type, to, tag, comm);
  return code ? code : MPI_Recv(y, m, other, from, other_tag, comm, status);
}
MPI_FUNCTION int MPI_Sendrecv_replace(void* x, int n, int type, int to, int tag, int from,
                                      int other_tag, int comm, MPI_Status* status) {
  return MPI_Sendrecv(x, n, type, to, tag, x, n, type, from, other_tag, comm, status);
}
MPI_FUNCTION int MPI_Iprobe(int from, int tag, int comm, int* flag, MPI_Status* status) {
  Lock hold(lock);
  if (const int code = check(comm, one_rank::kBasic + 0x100, from, tag, true)) return code;
  *flag = from == kProcNull;
  if (*flag) set_status(status, kProcNull, kAnyTag, 0);
  for (const auto& message : messages) {
    if (*flag || message->comm != comm || (tag != kAnyTag && tag != message->tag)) continue;
    *flag = 1;
    set_status(status, 0, message->tag, message->data.size());
  }
  return kSuccess;
}
MPI_FUNCTION int MPI_Probe(int from, int tag, int comm, MPI_Status* status) {
  Lock hold(lock);
  int flag = 0, code = 0;
  changed.wait(hold, [&] { return (code = MPI_Iprobe(from, tag, comm, &flag, status)) || flag; });
  return code;
}

MPI_FUNCTION int MPI_Improbe(int from, int tag, int comm, int* flag, int* message,
                             MPI_Status* status) {
  Lock hold(lock);
  if (const int code = MPI_Iprobe(from, tag, comm, flag, status)) return code;
  *message = from == kProcNull ? kNullMessage : kNoMessage;
  if (!*flag || from == kProcNull) return kSuccess;
  const auto entry = std::find_if(messages.begin(), messages.end(), [&](const auto& m) {
    return m->comm == comm && (tag == kAnyTag || tag == m->tag);
  });
  probed[*message = new_handle(kMadeRequest, probed)] = *entry;
  messages.erase(entry);
  return kSuccess;
}
MPI_FUNCTION int MPI_Mprobe(int from, int tag, int comm, int* message, MPI_Status* status) {
  Lock hold(lock);
  int flag = 0, code = 0;
  changed.wait(hold, [&] {
    return (code = MPI_Improbe(from, tag, comm, &flag, message, status)) || flag;
  });
  return code;
}
MPI_FUNCTION int MPI_Imrecv(void* y, int n, int type, int* message, int* request) {
  Lock hold(lock);
  if (!type_of(type)) return kType;
  const auto entry = probed.find(*message);
  const bool null = *message == kNullMessage;
  if (entry == probed.end() && !null) return kRequest;
  const auto operation = transfer(true, y, n, type, null ? kProcNull : 0, kAnyTag, 0);
  if (null) {
    start(operation);
  } else {
    finish(*operation, *entry->second);
    probed.erase(entry);
  }
  requests[*request = new_handle(kMadeRequest, requests)] = operation;
  return *message = kNoMessage, kSuccess;
}
MPI_FUNCTION int MPI_Wait(int* request, MPI_Status* status);
MPI_FUNCTION int MPI_Mrecv(void* y, int n, int type, int* message, MPI_Status* status) {
  int request = 0;
  const int code = MPI_Imrecv(y, n, type, message, &request);
  return code ? code : MPI_Wait(&request, status);
}

MPI_FUNCTION int MPI_Test(int* request, int* flag, MPI_Status* status) {
  Lock hold(lock);
  if (is_idle(*request)) return *flag = 1, set_empty(status), kSuccess;
  *flag = is_done(*requests[*request]);
  return *flag ? complete(request, status) : kSuccess;
}
MPI_FUNCTION int MPI_Wait(int* request, MPI_Status* status) {
  Lock hold(lock);
  if (is_idle(*request)) return set_empty(status), kSuccess;
  const auto operation = requests[*request];
  changed.wait(hold, [&] { return is_done(*operation); });
  return complete(request, status);
}
MPI_FUNCTION int MPI_Waitall(int n, int* all, MPI_Status* statuses) {
  int result = kSuccess;
  for (int i = 0; i < n; ++i) {
    MPI_Status* status = statuses == kIgnored ? kIgnored : statuses + i;
    const int code = MPI_Wait(all + i, status);
    if (status != kIgnored) status->error = code;
    if (code) result = kInStatus;
  }
  return result;
}
MPI_FUNCTION int MPI_Testall(int n, int* all, int* flag, MPI_Status* statuses) {
  Lock hold(lock);
  *flag = 1;
  for (int i = 0; i < n; ++i) *flag = *flag && (is_idle(all[i]) || is_done(*requests[all[i]]));
  return *flag ? MPI_Waitall(n, all, statuses) : kSuccess;
}
MPI_FUNCTION int MPI_Testany(int n, int* all, int* index, int* flag, MPI_Status* status) {
  Lock hold(lock);
  bool idle = true;
  *index = kUndefined;
  for (int i = 0; i < n; ++i) {
    if (is_idle(all[i])) continue;
    idle = false;
    if (is_done(*requests[all[i]])) return *index = i, *flag = 1, complete(all + i, status);
  }
  *flag = idle;
  if (idle) set_empty(status);
  return kSuccess;
}
MPI_FUNCTION int MPI_Waitany(int n, int* all, int* index, MPI_Status* status) {
  Lock hold(lock);
  int flag = 0, code = 0;
  changed.wait(hold, [&] { return (code = MPI_Testany(n, all, index, &flag, status)) || flag; });
  return code;
}
MPI_FUNCTION int MPI_Testsome(int n, int* all, int* count, int* indices, MPI_Status* statuses) {
  Lock hold(lock);
  int result = kSuccess;
  bool idle = true;
  *count = 0;
  for (int i = 0; i < n; ++i) {
    if (is_idle(all[i])) continue;
    idle = false;
    if (!is_done(*requests[all[i]])) continue;
    MPI_Status* status = statuses == kIgnored ? kIgnored : statuses + *count;
    const int code = complete(all + i, status);
    if (status != kIgnored) status->error = code;
    if (code) result = kInStatus;
    indices[(*count)++] = i;
  }
  if (idle) *count = kUndefined;
  return result;
}
MPI_FUNCTION int MPI_Waitsome(int n, int* all, int* count, int* indices, MPI_Status* statuses) {
  Lock hold(lock);
  int code = 0;
  changed.wait(hold, [&] {
    return (code = MPI_Testsome(n, all, count, indices, statuses)) || *count;
  });
  return code;
}
MPI_FUNCTION int MPI_Request_get_status(int request, int* flag, MPI_Status* status) {
  Lock hold(lock);
  if (is_idle(request)) return *flag = 1, set_empty(status), kSuccess;
  *flag = is_done(*requests[request]);
  if (*flag) copy_status(status, requests[request]->status);
  return kSuccess;
}
MPI_FUNCTION int MPI_Request_free(int* request) {
  Lock hold(lock);
  requests.erase(*request);
  return *request = kNoRequest, kSuccess;
}
MPI_FUNCTION int MPI_Cancel(int* request) {
  Lock hold(lock);
  const auto entry = requests.find(*request);
  if (entry == requests.end()) return kRequest;
  const auto operation = entry->second;
  if (!is_done(*operation)) {
    receivers.remove(operation);
    messages.remove(operation->sent);
    operation->sent.reset();
    operation->done = true;
    operation->status.count_high_and_cancelled = 1;
    changed.notify_all();
  }
  return kSuccess;
}
MPI_FUNCTION int MPI_Test_cancelled(const MPI_Status* status, int* flag) {
  return *flag = status->count_high_and_cancelled & 1, kSuccess;
}
MPI_FUNCTION int MPI_Status_set_cancelled(MPI_Status* status, int flag) {
  status->count_high_and_cancelled = (status->count_high_and_cancelled & ~1) | (flag != 0);
  return kSuccess;
}
MPI_FUNCTION int MPI_Status_set_elements_x(MPI_Status* status, int type, long long n) {
  Lock hold(lock);
  const Shared t = type_of(type);
  if (!t) return kType;
  set_status(status, status->source, status->tag, n * (t->item ? t->item : t->size));
  return kSuccess;
}
MPI_FUNCTION int MPI_Get_elements_x(const MPI_Status* status, int type, long long* n) {
  Lock hold(lock);
  const Shared t = type_of(type);
  if (!t) return kType;
  *n = !t->size ? 0 : t->item ? bytes_of(*status) / t->item : kUndefined;
  return kSuccess;
}
MPI_FUNCTION int MPI_Get_count(const MPI_Status* status, int type, int* n) {
  Lock hold(lock);
  const Shared t = type_of(type);
  if (!t) return kType;
  const Aint bytes = bytes_of(*status), count = t->size ? bytes / t->size : 0;
  const bool whole = count * t->size == bytes && count <= 0x7fffffff;
  *n = !t->size ? 0 : whole ? static_cast<int>(count) : kUndefined;
  return kSuccess;
}

// ---- Collectives, and their forms that return a request ----

// UNPACKED removes the parentheses around a list.
#define UNPACKED(...) __VA_ARGS__
#define MPI_COLLECTIVE(name, small, parameters, arguments, body)                \
  MPI_FUNCTION int MPI_##name(UNPACKED parameters) { return body; }             \
  MPI_FUNCTION int MPI_I##small(UNPACKED parameters, int* request) {            \
    return done_request(MPI_##name arguments, request);                         \
  }

MPI_COLLECTIVE(Barrier, barrier, (int comm), (comm), check_comm(comm))
MPI_COLLECTIVE(Bcast, bcast, (void* x, int n, int t, int root, int comm), (x, n, t, root, comm),
               (void(x), void(n), void(t), check_comm(comm, root)))
MPI_COLLECTIVE(Gather, gather,
               (const void* x, int n, int t, void* y, int m, int u, int root, int comm),
               (x, n, t, y, m, u, root, comm),
               root ? kRoot : copy(x, n, t, y, m, u, comm))
MPI_COLLECTIVE(Gatherv, gatherv,
               (const void* x, int n, int t, void* y, const int* counts, const int* starts, int u,
                int root, int comm),
               (x, n, t, y, counts, starts, u, root, comm),
               root ? kRoot : copy(x, n, t, at(y, starts[0], u), counts[0], u, comm))
MPI_COLLECTIVE(Scatter, scatter,
               (const void* x, int n, int t, void* y, int m, int u, int root, int comm),
               (x, n, t, y, m, u, root, comm),
               root ? kRoot : copy(x, n, t, y, m, u, comm))
MPI_COLLECTIVE(Scatterv, scatterv,
               (const void* x, const int* counts, const int* starts, int t, void* y, int m, int u,
                int root, int comm),
               (x, counts, starts, t, y, m, u, root, comm),
               root ? kRoot : copy(at(x, starts[0], t), counts[0], t, y, m, u, comm))
MPI_COLLECTIVE(Allgather, allgather,
               (const void* x, int n, int t, void* y, int m, int u, int comm),
               (x, n, t, y, m, u, comm), copy(x, n, t, y, m, u, comm))
MPI_COLLECTIVE(Allgatherv, allgatherv,
               (const void* x, int n, int t, void* y, const int* counts, const int* starts, int u,
                int comm),
               (x, n, t, y, counts, starts, u, comm),
               copy(x, n, t, at(y, starts[0], u), counts[0], u, comm))
MPI_COLLECTIVE(Alltoall, alltoall,
               (const void* x, int n, int t, void* y, int m, int u, int comm),
               (x, n, t, y, m, u, comm), copy(x, n, t, y, m, u, comm))
MPI_COLLECTIVE(Alltoallv, alltoallv,
               (const void* x, const int* n, const int* starts, int t, void* y, const int* m,
                const int* places, int u, int comm),
               (x, n, starts, t, y, m, places, u, comm),
               x == kInPlace
                   ? check_comm(comm)
                   : copy(at(x, starts[0], t), n[0], t, at(y, places[0], u), m[0], u, comm))
MPI_COLLECTIVE(Alltoallw, alltoallw,
               (const void* x, const int* n, const int* starts, const int* t, void* y,
                const int* m, const int* places, const int* u, int comm),
               (x, n, starts, t, y, m, places, u, comm),
               x == kInPlace ? check_comm(comm)
                             : copy(static_cast<const char*>(x) + starts[0], n[0], t[0],
                                    static_cast<char*>(y) + places[0], m[0], u[0], comm))
MPI_COLLECTIVE(Reduce, reduce, (const void* x, void* y, int n, int t, int op, int root, int comm),
               (x, y, n, t, op, root, comm),
               (void(op), root ? kRoot : copy(x, n, t, y, n, t, comm)))
MPI_COLLECTIVE(Allreduce, allreduce, (const void* x, void* y, int n, int t, int op, int comm),
               (x, y, n, t, op, comm), (void(op), copy(x, n, t, y, n, t, comm)))
MPI_COLLECTIVE(Reduce_scatter, reduce_scatter,
               (const void* x, void* y, const int* counts, int t, int op, int comm),
               (x, y, counts, t, op, comm),
               (void(op), copy(x, counts[0], t, y, counts[0], t, comm)))
MPI_COLLECTIVE(Reduce_scatter_block, reduce_scatter_block,
               (const void* x, void* y, int n, int t, int op, int comm), (x, y, n, t, op, comm),
               (void(op), copy(x, n, t, y, n, t, comm)))
MPI_COLLECTIVE(Scan, scan, (const void* x, void* y, int n, int t, int op, int comm),
               (x, y, n, t, op, comm), (void(op), copy(x, n, t, y, n, t, comm)))
// The first rank gets nothing.
MPI_COLLECTIVE(Exscan, exscan, (const void* x, void* y, int n, int t, int op, int comm),
               (x, y, n, t, op, comm),
               (void(x), void(y), void(n), void(t), void(op), check_comm(comm)))

// ---- What one rank does without ----

int empty_list;
MPI_FUNCTION int* const MPI_UNWEIGHTED = &empty_list;
MPI_FUNCTION int* const MPI_WEIGHTS_EMPTY = &empty_list;

#define MPI_UNSUPPORTED(name) \
  MPI_FUNCTION int MPI_##name() { return kUnsupported; }
#include "one_rank/unsupported.def"

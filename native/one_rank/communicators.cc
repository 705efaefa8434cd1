// Communicators of one rank: groups, attributes, error handlers and info objects.
#include "one_rank/mpi.h"

using namespace one_rank;

namespace {

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

std::map<int, Comm> comms = {{kWorld, {{}, kReturn, "MPI_COMM_WORLD"}},
                             {kSelf, {{}, kReturn, "MPI_COMM_SELF"}}};
std::map<int, Keyval> keyvals;
std::map<int, std::map<std::string, std::string>> infos;

}  // namespace

namespace one_rank {

bool has_comm(int comm) { return comms.count(comm) > 0; }

int check_comm(int comm, int root) {
  Lock hold(lock);
  return !has_comm(comm) ? kComm : root ? kRoot : kSuccess;
}

void delete_attributes(int handle) {
  auto attributes = std::move(comms[handle].attributes);
  for (const auto& [key, value] : attributes) {
    const auto keyval = keyvals.find(key);
    if (keyval != keyvals.end() && keyval->second.remove)
      keyval->second.remove(handle, key, value, keyval->second.extra);
  }
}

}  // namespace one_rank

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
  forget_messages(*comm);
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

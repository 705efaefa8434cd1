// Messages of the rank to itself: a queue of what was sent, a queue of receives, and requests.
#include <list>

#include "one_rank/mpi.h"

using namespace one_rank;

namespace {

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

std::condition_variable_any changed;
std::map<int, std::shared_ptr<Operation>> requests;
std::list<std::shared_ptr<Message>> messages;     // not received yet, oldest first
std::map<int, std::shared_ptr<Message>> probed;   // taken out by Improbe
std::list<std::shared_ptr<Operation>> receivers;  // without a message, oldest first

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
  if (!has_comm(comm)) return kComm;
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

}  // namespace

namespace one_rank {

int done_request(int code, int* request) {
  if (code) return code;
  Lock hold(lock);
  auto operation = std::make_shared<Operation>();
  operation->done = true;
  requests[*request = new_handle(kMadeRequest, requests)] = operation;
  return kSuccess;
}

void forget_messages(int comm) {
  messages.remove_if([=](const auto& message) { return message->comm == comm; });
}

}  // namespace one_rank

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

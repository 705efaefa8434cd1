// The waits of a rank that is alone in its world. It can receive only what it has sent to itself,
// so a wait may never end. In a notebook, all would be lost if the process ended then: the wait
// ends by an error instead.
#include <signal.h>
#include <time.h>

#include <atomic>
#include <mutex>
#include <string>

#include "mpi/mpi_runtime.h"

namespace mpigrad {
namespace {

constexpr int kSpins = 2000;       // before it sleeps between two tests, and listens to Ctrl-C
constexpr long kNap = 500 * 1000;  // ns
std::atomic<bool> interrupted{false};
std::atomic<bool> stopped{false};
std::mutex text_lock;
std::string text;

// Notes Ctrl-C while a wait lasts, and passes it on to the handler of Python.
class Interrupts {
 public:
  ~Interrupts() {
    if (listening_) sigaction(SIGINT, &before(), nullptr);
  }
  void listen() {
    // Without a handler of Python, Ctrl-C ends the process or is ignored.
    const bool known = !sigaction(SIGINT, nullptr, &before());
    const bool handled = before().sa_flags & SA_SIGINFO || (before().sa_handler != SIG_DFL &&
                                                           before().sa_handler != SIG_IGN);
    if (listening_ || !known || !handled) return;
    struct sigaction action = {};
    action.sa_sigaction = note;
    action.sa_flags = SA_SIGINFO | SA_RESTART;
    sigemptyset(&action.sa_mask);
    listening_ = !sigaction(SIGINT, &action, &before());
  }

 private:
  static struct sigaction& before() {
    static struct sigaction action;
    return action;
  }
  static void note(int number, siginfo_t* info, void* context) {
    interrupted = true;
    const auto& next = before();
    if (next.sa_flags & SA_SIGINFO)
      next.sa_sigaction(number, info, context);
    else
      next.sa_handler(number);
  }
  bool listening_ = false;
};

}  // namespace

std::string stop_text() {
  const std::lock_guard<std::mutex> hold(text_lock);
  return interrupted.exchange(false) ? "interrupted while it waited for a message" : text;
}

void begin_waits() { stopped = interrupted = false; }

int await_alone(Request& request, Status& status, Stopped how) {
  static std::mutex one;  // one of two threads that wait listens to Ctrl-C
  Interrupts interrupts;
  std::unique_lock<std::mutex> turn;
  for (int i = 0;; ++i) {
    int complete = 0;
    const int code = call(runtime.mpi.Test, request.address(), &complete,
                          static_cast<void*>(status.bytes));
    if (code || complete) return code;
    if (i < kSpins) continue;
    if (i == kSpins) {
      turn = std::unique_lock<std::mutex>(one, std::try_to_lock);
      if (turn) interrupts.listen();
    }
    if (stopped || interrupted) {
      request.under_way = true;
      if (how == Stopped::cancels) cancel_request(request);
      return kStopped;
    }
    const timespec nap{0, kNap};
    nanosleep(&nap, nullptr);
  }
}

}  // namespace mpigrad

// Ends the waits of this rank by an error.
MPIGRAD_EXPORT void mpigrad_stop_waits(const char* reason) {
  {
    const std::lock_guard<std::mutex> hold(mpigrad::text_lock);
    mpigrad::text = reason;
  }
  mpigrad::stopped = true;
}

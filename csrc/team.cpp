// The threads of run_together, and the waiting of decode.h: clock, sleep and wake.
#include "team.h"

#include "decode.h"

#include <limits.h>
#include <pthread.h>
#include <sched.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

namespace linpix {
namespace {

constexpr uint64_t MAX_THREADS = 4096;  // and the unit of call numbers in call_
constexpr int HICCUP = 8;    // passes: a delay of up to so many is not a reason to give up
constexpr int SPINS = 2000;  // of some 40 cycles: 20 to 30 microseconds

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

class Team {
 public:
  void run(int members, const std::function<void(int)>& work) {
    const std::lock_guard<std::mutex> alone(one_call_at_a_time_);
    for (; size_ < members; ++size_) std::thread(&Team::serve, this, size_, call_.load()).detach();
    work_ = &work;
    left_.store(members - 1);
    call_.store((call_.load() / MAX_THREADS + 1) * MAX_THREADS + members);
    call_.notify_all();
    work(0);
    for (int spins = 0, left; (left = left_.load()) != 0; ++spins)
      if (spins < SPINS)
        pause_briefly();
      else
        left_.wait(left);
  }

 private:
  void serve(int index, uint64_t seen) {
    for (;;) {
      for (int spins = 0; call_.load() == seen; ++spins)
        if (spins < SPINS)
          pause_briefly();
        else
          call_.wait(seen);
      seen = call_.load();  // may miss a call that this thread has no part in, and whose end does not depend on it
      if (index >= (int)(seen % MAX_THREADS)) continue;
      (*work_)(index);
      if (left_.fetch_sub(1) == 1) left_.notify_all();
    }
  }

  std::mutex one_call_at_a_time_;
  int size_ = 1;  // threads, the caller's included
  const std::function<void(int)>* work_ = nullptr;
  std::atomic<uint64_t> call_{0};  // number of the call * MAX_THREADS + its members
  std::atomic<int> left_{0};
};

// Never destroyed, since its threads may still use it while the process ends. A forked child has none of these threads,
// so it gets a new team.
Team* team = new Team;
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { team = new Team; });

}  // namespace

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void give_up_if_late(Barrier& b, int64_t passes) {
  b.given_up = seconds_now() - b.began > b.patience * (double)(passes + HICCUP);
}

void sleep_while([[maybe_unused]] int& number, [[maybe_unused]] int so) {
#if defined(__linux__)
  syscall(SYS_futex, &number, FUTEX_WAIT_PRIVATE, so, nullptr, nullptr, 0);
#else
  sched_yield();
#endif
}

void say_changed([[maybe_unused]] int& number) {
#if defined(__linux__)
  syscall(SYS_futex, &number, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
}

void run_together(int members, const std::function<void(int)>& work) {
  if (members <= 1) return work(0);
  team->run(members, work);
}

}  // namespace linpix

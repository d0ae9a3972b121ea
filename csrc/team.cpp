#include "team.h"

#include <pthread.h>
#include <sched.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <atomic>
#include <mutex>
#include <thread>

namespace linpix {
namespace {

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
    for (; size_ < members; ++size_) std::thread(&Team::serve, this, size_, round_.load()).detach();
    work_ = &work;
    members_ = members;
    left_.store(size_ - 1);
    round_.fetch_add(1);
    round_.notify_all();
    work(0);
    for (int spins = 0, left; (left = left_.load()) != 0; ++spins)
      if (spins < SPINS)
        pause_briefly();
      else
        left_.wait(left);
  }

 private:
  void serve(int index, unsigned seen) {
    for (;;) {
      for (int spins = 0; round_.load() == seen; ++spins)
        if (spins < SPINS)
          pause_briefly();
        else
          round_.wait(seen);
      ++seen;
      if (index < members_) (*work_)(index);
      if (left_.fetch_sub(1) == 1) left_.notify_all();
    }
  }

  std::mutex one_call_at_a_time_;
  int size_ = 1;  // threads, the caller's included
  int members_ = 0;
  const std::function<void(int)>* work_ = nullptr;
  std::atomic<unsigned> round_{0};
  std::atomic<int> left_{0};
};

// Never destroyed: its threads may still look at it while the process ends. A forked child has none of them.
Team* team = new Team;
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { team = new Team; });

}  // namespace

void run_together(int members, const std::function<void(int)>& work) {
  if (members <= 1) return work(0);
  team->run(members, work);
}

}  // namespace linpix

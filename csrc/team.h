// Our own threads. Threads that wait for each other must run at the same time, which torch's parallel_for does not
// promise.
#pragma once

#include <functional>

namespace linpix {

// Runs work(0) .. work(members - 1) at the same time, work(0) on the calling thread, and returns when all are done.
// The threads are kept: after their work they spin for 20 to 30 microseconds, so that the next call finds them awake,
// and then sleep. One call runs at a time; calls from other threads wait. work must not throw.
void run_together(int members, const std::function<void(int)>& work);

}  // namespace linpix

// Our own threads: torch's parallel_for promises no concurrency, and threads that wait for each other need it.
#pragma once

#include <functional>

namespace linpix {

// Runs work(0) .. work(members - 1) at the same time, work(0) on the calling thread, and returns when all are done.
// The threads stay, spin for some microseconds after their work, and then sleep. One call runs at a time: another
// thread's waits. work must not throw.
void run_together(int members, const std::function<void(int)>& work);

}  // namespace linpix

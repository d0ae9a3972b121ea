// Who does what: rows are dealt to threads, or the columns of a few rows are.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "decode.h"
#include "team.h"

namespace linpix {
namespace {

// Zeroed, since columns beyond a matrix's own are read and multiplied by zero weights.
class Scratch {
 public:
  explicit Scratch(size_t bytes) : at_(std::aligned_alloc(64, (bytes + 63) / 64 * 64)) {
    if (!at_) throw std::bad_alloc();
    std::memset(at_.get(), 0, bytes);
  }
  void* get() const { return at_.get(); }

 private:
  struct Free {
    void operator()(void* at) const { std::free(at); }
  };
  std::unique_ptr<void, Free> at_;
};

// work(thread's share, its own scratch, the scratch that a share has in common, task). Split: all threads work on one
// task after the other, each on its columns. Else each claims tasks and does them alone, so nobody waits for anybody.
template <class Work>
void deal(const Kernels& kernels, const Model& m, int tasks, int tokens, bool split, int threads, Work work) {
  const Sizes sizes = kernels.sizes(m, tokens);
  std::vector<Scratch> own, common;
  for (int i = 0; i < threads; ++i) {
    own.emplace_back(sizes.own);
    if (i == 0 || !split) common.emplace_back(sizes.common);
  }
  if (split) {
    Barrier barrier{threads};
    run_together(threads, [&](int i) {
      for (int task = 0; task < tasks; ++task)
        work(Share{i, threads, &barrier}, own[i].get(), common[0].get(), task);
    });
    return;
  }
  int next = 0;
  run_together(threads, [&](int i) {
    for (int task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < tasks;)
      work(Share{0, 1, nullptr}, own[i].get(), common[i].get(), task);
  });
}

// Threads that find work in every product: no more than its panels, and no more than heads.
int sharers(const Model& m, int threads) {
  for (const Matrix* w : {&m.layer[0].out, &m.layer[0].up})
    threads = std::min(threads, (w->columns / TILE + Matrix::PANEL - 1) / Matrix::PANEL);
  return std::min(threads, m.heads);
}

}  // namespace

void decode(const Kernels& kernels, const Model& m, const Rows& rows, int threads) {
  if (rows.count == 0) return;
  const int together = sharers(m, threads);
  // Few rows share out the columns; where reading weights is dear, more rows than else share one reading of them.
  if (rows.count <= (m.far ? 8 : 4) * together)
    return deal(kernels, m, 1, rows.count, true, together, [&](Share share, void* own, void* common, int) {
      kernels.decode(m, rows, 0, rows.count, rows.count, share, own, common);
    });
  // Blocks of equal size, as many for each thread, and small enough that a thread whose core has other work to do can
  // leave some of its own to the others: 12 rows are two tiles.
  const int most_rows = m.far ? 32 : 12, rounds = (rows.count + most_rows * threads - 1) / (most_rows * threads);
  const int tasks = rounds * threads, most = (rows.count + tasks - 1) / tasks;
  deal(kernels, m, tasks, most, false, threads, [&](Share share, void* own, void* common, int task) {
    const int first = (int)((int64_t)task * rows.count / tasks), last = (int)((int64_t)(task + 1) * rows.count / tasks);
    kernels.decode(m, rows, first, last, most, share, own, common);
  });
}

void prefill(const Kernels& kernels, const Model& m, const Rows& rows, int threads) {
  const bool split = rows.count < threads;
  deal(kernels, m, rows.count, PREFILL_TOKENS, split, split ? sharers(m, threads) : threads,
       [&](Share share, void* own, void* common, int row) { kernels.prefill(m, rows, row, share, own, common); });
}

}  // namespace linpix

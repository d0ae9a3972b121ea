// Who does what: rows are dealt to threads, or the columns of a few rows are.
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

// work(thread's share, its own scratch, the scratch that a share has in common, task). With fewer tasks than it takes to
// keep the threads busy, all of them work on one after the other, each on its columns; else each claims tasks and does
// them alone, so nobody waits for anybody.
template <class Work>
void deal(const Kernels& kernels, const Model& m, int tasks, int tokens, bool split, int threads, Work work) {
  const size_t own_bytes = kernels.own_bytes(m, tokens), common_bytes = kernels.common_bytes(m, tokens);
  std::vector<Scratch> own, common;
  for (int i = 0; i < threads; ++i) {
    own.emplace_back(own_bytes);
    if (i == 0 || !split) common.emplace_back(common_bytes);
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

// Whether the weights, which every thread with rows of its own reads at its own pace, stay in the cache that they
// share: half of a last-level cache of 32 MiB. What the system says of its size may be that of all sockets together.
bool stay_in_cache(const Model& m) {
  const Layer& l = m.layer[0];
  long weights = 0;
  for (const Matrix* w : {&l.qkv, &l.out, &l.up, &l.down}) weights += (long)w->groups * w->columns * w->depth;
  return weights * m.layers * (m.bf16 ? 2 : 4) <= 16 << 20;
}

}  // namespace

void decode(const Kernels& kernels, const Model& m, const Rows& rows, int threads) {
  if (rows.count == 0) return;
  const bool cheap = stay_in_cache(m);  // where reading weights is dear, more rows share one reading of them
  if (rows.count <= (cheap ? 4 : 8) * threads)
    return deal(kernels, m, 1, rows.count, threads > 1, threads, [&](Share share, void* own, void* common, int) {
      kernels.decode(m, rows, 0, rows.count, rows.count, share, own, common);
    });
  // blocks of equal size, as many for each thread
  const int most_rows = cheap ? 16 : 32, rounds = (rows.count + most_rows * threads - 1) / (most_rows * threads);
  const int tasks = rounds * threads, most = (rows.count + tasks - 1) / tasks;
  deal(kernels, m, tasks, most, false, threads, [&](Share share, void* own, void* common, int task) {
    const int first = (int)((int64_t)task * rows.count / tasks), last = (int)((int64_t)(task + 1) * rows.count / tasks);
    kernels.decode(m, rows, first, last, most, share, own, common);
  });
}

void prefill(const Kernels& kernels, const Model& m, const Rows& rows, int threads) {
  deal(kernels, m, rows.count, PREFILL_TOKENS, rows.count < threads, threads,
       [&](Share share, void* own, void* common, int row) { kernels.prefill(m, rows, row, share, own, common); });
}

}  // namespace linpix

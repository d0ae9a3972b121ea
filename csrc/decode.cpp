// Divides the work of a call among threads: by rows, or by the columns of the matrices if there are only a few rows.
//
// Why it is fast: threads that have rows of their own never wait for each other, and fetch a state into their core's
// caches once for many passes. Threads that share columns and lose a core to another program give up sharing in the
// middle of the call, and go on by rows.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "decode.h"
#include "team.h"

namespace linpix {
namespace {

// Zeroed, since padded columns are read and multiplied by zero weights: zero times a stale NaN would be NaN.
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

// The rows of a call in blocks. A free thread takes the block that is furthest behind and not taken. While more blocks
// than threads are waiting, it does all of the block's passes, so that a state is fetched into a core's caches once. Of
// the last blocks it does half of the passes that are left, or a few: a thread that loses its core for a moment then
// delays few passes, and no other block.
class Blocks {
 public:
  Blocks(int rows, int count, int threads, int64_t from, int64_t steps) : steps_(steps), threads_(threads) {
    for (int i = 0; i < count; ++i)
      blocks_.push_back({(int)((int64_t)i * rows / count), (int)((int64_t)(i + 1) * rows / count), from, from});
    taken_.resize(count);
  }

  // The block that this thread works on next. done: the one before, or -1. Returns -1 when other threads have the rest.
  int next(int done) {
    const std::lock_guard<std::mutex> alone(mutex_);
    if (done >= 0) taken_[done] = false;
    int behind = -1, waiting = 0;
    for (int i = 0; i < (int)blocks_.size(); ++i) {
      if (taken_[i] || blocks_[i].to == steps_) continue;
      ++waiting;
      if (behind < 0 || blocks_[i].to < blocks_[behind].to) behind = i;
    }
    if (behind < 0) return -1;
    Piece& piece = blocks_[behind];
    const int64_t left = steps_ - piece.to;
    piece.from = piece.to;
    piece.to += waiting > threads_ ? left : std::min(left, std::max(LEAST, left / 2));
    taken_[behind] = true;
    return behind;
  }
  Piece operator[](int i) const { return blocks_[i]; }  // only for the thread that has it

 private:
  static constexpr int64_t LEAST = 3;  // passes: fewer are not worth fetching the state of a block

  const int64_t steps_;
  const int threads_;
  std::vector<Piece> blocks_;
  std::vector<char> taken_;
  std::mutex mutex_;
};

// Scratch of all threads for passes of so many tokens. split: all threads work on the same tokens, each on its columns.
struct Workplaces {
  Workplaces(const Kernels& kernels, const Model& m, int tokens, bool split, int threads) {
    const Sizes sizes = kernels.sizes(m, tokens);
    for (int i = 0; i < threads; ++i) {
      own.emplace_back(sizes.own);
      if (i == 0 || !split) common.emplace_back(sizes.common);
    }
  }

  std::vector<Scratch> own, common;
};

// How many threads can share the columns: each needs a panel of every product, and a head.
int sharers(const Model& m, int threads) {
  for (const Matrix* w : {&m.layer[0].out, &m.layer[0].up})
    threads = std::min(threads, (w->columns / TILE + Matrix::PANEL - 1) / Matrix::PANEL);
  return std::min(threads, m.heads);
}

void fold_in(const Kernels& kernels, FoldIn fold, const Model& m, const Rows& rows, int threads) {
  const bool split = rows.count < threads;
  const int members = split ? sharers(m, threads) : threads;
  Workplaces at(kernels, m, PREFILL_TOKENS, split, members);
  Barrier barrier{members};
  int next = 0;
  run_together(members, [&](int i) {
    const Share share = split ? Share{i, members, &barrier} : Share{0, 1, nullptr};
    const auto claim = [&](int last) { return split ? last + 1 : __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); };
    for (int row = -1; (row = claim(row)) < rows.count;)
      fold(m, rows, row, share, at.own[i].get(), at.common[split ? 0 : i].get());
  });
}

}  // namespace

void decode(const Kernels& kernels, const Model& m, const Rows& rows, int threads, double patience) {
  if (rows.count == 0) return;
  const int together = sharers(m, threads);
  int64_t from = 0;
  // With a few rows, threads share the columns. If weights exceed the cache, they also do so with more rows, since all
  // threads together then read the weights once.
  if (rows.count <= (m.exceeds_cache ? 8 : 4) * together) {
    Workplaces at(kernels, m, rows.count, true, together);
    Barrier barrier{together, patience};
    const Piece piece{0, rows.count, 0, rows.most_passes};
    std::vector<int64_t> done(together);
    run_together(together, [&](int i) {
      done[i] = kernels.decode(m, rows, piece, rows.count, Share{i, together, &barrier}, at.own[i].get(),
                               at.common[0].get());
    });
    if (!barrier.given_up) return;
    from = done[0];
    threads = std::min(threads, rows.count);
  }
  // The same number of blocks for each thread, of about equal size.
  const int most_rows = m.exceeds_cache ? 32 : kernels.block_rows, rounds = (rows.count + most_rows * threads - 1) / (most_rows * threads);
  const int count = rounds * threads, most = (rows.count + count - 1) / count;
  Workplaces at(kernels, m, most, false, threads);
  Blocks blocks(rows.count, count, threads, from, rows.most_passes);
  run_together(threads, [&](int i) {
    for (int block = -1; (block = blocks.next(block)) >= 0;)
      kernels.decode(m, rows, blocks[block], most, Share{0, 1, nullptr}, at.own[i].get(), at.common[i].get());
  });
}

void prefill(const Kernels& kernels, const Model& m, const Rows& rows, int threads) {
  fold_in(kernels, kernels.prefill, m, rows, threads);
}
void read(const Kernels& kernels, const Model& m, const Rows& rows, int threads) {
  fold_in(kernels, kernels.read, m, rows, threads);
}

}  // namespace linpix

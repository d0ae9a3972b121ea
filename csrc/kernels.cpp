// One version of the kernels: decode, prefill and read, as one thread runs them. Compiled once for each instruction
// set, which LINPIX_ISA names.
//
// Every number is computed in one order, whatever else is in the batch: products add up k by k, and everything else is
// computed per row. So an image does not depend on the images beside it, bit for bit.

#include "attention.h"
#include "causal.h"
#include "decode.h"
#include "drawing.h"
#include "pass.h"

namespace linpix::LINPIX_ISA {
namespace {

Token token_of(const Model& m, const Rows& rows, int row) {
  return token_at(m, rows, row, rows.positions[row] + (rows.taken ? rows.taken[row] : 0));
}

// Takes a row through the next sub-pixels that skip the layers: those that the model has read or that lie amid
// background.
template <class T>
void run_ahead(const Model& m, const Rows& rows, int row, Pass<T>& pass) {
  for (int64_t& taken = rows.taken[row]; taken < rows.steps[row]; ++taken) {
    const Token k = token_of(m, rows, row);
    if (was_read(m, k)) continue;
    if (!amid_background(m, k, rows.canvas + k.slot * m.subpixels)) return;
    finish_token(m, rows, row, taken, pass.skip(k), pass.scratch, true, [&] { pass.skip_others(); });
  }
}

template <class T>
int64_t decode(const Model& m, const Rows& rows, Piece piece, int most, Share share, void* own, void* common) {
  Pass<T> pass(m, rows, share, most, own, common);
  const int width = m.head.groups * m.head.columns;
  if (share.index == 0)
    for (int row = piece.first; row < piece.last; ++row) run_ahead(m, rows, row, pass);
  wait(share);
  for (int64_t step = piece.from; step < piece.to; ++step) {
    pass.tokens = 0;
    for (int row = piece.first; row < piece.last; ++row) {
      if (rows.taken[row] < rows.steps[row]) pass.token[pass.tokens++] = token_of(m, rows, row);
    }
    if (!pass.tokens) break;
    pass.run(true);
    if (share.index == 0) {
      pass.head();
      int r = 0;
      for (int row = piece.first; row < piece.last; ++row) {
        if (rows.taken[row] >= rows.steps[row]) continue;
        ++rows.passes[row];
        finish_token(m, rows, row, rows.taken[row]++, pass.parameters + r++ * width, pass.scratch, false, [] {});
        run_ahead(m, rows, row, pass);
      }
    }
    if (share.index == 0 && share.count > 1) give_up_if_late(*share.barrier, step + 1 - piece.from);
    wait(share);  // for the sub-pixels that the next step looks up
    if (share.count > 1 && share.barrier->given_up) return step + 1;
  }
  return piece.to;
}

template <class T>
void prefill(const Model& m, const Rows& rows, int row, Share share, void* own, void* common) {
  Pass<T> pass(m, rows, share, PREFILL_TOKENS, own, common);
  const int64_t end = rows.positions[row] + rows.steps[row];
  Token next = token_of(m, rows, row);
  if (!next.folded) ++next.t;
  next.folded = true;
  while (next.t < end) {
    pass.tokens = 0;
    for (; next.t < end && pass.tokens < PREFILL_TOKENS; ++next.t)
      if (!was_read(m, next) && !amid_background(m, next, rows.canvas + next.slot * m.subpixels))
        pass.token[pass.tokens++] = next;
    if (!pass.tokens) return;
    const bool features = m.background >= 0;  // of the last token: sub-pixels after it may be amid background
    pass.run(features);
    if (features && share.index == 0) pass.finish_last();
    wait(share);
  }
}

template <class T>
void read(const Model& m, const Rows& rows, int row, Share share, void* own, void* common) {
  Pass<T> pass(m, rows, share, PREFILL_TOKENS, own, common);
  for (int64_t next = rows.offsets[row]; next < rows.offsets[row + 1];) {
    pass.tokens = 0;
    for (; next < rows.offsets[row + 1] && pass.tokens < PREFILL_TOKENS; ++next)
      pass.token[pass.tokens++] = {rows.slots[row], next, 0, true};
    pass.run(true);
    if (share.index == 0) memcpy(rows.features + row * m.d_model, pass.finish_last(), m.d_model * sizeof(float));
    wait(share);
  }
}

template <class T>
Sizes sizes_of(const Model& m, int tokens) {
  const Pass<T> counted(m, Rows{}, Share{}, tokens, nullptr, nullptr);
  return {counted.own_bytes, counted.common_bytes};
}
Sizes sizes(const Model& m, int tokens) { return (m.bf16 ? sizes_of<bfloat16> : sizes_of<float>)(m, tokens); }
int64_t decode_any(const Model& m, const Rows& rows, Piece piece, int most, Share share, void* own, void* common) {
  return (m.bf16 ? decode<bfloat16> : decode<float>)(m, rows, piece, most, share, own, common);
}
void prefill_any(const Model& m, const Rows& rows, int row, Share share, void* own, void* common) {
  (m.bf16 ? prefill<bfloat16> : prefill<float>)(m, rows, row, share, own, common);
}
void read_any(const Model& m, const Rows& rows, int row, Share share, void* own, void* common) {
  (m.bf16 ? read<bfloat16> : read<float>)(m, rows, row, share, own, common);
}

}  // namespace
}  // namespace linpix::LINPIX_ISA

#define LINPIX_STRING_(name) #name
#define LINPIX_STRING(name) LINPIX_STRING_(name)
#define LINPIX_JOIN_(a, b) a##b
#define LINPIX_JOIN(a, b) LINPIX_JOIN_(a, b)

namespace linpix {
const Kernels LINPIX_JOIN(kernels_, LINPIX_ISA) = {
    LINPIX_STRING(LINPIX_ISA),
#if defined(__AVX512BF16__)
    true,
#else
    false,
#endif
    LINPIX_ISA::BLOCK_ROWS, LINPIX_ISA::sizes, LINPIX_ISA::decode_any, LINPIX_ISA::prefill_any, LINPIX_ISA::read_any,
    LINPIX_ISA::attend, {LINPIX_ISA::scratch_bytes<LINPIX_ISA::Forward>, LINPIX_ISA::run<LINPIX_ISA::Forward>},
    {LINPIX_ISA::scratch_bytes<LINPIX_ISA::Backward>, LINPIX_ISA::run<LINPIX_ISA::Backward>}};
}

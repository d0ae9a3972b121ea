// One version of the kernels: compiled once for each instruction set, LINPIX_ISA naming it.
//
// Every number is computed in one order, whatever else is in the batch: products add up k by k, and all else is per
// row. So an image does not depend on its neighbours, bit for bit.

#include "attention.h"
#include "causal.h"
#include "decode.h"
#include "drawing.h"
#include "pass.h"

namespace linpix::LINPIX_ISA {
namespace {

template <class T>
int64_t decode(const Model& m, const Rows& rows, Piece piece, int most, Share share, void* own, void* common) {
  Pass<T> pass(m, rows, share, most, own, common);
  const int width = m.head.groups * m.head.columns;
  for (int64_t step = piece.from; step < piece.to; ++step) {
    pass.tokens = 0;
    for (int row = piece.first; row < piece.last; ++row) {
      if (step >= rows.steps[row]) continue;
      const int64_t t = rows.positions[row] + step;
      pass.token[pass.tokens++] = {rows.slots[row], t, rows.start[row], !(m.marginal && t == 0)};
    }
    if (!pass.tokens) break;
    pass.run(true);
    if (share.index == 0) {
      pass.head();
      int r = 0;
      for (int row = piece.first; row < piece.last; ++row)
        if (step < rows.steps[row]) finish_subpixel(m, rows, row, step, pass.parameters + r++ * width, pass.scratch);
    }
    if (share.index == 0 && share.count > 1) give_up_if_late(*share.barrier, step + 1 - piece.from);
    wait(share);  // until the sub-pixels that the next step looks up are there
    if (share.count > 1 && share.barrier->given_up) return step + 1;
  }
  return piece.to;
}

template <class T>
void prefill(const Model& m, const Rows& rows, int row, Share share, void* own, void* common) {
  Pass<T> pass(m, rows, share, PREFILL_TOKENS, own, common);
  const int64_t from = rows.positions[row], end = from + rows.steps[row];
  for (int64_t t = m.marginal && from == 0 ? 1 : from; t < end; t += PREFILL_TOKENS) {
    const int64_t left = end - t;
    pass.tokens = left < PREFILL_TOKENS ? (int)left : PREFILL_TOKENS;
    for (int i = 0; i < pass.tokens; ++i) pass.token[i] = {rows.slots[row], t + i, rows.start[row], true};
    pass.run(false);
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
    LINPIX_ISA::sizes, LINPIX_ISA::decode_any, LINPIX_ISA::prefill_any,
    LINPIX_ISA::attend, {LINPIX_ISA::scratch_bytes<LINPIX_ISA::Forward>, LINPIX_ISA::run<LINPIX_ISA::Forward>},
    {LINPIX_ISA::scratch_bytes<LINPIX_ISA::Backward>, LINPIX_ISA::run<LINPIX_ISA::Backward>}};
}

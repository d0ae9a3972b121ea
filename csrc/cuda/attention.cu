// Starts the state kernel: that of attention.h, for each size of heads that there is one for, or that of recall.h.
#include "attention.h"

#include "recall.h"

namespace linpix {
namespace {

using namespace linpix::LINPIX_ISA;

template <class Kernel>
int start(const AttendCall& call, int shared_bytes, void* stream, bool overlapped) {
  constexpr int WARPS = Kernel::BLOCK / WARP;
  const Grid grid = {call.pass.rows.count, (call.pass.model.heads + WARPS - 1) / WARPS};
  return launch<Kernel>(grid, WARPS * shared_bytes, stream, overlapped, call);
}

template <class T>
int start(const AttendCall& call, void* stream, bool overlapped) {
  using One = Recall<T, true>;
  using Many = Recall<T, false>;
  if (call.pass.pools.scale)
    return call.pass.tokens == 1 ? start<One>(call, One::WARP_BYTES, stream, overlapped)
                                 : start<Many>(call, Many::WARP_BYTES, stream, overlapped);
  switch (call.pass.model.key_dim) {
    case 8: return start<Attend<T, 8>>(call, 0, stream, overlapped);
    case 16: return start<Attend<T, 16>>(call, 0, stream, overlapped);
    default: return start<Attend<T, 32>>(call, 0, stream, overlapped);
  }
}

}  // namespace

bool attends(int key_dim, int value_dim) {
  return key_dim == value_dim && (key_dim == 8 || key_dim == 16 || key_dim == 32);
}

int attend(const AttendCall& call, void* stream, bool overlapped) {
  return call.pass.model.bf16 ? start<bfloat16>(call, stream, overlapped) : start<float>(call, stream, overlapped);
}

}  // namespace linpix

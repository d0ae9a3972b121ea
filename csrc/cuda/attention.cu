// Starts the state kernel of attention.h, for each size of heads that there is a kernel for; or that of recall.h.
#include "attention.h"

#include "recall.h"

namespace linpix {
namespace {

using namespace linpix::LINPIX_ISA;

template <class Kernel>
int start(const AttendCall& call, int shared_bytes, void* stream, bool overlapped) {
  constexpr int WARPS = Kernel::BLOCK / WARP;
  const int64_t blocks = ((int64_t)call.pass.rows.count * call.pass.model.heads + WARPS - 1) / WARPS;
  return launch<Kernel>(Grid{blocks}, WARPS * shared_bytes, stream, overlapped, call);
}

template <class T, class S>
int start(const AttendCall& call, void* stream, bool overlapped) {
  switch (call.pass.model.key_dim) {
    case 8: return start<Attend<T, S, 8, 8>>(call, 0, stream, overlapped);
    case 16: return start<Attend<T, S, 16, 16>>(call, 0, stream, overlapped);
    default: return start<Attend<T, S, 32, 32>>(call, 0, stream, overlapped);
  }
}

template <class T>
int start(const AttendCall& call, void* stream, bool overlapped) {
  const Pass& p = call.pass;
  if (!p.pools.scale) return start<T, float>(call, stream, overlapped);
  using One = Recall<T, true>;
  using Many = Recall<T, false>;
  if (p.pools.defer != One::DEFER || p.model.key_dim != One::D || without("recall"))
    return start<T, float16>(call, stream, overlapped);
  return p.tokens == 1 ? start<One>(call, One::WARP_BYTES, stream, overlapped)
                       : start<Many>(call, Many::WARP_BYTES, stream, overlapped);
}

}  // namespace

bool attends(int key_dim, int value_dim) {
  return key_dim == value_dim && (key_dim == 8 || key_dim == 16 || key_dim == 32);
}

int attend(const AttendCall& call, void* stream, bool overlapped) {
  return call.pass.model.bf16 ? start<bfloat16>(call, stream, overlapped) : start<float>(call, stream, overlapped);
}

}  // namespace linpix

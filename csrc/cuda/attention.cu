// Starts the state kernel of attention.h, for each size of heads that there is a kernel for.
#include "attention.h"

namespace linpix {
namespace {

using namespace linpix::LINPIX_ISA;

template <class T, class S, int SIZE>
int start(const AttendCall& call, void* stream, bool overlapped) {
  using Kernel = Attend<T, S, SIZE, SIZE>;
  constexpr int WARPS = Kernel::BLOCK / WARP;
  const int64_t blocks = ((int64_t)call.pass.rows.count * call.pass.model.heads + WARPS - 1) / WARPS;
  return launch<Kernel>(Grid{blocks}, 0, stream, overlapped, call);
}

template <class T, class S>
int start(const AttendCall& call, void* stream, bool overlapped) {
  switch (call.pass.model.key_dim) {
    case 8: return start<T, S, 8>(call, stream, overlapped);
    case 16: return start<T, S, 16>(call, stream, overlapped);
    default: return start<T, S, 32>(call, stream, overlapped);
  }
}

}  // namespace

bool attends(int key_dim, int value_dim) {
  return key_dim == value_dim && (key_dim == 8 || key_dim == 16 || key_dim == 32);
}

int attend(const AttendCall& call, void* stream, bool overlapped) {
  const bool half = call.pass.pools.scale;
  if (call.pass.model.bf16)
    return half ? start<bfloat16, float16>(call, stream, overlapped) : start<bfloat16, float>(call, stream, overlapped);
  return half ? start<float, float16>(call, stream, overlapped) : start<float, float>(call, stream, overlapped);
}

}  // namespace linpix

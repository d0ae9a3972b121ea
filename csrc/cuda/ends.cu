// Starts the kernels of ends.h; and explain.
#include "ends.h"

namespace linpix {

using namespace linpix::LINPIX_ISA;

int embed(const Pass& pass, void* stream) {
  constexpr int WARPS = Embed::BLOCK / WARP;
  const int64_t tokens = (int64_t)pass.rows.count * pass.tokens;
  return launch<Embed>(Grid{(tokens + WARPS - 1) / WARPS}, 0, stream, false, pass);
}

int finish(const EndCall& given, void* stream) {
  constexpr int WARPS = Finish::BLOCK / WARP, SHARED = 64 << 10;
  const Model& m = given.pass.model;
  EndCall call = given;
  const int head = m.d_model * m.head.groups * m.mixtures * (int)sizeof(float);
  int bytes = WARPS * Finish::floats(m) * (int)sizeof(float);
  call.keep_head = bytes + head <= SHARED;
  if (call.keep_head) bytes += head;
  return launch<Finish>(Grid{(call.pass.rows.count + WARPS - 1) / WARPS}, bytes, stream, true, call);
}

const char* explain(int error) {
#if defined(__CUDACC__)
  return cudaGetErrorString((cudaError_t)error);
#else
  return error ? "invalid argument" : "no error";
#endif
}

}  // namespace linpix

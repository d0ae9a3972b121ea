// Starts the kernels of background.h.
#include "background.h"

namespace linpix {

using namespace linpix::LINPIX_ISA;

int run_ahead(const Pass& pass, void* stream, bool overlapped) {
  return launch<RunAhead>(Grid{pass.rows.count}, RunAhead::floats(pass.model) * (int)sizeof(float), stream, overlapped,
                          pass);
}

int keep_last(const EndCall& call, void* stream) {
  constexpr int WARPS = KeepLast::BLOCK / WARP;
  return launch<KeepLast>(Grid{(call.pass.rows.count + WARPS - 1) / WARPS},
                          WARPS * call.pass.model.d_model * (int)sizeof(float), stream, true, call);
}

}  // namespace linpix

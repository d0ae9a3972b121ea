// Starts the kernels of causal.h, for each type of the elements.
#include "causal.h"

#include "kernels.h"

namespace linpix {
namespace {

using namespace linpix::LINPIX_ISA;

template <template <class, class> class Kernel, class R, class E>
int start(const Sequences& s, void* stream) {
  Kernel<R, E> kernel;
  const int bytes = (int)((kernel.lay_out(nullptr, s.D, s.M) - (R*)nullptr) * sizeof(R));
  return launch<Kernel<R, E>>(Grid{s.count * s.heads}, bytes, stream, false, s);
}

template <template <class, class> class Kernel>
int start(const Sequences& s, void* stream) {
  if (s.element == Element::float64) return start<Kernel, double, double>(s, stream);
  if (s.element == Element::bfloat16) return start<Kernel, float, bfloat16>(s, stream);
  return start<Kernel, float, float>(s, stream);
}

}  // namespace

int causal(const Sequences& s, void* stream) { return start<CausalForward>(s, stream); }
int causal_backward(const Sequences& s, void* stream) { return start<CausalBackward>(s, stream); }

}  // namespace linpix

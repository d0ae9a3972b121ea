// Starts the kernels of causal.h, for each type of the elements.
#include "causal.h"

#include "kernels.h"

namespace linpix {
namespace {

using namespace linpix::LINPIX_ISA;

template <bool BACKWARD, class R, class E, int SIZE>
int start(const Sequences& s, void* stream) {
  using Kernel = Causal<R, E, SIZE, BACKWARD>;
  return launch<Kernel>(Grid{s.count * s.heads}, sizeof(typename Kernel::Shared), stream, false, s);
}

template <bool BACKWARD, class R, class E>
int start(const Sequences& s, void* stream) {
  if (s.D <= 32 && s.M <= 32) return start<BACKWARD, R, E, 32>(s, stream);
  return start<BACKWARD, R, E, MAX_SEQUENCE_HEAD>(s, stream);
}

template <bool BACKWARD>
int start(const Sequences& s, void* stream) {
  if (s.element == Element::float64) return start<BACKWARD, double, double>(s, stream);
  if (s.element == Element::bfloat16) return start<BACKWARD, float, bfloat16>(s, stream);
  return start<BACKWARD, float, float>(s, stream);
}

}  // namespace

int causal(const Sequences& s, void* stream) { return start<false>(s, stream); }
int causal_backward(const Sequences& s, void* stream) { return start<true>(s, stream); }

}  // namespace linpix

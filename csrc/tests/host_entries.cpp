// Calls every function of csrc/cuda that the host may call, on a machine without a GPU. Each must return a CUDA error:
// if a host function calls a device function, nvcc compiles it without a warning, but the process ends at that call.
// Prints a line for each call, the function's name and its result, and takes every path through it.
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "../cuda/kernels.h"

using namespace linpix;

namespace {

// The name is printed before the call, so if the process ends, the last line names the function.
template <class F>
void report(const char* name, F call) {
  std::printf("%s", name);
  std::fflush(stdout);
  std::printf(" %d\n", call());
}

Model model(Layer& layer, int head, bool bf16) {
  const auto matrix = [](int groups, int columns, int depth) { return Matrix{nullptr, nullptr, groups, columns, depth}; };
  Model m{};
  m.layers = 1, m.heads = 2, m.key_dim = m.value_dim = head, m.d_model = 32, m.d_ff = 64, m.mixtures = 10;
  m.subpixels = m.tokens = 64, m.token_size = 1, m.pre_norm = true, m.bf16 = bf16;
  layer.qkv = matrix(2, 96, 32), layer.out = matrix(1, 32, 64);
  layer.up = matrix(1, 64, 32), layer.down = matrix(1, 32, 64);
  m.layer = &layer;
  m.head = matrix(3, 10, 32);
  return m;
}

}  // namespace

int main() {
  for (const Element element : {Element::float32, Element::bfloat16, Element::float64}) {
    Sequences s{};
    s.count = s.heads = 1, s.D = s.M = 8;
    s.element = element;
    report("causal", [&] { return causal(s, nullptr); });
    report("causal_backward", [&] { return causal_backward(s, nullptr); });
  }
  for (const int head : {8, 16, 32})
    for (const bool bf16 : {false, true})
      for (const bool half : {false, true}) {
        const float scale = 1;
        Layer layer{};
        Pass pass{};
        pass.model = model(layer, head, bf16);
        pass.rows.count = 1;
        pass.pools.scale = half ? &scale : nullptr;
        pass.tokens = 1;
        for (const int tokens : {1, 2}) {
          Pass some = pass;
          some.tokens = tokens;
          report("attend", [&] { return attend({some, 0, 96, 64}, nullptr, true); });
        }
        report("embed", [&] { return embed(pass, nullptr); });
        report("finish", [&] { return finish({pass, {}}, nullptr); });
        report("decode", [&] { return decode(pass, 1, nullptr); });
        report("prefill", [&] { return prefill(pass, 1, nullptr); });
        int64_t tokens = 0;
        Pass skips = pass;
        skips.pools.tokens = &tokens;
        skips.model.background = 0;
        report("run_ahead", [&] { return run_ahead(skips, nullptr, true); });
        report("keep_last", [&] { return keep_last({skips, {}}, nullptr); });
        report("decode", [&] { return decode(skips, 1, nullptr); });
        report("prefill", [&] { return prefill(skips, 1, nullptr); });
        for (const Product product : {Product::qkv, Product::up, Product::add})
          for (const int rows : {1, 200, 2000}) {
            ProductCall call{};
            call.weights = layer.up;
            call.rows = rows;
            call.d_model = 32;
            report("multiply", [&] { return multiply(product, call, bf16, nullptr); });
          }
      }
  report("attends", [] { return attends(8, 8) ? 100 : 0; });                       // these two do not use a GPU
  report("explain", [] { return std::strlen(explain(100)) > 0 ? 100 : 0; });
}

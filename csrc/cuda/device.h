// The GPU and the stream that an operator runs on, and a check of what a launch returned.
#pragma once

#include <torch/csrc/stable/tensor.h>
#if defined(USE_CUDA)
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#endif

#include "../checks.h"
#include "kernels.h"
#if !defined(USE_CUDA)
#include "threads.h"
#endif

namespace linpix {

#if defined(USE_CUDA)
// Makes a tensor's GPU the current one while it lives; stream: the current stream there.
class Device {
 public:
  explicit Device(const Tensor& on) : guard_(on.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream));
  }
  void* stream = nullptr;

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};
#else
struct Device {
  explicit Device(const Tensor&) {}
  void* stream = nullptr;
};
#endif

inline void check(const char* op, int error) {
#if !defined(USE_CUDA)
  gpu::finish_launch();
#endif
  STD_TORCH_CHECK(error == 0, op, ": CUDA error: ", explain(error));
}

}  // namespace linpix

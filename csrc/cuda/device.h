// Which GPU and stream an operator runs on, and what a launch answered.
#pragma once

#include <torch/csrc/stable/tensor.h>
#if defined(USE_CUDA)
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#endif

#include "../checks.h"
#include "kernels.h"

namespace linpix {

#if defined(USE_CUDA)
// Makes the GPU of a tensor the current one, and knows its stream.
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

inline void check(const char* op, int error) { STD_TORCH_CHECK(error == 0, op, ": CUDA error: ", explain(error)); }

}  // namespace linpix

// Which library is being compiled: the processor's (LINPIX_ISA names the instruction set of its kernels), the GPU's
// (USE_CUDA), or the GPU's emulated on the host for tests (LINPIX_EMULATE).
#pragma once

#if defined(USE_CUDA) || defined(LINPIX_EMULATE)
#define LINPIX_ONE_LANE
#define LINPIX_ISA gpu
#endif

#if defined(__CUDACC__)
#define LINPIX_HOST_DEVICE __host__ __device__ inline
#else
#define LINPIX_HOST_DEVICE inline __attribute__((always_inline))
#endif

// How kernels are written, and started. A kernel is written once and runs on a GPU, or in tests as loops on the host.
//
// A kernel is a type with BLOCK (threads of a block), PER_SM (how many blocks must fit on a multiprocessor, which
// limits its registers) and `run(Threads<BLOCK>&, const Call&)`. Its body is a list of phases. In a phase, `each`,
// every thread does something, and reads nothing that another thread writes in the same phase. Between phases that
// depend on each other there is a `barrier`. What a thread keeps from phase to phase is an `Own`. `add_across` and
// `multiply` work across the 32 lanes of a warp and need no barrier.
//
// On a GPU (of compute capability 8.0 or later) all this is inlined to plain CUDA, so it costs nothing. On the host each
// warp of a block is a fibre, which runs to the next barrier or its end while the others wait, and a phase is a loop over
// its lanes. Tests reverse both orders (`backwards`): if that changes a result, a barrier is missing. An asynchronous copy
// is done when it is waited for and not before. Registers and shared memory hold UNWRITTEN until something is written
// there.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "lane.h"

#include <stdlib.h>
#if defined(__CUDACC__)
#include <atomic>
#else
#include <ucontext.h>

#include <functional>
#include <memory>
#include <vector>
#endif

namespace linpix::LINPIX_ISA {

constexpr int WARP = 32;

struct alignas(16) Chunk {
  uint32_t word[4];
};

struct Grid {
  int64_t x;  // blocks
  int y = 1;
};

#if defined(__CUDACC__)
// ------------------------------------------------------------------------------------------------ on a GPU

#define LINPIX_BODY static __device__ __forceinline__ void

template <int COUNT>
class Threads {
 public:
  template <class T>
  struct Own {  // in the thread's registers; the index is used only on the host
    T mine;
    __device__ __forceinline__ T& operator[](int) { return mine; }
  };

  int64_t x;  // this block of the grid
  int y;
  char* shared;

  __device__ __forceinline__ Threads(char* shared) : x(blockIdx.x), y((int)blockIdx.y), shared(shared) {}

  template <class F>
  __device__ __forceinline__ void each(F f) {
    f((int)threadIdx.x);
  }
  __device__ __forceinline__ void barrier() { __syncthreads(); }

  // Until here a kernel may run beside the one before it, and may read only what that one does not write. After this
  // call it sees all that was written before, and the kernel after it may begin in the same way.
  __device__ __forceinline__ void follow() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  }

  // value(thread) of each lane becomes the sum of its own and that of lane (its number xor stride).
  template <class F>
  __device__ __forceinline__ void add_across(int stride, F value) {
    auto& mine = value((int)threadIdx.x);
    mine = mine + __shfl_xor_sync(0xffffffffu, mine, stride);
  }

  // sums(thread)[4] += a(thread)[4] x b(thread)[2] for a warp: 16 x 16 times 16 x 8 bfloat16 (or float16), laid out in
  // registers as in mma.m16n8k16 (PTX manual, "Matrix Fragments for mma.m16n8k16").
  template <class Number = bfloat16, class A, class B, class C>
  __device__ __forceinline__ void multiply(A a, B b, C sums) {
    const uint32_t *l = a((int)threadIdx.x), *r = b((int)threadIdx.x);
    float(&c)[4] = sums((int)threadIdx.x);
    if constexpr (std::is_same_v<Number, float16>)
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(l[0]), "r"(l[1]), "r"(l[2]), "r"(l[3]), "r"(r[0]), "r"(r[1]));
    else
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(l[0]), "r"(l[1]), "r"(l[2]), "r"(l[3]), "r"(r[0]), "r"(r[1]));
  }

  // Four 8 x 8 matrices of 16 bits from shared memory, for a warp. from(thread): row lane % 8 of matrix lane / 8, 16
  // bytes. to(thread)[m] becomes elements (lane / 4, lane % 4 * 2) of matrix m and the next, or if TRANSPOSED
  // (lane % 4 * 2, lane / 4) and the one below: the layout of multiply.
  template <bool TRANSPOSED, class To, class From>
  __device__ __forceinline__ void matrices(To to, From from) {
    const int i = (int)threadIdx.x;
    uint32_t* r = to(i);
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(from(i));
    if constexpr (TRANSPOSED)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
    else
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
  }

  // value(thread) of each lane becomes the largest of its warp.
  template <class F>
  __device__ __forceinline__ void max_across(F value) {
    uint32_t& mine = value((int)threadIdx.x);
    mine = __reduce_max_sync(0xffffffffu, mine);
  }

  // Whether the condition holds for this warp, whose lanes must agree.
  template <class F>
  __device__ __forceinline__ bool some_warp(F condition) {
    return condition((int)threadIdx.x);
  }
  __device__ __forceinline__ void warp_barrier() { __syncwarp(); }  // if phases depend on threads of their warp only

  // Starts a copy of 16 bytes into shared memory; wait() waits for its end.
  __device__ __forceinline__ void copy(void* to, const void* from) {
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
  }
  __device__ __forceinline__ void end_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // Waits until at most LEFT groups of this thread's copies are under way. Other threads see them after a barrier.
  template <int LEFT>
  __device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
  }
};

// Loads and stores that do not stay in the caches: state is not needed again before the next step.
__device__ __forceinline__ Chunk load_streaming(const void* from) {
  const uint4 x = __ldcs((const uint4*)from);
  return {{x.x, x.y, x.z, x.w}};
}
__device__ __forceinline__ void store_streaming(void* to, const Chunk& c) {
  __stcs((uint4*)to, make_uint4(c.word[0], c.word[1], c.word[2], c.word[3]));
}
// Past the first-level cache: for what an earlier kernel wrote that this one need not wait for (see follow).
template <class T>
__device__ __forceinline__ T load_fresh(const T* from) {
  return __ldcg(from);
}
__device__ __forceinline__ void count(int64_t* at, int64_t n) { atomicAdd((unsigned long long*)at, (unsigned long long)n); }

template <class Kernel, class Call>
__global__ void __launch_bounds__(Kernel::BLOCK, Kernel::PER_SM) enter(const __grid_constant__ Call call) {
  extern __shared__ __align__(128) char shared[];
  Threads<Kernel::BLOCK> threads(shared);
  Kernel::run(threads, call);
}

struct Gpu {
  int device = 0, major = 0, shared_bytes = 0;  // compute capability; shared memory that a block may ask for
};
inline Gpu this_gpu() {  // the current one; not kept, since another one may be current at the next launch
  Gpu gpu;
  cudaGetDevice(&gpu.device);
  cudaDeviceGetAttribute(&gpu.major, cudaDevAttrComputeCapabilityMajor, gpu.device);
  cudaDeviceGetAttribute(&gpu.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu.device);
  return gpu;
}

// Lets a kernel ask for all the shared memory that this GPU has: once for each, since of two threads that set what their
// own launch needs, one would take it from the other.
template <class Kernel, class Call>
cudaError_t allow_shared_memory() {
  static std::atomic<uint64_t> allowed{0};  // a bit for each GPU
  const Gpu gpu = this_gpu();
  const uint64_t bit = gpu.device < 64 ? (uint64_t)1 << gpu.device : 0;
  if (allowed.load() & bit) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(enter<Kernel, Call>, cudaFuncAttributeMaxDynamicSharedMemorySize, gpu.shared_bytes);
  if (error == cudaSuccess) allowed.fetch_or(bit);
  return error;
}

// Whether a kernel may begin while the one before it ends; LINPIX_OVERLAP=0 forbids it.
inline bool overlaps() {
  const char* wanted = getenv("LINPIX_OVERLAP");
  return this_gpu().major >= 9 && !(wanted && wanted[0] == '0');
}

// Returns a call's error, and clears it in the runtime, so that it is not reported for a later launch.
inline int taken_back(cudaError_t error) {
  (void)cudaGetLastError();
  return (int)error;
}

// Starts a kernel on stream, after what is there already. `overlapped`: the launch before it was one of ours, so this
// one may begin while that one ends (see follow; on Hopper and later). Returns a cudaError_t.
template <class Kernel, class Call>
int launch(Grid grid, int shared_bytes, void* stream, bool overlapped, const Call& call) {
  if (shared_bytes > 48 << 10) {
    const cudaError_t error = allow_shared_memory<Kernel, Call>();
    if (error != cudaSuccess) return taken_back(error);
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3((unsigned)grid.x, (unsigned)grid.y);
  config.blockDim = dim3(Kernel::BLOCK);
  config.dynamicSmemBytes = (size_t)shared_bytes;
  config.stream = (cudaStream_t)stream;
  config.attrs = &overlap;
  config.numAttrs = overlapped && overlaps() ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, enter<Kernel, Call>, call);
  return error == cudaSuccess ? 0 : taken_back(error);
}

#else
// ------------------------------------------------------------------------------------------------ on the host

#define LINPIX_BODY static void

inline bool backwards = false;
constexpr uint32_t UNWRITTEN = 0x7fffffff;  // in each word: a NaN as any float, out of range as a number or address
inline std::vector<Chunk> unwritten(size_t bytes) {
  return std::vector<Chunk>(bytes / sizeof(Chunk) + 1, Chunk{{UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN}});
}

struct Fibre {  // of one warp
  static constexpr size_t STACK_BYTES = 256 << 10;
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
  bool done;
};
struct Block {  // that this thread of the host runs
  ucontext_t scheduler;
  std::vector<Fibre> warps;
  std::function<void()> body;
  int warp;  // the one that runs now
};
inline thread_local Block block;
inline void run_warp() {
  block.body();
  block.warps[block.warp].done = true;
}
inline void prepare(Fibre& fibre) {
  getcontext(&fibre.context);
  fibre.context.uc_stack.ss_sp = fibre.stack.get();
  fibre.context.uc_stack.ss_size = Fibre::STACK_BYTES;
  fibre.context.uc_link = &block.scheduler;  // where its end leads
  makecontext(&fibre.context, run_warp, 0);
  fibre.done = false;
}

template <int COUNT>
class Threads {
 public:
  template <class T>
  class Own {
    static_assert(std::is_trivially_copyable_v<T>, "what lies in registers");

   public:
    T& operator[](int thread) { return ((T*)lanes_.data())[thread % WARP]; }

   private:
    std::vector<Chunk> lanes_ = unwritten(WARP * sizeof(T));
  };

  int64_t x;
  int y;
  char* shared;

  Threads(int64_t x, int y, char* shared) : x(x), y(y), shared(shared), warp_(block.warp) {}

  template <class F>
  void each(F f) {
    for (int lane = 0; lane < WARP; ++lane) f(first() + (backwards ? WARP - 1 - lane : lane));
  }
  void barrier() { swapcontext(&block.warps[warp_].context, &block.scheduler); }
  void warp_barrier() {}
  void follow() {}

  template <class F>
  void add_across(int stride, F value) {
    std::vector<std::decay_t<decltype(value(0))>> before;
    for (int i = 0; i < WARP; ++i) before.push_back(value(first() + i));
    for (int i = 0; i < WARP; ++i) value(first() + i) = before[i] + before[i ^ stride];
  }

  template <class Number = bfloat16, class A, class B, class C>
  void multiply(A a, B b, C sums) {
    const auto half = [](uint32_t pair, int i) { return to_float(Number{(uint16_t)(pair >> 16 * i)}); };
    for (int row = 0; row < 16; ++row)
      for (int column = 0; column < 8; ++column) {
        float& sum = sums(first() + row % 8 * 4 + column / 2)[row / 8 * 2 + column % 2];
        for (int k = 0; k < 16; ++k)
          sum = multiply_add(half(a(first() + row % 8 * 4 + k % 8 / 2)[row / 8 + k / 8 * 2], k % 2),
                             half(b(first() + column * 4 + k % 8 / 2)[k / 8], k % 2), sum);
      }
  }

  template <bool TRANSPOSED, class To, class From>
  void matrices(To to, From from) {
    for (int i = 0; i < WARP; ++i)
      for (int m = 0; m < 4; ++m) {
        const auto at = [&](int row, int column) {
          return (uint32_t)((const uint16_t*)aligned(from(first() + m * 8 + row)))[column];
        };
        const int far = i / 4, near = i % 4 * 2;
        to(first() + i)[m] =
            TRANSPOSED ? at(near, far) | at(near + 1, far) << 16 : at(far, near) | at(far, near + 1) << 16;
      }
  }

  template <class F>
  void max_across(F value) {
    uint32_t most = 0;
    for (int i = 0; i < WARP; ++i) most = value(first() + i) > most ? value(first() + i) : most;
    for (int i = 0; i < WARP; ++i) value(first() + i) = most;
  }

  template <class F>
  bool some_warp(F condition) {
    const bool holds = condition(first());
    for (int i = 1; i < WARP; ++i)
      if ((bool)condition(first() + i) != holds) abort();  // on a GPU the lanes would part
    return holds;
  }

  void copy(void* to, const void* from) {
    open_.push_back([=] { memcpy((void*)aligned(to), aligned(from), 16); });
  }
  // A group is that of the whole warp: every lane calls this, and the last of its calls ends the group.
  void end_group() {
    if (++ended_ % WARP == 0) {
      groups_.push_back(std::move(open_));
      open_.clear();
    }
  }
  template <int LEFT>
  void wait() {
    if (++waited_ % WARP) return;
    while (groups_.size() > LEFT) {
      for (const auto& copy : groups_.front()) copy();
      groups_.erase(groups_.begin());
    }
  }

 private:
  int warp_;
  std::vector<std::function<void()>> open_;
  std::vector<std::vector<std::function<void()>>> groups_;
  int64_t ended_ = 0, waited_ = 0;

  int first() const { return warp_ * WARP; }
  static const void* aligned(const void* place) {
    if ((uintptr_t)place % 16) abort();  // an error on a GPU
    return place;
  }
};

inline Chunk load_streaming(const void* from) {
  Chunk c;
  memcpy(&c, from, sizeof c);
  return c;
}
inline void store_streaming(void* to, const Chunk& c) { memcpy(to, &c, sizeof c); }
template <class T>
T load_fresh(const T* from) {
  return *from;
}
inline void count(int64_t* at, int64_t n) { *at += n; }

struct Gpu {
  int shared_bytes = 163 << 10;  // as with compute capability 8.0; tests change it
};
inline Gpu& this_gpu() {
  static Gpu gpu;
  return gpu;
}

template <class Kernel, class Call>
void run_block(int64_t x, int y, int shared_bytes, const Call& call) {
  constexpr int WARPS = Kernel::BLOCK / WARP;
  std::vector<Chunk> memory = unwritten(shared_bytes);
  block.body = [&] {
    Threads<Kernel::BLOCK> threads(x, y, (char*)memory.data());
    Kernel::run(threads, call);
  };
  if (block.warps.size() < WARPS) block.warps.resize(WARPS);
  for (int warp = 0; warp < WARPS; ++warp) prepare(block.warps[warp]);
  for (int left = WARPS; left > 0;)
    for (int turn = 0; turn < WARPS; ++turn) {
      block.warp = backwards ? WARPS - 1 - turn : turn;
      Fibre& fibre = block.warps[block.warp];
      if (fibre.done) continue;
      swapcontext(&block.scheduler, &fibre.context);
      left -= fibre.done;
    }
}

template <class Kernel, class Call>
int launch(Grid grid, int shared_bytes, void*, bool, const Call& call) {
  if (shared_bytes > this_gpu().shared_bytes) return 1;  // cudaErrorInvalidValue, as on a GPU
  for (int y = 0; y < grid.y; ++y)
    for (int64_t x = 0; x < grid.x; ++x) run_block<Kernel>(backwards ? grid.x - 1 - x : x, y, shared_bytes, call);
  return 0;
}
#endif

}  // namespace linpix::LINPIX_ISA

// How kernels are written, and started. A kernel is written once and runs on a GPU, or in tests as loops on the host.
//
// A kernel is a type with BLOCK (threads of a block), PER_SM (how many blocks must fit on a multiprocessor, which
// limits its registers) and `run(Threads<BLOCK>&, const Call&)`. Its body is a list of phases. In a phase, `each`,
// every thread does something, and reads nothing that another thread writes in the same phase. Between phases that
// depend on each other there is a `barrier`. What a thread keeps from phase to phase is an `Own`. `add_across` and
// `multiply` work across the 32 lanes of a warp and need no barrier.
//
// On a GPU (of compute capability 8.0 or later) all this is inlined to plain CUDA, so it costs nothing. On the host each
// thread is a fibre, which runs until it must wait for the others of its warp or block. The first blocks of a kernel run
// to `follow` before those of the kernel before it go on. Tests reverse the order of threads, warps and blocks
// (`backwards`): if that changes a result, a barrier is missing. An asynchronous copy is done when it is waited for and
// not before; backwards, at once. Registers and shared memory hold UNWRITTEN until something is written there.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "lane.h"

#include <stdlib.h>
#if defined(__CUDACC__)
#include <atomic>
#else
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
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
    __builtin_assume(threadIdx.x < COUNT);  // so i / WARP and i % WARP are one instruction each
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

enum class Stop { end, follow, block, warp, add, multiply, matrices, max };  // the last five wait for their warp only
constexpr int SHARED_BYTES = 48;  // of what a lane shows the others of its warp

struct Fibre {  // runs a thread of a block, then one of another; it never ends
  static constexpr size_t STACK_BYTES = 128 << 10;
  jmp_buf place, scheduler;
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
  std::function<void()> work;
  bool begun = false;
  Stop at;

  void stop(Stop why) {
    at = why;
    if (!_setjmp(place)) _longjmp(scheduler, 1);
  }
};
inline thread_local Fibre* running;
inline void run_fibre() {
  for (Fibre& fibre = *running;;) {
    fibre.work();
    fibre.stop(Stop::end);
  }
}
inline void begin(Fibre& fibre) {
  fibre.begun = true;
  getcontext(&fibre.context);
  fibre.context.uc_stack.ss_sp = fibre.stack.get();
  fibre.context.uc_stack.ss_size = Fibre::STACK_BYTES;
  makecontext(&fibre.context, run_fibre, 0);
  setcontext(&fibre.context);
}
inline thread_local std::vector<std::unique_ptr<Fibre>> idle;

// A block that runs; work: what a thread of it does.
struct Block {
  std::vector<std::unique_ptr<Fibre>> fibres;
  std::vector<Chunk> memory;
  std::vector<char> shown;  // by the lanes of each warp, twice: one is read while the other is written
  bool ahead;               // begins before the launch before its own has ended

  Block(int threads, int shared_bytes, bool ahead, std::function<void(Block&, int)> work)
      : memory(shared_bytes / sizeof(Chunk) + 1, Chunk{{UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN}}),
        shown(2 * threads * SHARED_BYTES),
        ahead(ahead) {
    for (int i = 0; i < threads; ++i) {
      if (idle.empty()) idle.push_back(std::make_unique<Fibre>());
      fibres.push_back(std::move(idle.back()));
      idle.pop_back();
      fibres[i]->work = [this, work, i] { work(*this, i); };
    }
  }
  ~Block() {
    for (auto& fibre : fibres) idle.push_back(std::move(fibre));
  }

  // Until all threads have come to this, or ended.
  void run(Stop until) {
    while (at_ != until && at_ != Stop::end) at_ = next((int)fibres.size() / WARP, [&](int warp) {
      for (;;) {
        const Stop at = next(WARP, [&](int lane) { return resume(*fibres[warp * WARP + lane]); });
        if (at <= Stop::block) return at;
      }
    });
  }

 private:
  Stop at_ = Stop::block;

  // What each of some warps, or of the lanes of one, comes to, one after the other.
  template <class Run>
  static Stop next(int count, Run run) {
    const Stop at = run(backwards ? count - 1 : 0);
    for (int turn = 1; turn < count; ++turn)
      if (run(backwards ? count - 1 - turn : turn) != at) abort();  // on a GPU they would have parted, and wait for ever
    return at;
  }
  static Stop resume(Fibre& fibre) {
    running = &fibre;
    if (!_setjmp(fibre.scheduler)) fibre.begun ? _longjmp(fibre.place, 1) : begin(fibre);
    return running->at;
  }
};

template <int COUNT>
class Threads {
 public:
  template <class T>
  class Own {
    static_assert(std::is_trivially_copyable_v<T>, "what lies in registers");

   public:
    Own() {
      for (size_t at = 0; at < sizeof mine_; at += sizeof UNWRITTEN) memcpy(mine_ + at, &UNWRITTEN, sizeof UNWRITTEN);
    }
    T& operator[](int) { return *(T*)mine_; }

   private:
    alignas(16) char mine_[(sizeof(T) + 3) / 4 * 4];
  };

  int64_t x;
  int y;
  char* shared;

  Threads(int64_t x, int y, Block& block, int thread)
      : x(x), y(y), shared((char*)block.memory.data()), block_(block), fibre_(*block.fibres[thread]), thread_(thread) {}

  template <class F>
  void each(F f) {
    f(thread_);
  }
  void barrier() { fibre_.stop(Stop::block); }
  void warp_barrier() { fibre_.stop(Stop::warp); }
  void follow() {
    if (block_.ahead) fibre_.stop(Stop::follow);
  }

  template <class F>
  void add_across(int stride, F value) {
    auto& mine = value(thread_);
    mine = mine + show(Stop::add, mine)[thread_ % WARP ^ stride];
  }

  template <class Number = bfloat16, class A, class B, class C>
  void multiply(A a, B b, C sums) {
    struct Operands {
      float a[8], b[4];
    } mine;
    for (int i = 0; i < 8; ++i) mine.a[i] = to_float(Number{(uint16_t)(a(thread_)[i / 2] >> i % 2 * 16)});
    for (int i = 0; i < 4; ++i) mine.b[i] = to_float(Number{(uint16_t)(b(thread_)[i / 2] >> i % 2 * 16)});
    const Operands* of = show(Stop::multiply, mine);
    const int lane = thread_ % WARP;
    for (int c = 0; c < 4; ++c) {
      float& sum = sums(thread_)[c];
      for (int k = 0; k < 16; ++k)
        sum = multiply_add(of[lane / 4 * 4 + k % 8 / 2].a[(c / 2 + k / 8 * 2) * 2 + k % 2],
                           of[(lane % 4 * 2 + c % 2) * 4 + k % 8 / 2].b[k / 8 * 2 + k % 2], sum);
    }
  }

  template <bool TRANSPOSED, class To, class From>
  void matrices(To to, From from) {
    const void* const* rows = show(Stop::matrices, aligned(from(thread_)));
    const int far = thread_ % WARP / 4, near = thread_ % 4 * 2;
    for (int m = 0; m < 4; ++m) {
      const auto at = [&](int row, int column) { return (uint32_t)((const uint16_t*)rows[m * 8 + row])[column]; };
      to(thread_)[m] = TRANSPOSED ? at(near, far) | at(near + 1, far) << 16 : at(far, near) | at(far, near + 1) << 16;
    }
  }

  template <class F>
  void max_across(F value) {
    uint32_t& mine = value(thread_);
    const uint32_t* all = show(Stop::max, mine);
    mine = *std::max_element(all, all + WARP);
  }

  template <class F>
  bool some_warp(F condition) {
    return condition(thread_);
  }

  void copy(void* to, const void* from) {
    if (backwards)
      memcpy((void*)aligned(to), aligned(from), 16);
    else
      copies_.push_back({(void*)aligned(to), aligned(from), groups_});
  }
  void end_group() { ++groups_; }
  template <int LEFT>
  void wait() {
    auto copy = copies_.begin();
    for (; copy != copies_.end() && copy->group < groups_ - LEFT; ++copy) memcpy(copy->to, copy->from, 16);
    copies_.erase(copies_.begin(), copy);
  }

 private:
  struct Copy {
    void* to;
    const void* from;
    int group;
  };
  Block& block_;
  Fibre& fibre_;
  int thread_, shows_ = 0, groups_ = 0;
  std::vector<Copy> copies_;

  // What each lane of the warp shows, until it shows something again.
  template <class T>
  const T* show(Stop why, const T& mine) {
    static_assert(sizeof(T) <= SHARED_BYTES);
    char* const all = block_.shown.data() + (2 * (thread_ / WARP) + shows_++ % 2) * WARP * SHARED_BYTES;
    memcpy(all + thread_ % WARP * sizeof(T), &mine, sizeof(T));
    fibre_.stop(why);
    return (const T*)all;
  }
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

// The blocks that have not ended yet, of the last launch. A launch that may overlap it begins before they go on.
inline thread_local std::function<void()> unfinished;
inline void finish_launch() {
  if (const auto work = std::exchange(unfinished, nullptr)) work();
}
constexpr int AHEAD = 8;  // blocks, of which every other one begins so early

template <class Kernel, class Call>
int launch(Grid grid, int shared_bytes, void*, bool overlapped, const Call& call) {
  if (shared_bytes > this_gpu().shared_bytes) return 1;  // cudaErrorInvalidValue, as on a GPU
  const int64_t blocks = grid.x * grid.y;
  const auto block = [=](int64_t number, bool ahead) {
    const int64_t at = backwards ? blocks - 1 - number : number;
    return std::make_unique<Block>(Kernel::BLOCK, shared_bytes, ahead, [=](Block& block, int thread) {
      Threads<Kernel::BLOCK> threads(at % grid.x, (int)(at / grid.x), block, thread);
      Kernel::run(threads, call);
    });
  };
  if (!overlapped) finish_launch();
  const auto begun = std::make_shared<std::vector<std::unique_ptr<Block>>>();
  for (int64_t i = 0; i < blocks && i < AHEAD; ++i) {
    begun->push_back(block(i, i % 2 == 0));
    if (i % 2 == 0) begun->back()->run(Stop::follow);
  }
  finish_launch();
  unfinished = [=] {
    for (int64_t i = 0; i < blocks; ++i) {
      const auto next = i < AHEAD ? std::move((*begun)[i]) : block(i, false);
      next->run(Stop::end);
    }
  };
  return 0;
}
#endif

}  // namespace linpix::LINPIX_ISA

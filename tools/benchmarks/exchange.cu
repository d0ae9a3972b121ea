// Microseconds in which eight multiprocessors tell each other their parts of a row: as a cluster, from shared memory to
// shared memory; and by a counter and numbers in memory, which lie in the L2 cache. One image that is drawn alone would
// need some four exchanges a layer if weights stayed in shared memory, a layer a cluster, instead of five kernels.
//
//     nvcc -std=c++17 -O2 -arch=sm_90 -o exchange exchange.cu && ./exchange     # {"by_cluster_us": ..., "by_flag_us": ...}
#include <cooperative_groups.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cuda/atomic>
#include <vector>

constexpr int BLOCKS = 8, WIDTH = 256, PART = WIDTH / BLOCKS, ROUNDS = 10000;

// In each round a block makes its part of the next row from its neighbour's part of this one, and all blocks get it. So
// no round can begin before the one before it has ended everywhere, and in the end all numbers are ROUNDS.
__global__ void __cluster_dims__(BLOCKS) by_cluster(float* rows, unsigned*, float* out) {
  __shared__ float row[2][WIDTH];
  const auto cluster = cooperative_groups::this_cluster();
  const int i = threadIdx.x, at = blockIdx.x * PART + i % PART;
  row[0][i] = 0;
  cluster.sync();
  for (int n = 0; n < ROUNDS; ++n) {
    float* const next = cluster.map_shared_rank(row[(n + 1) % 2], i / PART);  // a warp writes to each block
    next[at] = row[n % 2][(at + PART) % WIDTH] + 1;
    cluster.sync();
  }
  out[blockIdx.x * WIDTH + i] = row[ROUNDS % 2][i];
}

__global__ void by_flag(float* rows, unsigned* arrived, float* out) {
  __shared__ float row[WIDTH];
  const cuda::atomic_ref<unsigned, cuda::thread_scope_device> flag(*arrived);
  const int i = threadIdx.x, at = blockIdx.x * PART + i % PART;
  row[i] = 0;
  __syncthreads();
  for (int n = 0; n < ROUNDS; ++n) {
    float* const next = rows + n % 2 * WIDTH;
    if (i < PART) __stcg(next + at, row[(at + PART) % WIDTH] + 1);
    __syncthreads();
    if (i == 0) {
      flag.fetch_add(1, cuda::memory_order_release);
      while (flag.load(cuda::memory_order_acquire) < (n + 1) * BLOCKS) continue;
    }
    __syncthreads();
    row[i] = __ldcg(next + i);
    __syncthreads();
  }
  out[blockIdx.x * WIDTH + i] = row[i];
}

void check(cudaError_t error) {
  if (error != cudaSuccess) fprintf(stderr, "%s\n", cudaGetErrorString(error)), exit(1);
}

float microseconds(void (*kernel)(float*, unsigned*, float*)) {
  float *rows, *out, best = 1e9;
  unsigned* arrived;
  cudaEvent_t begin, end;
  check(cudaMalloc(&rows, 2 * WIDTH * sizeof *rows));
  check(cudaMalloc(&out, BLOCKS * WIDTH * sizeof *out));
  check(cudaMalloc(&arrived, sizeof *arrived));
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  for (int run = 0; run < 5; ++run) {
    check(cudaMemset(arrived, 0, sizeof *arrived));
    check(cudaEventRecord(begin));
    kernel<<<BLOCKS, WIDTH>>>(rows, arrived, out);
    check(cudaGetLastError());
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float ms;
    check(cudaEventElapsedTime(&ms, begin, end));
    best = std::min(best, ms * 1000 / ROUNDS);
  }
  std::vector<float> found(BLOCKS * WIDTH);
  check(cudaMemcpy(found.data(), out, found.size() * sizeof(float), cudaMemcpyDeviceToHost));
  for (float x : found)
    if (x != ROUNDS) fprintf(stderr, "a number should be %d, got %g\n", ROUNDS, x), exit(1);
  return best;
}

int main() {
  const float cluster = microseconds(by_cluster), flag = microseconds(by_flag);
  printf("{\"by_cluster_us\": %.3f, \"by_flag_us\": %.3f}\n", cluster, flag);
}

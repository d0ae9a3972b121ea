// Philox4x32-10 (Salmon et al., 2011): random words as a function of an image's seed and the position, without a state.
#pragma once

#include <stdint.h>

#include "target.h"

namespace linpix {

struct Words {
  uint32_t word[4];
};

LINPIX_HOST_DEVICE Words philox4x32(Words counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = (uint64_t)counter.word[0] * 0xD2511F53u, right = (uint64_t)counter.word[2] * 0xCD9E8D57u;
    counter = {{(uint32_t)(right >> 32) ^ counter.word[1] ^ key0, (uint32_t)right,
                (uint32_t)(left >> 32) ^ counter.word[3] ^ key1, (uint32_t)left}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The words of image `seed` at sub-pixel t: stream 0 of model/philox.py.
LINPIX_HOST_DEVICE Words noise(int64_t seed, int64_t t) {
  const uint64_t key = (uint64_t)seed;
  return philox4x32({{(uint32_t)t, 0, 0, 0}}, (uint32_t)key, (uint32_t)(key >> 32));
}

// In (0, 1); exact in float32, as is 1 - u.
LINPIX_HOST_DEVICE float uniform(uint32_t word) { return ((float)(word >> 9) + 0.5f) * 0x1p-23f; }

}  // namespace linpix

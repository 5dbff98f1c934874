#include "kv_cache.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace spile {

KvCache::KvCache(const CacheShape& shape) : shape_(shape), blocks_(shape.sliding.size()) {}

KvCache::~KvCache() {
  for (auto& layer : blocks_)
    for (uint8_t* block : layer) std::free(block);
}

size_t KvCache::index(int layer, int64_t block) const {
  return static_cast<size_t>(shape_.sliding[static_cast<size_t>(layer)] ? block % shape_.ring_blocks() : block);
}

void KvCache::reserve(int layer, int64_t end) {
  auto& blocks = blocks_[static_cast<size_t>(layer)];
  size_t wanted = static_cast<size_t>((end + kBlockPositions - 1) / kBlockPositions);
  const size_t ring = static_cast<size_t>(shape_.ring_blocks());
  if (shape_.sliding[static_cast<size_t>(layer)] && wanted > ring) wanted = ring;
  while (blocks.size() < wanted) {
    const size_t nbytes = (shape_.block_nbytes() + 4095) / 4096 * 4096;
    void* block = std::aligned_alloc(4096, nbytes);
    if (!block) throw std::bad_alloc();
    std::memset(block, 0, nbytes);
    blocks.push_back(static_cast<uint8_t*>(block));
    nbytes_ += nbytes;
  }
}

uint8_t* KvCache::keys(int layer, int64_t block, int kv_head) const {
  return blocks_[static_cast<size_t>(layer)][index(layer, block)] + static_cast<size_t>(kv_head) * shape_.head_nbytes();
}

uint8_t* KvCache::values(int layer, int64_t block, int kv_head) const {
  return keys(layer, block, kv_head) +
         static_cast<size_t>(kBlockPositions) * static_cast<size_t>(shape_.head_dim) * shape_.entry_nbytes();
}

}  // namespace spile

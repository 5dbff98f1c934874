#include "kv_cache.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <stdexcept>

namespace spile {

KvCache::KvCache(const CacheShape& shape) : shape_(shape), blocks_(shape.sliding.size()) {}

KvCache::~KvCache() {
  for (size_t layer = 0; layer < blocks_.size(); ++layer)
    for (uint8_t* block : blocks_[layer]) munmap(block, shape_.block_nbytes(static_cast<int>(layer)));
}

size_t KvCache::index(int layer, int64_t block) const {
  return static_cast<size_t>(shape_.sliding[static_cast<size_t>(layer)] ? block % shape_.ring_blocks() : block);
}

void KvCache::reserve(int layer, int64_t end) {
  auto& blocks = blocks_[static_cast<size_t>(layer)];
  size_t wanted = static_cast<size_t>((end + kBlockPositions - 1) / kBlockPositions);
  const size_t ring = static_cast<size_t>(shape_.ring_blocks());
  if (shape_.sliding[static_cast<size_t>(layer)] && wanted > ring) wanted = ring;
  if (blocks.size() < wanted) blocks.reserve(wanted);
  while (blocks.size() < wanted) {
    // Pages of its own: zero at the start, and the system's again when the sequence ends, whatever else was allocated.
    const size_t nbytes = shape_.block_nbytes(layer);
    void* block = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) throw std::bad_alloc();
    blocks.push_back(static_cast<uint8_t*>(block));
    nbytes_ += nbytes;
  }
}

uint8_t* KvCache::head(int layer, int64_t block, int kv_head) const {
  return blocks_[static_cast<size_t>(layer)][index(layer, block)] +
         static_cast<size_t>(kv_head) * shape_.layout(layer).head_nbytes();
}

void KvCache::check_span(int layer, int64_t start, int64_t end, bool stored) const {
  if (layer < 0 || static_cast<size_t>(layer) >= blocks_.size()) throw std::invalid_argument("there is no such layer");
  if (start < 0 || end < start) throw std::invalid_argument("positions must lie in order");
  if (shape_.sliding[static_cast<size_t>(layer)] && end > start &&
      (end - 1) / kBlockPositions - start / kBlockPositions >= shape_.ring_blocks())
    throw std::invalid_argument("a ring does not hold so many positions");
  const auto& blocks = blocks_[static_cast<size_t>(layer)];
  for (int64_t block = start / kBlockPositions; stored && block * kBlockPositions < end; ++block)
    if (index(layer, block) >= blocks.size()) throw std::invalid_argument("nothing was stored at these positions");
}

template <bool OUT>
void KvCache::copy(int layer, int64_t start, int64_t end, uint8_t* data) const {
  const KvLayout& layout = shape_.layout(layer);
  const size_t key = static_cast<size_t>(layout.bits.keys > 8 ? layout.bits.keys / 8 : 1);  // bytes at a time
  const auto move = [&](uint8_t* stored, size_t nbytes) {
    std::memcpy(OUT ? data : stored, OUT ? stored : data, nbytes);
    data += nbytes;
  };
  for (int64_t at = start; at < end; ++at) {
    const size_t place = static_cast<size_t>(at % kBlockPositions), tile = place / 16, lane = place % 16;
    for (int kv_head = 0; kv_head < shape_.num_kv_heads; ++kv_head) {
      uint8_t* block = head(layer, at / kBlockPositions, kv_head);
      uint8_t* from = block + tile * 16 * layout.key_row() + lane * key;
      for (size_t i = 0; i < layout.key_row(); i += key) move(from + i * 16, key);
      from = block + layout.key_groups_at() + tile * 16 * layout.key_groups_row() + lane * 2;
      for (size_t i = 0; i < layout.key_groups_row(); i += 2) move(from + i * 16, 2);
      move(block + layout.values_at() + place * layout.value_row(), layout.value_row());
      from = block + layout.value_groups_at() + place * 2;
      for (size_t i = 0; i < layout.value_groups_row(); i += 2) move(from + i * kBlockPositions, 2);
    }
  }
}

void KvCache::read(int layer, int64_t start, int64_t end, uint8_t* out) const {
  check_span(layer, start, end, true);
  copy<true>(layer, start, end, out);
}

void KvCache::write(int layer, int64_t start, int64_t end, const uint8_t* data) {
  check_span(layer, start, end, false);
  reserve(layer, end);
  copy<false>(layer, start, end, const_cast<uint8_t*>(data));
}

}  // namespace spile

// The keys and values of one sequence: per layer, blocks of 128 absolute positions.
//
// A full-attention layer grows by blocks; a sliding layer keeps a ring of blocks, and position p always lies in block p / 128,
// so a block never mixes positions of two rounds that anyone still sees. Nothing here depends on chunks or threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace spile {

constexpr int kBlockPositions = 128;

struct CacheShape {
  int num_kv_heads;
  int head_dim;
  bool half;                // FP16 entries, else float32
  int window;               // of sliding layers
  int max_chunk;            // tokens that may be stored before the first of them is attended
  std::vector<bool> sliding;  // per layer

  int value_stride() const { return (head_dim + 15) / 16 * 16; }
  size_t entry_nbytes() const { return half ? 2 : 4; }
  size_t head_nbytes() const {
    return static_cast<size_t>(kBlockPositions) * static_cast<size_t>(head_dim + value_stride()) * entry_nbytes();
  }
  size_t block_nbytes() const { return head_nbytes() * static_cast<size_t>(num_kv_heads); }
  // Blocks that positions [p - window + 1, p + max_chunk - 1] can touch.
  int ring_blocks() const { return (window + max_chunk - 2) / kBlockPositions + 2; }
};

class KvCache {
 public:
  explicit KvCache(const CacheShape& shape);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  const CacheShape& shape() const { return shape_; }
  int64_t position = 0;  // tokens held

  // Makes room for positions [0, end) of a layer. Throws std::bad_alloc.
  void reserve(int layer, int64_t end);
  uint8_t* keys(int layer, int64_t block, int kv_head) const;
  uint8_t* values(int layer, int64_t block, int kv_head) const;
  size_t nbytes() const { return nbytes_; }

 private:
  size_t index(int layer, int64_t block) const;

  CacheShape shape_;
  std::vector<std::vector<uint8_t*>> blocks_;
  size_t nbytes_ = 0;
};

}  // namespace spile

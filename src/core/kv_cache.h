// The keys and values of one sequence: per layer, blocks of 128 absolute positions.
//
// A full-attention layer grows by blocks; a sliding layer keeps a ring of blocks, and position p always lies in block p / 128,
// so a block never mixes positions of two rounds that anyone still sees. Nothing here depends on chunks or threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kv_layout.h"

namespace spile {

struct CacheShape {
  int num_kv_heads;
  KvLayout full, ring;      // of growing and of sliding layers
  int window;               // of sliding layers
  int max_chunk;            // tokens that may be stored before the first of them is attended
  std::vector<bool> sliding;  // per layer

  const KvLayout& layout(int layer) const { return sliding[static_cast<size_t>(layer)] ? ring : full; }
  // Bytes of one position of a layer, all its KV heads.
  size_t position_nbytes(int layer) const { return layout(layer).position_nbytes() * static_cast<size_t>(num_kv_heads); }
  // Bytes of a block: whole pages.
  size_t block_nbytes(int layer) const { return (kBlockPositions * position_nbytes(layer) + 4095) / 4096 * 4096; }
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
  // One KV head's part of a block, as KvLayout says.
  uint8_t* head(int layer, int64_t block, int kv_head) const;
  size_t nbytes() const { return nbytes_; }

  // Throws std::invalid_argument when a ring cannot hold positions [start, end) at once, or (`stored`) there was never room
  // for them.
  void check_span(int layer, int64_t start, int64_t end, bool stored) const;
  // Copies the stored bits of positions [start, end) of a layer, [end - start][position_nbytes(layer)], in an order that
  // depends on the layout alone: per KV head its key, the key's groups, its value, the value's groups. `write` makes room first
  // and does not move `position`. Both check the span; whether a ring still has what is asked is the caller's to know.
  void read(int layer, int64_t start, int64_t end, uint8_t* out) const;
  void write(int layer, int64_t start, int64_t end, const uint8_t* data);

 private:
  size_t index(int layer, int64_t block) const;
  template <bool OUT>
  void copy(int layer, int64_t start, int64_t end, uint8_t* data) const;

  CacheShape shape_;
  std::vector<std::vector<uint8_t*>> blocks_;
  size_t nbytes_ = 0;
};

}  // namespace spile

// Where the bits of keys and values lie inside a block of the cache: 128 positions of one KV head.
//
// 32 and 16 bits are float32 and FP16. 8 and 4 are unsigned codes, value = code * scale + bias with an FP16 scale and bias a
// group of dimensions (head_dim is then a multiple of 16); such keys, and the queries that meet them, are rotated first, see
// `rotation`. In order:
//   keys           [8 tiles][head_dim][16 positions]; of 4 bits [8][head_dim / 2][16], the even dimension in the low nibble
//   their groups   [8][groups]{scale[16], bias[16]}
//   values         [128][value_stride]; of 4 bits sixteen dimensions make 8 bytes, dimension i in the low nibble of byte i, i + 8
//                  in its high one
//   their groups   [groups]{scale[128], bias[128]}
// No two positions share a byte, so threads may store them at once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spile {

constexpr int kBlockPositions = 128;

struct KvBits {
  int keys, values;  // 32, 16, 8 or 4 each
};

struct KvLayout {
  int head_dim;
  KvBits bits;

  // Dimensions that share a scale: the largest multiple of 16, up to 80, that divides the head (64 for heads of 64, 128, 192
  // and 256; 80 for 80; 48 for 96).
  int group() const {
    int size = 80;
    while (size > 16 && head_dim % size != 0) size -= 16;
    return size;
  }
  int num_groups() const { return head_dim / group(); }
  // Keys of 8 and 4 bits are stored as their Hadamard transform over runs of so many dimensions, the largest power of two
  // that divides the head: it spreads a channel that is much larger than the others, and a product of two vectors that are
  // both transformed is unchanged. 1: not at all.
  int rotation() const { return bits.keys < 16 ? head_dim & -head_dim : 1; }
  int value_stride() const { return (head_dim + 15) / 16 * 16; }
  size_t key_row() const { return static_cast<size_t>(head_dim) * static_cast<size_t>(bits.keys) / 8; }
  size_t value_row() const { return static_cast<size_t>(value_stride()) * static_cast<size_t>(bits.values) / 8; }
  size_t key_groups_row() const { return bits.keys < 16 ? 4 * static_cast<size_t>(num_groups()) : 0; }
  size_t value_groups_row() const { return bits.values < 16 ? 4 * static_cast<size_t>(num_groups()) : 0; }
  // Bytes of one position.
  size_t position_nbytes() const { return key_row() + key_groups_row() + value_row() + value_groups_row(); }

  size_t key_groups_at() const { return kBlockPositions * key_row(); }
  size_t values_at() const { return kBlockPositions * (key_row() + key_groups_row()); }
  size_t value_groups_at() const { return values_at() + kBlockPositions * value_row(); }
  size_t head_nbytes() const { return kBlockPositions * position_nbytes(); }
};

}  // namespace spile

// What one instruction set offers: the table of kernels that the decoder calls.
//
// Every table gives the same bits for the same arguments. Integer sums are exact, so they may be taken in any order; float
// steps are elementwise or follow the one order that lanes.inl fixes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kv_layout.h"

namespace spile {

// A fixed-point vector: x[i] is about scale * q[i], and q[i] = sum over planes p of byte_p[i] * 256^(num - 1 - p).
// plane[0] is the most significant signed byte. Two planes as a rule, three where one entry dwarfs the others.
struct Fixed {
  const int8_t* plane[3];
  int num;
  float scale;
  int64_t sum;            // of q
  const int32_t* groups;  // sums of q over groups of 64, padded to a multiple of 16 (only where a 4-bit layer reads it)

  bool is_finite() const { return scale == scale; }  // whether all of x was
};

// Bytes of one plane of n entries, padding included. Planes are zero behind their last entry.
inline size_t plane_nbytes(size_t n) { return (n + 255) / 256 * 256; }

// Entries of `groups` for n inputs, padding included.
inline size_t num_group_sums(size_t n) { return (n / 64 + 15) / 16 * 16; }

// How far ahead of their use the streaming kernels fetch codes, in the order of memory: a tile of eight rows visits its lines
// in an order that the hardware's prefetchers do not follow, and they stop at page ends. Measured on Zen 4, weights in memory,
// GMAC/s a core: 30 without, 34 in the order of use, 65 in the order of memory (95 in huge pages); 1 kB to 32 kB tried.
constexpr size_t kFetchAhead = 4096;

enum class Layout { kTernary, kNibble };  // the order in which a plane's bytes lie, per the codes they meet

// Weights may lie at any address, BF16 at an odd one too: a safetensors file promises no alignment.
struct Ternary {  // rows of 2-bit codes, value (code - 1) * alpha
  const uint8_t* codes;
  const uint16_t* alpha;  // BF16 [rows]
  size_t n;               // codes in a row, a multiple of 16
};

struct Affine4 {  // rows of 4-bit codes, value code * scale + bias per group of 64
  const uint8_t* codes;
  const uint16_t* scales;
  const uint16_t* biases;
  size_t n;
};

// Rows of queries that meet the same keys, already scaled: dimension d of row r is x[d * stride + r]. Where keys are coded,
// `sums` [groups][stride] holds each row's sum over a group.
struct Queries {
  const float* x;
  const float* sums;
  int stride;
};

struct Seen {  // positions [first, last) of the block, at least one
  int first, last;
};

struct Kernels {
  const char* name;

  // Fixed point of x [n]; `planes` holds 3 * plane_nbytes(n), `groups` num_group_sums(n) sums or is null. `num` is 2, or 3 to force three.
  Fixed (*fix)(const float* x, size_t n, int num, Layout layout, int8_t* planes, int32_t* groups);

  // y[t][row] (row stride ldy) for rows [row, row_end) of each fixed vector x[t], t < T.
  void (*ternary)(const Ternary& w, size_t row, size_t row_end, const Fixed* const* x, int T, float* const* y);
  void (*affine4)(const Affine4& w, size_t row, size_t row_end, const Fixed* const* x, int T, float* const* y);
  void (*affine4_row)(const Affine4& w, size_t row, float* y);  // the row itself, dequantized

  // The largest |x|; NaN where any is NaN, which no comparison with a limit passes.
  float (*largest)(const float* x, size_t n);

  void (*router)(const uint16_t* w, size_t n, size_t row, size_t row_end, const float* const* x, int T, float* const* y);
  // Returns whether the sum of the squares is finite. It is not where an x is not, nor where one is so large that y would be 0.
  bool (*rmsnorm)(const float* x, const uint16_t* weight, size_t n, float eps, float* y);
  void (*softmax)(float* x, size_t n);
  void (*swiglu)(const float* gate, const float* up, size_t n, float limit, float* y);  // 0: no limit
  void (*add_scaled)(float* y, const float* x, float weight, size_t n);  // y += weight * x

  // Partial attention of rows [row, row + num) over one KV head's block: per row the largest score, the sum of exponentials
  // and the weighted values, out[num][2 + value_stride] = {max, sum, values...}. What a row gets does not depend on the others.
  void (*attend)(const KvLayout& layout, const uint8_t* block, const Queries& q, int row, int num, const Seen* seen, float* out);
  // Folds a partial result into a running one of the same form; a running sum of 0 means empty.
  void (*merge)(float* running, const float* partial, int value_stride);
  void (*attend_end)(const float* running, int head_dim, float* out);  // values / sum

  void (*rotate_head)(float* x, int n, int size, float factor);  // Hadamard's transform of runs of `size`, times factor
  void (*store_key)(const KvLayout& layout, const float* key, int position, uint8_t* block);
  void (*store_value)(const KvLayout& layout, const float* value, int position, uint8_t* block);
};

const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* neon_kernels();

// The best table that this machine can run, or the named one. Null when the name is unknown or the machine cannot run it.
const Kernels* find_kernels(const char* name);
// Names of the tables that this machine can run, best first, null-terminated.
const char* const* available_kernels();

}  // namespace spile

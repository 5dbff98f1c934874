// The reference: plain loops, any machine.
#include "kernels.h"

namespace spile {
namespace scalar {

#define SPILE_PLAIN
#define SPILE_WIDTH 4
constexpr int kBlock = 16;
#include "lanes.inl"

template <int R, int C>
static inline void tile(const uint8_t* const* rows, size_t n, const int8_t* const* cols, int32_t* out) {
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      int32_t total = 0;
      for (size_t byte = 0; byte < n / 4; ++byte) {
        const int8_t* x = cols[c] + byte / kBlock * (4 * kBlock) + byte % kBlock;
        for (int j = 0; j < 4; ++j) total += ((rows[r][byte] >> (2 * j)) & 3) * x[j * kBlock];
      }
      out[c * R + r] = total;
    }
}
static void tile_8x2(const uint8_t* const* rows, size_t n, const int8_t* const* cols, int32_t* out) {
  tile<8, 2>(rows, n, cols, out);
}
static void tile_4x4(const uint8_t* const* rows, size_t n, const int8_t* const* cols, int32_t* out) {
  tile<4, 4>(rows, n, cols, out);
}

// out[g] = sum over the 64 codes of group g of code * (256 * high + low), for g < count; 0 for the rest.
static void nibble_sums(const uint8_t* codes, int count, const int8_t* high, const int8_t* low, int32_t* out) {
  for (int g = 0; g < 16; ++g) {
    int32_t total = 0;
    if (g < count)
      for (int k = 0; k < 32; ++k) {
        const int at = g * 64 + k / kBlock * (2 * kBlock) + k % kBlock;
        const int code = codes[g * 32 + k];
        total += (code & 15) * low[at] + (code >> 4) * low[at + kBlock];
        if (high) total += 256 * ((code & 15) * high[at] + (code >> 4) * high[at + kBlock]);
      }
    out[g] = total;
  }
}

#include "kernels_float.inl"
#include "kernels_attention.inl"

static const Kernels table = SPILE_KERNELS("scalar");

}  // namespace scalar

const Kernels* scalar_kernels() { return &scalar::table; }

}  // namespace spile

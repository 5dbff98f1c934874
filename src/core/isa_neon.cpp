// NEON with dotprod: sdot adds four products of signed bytes to each int32 lane, exactly. Codes (0..3, 0..15) are signed bytes too.
#include <arm_neon.h>

#include "kernels.h"

namespace spile {
namespace neon {

#define SPILE_WIDTH 4
constexpr int kBlock = 16;
#include "lanes.inl"

static inline int8x16_t load_codes(const uint8_t* p, size_t left) {
  if (left >= 16) return vreinterpretq_s8_u8(vld1q_u8(p));
  uint8_t rest[16] = {};
  __builtin_memcpy(rest, p, left);
  return vreinterpretq_s8_u8(vld1q_u8(rest));
}

template <int R, int C>
static inline void tile(const uint8_t* const* rows, size_t n, const int8_t* const* cols, int32_t* out) {
  int32x4_t acc[R * C];
  for (int i = 0; i < R * C; ++i) acc[i] = vdupq_n_s32(0);
  const uint8x16_t three = vdupq_n_u8(3);
  const size_t nbytes = n / 4;
  for (size_t at = 0; at < nbytes; at += 16) {
    int8x16_t x[C][4];
    for (int c = 0; c < C; ++c)
      for (int j = 0; j < 4; ++j) x[c][j] = vld1q_s8(cols[c] + at * 4 + (size_t)j * 16);
    for (int r = 0; r < R; ++r) {
      const uint8x16_t raw = vreinterpretq_u8_s8(load_codes(rows[r] + at, nbytes - at));
      const int8x16_t code[4] = {
          vreinterpretq_s8_u8(vandq_u8(raw, three)), vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(raw, 2), three)),
          vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(raw, 4), three)), vreinterpretq_s8_u8(vshrq_n_u8(raw, 6))};
      for (int c = 0; c < C; ++c)
        for (int j = 0; j < 4; ++j) acc[c * R + r] = vdotq_s32(acc[c * R + r], code[j], x[c][j]);
    }
  }
  for (int i = 0; i < R * C; ++i) out[i] = vaddvq_s32(acc[i]);
}
static void tile_8x2(const uint8_t* const* rows, size_t n, const int8_t* const* cols, int32_t* out) {
  tile<8, 2>(rows, n, cols, out);
}
static void tile_4x4(const uint8_t* const* rows, size_t n, const int8_t* const* cols, int32_t* out) {
  tile<4, 4>(rows, n, cols, out);
}

// out[g] = sum over the 64 codes of group g of code * (256 * high + low), for g < count; 0 for the rest.
static inline void nibble_sums(const uint8_t* codes, int count, const int8_t* high, const int8_t* low, int32_t* out) {
  const uint8x16_t fifteen = vdupq_n_u8(15);
  for (int g = 0; g < 16; ++g) {
    int32x4_t s = vdupq_n_s32(0), h = vdupq_n_s32(0);
    if (g < count)
      for (int k = 0; k < 2; ++k) {
        const uint8x16_t raw = vld1q_u8(codes + g * 32 + k * 16);
        const int8x16_t even = vreinterpretq_s8_u8(vandq_u8(raw, fifteen));
        const int8x16_t odd = vreinterpretq_s8_u8(vshrq_n_u8(raw, 4));
        s = vdotq_s32(s, even, vld1q_s8(low + g * 64 + k * 32));
        s = vdotq_s32(s, odd, vld1q_s8(low + g * 64 + k * 32 + 16));
        if (high) {
          h = vdotq_s32(h, even, vld1q_s8(high + g * 64 + k * 32));
          h = vdotq_s32(h, odd, vld1q_s8(high + g * 64 + k * 32 + 16));
        }
      }
    out[g] = vaddvq_s32(vaddq_s32(s, vshlq_n_s32(h, 8)));
  }
}

#include "kernels_float.inl"
#include "kernels_attention.inl"

static const Kernels table = SPILE_KERNELS("neon");

}  // namespace neon

const Kernels* neon_kernels() { return &neon::table; }

}  // namespace spile

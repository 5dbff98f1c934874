// AVX2: vpmaddubsw multiplies unsigned codes by signed bytes and adds neighbours into int16 lanes. The sums of a few blocks
// fit there (4 * 2 * 3 * 128 = 3,072 a block of ternary codes, 7,680 a group of 4-bit codes), so nothing saturates.
#include <immintrin.h>

#include "kernels.h"

namespace spile {
namespace avx2 {

#define SPILE_WIDTH 8
constexpr int kBlock = 32;
#include "lanes.inl"

static inline __m256i load32(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }

// Eight vectors -> their eight lane sums, in order.
static inline __m256i fold8(const __m256i* v) {
  const __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
  const __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

template <int R, int C, bool FETCH>
static inline void tile8(const uint8_t* const* rows, size_t n, const int8_t* const* cols, int32_t* out) {
  static_assert(R * C == 8, "a tile folds into one vector");
  const __m256i three = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1);
  const size_t nbytes = n / 4;
  __m256i acc[8];
  for (int i = 0; i < 8; ++i) acc[i] = _mm256_setzero_si256();
  for (size_t start = 0; start < nbytes; start += 8 * 32) {  // eight blocks: 24,576 at most in an int16 lane
    __m256i part[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) part[i] = _mm256_setzero_si256();
    const size_t end = start + 8 * 32 < nbytes ? start + 8 * 32 : nbytes;
    for (size_t at = start; at < end; at += 32) {
      __m256i raw[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        if (at + 32 <= nbytes) {
          raw[r] = load32(rows[r] + at);
          if (FETCH && r % 2 == 0) _mm_prefetch((const char*)(rows[0] + at * R + (size_t)r * 32 + kFetchAhead), _MM_HINT_T0);
        } else {
          alignas(32) uint8_t rest[32] = {};
          __builtin_memcpy(rest, rows[r] + at, nbytes - at);
          raw[r] = load32(rest);
        }
      }
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        __m256i code[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) code[r] = _mm256_and_si256(j ? _mm256_srli_epi16(raw[r], 2 * j) : raw[r], three);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
          const __m256i x = load32(cols[c] + at * 4 + (size_t)j * 32);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r)
            part[c * R + r] = _mm256_add_epi16(part[c * R + r], _mm256_maddubs_epi16(code[r], x));
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) acc[i] = _mm256_add_epi32(acc[i], _mm256_madd_epi16(part[i], ones));
  }
  _mm256_storeu_si256((__m256i*)out, fold8(acc));
}
static void tile_8x2(const uint8_t* const* rows, size_t n, const int8_t* const* cols, int32_t* out) {
  int32_t s[16];
  tile8<4, 2, true>(rows, n, cols, s);
  tile8<4, 2, true>(rows + 4, n, cols, s + 8);
  for (int c = 0; c < 2; ++c)
    for (int r = 0; r < 8; ++r) out[c * 8 + r] = s[r / 4 * 8 + c * 4 + r % 4];
}
static void tile_4x4(const uint8_t* const* rows, size_t n, const int8_t* const* cols, int32_t* out) {
  tile8<4, 2, false>(rows, n, cols, out);
  tile8<4, 2, false>(rows, n, cols + 2, out + 8);
}

// out[g] = sum over the 64 codes of group g of code * (256 * high + low), for g < count; 0 for the rest.
static inline void nibble_sums(const uint8_t* codes, int count, const int8_t* high, const int8_t* low, int32_t* out) {
  const __m256i fifteen = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  for (int base = 0; base < 16; base += 8) {
    __m256i v[8];
    for (int i = 0; i < 8; ++i) {
      const int g = base + i;
      if (g >= count) {
        v[i] = _mm256_setzero_si256();
        continue;
      }
      const __m256i raw = load32(codes + g * 32);
      if (g % 2 == 0) _mm_prefetch((const char*)(codes + g * 32 + kFetchAhead), _MM_HINT_T0);
      const __m256i even = _mm256_and_si256(raw, fifteen), odd = _mm256_and_si256(_mm256_srli_epi16(raw, 4), fifteen);
      __m256i s = _mm256_add_epi16(_mm256_maddubs_epi16(even, load32(low + g * 64)),
                                   _mm256_maddubs_epi16(odd, load32(low + g * 64 + 32)));
      s = _mm256_madd_epi16(s, ones);
      if (high) {
        __m256i h = _mm256_add_epi16(_mm256_maddubs_epi16(even, load32(high + g * 64)),
                                     _mm256_maddubs_epi16(odd, load32(high + g * 64 + 32)));
        s = _mm256_add_epi32(s, _mm256_slli_epi32(_mm256_madd_epi16(h, ones), 8));
      }
      v[i] = s;
    }
    _mm256_storeu_si256((__m256i*)(out + base), fold8(v));
  }
}

#include "kernels_float.inl"
#include "kernels_attention.inl"

static const Kernels table = SPILE_KERNELS("avx2");

}  // namespace avx2

const Kernels* avx2_kernels() { return &avx2::table; }

}  // namespace spile

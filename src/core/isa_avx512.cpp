// AVX-512 with VNNI: vpdpbusd adds four products of an unsigned code and a signed byte to each int32 lane, exactly.
#include <immintrin.h>

#include "kernels.h"

namespace spile {
namespace avx512 {

#define SPILE_WIDTH 16
constexpr int kBlock = 64;
#include "lanes.inl"

// Sixteen vectors -> their sixteen lane sums, in order.
static inline __m512i fold16(const __m512i* v) {
  __m512i a[8], b[4];
  for (int i = 0; i < 8; ++i)
    a[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; ++i)
    b[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
  // each 128-bit lane of b[i] now holds that lane's sums of vectors 4i .. 4i+3
  const __m512i c = _mm512_add_epi32(_mm512_shuffle_i32x4(b[0], b[1], 0x88), _mm512_shuffle_i32x4(b[0], b[1], 0xDD));
  const __m512i d = _mm512_add_epi32(_mm512_shuffle_i32x4(b[2], b[3], 0x88), _mm512_shuffle_i32x4(b[2], b[3], 0xDD));
  return _mm512_add_epi32(_mm512_shuffle_i32x4(c, d, 0x88), _mm512_shuffle_i32x4(c, d, 0xDD));
}

template <int R, int C>
static inline void step(const __m512i* raw, const int8_t* const* cols, size_t at, __m512i* acc) {
  const __m512i three = _mm512_set1_epi8(3);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    __m512i x[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) x[c] = _mm512_loadu_si512(cols[c] + at + (size_t)j * 64);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512i code = _mm512_and_si512(j ? _mm512_srli_epi16(raw[r], 2 * (unsigned)j) : raw[r], three);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[c * R + r] = _mm512_dpbusd_epi32(acc[c * R + r], code, x[c]);
    }
  }
}

template <int R, int C, bool FETCH>
static inline void tile(const uint8_t* const* rows, size_t n, const int8_t* const* cols, int32_t* out) {
  static_assert(R * C == 16, "a tile folds into one vector");
  __m512i acc[16], raw[R];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) acc[i] = _mm512_setzero_si512();
  const size_t nbytes = n / 4, whole = nbytes / 64 * 64;
  for (size_t at = 0; at < whole; at += 64) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      raw[r] = _mm512_loadu_si512(rows[r] + at);
      if (FETCH) _mm_prefetch((const char*)(rows[0] + at * R + (size_t)r * 64 + kFetchAhead), _MM_HINT_T0);
    }
    step<R, C>(raw, cols, at * 4, acc);
  }
  if (whole < nbytes) {
    const __mmask64 mask = ((__mmask64)1 << (nbytes - whole)) - 1;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) raw[r] = _mm512_maskz_loadu_epi8(mask, rows[r] + whole);
    step<R, C>(raw, cols, whole * 4, acc);
  }
  _mm512_storeu_si512(out, fold16(acc));
}
static void tile_8x2(const uint8_t* const* rows, size_t n, const int8_t* const* cols, int32_t* out) {
  tile<8, 2, true>(rows, n, cols, out);
}
static void tile_4x4(const uint8_t* const* rows, size_t n, const int8_t* const* cols, int32_t* out) {
  tile<4, 4, false>(rows, n, cols, out);
}

// out[g] = sum over the 64 codes of group g of code * (256 * high + low), for g < count; 0 for the rest.
static inline void nibble_sums(const uint8_t* codes, int count, const int8_t* high, const int8_t* low, int32_t* out) {
  const __m512i fifteen = _mm512_set1_epi8(15);
  __m512i v[8];  // two groups each, eight lanes a group
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const int left = count - 2 * i;
    if (left <= 0) {
      v[i] = _mm512_setzero_si512();
      continue;
    }
    const __m512i raw = left == 1 ? _mm512_maskz_loadu_epi8(0xFFFFFFFFull, codes + i * 64)
                                  : _mm512_loadu_si512(codes + i * 64);
    _mm_prefetch((const char*)(codes + i * 64 + kFetchAhead), _MM_HINT_T0);
    const __m512i even = _mm512_and_si512(raw, fifteen), odd = _mm512_and_si512(_mm512_srli_epi16(raw, 4), fifteen);
    __m512i s = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even, _mm512_loadu_si512(low + i * 128));
    s = _mm512_dpbusd_epi32(s, odd, _mm512_loadu_si512(low + i * 128 + 64));
    if (high) {
      __m512i h = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even, _mm512_loadu_si512(high + i * 128));
      h = _mm512_dpbusd_epi32(h, odd, _mm512_loadu_si512(high + i * 128 + 64));
      s = _mm512_add_epi32(s, _mm512_slli_epi32(h, 8));
    }
    v[i] = s;
  }
  __m512i a[4], b[2];
  for (int i = 0; i < 4; ++i)
    a[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 2; ++i)
    b[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
  const __m512i s = _mm512_add_epi32(_mm512_shuffle_i32x4(b[0], b[1], 0x88), _mm512_shuffle_i32x4(b[0], b[1], 0xDD));
  // lanes hold groups 0 2 4 6 | 1 3 5 7 | 8 10 12 14 | 9 11 13 15
  const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, s));
}

#include "kernels_float.inl"
#include "kernels_attention.inl"

static const Kernels table = SPILE_KERNELS("avx512");

}  // namespace avx512

const Kernels* avx512_kernels() { return &avx512::table; }

}  // namespace spile

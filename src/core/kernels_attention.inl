// Attention over one block of the cache, and how keys and values get into it. Included by each isa_*.cpp after
// kernels_float.inl.
//
// Each query row has its own results in its own fixed order: over dimensions for a score, over positions for a value. Rows are
// taken several at a time only so that keys and values are converted once for all of them.

// Rows at a time, and tiles of sixteen positions (chunks of sixteen value dimensions) that go with so many rows: as many sums
// as the registers hold, sixteen of AVX-512 and NEON, eight of AVX2.
constexpr int kRows = SPILE_WIDTH == 16 ? 8 : 4;
constexpr int tiles_for(int rows) { return SPILE_WIDTH == 16 ? (rows > 4 ? 2 : 4) : (rows > 2 ? 1 : rows > 1 ? 2 : 4); }

// Sixteen unsigned bytes as integers. (GCC takes a generic conversion of bytes apart into scalars.)
struct I16 {
  vi part[kParts];
};
static inline I16 load_bytes(const uint8_t* x) {
  I16 r;
#if defined(SPILE_PLAIN)
  for (int i = 0; i < 16; ++i) r.part[i / SPILE_WIDTH][i % SPILE_WIDTH] = x[i];
#elif defined(__AVX512F__)
  r.part[0] = (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)x));
#elif defined(__AVX2__)
  EACH r.part[p_] = (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(x + 8 * p_)));
#elif defined(__ARM_NEON) && defined(__aarch64__)
  const uint8x16_t bytes = vld1q_u8(x);
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
  r.part[0] = (vi)vmovl_u16(vget_low_u16(low));
  r.part[1] = (vi)vmovl_high_u16(low);
  r.part[2] = (vi)vmovl_u16(vget_low_u16(high));
  r.part[3] = (vi)vmovl_high_u16(high);
#endif
  return r;
}
static inline F16 to_float(const I16& x) {
  F16 r;
  EACH r.part[p_] = __builtin_convertvector(x.part[p_], vf);
  return r;
}
static inline I16 low_nibbles(const I16& x) {
  I16 r;
  EACH r.part[p_] = x.part[p_] & 15;
  return r;
}
static inline I16 high_nibbles(const I16& x) {
  I16 r;
  EACH r.part[p_] = x.part[p_] >> 4;
  return r;
}

// Sixteen codes of 4 bits: 0..7 in the low nibbles of 8 bytes, 8..15 in the high ones.
static inline I16 load_nibbles(const uint8_t* x) {
  I16 r;
#if defined(SPILE_PLAIN)
  for (int i = 0; i < 16; ++i) r.part[i / SPILE_WIDTH][i % SPILE_WIDTH] = i < 8 ? x[i] & 15 : x[i - 8] >> 4;
#elif defined(__AVX512F__)
  const __m128i low = _mm_loadl_epi64((const __m128i*)x), both = _mm_unpacklo_epi64(low, _mm_srli_epi16(low, 4));
  r.part[0] = (vi)_mm512_cvtepu8_epi32(_mm_and_si128(both, _mm_set1_epi8(15)));
#elif defined(__AVX2__)
  const vi bytes = (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)x));
  r.part[0] = bytes & 15;
  r.part[1] = bytes >> 4;
#elif defined(__ARM_NEON) && defined(__aarch64__)
  const uint16x8_t bytes = vmovl_u8(vld1_u8(x));
  const vi low = (vi)vmovl_u16(vget_low_u16(bytes)), high = (vi)vmovl_high_u16(bytes);
  r.part[0] = low & 15;
  r.part[1] = high & 15;
  r.part[2] = low >> 4;
  r.part[3] = high >> 4;
#endif
  return r;
}

// Keys of one tile; of codes, at kUnit dimensions that share bytes. `at` is the tile's start.
struct Keys32 {
  static inline void load(const uint8_t* at, int d, F16* k) { k[0] = load_cache((const float*)at + d * 16); }
};
struct Keys16 {
  static inline void load(const uint8_t* at, int d, F16* k) { k[0] = load_cache((const uint16_t*)at + d * 16); }
};
struct Keys8 {
  static constexpr int kUnit = 1;
  static inline void load(const uint8_t* at, int d, F16* k) { k[0] = to_float(load_bytes(at + d * 16)); }
};
struct Keys4 {
  static constexpr int kUnit = 2;
  static inline void load(const uint8_t* at, int d, F16* k) {
    const I16 bytes = load_bytes(at + d * 8);
    k[0] = to_float(low_nibbles(bytes));
    k[1] = to_float(high_nibbles(bytes));
  }
};

// Scores of H rows for TILES tiles of positions.
template <class K, int H, int TILES>
static inline void score_tiles(const KvLayout& l, const uint8_t* block, int tile, const Queries& q, int row, float* scores) {
  const size_t tile_nbytes = 16 * l.key_row();
  const uint8_t* keys = block + (size_t)tile * tile_nbytes;
  F16 acc[H][TILES];
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < TILES; ++i) acc[h][i] = zero();
  for (int d = 0; d < l.head_dim; ++d) {
    F16 k[TILES];
    for (int i = 0; i < TILES; ++i) K::load(keys + (size_t)i * tile_nbytes, d, k + i);
    const float* x = q.x + (size_t)d * (size_t)q.stride + row;
    for (int h = 0; h < H; ++h) {
      const F16 s = splat(x[h]);
      for (int i = 0; i < TILES; ++i) acc[h][i] = acc[h][i] + s * k[i];
    }
  }
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < TILES; ++i) store(scores + h * 128 + (tile + i) * 16, acc[h][i]);
}

// The same with codes, multiplied as they are; a group's scale and bias come at its end.
template <class K, int H, int TILES>
static inline void score_coded(const KvLayout& l, const uint8_t* block, int tile, const Queries& q, int row, float* scores) {
  const int group = l.group(), num_groups = l.num_groups();
  const size_t tile_nbytes = 16 * l.key_row();
  const uint8_t* keys = block + (size_t)tile * tile_nbytes;
  for (int g = 0; g < num_groups; ++g) {
    F16 acc[H][TILES];
    for (int h = 0; h < H; ++h)
      for (int i = 0; i < TILES; ++i) acc[h][i] = zero();
    const int end = (g + 1) * group;
    for (int d = g * group; d < end; d += K::kUnit) {
      F16 k[TILES][K::kUnit];
      for (int i = 0; i < TILES; ++i) K::load(keys + (size_t)i * tile_nbytes, d, k[i]);
      for (int u = 0; u < K::kUnit; ++u) {
        const float* x = q.x + (size_t)(d + u) * (size_t)q.stride + row;
        for (int h = 0; h < H; ++h) {
          const F16 s = splat(x[h]);
          for (int i = 0; i < TILES; ++i) acc[h][i] = acc[h][i] + s * k[i][u];
        }
      }
    }
    const float* sums = q.sums + (size_t)g * (size_t)q.stride + row;
    for (int i = 0; i < TILES; ++i) {
      const uint16_t* at = (const uint16_t*)(block + l.key_groups_at()) + (size_t)((tile + i) * num_groups + g) * 32;
      const F16 scale = load_cache(at), bias = load_cache(at + 16);
      for (int h = 0; h < H; ++h) {
        float* to = scores + h * 128 + (tile + i) * 16;
        const F16 part = acc[h][i] * scale + splat(sums[h]) * bias;
        store(to, g == 0 ? part : load(to) + part);
      }
    }
  }
}

template <int H>
static void score(const KvLayout& l, const uint8_t* block, int tile, int end_tile, const Queries& q, int row, float* scores) {
  constexpr int kTiles = tiles_for(H);
#define SPILE_SCORE(FUNCTION, KEYS)                                                                              \
  for (; tile + kTiles <= end_tile; tile += kTiles) FUNCTION<KEYS, H, kTiles>(l, block, tile, q, row, scores);   \
  for (; tile < end_tile; ++tile) FUNCTION<KEYS, H, 1>(l, block, tile, q, row, scores);                          \
  break
  switch (l.bits.keys) {
    case 32: SPILE_SCORE(score_tiles, Keys32);
    case 16: SPILE_SCORE(score_tiles, Keys16);
    case 8: SPILE_SCORE(score_coded, Keys8);
    default: SPILE_SCORE(score_coded, Keys4);
  }
#undef SPILE_SCORE
}

// Chunk c of a position's values.
struct Values32 {
  static inline F16 load(const uint8_t* row, int c) { return load_cache((const float*)row + c * 16); }
};
struct Values16 {
  static inline F16 load(const uint8_t* row, int c) { return load_cache((const uint16_t*)row + c * 16); }
};
struct Values8 {
  static inline F16 load(const uint8_t* row, int c) { return to_float(load_bytes(row + c * 16)); }
};
struct Values4 {
  static inline F16 load(const uint8_t* row, int c) { return to_float(load_nibbles(row + c * 8)); }
};

// out[h][c] += sum over positions [first, last) of p[h][position] * value, for chunks [c, c + C).
template <class V, int H, int C>
static inline void weigh_chunks(const uint8_t* values, size_t stride, int c, int first, int last, const float* p, float* out,
                                size_t out_stride) {
  F16 acc[H][C];
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < C; ++i) acc[h][i] = load(out + (size_t)h * out_stride + (c + i) * 16);
  const uint8_t* at = values + (size_t)first * stride;
  for (int j = first; j < last; ++j, at += stride) {
    F16 v[C];
    for (int i = 0; i < C; ++i) v[i] = V::load(at, c + i);
    for (int h = 0; h < H; ++h) {
      const F16 w = splat(p[h * 128 + j]);
      for (int i = 0; i < C; ++i) acc[h][i] = acc[h][i] + w * v[i];
    }
  }
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < C; ++i) store(out + (size_t)h * out_stride + (c + i) * 16, acc[h][i]);
}

template <class V, int H>
static inline void weigh_span(const uint8_t* values, size_t stride, int c, int end, int first, int last, const float* p,
                              float* out, size_t out_stride) {
  constexpr int kChunks = tiles_for(H);
  if (first >= last) return;
  for (; c + kChunks <= end; c += kChunks) weigh_chunks<V, H, kChunks>(values, stride, c, first, last, p, out, out_stride);
  for (; c < end; ++c) weigh_chunks<V, H, 1>(values, stride, c, first, last, p, out, out_stride);
}

// The positions that all rows see together, and each row's own before and after them.
template <class V, int H>
static inline void weigh_rows(const uint8_t* values, size_t stride, int c, int end, const Seen* seen, const float* p,
                              float* out, size_t out_stride) {
  int first = seen[0].first, last = seen[0].last;
  for (int h = 1; h < H; ++h) {
    first = seen[h].first > first ? seen[h].first : first;
    last = seen[h].last < last ? seen[h].last : last;
  }
  if (H == 1 || first >= last) {
    for (int h = 0; h < H; ++h)
      weigh_span<V, 1>(values, stride, c, end, seen[h].first, seen[h].last, p + h * 128, out + (size_t)h * out_stride, out_stride);
    return;
  }
  for (int h = 0; h < H; ++h)
    weigh_span<V, 1>(values, stride, c, end, seen[h].first, first, p + h * 128, out + (size_t)h * out_stride, out_stride);
  weigh_span<V, H>(values, stride, c, end, first, last, p, out, out_stride);
  for (int h = 0; h < H; ++h)
    weigh_span<V, 1>(values, stride, c, end, last, seen[h].last, p + h * 128, out + (size_t)h * out_stride, out_stride);
}

// weight * x, and 0 where the weight is 0: what x is at a position that is not seen must not matter, NaN neither.
static inline F16 weight_times(const F16& weight, const F16& x) {
  F16 r;
  EACH r.part[p_] = weight.part[p_] == 0.0f ? vf{} : weight.part[p_] * x.part[p_];
  return r;
}

// Coded values: a group's scale goes into the weights, its bias is added once.
template <class V, int H>
static inline void weigh_coded(const KvLayout& l, const uint8_t* block, const Seen* seen, const float* p, float* out,
                               size_t out_stride) {
  alignas(64) float scaled[H * 128];
  const int num_groups = l.num_groups(), chunks = l.value_stride() / 16 / num_groups;
  for (int g = 0; g < num_groups; ++g) {
    const uint16_t* scales = (const uint16_t*)(block + l.value_groups_at()) + (size_t)g * 256;
    float offset[H];
    for (int h = 0; h < H; ++h) {
      F16 total = zero();
      for (int j = seen[h].first / 16 * 16; j < seen[h].last; j += 16) {
        const F16 w = load(p + h * 128 + j);
        store(scaled + h * 128 + j, weight_times(w, load_cache(scales + j)));
        total = total + weight_times(w, load_cache(scales + 128 + j));
      }
      offset[h] = sum(total);
    }
    weigh_rows<V, H>(block + l.values_at(), l.value_row(), g * chunks, (g + 1) * chunks, seen, scaled, out, out_stride);
    for (int h = 0; h < H; ++h)
      for (int c = g * chunks; c < (g + 1) * chunks; ++c) {
        float* to = out + (size_t)h * out_stride + c * 16;
        store(to, load(to) + splat(offset[h]));
      }
  }
}

template <int H>
static void attend_rows(const KvLayout& l, const uint8_t* block, const Queries& q, int row, const Seen* seen, float* out) {
  alignas(64) float p[H * 128];
  const size_t stride = (size_t)(2 + l.value_stride());
  int tile = 8, end_tile = 0;
  for (int h = 0; h < H; ++h) {
    tile = seen[h].first / 16 < tile ? seen[h].first / 16 : tile;
    end_tile = (seen[h].last + 15) / 16 > end_tile ? (seen[h].last + 15) / 16 : end_tile;
  }
  score<H>(l, block, tile, end_tile, q, row, p);
  for (int h = 0; h < H; ++h) {
    float* scores = p + h * 128;
    const int start = seen[h].first / 16 * 16, end = (seen[h].last + 15) / 16 * 16;
    for (int j = start; j < seen[h].first; ++j) scores[j] = -__builtin_inff();
    for (int j = seen[h].last; j < end; ++j) scores[j] = -__builtin_inff();
    F16 tops = splat(-__builtin_inff());
    for (int j = start; j < end; j += 16) tops = higher(load(scores + j), tops);
    float lanes[16];
    store(lanes, tops);
    float top = lanes[0];
    for (int i = 1; i < 16; ++i) top = lanes[i] > top ? lanes[i] : top;
    F16 total = zero();
    for (int j = start; j < end; j += 16) {
      const F16 e = exp16(load(scores + j) - splat(top));
      total = total + e;
      store(scores + j, e);
    }
    float* to = out + (size_t)h * stride;
    to[0] = top;
    to[1] = sum(total);
    for (int c = 0; c < l.value_stride(); c += 16) store(to + 2 + c, zero());
  }
  const uint8_t* values = block + l.values_at();
  const int chunks = l.value_stride() / 16;
  switch (l.bits.values) {
    case 32: weigh_rows<Values32, H>(values, l.value_row(), 0, chunks, seen, p, out + 2, stride); break;
    case 16: weigh_rows<Values16, H>(values, l.value_row(), 0, chunks, seen, p, out + 2, stride); break;
    case 8: weigh_coded<Values8, H>(l, block, seen, p, out + 2, stride); break;
    default: weigh_coded<Values4, H>(l, block, seen, p, out + 2, stride); break;
  }
}

static void attend(const KvLayout& l, const uint8_t* block, const Queries& q, int row, int num, const Seen* seen, float* out) {
  const size_t stride = (size_t)(2 + l.value_stride());
  const int end = row + num;
#define SPILE_ROWS(H)                                \
  for (; row + (H) <= end; row += (H)) {             \
    attend_rows<H>(l, block, q, row, seen, out);     \
    seen += (H);                                     \
    out += (size_t)(H) * stride;                     \
  }
  SPILE_ROWS(kRows)
  if (kRows > 4) { SPILE_ROWS(4) }
  SPILE_ROWS(2)
  SPILE_ROWS(1)
#undef SPILE_ROWS
}

static void merge(float* running, const float* partial, int value_stride) {
  if (running[1] == 0.0f) {
    __builtin_memcpy(running, partial, sizeof(float) * (size_t)(2 + value_stride));
    return;
  }
  const float top = running[0] > partial[0] ? running[0] : partial[0];
  float e[16] = {running[0] - top, partial[0] - top};
  store(e, exp16(load(e)));
  running[0] = top;
  running[1] = running[1] * e[0] + partial[1] * e[1];
  const F16 a = splat(e[0]), b = splat(e[1]);
  for (int i = 0; i < value_stride; i += 16)
    store(running + 2 + i, load(running + 2 + i) * a + load(partial + 2 + i) * b);
}

static void attend_end(const float* running, int head_dim, float* out) {
  for (int i = 0; i < head_dim; ++i) out[i] = running[2 + i] / running[1];
}

// ---- storing ----

// Hadamard's transform of runs of `size`, without its factor.
static void rotate_head(float* x, int n, int size, float factor) {
  for (int span = 1; span < size; span *= 2)
    for (int start = 0; start < n; start += 2 * span)
      for (int i = start; i < start + span; ++i) {
        const float a = x[i], b = x[i + span];
        x[i] = a + b;
        x[i + span] = a - b;
      }
  for (int i = 0; i < n; ++i) x[i] = x[i] * factor;
}

static inline float half_to_float(uint16_t h) {
  uint16_t in[16] = {h};
  float out[16];
  store(out, load_cache(in));
  return out[0];
}

constexpr int kMaxGroup = 80;

// Codes 0..top of one group, and its FP16 scale and bias. The bias is rounded down and the scale up, so that the codes reach
// from the least entry to the greatest, and no entry up to 65,504 moves by more than half a scale. One that is infinite or no
// number makes the whole group NaN.
static void quantize(const float* x, int n, int top, uint16_t* scale, uint16_t* bias, uint8_t* codes) {
  F16 lows = splat(65504.0f), highs = splat(-65504.0f), wrong = zero();
  for (int i = 0; i < n; i += 16) {
    const F16 v = load(x + i);
    wrong = wrong + (v - v);
    lows = lower(v, lows);
    highs = higher(v, highs);
  }
  if (sum(wrong) != 0.0f) {
    *scale = *bias = 0x7E00;
    __builtin_memset(codes, 0, (size_t)n);
    return;
  }
  float low[16], high[16];
  store(low, higher(lows, splat(-65504.0f)));
  store(high, lower(highs, splat(65504.0f)));
  for (int i = 1; i < 16; ++i) {
    low[0] = low[i] < low[0] ? low[i] : low[0];
    high[0] = high[i] > high[0] ? high[i] : high[0];
  }
  uint16_t b = half_from_float(low[0]);
  if (half_to_float(b) > low[0]) b = (uint16_t)(b == 0 ? 0x8001 : b & 0x8000 ? b + 1 : b - 1);
  const float origin = half_to_float(b), wanted = (high[0] - origin) / (float)top;
  uint16_t s = half_from_float(wanted);
  if (half_to_float(s) < wanted) s = (uint16_t)(s + 1);
  *scale = s;
  *bias = b;
  const float step = half_to_float(s);
  for (int i = 0; i < n; i += 16) {
    F16 code = zero();
    if (step > 0.0f) {
      code = (load(x + i) - splat(origin)) / splat(step) + splat(0.5f);
      code = lower(higher(code, zero()), splat((float)top + 0.5f));
    }
    int32_t whole[16];
    EACH {
      const vi part = __builtin_convertvector(code.part[p_], vi);
      __builtin_memcpy(whole + p_ * SPILE_WIDTH, &part, sizeof part);
    }
    for (int k = 0; k < 16; ++k) codes[i + k] = (uint8_t)whole[k];
  }
}

static void store_key(const KvLayout& l, const float* key, int position, uint8_t* block) {
  const size_t lane = (size_t)(position % 16);
  const int tile = position / 16, group = l.group(), num_groups = l.num_groups();
  uint8_t* to = block + (size_t)tile * 16 * l.key_row();
  if (l.bits.keys == 32) {
    for (int d = 0; d < l.head_dim; ++d) put_cache((float*)to + (size_t)d * 16 + lane, key[d]);
    return;
  }
  if (l.bits.keys == 16) {
    for (int d = 0; d < l.head_dim; ++d) put_cache((uint16_t*)to + (size_t)d * 16 + lane, key[d]);
    return;
  }
  uint16_t* scales = (uint16_t*)(block + l.key_groups_at()) + (size_t)(tile * num_groups) * 32 + lane;
  uint8_t codes[kMaxGroup];
  for (int g = 0; g < num_groups; ++g) {
    quantize(key + g * group, group, (1 << l.bits.keys) - 1, scales + g * 32, scales + g * 32 + 16, codes);
    if (l.bits.keys == 8) {
      for (int d = 0; d < group; ++d) to[(size_t)(g * group + d) * 16 + lane] = codes[d];
    } else {
      for (int d = 0; d < group; d += 2) to[(size_t)(g * group + d) * 8 + lane] = (uint8_t)(codes[d] | codes[d + 1] << 4);
    }
  }
}

static void store_value(const KvLayout& l, const float* value, int position, uint8_t* block) {
  uint8_t* to = block + l.values_at() + (size_t)position * l.value_row();
  if (l.bits.values == 32) {
    for (int d = 0; d < l.head_dim; ++d) put_cache((float*)to + d, value[d]);
    return;
  }
  if (l.bits.values == 16) {
    for (int d = 0; d < l.head_dim; ++d) put_cache((uint16_t*)to + d, value[d]);
    return;
  }
  const int group = l.group();
  uint16_t* scales = (uint16_t*)(block + l.value_groups_at()) + position;
  uint8_t codes[kMaxGroup];
  for (int g = 0; g < l.num_groups(); ++g, to += (size_t)group * (size_t)l.bits.values / 8) {
    quantize(value + g * group, group, (1 << l.bits.values) - 1, scales + g * 256, scales + g * 256 + 128, codes);
    if (l.bits.values == 8) {
      __builtin_memcpy(to, codes, (size_t)group);
      continue;
    }
    for (int c = 0; c < group; c += 16)
      for (int i = 0; i < 8; ++i) to[c / 2 + i] = (uint8_t)(codes[c + i] | codes[c + 8 + i] << 4);
  }
}

#define SPILE_KERNELS(NAME)                                                                          \
  {NAME,   fix,        ternary, affine4, affine4_row, largest,     router,    rmsnorm,    softmax, \
   swiglu, add_scaled, attend,  merge,   attend_end,  rotate_head, store_key, store_value}

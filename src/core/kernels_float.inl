// The float kernels: norms, softmax, SwiGLU, router, fixed-point conversion. Included by each
// isa_*.cpp after lanes.inl; kBlock (bytes of codes that the integer kernels take at a time) is defined before.

static inline F16 load_part(const float* x, size_t count, float fill) {
  if (count >= 16) return load(x);
  float v[16];
  for (size_t i = 0; i < 16; ++i) v[i] = i < count ? x[i] : fill;
  return load(v);
}

static float largest(const float* x, size_t n) {
  uint32_t top = 0;  // as integers, magnitudes are in the order of their values, and NaN is above all of them
  for (size_t i = 0; i < n; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, x + i, 4);
    bits &= 0x7FFFFFFFu;
    top = bits > top ? bits : top;
  }
  float value;
  __builtin_memcpy(&value, &top, 4);
  return value;
}

static bool rmsnorm(const float* x, const uint16_t* weight, size_t n, float eps, float* y) {
  F16 squares = zero();
  for (size_t i = 0; i < n; i += 16) {
    const F16 v = load_part(x + i, n - i, 0.0f);
    squares = squares + v * v;
  }
  const float total = sum(squares), r = 1.0f / __builtin_sqrtf(total / (float)n + eps);
  for (size_t i = 0; i < n; ++i) y[i] = (x[i] * r) * bf16_at(weight, i);
  return total < __builtin_inff();
}

static void softmax(float* x, size_t n) {
  float top = x[0];
  for (size_t i = 1; i < n; ++i) top = x[i] > top ? x[i] : top;
  F16 total = zero();
  for (size_t i = 0; i < n; i += 16) {
    const F16 e = exp16(load_part(x + i, n - i, -__builtin_inff()) - splat(top));
    total = total + e;
    float v[16];
    store(v, e);
    for (size_t j = 0; j < 16 && i + j < n; ++j) x[i + j] = v[j];
  }
  const float s = sum(total);
  for (size_t i = 0; i < n; ++i) x[i] = x[i] / s;
}

static void swiglu(const float* gate, const float* up, size_t n, float limit, float* y) {  // n is a multiple of 16
  for (size_t i = 0; i < n; i += 16) {
    F16 g = load(gate + i), u = load(up + i);
    if (limit > 0.0f) {
      g = lower(g, splat(limit));
      u = higher(lower(u, splat(limit)), splat(-limit));
    }
    store(y + i, g / (splat(1.0f) + exp16(zero() - g)) * u);
  }
}

static void add_scaled(float* y, const float* x, float weight, size_t n) {  // n is a multiple of 16
  const F16 w = splat(weight);
  for (size_t i = 0; i < n; i += 16) store(y + i, load(y + i) + w * load(x + i));
}

template <int C>
static inline void router_tile(const uint16_t* w, size_t n, size_t row, const float* const* x, float* const* y) {
  F16 acc[C];
  for (int c = 0; c < C; ++c) acc[c] = zero();
  for (size_t i = 0; i < n; i += 16) {
    const F16 v = load_bf16(w + i);
    for (int c = 0; c < C; ++c) acc[c] = acc[c] + v * load(x[c] + i);
  }
  for (int c = 0; c < C; ++c) y[c][row] = sum(acc[c]);
}

static void router(const uint16_t* w, size_t n, size_t row, size_t row_end, const float* const* x, int T,
                   float* const* y) {
  for (; row < row_end; ++row) {
    int t = 0;
    for (; t + 4 <= T; t += 4) router_tile<4>(w + row * n, n, row, x + t, y + t);
    for (; t < T; ++t) router_tile<1>(w + row * n, n, row, x + t, y + t);
  }
}

// ---- fixed point ----

constexpr float kLimit2 = 32639.0f;    // 127 * 256 + 127
constexpr float kLimit3 = 8355000.0f;  // below 127 * 65536 + 127 * 256 + 127 by more than the product's rounding

// Takes the lowest signed byte off each of q [256] and puts it where the integer kernel meets the code of the same input.
static inline void take_byte(int32_t* q, Layout layout, int8_t* out) {
  alignas(64) int8_t bytes[256];
  for (int i = 0; i < 256; ++i) {
    bytes[i] = (int8_t)q[i];
    q[i] = (q[i] + 128) >> 8;
  }
  if (layout == Layout::kTernary) {  // four codes a byte: plane j of a block holds inputs 4k + j
    alignas(64) uint32_t words[64];
    __builtin_memcpy(words, bytes, 256);
    for (int b = 0; b < 64 / kBlock; ++b)
      for (int j = 0; j < 4; ++j)
        for (int k = 0; k < kBlock; ++k) out[(b * 4 + j) * kBlock + k] = (int8_t)(words[b * kBlock + k] >> (8 * j));
  } else {
    alignas(64) uint16_t words[128];
    __builtin_memcpy(words, bytes, 256);
    for (int b = 0; b < 128 / kBlock; ++b)
      for (int j = 0; j < 2; ++j)
        for (int k = 0; k < kBlock; ++k) out[(b * 2 + j) * kBlock + k] = (int8_t)(words[b * kBlock + k] >> (8 * j));
  }
}

static Fixed fix(const float* x, size_t n, int num, Layout layout, int8_t* planes, int32_t* groups) {
  const size_t stride = plane_nbytes(n);
  Fixed f;
  f.num = num;
  f.sum = 0;
  f.groups = groups;
  for (int p = 0; p < 3; ++p) f.plane[p] = planes + (size_t)p * stride;
  if (groups) __builtin_memset(groups, 0, num_group_sums(n) * sizeof(int32_t));
  const float max = largest(x, n);
  const bool finite = max < __builtin_inff();
  if (!finite || max < 0x1p-90f) {  // all zero (or as good as), or not a number: the scale says which
    f.scale = finite ? 0.0f : __builtin_nanf("");
    f.num = 2;
    __builtin_memset(planes, 0, 2 * stride);
    return f;
  }
  for (;;) {
    const float limit = f.num == 3 ? kLimit3 : kLimit2;
    const float inverse = limit / max;
    f.scale = max / limit;
    f.sum = 0;
    int64_t small = 0;  // sum of min(|q|, 1020)
    alignas(64) int32_t q[256];
    for (size_t base = 0; base < n; base += 256) {
      const size_t count = n - base < 256 ? n - base : 256;
      for (size_t i = 0; i < count; ++i) {
        const float v = x[base + i] * inverse;
        q[i] = (int32_t)(v + (v < 0.0f ? -0.5f : 0.5f));
      }
      for (size_t i = count; i < 256; ++i) q[i] = 0;
      int32_t clipped = 0;
      for (int g = 0; g < 4; ++g) {
        int32_t s = 0;
        for (int i = 0; i < 64; ++i) {
          const int32_t v = q[64 * g + i], a = v < 0 ? -v : v;
          s += v;
          clipped += a < 1020 ? a : 1020;
        }
        f.sum += s;
        if (groups && base + 64 * (size_t)g < n) groups[base / 64 + (size_t)g] = s;
      }
      small += clipped;
      for (int p = f.num - 1; p >= 0; --p) take_byte(q, layout, planes + (size_t)p * stride + base);
    }
    // Entries are small against the largest one: with two bytes they would be coarser than BF16. Counting each at 1020 at
    // most keeps several outliers from hiding one another, and short vectors from never getting here.
    if (f.num == 2 && small < 510 * (int64_t)n) {
      f.num = 3;
      continue;
    }
    return f;
  }
}

// ---- integer layers: what surrounds the exact sums ----

static inline const uint8_t* row_at(const uint8_t* codes, size_t stride, size_t row, size_t row_end) {
  return codes + (row < row_end ? row : row_end - 1) * stride;  // a tile that runs over repeats its last row
}

static inline int64_t total_of(const Fixed& x, const int32_t* s, int rows, int r) {
  int64_t total = 0;
  for (int p = 0; p < x.num; ++p) total = total * 256 + s[p * rows + r];
  return total - x.sum;
}

// One vector: eight rows by two planes a tile. `s` is [plane][row].
static void ternary_one(const Ternary& w, size_t row, size_t row_end, const Fixed& x, float* y) {
  const size_t stride = w.n / 4;
  const bool narrow = w.n <= 16384;  // 256 * sum(c * hi) fits an int32
  for (; row < row_end; row += 8) {
    const uint8_t* rows[8];
    for (int r = 0; r < 8; ++r) rows[r] = row_at(w.codes, stride, row + (size_t)r, row_end);
    alignas(64) int32_t s[32];
    const int8_t* cols[2] = {x.plane[0], x.plane[1]};
    tile_8x2(rows, w.n, cols, s);  // streams the weights: it prefetches
    const int count = row_end - row < 8 ? (int)(row_end - row) : 8;
    if (x.num == 2 && narrow && count == 8) {
      const int32_t q_sum = (int32_t)x.sum;
      for (int r = 0; r < 8; ++r) {
        const int32_t total = s[r] * 256 + s[8 + r] - q_sum;
        y[row + (size_t)r] = (bf16_at(w.alpha, row + (size_t)r) * x.scale) * (float)total;
      }
      continue;
    }
    if (x.num == 3) {
      const int8_t* third[2] = {x.plane[2], x.plane[2]};
      tile_8x2(rows, w.n, third, s + 16);
    }
    for (int r = 0; r < count; ++r)
      y[row + (size_t)r] = (bf16_at(w.alpha, row + (size_t)r) * x.scale) * (float)total_of(x, s, 8, r);
  }
}

// Two two-plane vectors: four rows by four planes a tile.
static void ternary_two(const Ternary& w, size_t row, size_t row_end, const Fixed& a, const Fixed& b, float* ya,
                        float* yb) {
  const size_t stride = w.n / 4;
  const bool narrow = w.n <= 16384;
  const int8_t* cols[4] = {a.plane[0], a.plane[1], b.plane[0], b.plane[1]};
  const int32_t a_sum = (int32_t)a.sum, b_sum = (int32_t)b.sum;
  for (; row < row_end; row += 4) {
    const uint8_t* rows[4];
    for (int r = 0; r < 4; ++r) rows[r] = row_at(w.codes, stride, row + (size_t)r, row_end);
    alignas(64) int32_t s[16];
    tile_4x4(rows, w.n, cols, s);
    const int count = row_end - row < 4 ? (int)(row_end - row) : 4;
    if (narrow && count == 4) {
      for (int r = 0; r < 4; ++r) {
        const float alpha = bf16_at(w.alpha, row + (size_t)r);
        ya[row + (size_t)r] = (alpha * a.scale) * (float)(s[r] * 256 + s[4 + r] - a_sum);
        yb[row + (size_t)r] = (alpha * b.scale) * (float)(s[8 + r] * 256 + s[12 + r] - b_sum);
      }
      continue;
    }
    for (int r = 0; r < count; ++r) {
      const float alpha = bf16_at(w.alpha, row + (size_t)r);
      ya[row + (size_t)r] = (alpha * a.scale) * (float)total_of(a, s, 4, r);
      yb[row + (size_t)r] = (alpha * b.scale) * (float)total_of(b, s + 8, 4, r);
    }
  }
}

static void ternary(const Ternary& w, size_t row, size_t row_end, const Fixed* const* x, int T, float* const* y) {
  int waiting = -1;  // a two-plane vector that has no partner yet
  for (int t = 0; t < T; ++t) {
    if (x[t]->num == 3) {
      ternary_one(w, row, row_end, *x[t], y[t]);
    } else if (waiting < 0) {
      waiting = t;
    } else {
      ternary_two(w, row, row_end, *x[waiting], *x[t], y[waiting], y[t]);
      waiting = -1;
    }
  }
  if (waiting >= 0) ternary_one(w, row, row_end, *x[waiting], y[waiting]);
}

// 4-bit groups of 64: group g adds to lane g % 16, in ascending order; lanes fold as sum() does.
static inline F16 affine4_groups(const uint8_t* codes, const uint16_t* scales, const uint16_t* biases, const Fixed& f,
                                 size_t first, int count) {
  alignas(64) int32_t s[16], high[16];
  nibble_sums(codes, count, f.plane[f.num - 2] + first * 64, f.plane[f.num - 1] + first * 64, s);
  F16 value = load_int(s);
  if (f.num == 3) {
    nibble_sums(codes, count, nullptr, f.plane[0] + first * 64, high);
    float exact[16];
    for (int i = 0; i < 16; ++i) exact[i] = (float)((double)high[i] * 65536.0 + (double)s[i]);
    value = load(exact);
  }
  return load_bf16(scales) * value + load_bf16(biases) * load_int(f.groups + first);
}

static void affine4(const Affine4& w, size_t row, size_t row_end, const Fixed* const* x, int T, float* const* y) {
  const size_t num_groups = w.n / 64, whole = num_groups / 16 * 16;
  for (; row < row_end; ++row) {
    const uint8_t* codes = w.codes + row * (w.n / 2);
    const uint16_t* scales = w.scales + row * num_groups;
    const uint16_t* biases = w.biases + row * num_groups;
    for (int t = 0; t < T; ++t) {
      F16 lanes = zero();
      for (size_t g = 0; g < whole; g += 16)
        lanes = lanes + affine4_groups(codes + g * 32, scales + g, biases + g, *x[t], g, 16);
      if (whole < num_groups) {
        const size_t rest = num_groups - whole;
        uint16_t scale[16] = {}, bias[16] = {};
        __builtin_memcpy(scale, scales + whole, rest * 2);
        __builtin_memcpy(bias, biases + whole, rest * 2);
        lanes = lanes + affine4_groups(codes + whole * 32, scale, bias, *x[t], whole, (int)rest);
      }
      y[t][row] = x[t]->scale * sum(lanes);
    }
  }
}

static void affine4_row(const Affine4& w, size_t row, float* y) {
  const uint8_t* codes = w.codes + row * (w.n / 2);
  const uint16_t* scales = w.scales + row * (w.n / 64);
  const uint16_t* biases = w.biases + row * (w.n / 64);
  for (size_t i = 0; i < w.n; ++i) {
    const int code = (codes[i / 2] >> (4 * (i % 2))) & 15;
    y[i] = (float)code * bf16_at(scales, i / 64) + bf16_at(biases, i / 64);
  }
}

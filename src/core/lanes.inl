// Sixteen float lanes on any instruction set, with the same bits on each.
//
// Included once by each isa_*.cpp inside its own namespace, after SPILE_WIDTH (lanes in a native register) is defined;
// SPILE_PLAIN keeps intrinsics out.
// Every operation is elementwise IEEE single precision; products and sums are never fused (-ffp-contract=off and no FMA
// flag). Sums over lanes always fold 16 -> 8 -> 4 -> 2 -> 1. Nothing here may call a std:: template: an inline function
// compiled with AVX-512 flags could be the copy that the linker keeps for everybody.

typedef float vf __attribute__((vector_size(SPILE_WIDTH * 4)));
typedef int32_t vi __attribute__((vector_size(SPILE_WIDTH * 4)));
typedef uint16_t vu16 __attribute__((vector_size(SPILE_WIDTH * 2)));
typedef uint32_t vu32 __attribute__((vector_size(SPILE_WIDTH * 4)));
constexpr int kParts = 16 / SPILE_WIDTH;

struct F16 {
  vf part[kParts];
};

#define EACH for (int p_ = 0; p_ < kParts; ++p_)

static inline F16 splat(float x) {
  F16 r;
  EACH r.part[p_] = x - vf{};
  return r;
}
static inline F16 zero() {
  F16 r;
  EACH r.part[p_] = vf{};
  return r;
}
static inline F16 load(const float* x) {
  F16 r;
  __builtin_memcpy(&r, x, 64);
  return r;
}
static inline void store(float* x, const F16& a) { __builtin_memcpy(x, &a, 64); }
static inline F16 load_bf16(const uint16_t* x) {  // BF16 is the upper half of a float32
  F16 r;
  EACH {
    vu16 h;
    __builtin_memcpy(&h, x + p_ * SPILE_WIDTH, sizeof h);
    r.part[p_] = (vf)(__builtin_convertvector(h, vu32) << 16);
  }
  return r;
}
static inline F16 load_int(const int32_t* x) {  // rounded to nearest even
  F16 r;
  EACH {
    vi v;
    __builtin_memcpy(&v, x + p_ * SPILE_WIDTH, sizeof v);
    r.part[p_] = __builtin_convertvector(v, vf);
  }
  return r;
}
static inline float bf16_at(const uint16_t* x, size_t i) {  // weights lie as in their file, at an odd address if need be
  uint16_t h;
  __builtin_memcpy(&h, x + i, 2);
  const uint32_t bits = (uint32_t)h << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
static inline F16 operator+(const F16& a, const F16& b) {
  F16 r;
  EACH r.part[p_] = a.part[p_] + b.part[p_];
  return r;
}
static inline F16 operator-(const F16& a, const F16& b) {
  F16 r;
  EACH r.part[p_] = a.part[p_] - b.part[p_];
  return r;
}
static inline F16 operator*(const F16& a, const F16& b) {
  F16 r;
  EACH r.part[p_] = a.part[p_] * b.part[p_];
  return r;
}
static inline F16 operator/(const F16& a, const F16& b) {
  F16 r;
  EACH r.part[p_] = a.part[p_] / b.part[p_];
  return r;
}
static inline F16 lower(const F16& a, const F16& b) {  // a < b ? a : b
  F16 r;
  EACH r.part[p_] = a.part[p_] < b.part[p_] ? a.part[p_] : b.part[p_];
  return r;
}
static inline F16 higher(const F16& a, const F16& b) {  // a > b ? a : b
  F16 r;
  EACH r.part[p_] = a.part[p_] > b.part[p_] ? a.part[p_] : b.part[p_];
  return r;
}
static inline float sum(const F16& a) {
  typedef float v4 __attribute__((vector_size(16)));
  v4 q[4];
  __builtin_memcpy(q, &a, 64);
  const v4 r = (q[0] + q[2]) + (q[1] + q[3]);
  return (r[0] + r[2]) + (r[1] + r[3]);
}

// exp by 2^n * e^r, |r| <= ln2/2, Taylor to r^7 (relative error below 2e-7). Below -87 the result is 0, above 88 it is exp(88).
static inline F16 exp16(const F16& x) {
  F16 r;
  EACH {
    vf v = x.part[p_];
    v = v > 88.0f ? vf{} + 88.0f : v;
    const vi under = v < -87.0f;
    v = under ? vf{} - 87.0f : v;
    const vf shifted = v * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the low mantissa bits now hold round(v / ln 2)
    const vf n = shifted - 12582912.0f;
    const vf t = (v - n * 0.693145752f) - n * 1.42860677e-6f;
    vf e = t * 1.98412698e-4f + 1.38888889e-3f;
    e = e * t + 8.33333333e-3f;
    e = e * t + 4.16666667e-2f;
    e = e * t + 1.66666667e-1f;
    e = e * t + 0.5f;
    e = e * t + 1.0f;
    e = e * t + 1.0f;
    const vi exponent = (((vi)shifted - 0x4B400000) + 127) << 23;
    const vf scaled = e * (vf)exponent;
    r.part[p_] = under ? vf{} : scaled;
  }
  return r;
}

// One float32 to FP16, rounded to nearest even; what exceeds FP16 becomes its largest finite value, NaN stays NaN.
static inline uint16_t half_from_float(float x) {
  uint32_t b;
  __builtin_memcpy(&b, &x, 4);
  const uint32_t sign = (b >> 16) & 0x8000u;
  b &= 0x7FFFFFFFu;
  if (b > 0x7F800000u) return (uint16_t)(sign | 0x7E00u);
  if (b >= 0x477FF000u) return (uint16_t)(sign | 0x7BFFu);
  if (b < 0x38800000u) {  // subnormal in FP16: add a float whose last mantissa bit is FP16's last
    float f;
    __builtin_memcpy(&f, &b, 4);
    f += 0.5f;
    uint32_t c;
    __builtin_memcpy(&c, &f, 4);
    return (uint16_t)(sign | (c - 0x3F000000u));
  }
  b += 0xFFFu + ((b >> 13) & 1u);
  return (uint16_t)(sign | ((b - 0x38000000u) >> 13));
}

#if defined(SPILE_PLAIN) || !(defined(__F16C__) || defined(__aarch64__))
static inline F16 load_half_plain(const uint16_t* x) {
  F16 r;
  EACH {
    vu16 h;
    __builtin_memcpy(&h, x + p_ * SPILE_WIDTH, sizeof h);
    const vu32 w = __builtin_convertvector(h, vu32);
    const vu32 magnitude = (w & 0x7FFFu) << 13;
    const vf normal = (vf)(magnitude + 0x38000000u);
    const vf tiny = (vf)(magnitude + 0x38800000u) - 6.103515625e-05f;  // exponent 0: subtract the implied one again
    vu32 out = magnitude < 0x00800000u ? (vu32)tiny : (vu32)normal;
    out = magnitude >= 0x0F800000u ? (magnitude | 0x7F800000u) : out;  // infinity or NaN
    r.part[p_] = (vf)(out | ((w & 0x8000u) << 16));
  }
  return r;
}
#endif
static inline F16 load_cache(const float* x) { return load(x); }
static inline F16 load_cache(const uint16_t* x) {  // FP16, exact
#if defined(SPILE_PLAIN)
  return load_half_plain(x);
#elif defined(__AVX512F__)
  F16 r;
  r.part[0] = (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x));
  return r;
#elif defined(__F16C__)
  F16 r;
  EACH r.part[p_] = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(x + 8 * p_)));
  return r;
#elif defined(__ARM_NEON) && defined(__aarch64__)
  F16 r;
  EACH r.part[p_] = (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x + 4 * p_)));
  return r;
#else
  return load_half_plain(x);
#endif
}
static inline void put_cache(float* to, float x) { *to = x; }
static inline void put_cache(uint16_t* to, float x) { *to = half_from_float(x); }

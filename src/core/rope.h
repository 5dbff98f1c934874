// sin, cos and powers in double precision, the same on every machine: libm's differ from one C library to the next.
#pragma once

#include <cmath>
#include <cstdint>

namespace spile {

inline double exp_double(double x) {  // e^x for |x| < 700: 2^n * Taylor to r^17, |r| <= ln2/2
  const double n = std::floor(x * 1.4426950408889634 + 0.5);
  const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double term = 1.0, total = 1.0;
  for (int i = 1; i <= 17; ++i) {
    term = term * r / i;
    total += term;
  }
  return std::ldexp(total, static_cast<int>(n));
}

inline double log_double(double x) {  // natural logarithm of x > 0: x = m * 2^e, atanh series for m in [0.7, 1.4]
  int e;
  double m = std::frexp(x, &e);
  if (m < 0.70710678118654752) {
    m *= 2.0;
    --e;
  }
  const double z = (m - 1.0) / (m + 1.0), z2 = z * z;
  double power = z, total = 0.0;
  for (int i = 1; i <= 41; i += 2) {
    total += power / i;
    power *= z2;
  }
  return 2.0 * total + e * 6.93147180559945286227e-01;
}

inline void sin_cos(double x, double* sine, double* cosine) {  // |x| < 2^20 or so: three-part reduction by pi/2, then Taylor
  const double n = std::floor(x * 0.63661977236758134308 + 0.5);
  const double r = ((x - n * 1.57079632673412561417e+00) - n * 6.07710050630396597660e-11) - n * 2.02226624879595063154e-21;
  const double r2 = r * r;
  double s = 0.0, c = 0.0;
  for (int i = 10; i >= 1; --i) {
    s = r2 / ((2.0 * i) * (2.0 * i + 1.0)) * (1.0 - s);
    c = r2 / ((2.0 * i - 1.0) * (2.0 * i)) * (1.0 - c);
  }
  s = r * (1.0 - s);
  c = 1.0 - c;
  switch (static_cast<int64_t>(n) & 3) {
    case 0: *sine = s; *cosine = c; break;
    case 1: *sine = c; *cosine = -s; break;
    case 2: *sine = -s; *cosine = -c; break;
    default: *sine = -c; *cosine = s; break;
  }
}

}  // namespace spile

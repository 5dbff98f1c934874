// Which kernel table this machine runs.
#include <cstring>

#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace spile {

const char* const* available_kernels() {
  static const char* names[4] = {};
  static const bool once = [] {
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
      names[n++] = "avx512";
    if (__builtin_cpu_supports("avx2")) names[n++] = "avx2";  // every AVX2 machine has F16C
#elif defined(__aarch64__)
#if defined(__linux__)
    const unsigned long capabilities = getauxval(AT_HWCAP);
    if ((capabilities & HWCAP_ASIMDDP) && (capabilities & HWCAP_ASIMDHP)) names[n++] = "neon";
#else
    names[n++] = "neon";  // every Apple arm64 machine has dotprod
#endif
#endif
    names[n++] = "scalar";
    return true;
  }();
  (void)once;
  return names;
}

const Kernels* find_kernels(const char* name) {
  const char* const* names = available_kernels();
  if (!name || !*name) name = names[0];
  for (; *names; ++names) {
    if (std::strcmp(*names, name) != 0) continue;
#if defined(__x86_64__)
    if (!std::strcmp(name, "avx512")) return avx512_kernels();
    if (!std::strcmp(name, "avx2")) return avx2_kernels();
#elif defined(__aarch64__)
    if (!std::strcmp(name, "neon")) return neon_kernels();
#endif
    return scalar_kernels();
  }
  return nullptr;
}

}  // namespace spile

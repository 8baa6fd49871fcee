// Chooses the instruction set once, when the engine is first used.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "engine.h"

#ifdef EMBEDFUSE_X86
#include <cpuid.h>
#endif

namespace embedfuse {
namespace {

struct Level {
  const char* name;
  const Kernels& (*kernels)();
};

// from the least to the most demanding
constexpr Level LEVELS[] = {
    {"baseline", kernels_baseline},
#ifdef EMBEDFUSE_X86
    {"avx2", kernels_avx2},
    {"avx512", kernels_avx512},
#endif
};

#ifdef EMBEDFUSE_X86
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
         has_f16c();
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

const Kernels& choose() {
  const char* cap = std::getenv("EMBEDFUSE_CPU_ISA");
  const bool capped = cap != nullptr && *cap != '\0';
  const Level* best = nullptr;
  std::string available;
  for (const Level& level : LEVELS) {
    if (!runs(level.name)) continue;
    available += available.empty() ? level.name : std::string(", ") + level.name;
    if (!capped || std::strcmp(cap, level.name) == 0) best = &level;
  }
  if (best == nullptr) {
    throw std::runtime_error("`EMBEDFUSE_CPU_ISA` must be one of " + available + " on this machine, got '" + cap +
                             "': correct or unset it");
  }
  return best->kernels();
}

}  // namespace

bool runs(const char* isa) {
#ifdef EMBEDFUSE_X86
  __builtin_cpu_init();
  if (std::strcmp(isa, "avx2") == 0) return has_avx2();
  if (std::strcmp(isa, "avx512") == 0) return has_avx512();
#endif
  return std::strcmp(isa, "baseline") == 0;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace embedfuse

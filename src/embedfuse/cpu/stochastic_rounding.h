// Rounding to 16 bits up or down at random, in proportion to the distance (torch/backends/rounding.py says how).
#pragma once

#include "vectors.h"

namespace embedfuse {
namespace {

template <class T>
constexpr uint32_t LOST_BITS = 0;
template <>
constexpr uint32_t LOST_BITS<BFloat16> = 16;
template <>
constexpr uint32_t LOST_BITS<Half> = 13;

inline uint64_t random_bits(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// Makes each number of a row one that `T` holds exactly. `element` is the place of the first one in its table.
template <class T>
void round_at_random(float* row, int64_t count, uint64_t seed, uint64_t step, uint64_t element) {
  constexpr uint32_t LOST = (1u << LOST_BITS<T>) - 1;
  const uint64_t first = element + seed * 0x9e3779b97f4a7c15u + step * 0xd1b54a32d192ed03u;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = float_to_bits(row[i]);
    const uint32_t random = static_cast<uint32_t>(random_bits(first + static_cast<uint64_t>(i))) & LOST;
    const bool finite = (bits & 0x7f800000) != 0x7f800000;
    row[i] = bits_to_float(finite ? (bits + random) & ~LOST : bits);
  }
}

}  // namespace
}  // namespace embedfuse

// Stable sort by key: least significant digit first, only the bits that keys have, all threads together.
#pragma once

#include <cstring>

#include "parallel.h"

namespace embedfuse {
namespace {

// A key and where its id stands. Eight bytes while both fit, which halves the memory that the sort moves.
struct NarrowItem {
  uint32_t position, key;
  static NarrowItem of(int64_t position, int64_t key) {
    return {static_cast<uint32_t>(position), static_cast<uint32_t>(key)};
  }
};
struct WideItem {
  uint64_t position, key;
  static WideItem of(int64_t position, int64_t key) {
    return {static_cast<uint64_t>(position), static_cast<uint64_t>(key)};
  }
};

inline int bits_of(uint64_t largest) {
  int bits = 0;
  for (; largest != 0; largest >>= 1) ++bits;
  return bits;
}

// Sorts `items`, with `spare` of the same size to work in; returns whichever of the two holds the result, or null if
// there is no memory.
template <class Item>
Item* radix_sort(Item* items, Item* spare, int64_t count, uint64_t largest_key, int threads) {
  const int bits = bits_of(largest_key);
  // few items do not pay for clearing many counters
  const int widest = count < 16384 ? 8 : 11;
  const int passes = static_cast<int>(ceil_div(bits, widest));
  if (passes == 0 || count < 2) return items;
  const int digit_bits = static_cast<int>(ceil_div(bits, passes));
  const int64_t digits = int64_t(1) << digit_bits;
  Buffer<int64_t> counters(threads * digits);
  if (!counters) return nullptr;

  parallel(threads, [&](const Team& team) {
    const Item* from = items;
    Item* to = spare;
    const int64_t first = team.first(count), last = team.last(count);
    int64_t* own = counters.data() + team.thread * digits;
    for (int pass = 0; pass < passes; ++pass) {
      const int shift = pass * digit_bits;
      const auto digit_of = [=](const Item& item) { return (item.key >> shift) & (digits - 1); };
      memset(own, 0, static_cast<size_t>(digits) * sizeof(int64_t));
      for (int64_t i = first; i < last; ++i) ++own[digit_of(from[i])];
      team.wait();
      if (team.thread == 0) {
        // where each thread puts its first item of each digit: threads in order, so equal keys stay in order
        int64_t sum = 0;
        for (int64_t digit = 0; digit < digits; ++digit) {
          for (int thread = 0; thread < team.threads; ++thread) {
            int64_t& counter = counters[thread * digits + digit];
            const int64_t here = counter;
            counter = sum;
            sum += here;
          }
        }
      }
      team.wait();
      for (int64_t i = first; i < last; ++i) to[own[digit_of(from[i])]++] = from[i];
      team.wait();
      Item* const filled = to;
      to = const_cast<Item*>(from);
      from = filled;
    }
  });
  return passes % 2 == 0 ? items : spare;
}

}  // namespace
}  // namespace embedfuse

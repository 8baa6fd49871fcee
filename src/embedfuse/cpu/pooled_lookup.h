// Forward: `out[b, columns] = scale[bag] * Σ w row(id)`.
#pragma once

#include "batch.h"
#include "gather_sum.h"
#include "max_norm.h"

namespace embedfuse {
namespace {

// Where the bags of a lookup are read and written.
template <class T>
struct Lookup {
  using A = Accumulation<T>;
  const Batch& batch;
  const T* table;
  T* out;  // [bags, width]
  int64_t width;
  A* scale;  // one a bag, or null
  // lowered to the first position of an id out of range.
  int64_t* first_bad;
  // What rows are multiplied by to have no more than their length, from the id at `first_cut` on.
  const A* cut = nullptr;
  int64_t first_cut = 0;
};

// What a bag adds up: rows, rows times weights, or rows times weights and cut to a length. Where there are no weights,
// there are no flags that look at them.
enum class Terms { ROWS, WEIGHTED, CUT };

// The address of a row of any id, for prefetching only: out of range it is nonsense, but no overflow.
template <class T>
inline const T* row_unchecked(const T* rows, int64_t id, int64_t stride) {
  const uint64_t bytes = static_cast<uint64_t>(id) * static_cast<uint64_t>(stride) * sizeof(T);
  return reinterpret_cast<const T*>(reinterpret_cast<uintptr_t>(rows) + static_cast<uintptr_t>(bytes));
}

// One block of columns of some bags.
template <class T, Terms TERMS, int WIDTH, bool TAIL>
void sum_bags(const Lookup<T>& lookup, const BagRange& range, Columns columns) {
  using A = Accumulation<T>;
  constexpr bool WEIGHTED = TERMS != Terms::ROWS;
  const Feature& feature = *range.span.feature;
  const Ids<A> ids(lookup.batch, feature);
  const int64_t* offsets = lookup.batch.offsets + range.span.first_bag;
  const int64_t stride = feature.stride, width = lookup.width, last_bag = range.last;
  const int64_t last_ahead = offsets[lookup.batch.bags] - columns.ahead;
  A* const scales = lookup.scale == nullptr ? nullptr : lookup.scale + range.span.first_bag;
  const T* rows = lookup.table + feature.offset + columns.first;
  T* out = lookup.out + (range.span.first_row + range.first) * width + feature.column + columns.first;
  for (int64_t bag = range.first; bag < last_bag; ++bag, out += width) {
    BlockSum<T, A, WIDTH, TAIL> sum;
    // stores of whole lines that are not in the cache yet took twice as long (Xeon of family 6 model 207, 2026-11)
    sum.prefetch_block_to_write(out + 2 * width);
    A total = 0;
    const int64_t end = offsets[bag + 1];
    for (int64_t position = offsets[bag]; position < end; ++position) {
      if (position < last_ahead) sum.prefetch_block(row_unchecked(rows, ids.id(position + columns.ahead), stride));
      if (WEIGHTED ? !ids.counts(position) : !ids.in_table(position)) {
        if (ids.is_bad(position)) atomic_min(lookup.first_bad, position);
        continue;
      }
      const A weight = WEIGHTED ? ids.weight(position) : A(1);
      total += WEIGHTED ? moment_of(weight, feature.moment) : A(1);
      const A factor = TERMS == Terms::CUT ? weight * lookup.cut[position - lookup.first_cut] : weight;
      sum.add(rows + ids.id(position) * stride, factor, columns.tail);
    }
    A scale = 1;
    if (scales != nullptr) scales[bag] = scale = scale_of(total, feature.power);
    sum.write(out, scale, columns.tail);
  }
}

template <class T>
using SumBags = void (*)(const Lookup<T>&, const BagRange&, Columns);
template <class T, Terms TERMS>
constexpr SumBags<T> SUM_BAGS[BLOCK][2] = EMBEDFUSE_WIDTHS(sum_bags, T, TERMS);

// Some bags of rows that are cut to a length: a few bags at a time, whose rows are still in the cache when they are
// read once more to be added. False if there is no memory.
template <class T>
__attribute__((noinline)) bool sum_cut_bags(Lookup<T> lookup, const BagRange& range) {
  using A = Accumulation<T>;
  constexpr int64_t BYTES_AT_ONCE = 256 * 1024;
  const Feature& feature = *range.span.feature;
  const Ids<A> ids(lookup.batch, feature);
  const int64_t* offsets = lookup.batch.offsets + range.span.first_bag;
  const int64_t at_once = BYTES_AT_ONCE / (feature.dim * static_cast<int64_t>(sizeof(T)));
  const Blocks<SumBags<T>> blocks(feature.dim, LANES<A>, sizeof(T), SUM_BAGS<T, Terms::CUT>);
  Buffer<A> factors;
  for (int64_t first = range.first, last; first < range.last; first = last) {
    last = first + 1;
    while (last < range.last && offsets[last + 1] - offsets[first] <= at_once) ++last;
    if (!factors.allocate(offsets[last] - offsets[first])) return false;
    cut_factors(ids, feature, lookup.table + feature.offset, offsets[first], offsets[last], factors.data());
    lookup.cut = factors.data();
    lookup.first_cut = offsets[first];
    blocks(lookup, BagRange{range.span, first, last});
  }
  return true;
}

template <class T>
int64_t pooled_lookup(const Batch& batch, const void* table, void* out, int64_t width, void* scale, bool checked,
                      int threads) {
  using A = Accumulation<T>;
  threads = threads_for(batch.id_count + batch.bags, threads);
  int64_t first_bad = NO_POSITION;
  const Lookup<T> lookup{batch,
                         static_cast<const T*>(table),
                         static_cast<T*>(out),
                         width,
                         static_cast<A*>(scale),
                         &first_bad};
  const BagRanges ranges(batch, threads);
  bool enough = true;
  parallel_tasks(ranges.count(), threads, [&](int64_t task, int) {
    const BagRange range = ranges[task];
    if (is_cut(range.span.feature->max_norm)) {
      if (!sum_cut_bags(lookup, range)) __atomic_store_n(&enough, false, __ATOMIC_RELAXED);
      return;
    }
    const auto& functions = batch.weights == nullptr ? SUM_BAGS<T, Terms::ROWS> : SUM_BAGS<T, Terms::WEIGHTED>;
    const Blocks<SumBags<T>> blocks(range.span.feature->dim, LANES<A>, sizeof(T), functions);
    blocks(lookup, range);
  });
  if (!enough) return OUT_OF_MEMORY;
  return checked && first_bad != NO_POSITION ? first_bad : DONE;
}

}  // namespace
}  // namespace embedfuse

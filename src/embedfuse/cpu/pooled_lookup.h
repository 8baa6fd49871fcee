// Forward: `out[b, columns] = scale[bag] * Σ w row(id)`.
#pragma once

#include "batch.h"
#include "gather_sum.h"

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
};

// The address of a row of any id, for prefetching only: out of range it is nonsense, but no overflow.
template <class T>
inline const T* row_unchecked(const T* rows, int64_t id, int64_t dim) {
  const uint64_t bytes = static_cast<uint64_t>(id) * static_cast<uint64_t>(dim) * sizeof(T);
  return reinterpret_cast<const T*>(reinterpret_cast<uintptr_t>(rows) + static_cast<uintptr_t>(bytes));
}

// One block of columns of some bags. If not WEIGHTED, there are no weights, and hence no flags that look at them.
template <class T, bool WEIGHTED, int WIDTH, bool TAIL>
void sum_bags(const Lookup<T>& lookup, const BagRange& range, Columns columns) {
  using A = Accumulation<T>;
  const Feature& feature = *range.span.feature;
  const Ids<A> ids(lookup.batch, feature);
  const int64_t* offsets = lookup.batch.offsets + range.span.first_bag;
  const int64_t dim = feature.dim, width = lookup.width, last_bag = range.last;
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
      if (position < last_ahead) sum.prefetch_block(row_unchecked(rows, ids.id(position + columns.ahead), dim));
      if (WEIGHTED ? !ids.counts(position) : !ids.in_table(position)) {
        if (ids.is_bad(position)) atomic_min(lookup.first_bad, position);
        continue;
      }
      const A weight = WEIGHTED ? ids.weight(position) : A(1);
      total += WEIGHTED ? moment_of(weight, feature.moment) : A(1);
      sum.add(rows + ids.id(position) * dim, weight, columns.tail);
    }
    A scale = 1;
    if (scales != nullptr) scales[bag] = scale = scale_of(total, feature.power);
    sum.write(out, scale, columns.tail);
  }
}

template <class T>
using SumBags = void (*)(const Lookup<T>&, const BagRange&, Columns);
template <class T, bool WEIGHTED>
constexpr SumBags<T> SUM_BAGS[BLOCK][2] = EMBEDFUSE_WIDTHS(sum_bags, T, WEIGHTED);

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
  parallel_tasks(ranges.count(), threads, [&](int64_t task, int) {
    const BagRange range = ranges[task];
    const auto& functions = batch.weights == nullptr ? SUM_BAGS<T, false> : SUM_BAGS<T, true>;
    const Blocks<SumBags<T>> blocks(range.span.feature->dim, LANES<A>, sizeof(T), functions);
    blocks(lookup, range);
  });
  return checked && first_bad != NO_POSITION ? first_bad : DONE;
}

}  // namespace
}  // namespace embedfuse

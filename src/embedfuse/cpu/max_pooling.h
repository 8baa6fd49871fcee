// Max pooling: the largest of a bag's weighted rows in each column, who it came from, and the gradient back to them.
#pragma once

#include "row_grad.h"

namespace embedfuse {
namespace {

// Takes `value` where it is larger than all before it; the first of equals stays, and the first NaN.
template <class T, class A>
inline void take_larger(const T* row, A weight, int64_t position, int64_t dim, A* __restrict best,
                        int64_t* __restrict winner) {
  for (int64_t i = 0; i < dim; ++i) {
    const A value = weight * widen(row[i]), seen = best[i];
    // NaN is larger than all but NaN
    const bool larger = (value > seen) | ((value != value) & (seen == seen));
    best[i] = larger ? value : seen;
    winner[i] = larger ? position : winner[i];
  }
}

template <class T>
int64_t max_of_bags(const Batch& batch, const BagRange& range, const T* table, T* out, int64_t width,
                    int64_t* winners, Accumulation<T>* best) {
  using A = Accumulation<T>;
  const Feature& feature = *range.span.feature;
  const Ids<A> ids(batch, feature);
  const T* rows = table + feature.offset;
  const bool cut = is_cut(feature.max_norm);
  int64_t bad = NO_POSITION;
  for (int64_t bag = range.first; bag < range.last; ++bag) {
    const int64_t number = range.span.first_bag + bag;
    const int64_t place = (range.span.first_row + bag) * width + feature.column;
    int64_t* winner = winners + place;
    bool empty = true;
    for (int64_t position = batch.offsets[number]; position < batch.offsets[number + 1]; ++position) {
      if (!ids.counts(position)) {
        if (bad == NO_POSITION && ids.is_bad(position)) bad = position;
        continue;
      }
      const T* row = rows + ids.id(position) * feature.stride;
      A weight = ids.weight(position);
      if (cut) weight *= cut_factor(row, feature.dim, feature.max_norm);
      if (empty) {
        for (int64_t i = 0; i < feature.dim; ++i) {
          best[i] = weight * widen(row[i]);
          winner[i] = position;
        }
        empty = false;
      } else {
        take_larger(row, weight, position, feature.dim, best, winner);
      }
    }
    if (empty) {
      for (int64_t i = 0; i < feature.dim; ++i) {
        best[i] = 0;
        winner[i] = -1;
      }
    }
    narrow_row(static_cast<const A*>(best), feature.dim, out + place);
  }
  return bad;
}

template <class T>
int64_t max_lookup(const Batch& batch, const void* table, void* out, int64_t width, int64_t* winners, bool checked,
                   int threads) {
  using A = Accumulation<T>;
  threads = threads_for(batch.id_count + batch.bags, threads);
  const BagRanges ranges(batch, threads);
  const int64_t scratch_size = ceil_div(largest_dim(batch), LINE) * LINE;
  Buffer<A> scratch(threads * scratch_size);
  if (!scratch) return OUT_OF_MEMORY;
  int64_t first_bad = NO_POSITION;
  parallel_tasks(ranges.count(), threads, [&](int64_t task, int thread) {
    const int64_t bad = max_of_bags<T>(batch, ranges[task], static_cast<const T*>(table), static_cast<T*>(out),
                                           width, winners, scratch.data() + thread * scratch_size);
    if (bad != NO_POSITION) atomic_min(&first_bad, bad);
  });
  return checked && first_bad != NO_POSITION ? first_bad : DONE;
}

// One id that won somewhere: its weight, and its bag's row of gradient and winners.
template <class A>
struct WinnerEntry {
  int64_t place;  // of the first column in both matrices
  int64_t position;
  A weight;
};

template <class A>
class WinnerSum {
 public:
  using E = WinnerEntry<A>;
  static constexpr bool READS_ROWS = false;

  WinnerSum(const A* grad, const int64_t* winners, int64_t dim) : grad_(grad), winners_(winners), dim_(dim) {}

  void operator()(int64_t, const E* entries, int64_t count, int64_t, A* out) const {
    for (int64_t i = 0; i < dim_; ++i) out[i] = 0;
    for (int64_t e = 0; e < count; ++e) {
      const E& entry = entries[e];
      const A* g = grad_ + entry.place;
      const int64_t* winner = winners_ + entry.place;
      for (int64_t i = 0; i < dim_; ++i) out[i] += winner[i] == entry.position ? entry.weight * g[i] : A(0);
    }
  }

 private:
  const A* grad_;
  const int64_t* winners_;
  int64_t dim_;
};

template <class T>
int64_t max_grad(const Batch& batch, const Matrix& grad, int64_t width, const int64_t* winners, void* out,
                 int threads) {
  using A = Accumulation<T>;
  TablesAtHand tables;
  GradRows<A> rows;
  // of one type and without gaps, like the winners
  const int64_t row_count = batch.records * batch.bags;
  Buffer<bool> won(batch.id_count);
  if (!list_tables(batch, &tables, true) || !won || !rows.prepare(grad, DTYPE<A>, row_count, width, threads, width))
    return OUT_OF_MEMORY;
  memset(won.data(), 0, static_cast<size_t>(batch.id_count) * sizeof(bool));
  for (int64_t i = 0; i < row_count * width; ++i)
    if (winners[i] >= 0) won[winners[i]] = true;

  const A* values = static_cast<const A*>(rows.row(0, 0));
  const auto make_entry = [&](const Span& span, int64_t bag, int64_t position, A weight, WinnerEntry<A>* entry) {
    *entry = {(span.first_row + bag) * width + span.feature->column, position, weight};
    return won[position];
  };
  using Memory = SumsMemory<A, WinnerEntry<A>>;
  const bool enough = for_each_table<Memory>(
      batch, tables, threads, [&](Memory& memory, int64_t place, const SpansOfTable& spans, int own_threads) {
        const TableRows& table = tables[place];
        if (!memory.runs.template build<A>(batch, table, spans, own_threads, make_entry)) return false;
        RowSums<A, WinnerSum<A>> sums(memory, WinnerSum<A>(values, winners, table.dim), table.dim);
        return sums.prepare(own_threads) && write_row_sums(sums, table, nullptr, static_cast<T*>(out), own_threads);
      });
  return enough ? DONE : OUT_OF_MEMORY;
}

}  // namespace
}  // namespace embedfuse

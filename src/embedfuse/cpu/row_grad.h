// The summed gradient of every row, for callers that keep the optimizer to themselves.
#pragma once

#include "row_update.h"

namespace embedfuse {
namespace {

// Calls `take(sum, range, u)` with the summed gradient of every run.
template <class A, class MakeSum, class Take>
bool for_each_row_sum(const RowSums<A, MakeSum>& sums, int threads, const Take& take) {
  return for_each_run_range(sums, 1, threads, [&](const RunRange& range, A* scratch, int64_t) {
    const auto sum = sums.sum_of(range.rows);
    for (int64_t u = range.first; u < range.last; ++u) {
      sums(sum, range.rows.dim, u, scratch);
      take(static_cast<const A*>(scratch), range, u);
    }
  });
}

// Writes each row's sum to its place in `out`, which is laid out like the tables.
template <class T, class MakeSum>
bool write_row_sums(const RowSums<Accumulation<T>, MakeSum>& sums, T* out, int threads) {
  return for_each_row_sum(sums, threads, [&](const Accumulation<T>* sum, const RunRange& range, int64_t u) {
    const Rows& rows = range.rows;
    narrow_row(sum, rows.dim, out + rows.offset + (sums.runs().keys[u] - rows.first_key) * rows.dim);
  });
}

inline bool list_tables(const Batch& batch, RowsList* list) {
  if (!list->allocate(batch.feature_count)) return false;
  for (int64_t f = 0; f < batch.feature_count; ++f) {
    const Feature& feature = batch.features[f];
    list->add({feature.row_base, feature.row_base + feature.rows, feature.dim, feature.offset, feature.table});
  }
  return true;
}

template <class T>
int64_t row_grad(const Batch& batch, const Upstream& upstream, void* out, int threads) {
  RowsList tables;
  if (!list_tables(batch, &tables)) return OUT_OF_MEMORY;
  return with_row_sums<T>(batch, upstream, tables, threads, [&](const LinearRowSums<Accumulation<T>>& sums) {
    return write_row_sums(sums, static_cast<T*>(out), threads);
  });
}

template <class T>
int64_t row_square_sum(const Batch& batch, const Upstream& upstream, const Learner& learner, double* result,
                       int threads) {
  using A = Accumulation<T>;
  RowsList tables;
  if (!list_tables(learner, [&](int64_t table) { return learner.tables[table].rule >= 0; }, &tables))
    return OUT_OF_MEMORY;
  return with_row_sums<T>(batch, upstream, tables, threads, [&](const LinearRowSums<A>& sums) {
    // one number a run, added up in order, so that the threads do not matter
    Buffer<double> squares(sums.runs().count);
    if (!squares) return false;
    const bool done = for_each_row_sum(sums, threads, [&](const A* sum, const RunRange& range, int64_t u) {
      squares[u] = square_sum(sum, range.rows.dim);
    });
    *result = 0;
    for (int64_t u = 0; u < sums.runs().count; ++u) *result += squares[u];
    return done;
  });
}

template <class T>
int64_t collect_rows(const Batch& batch, const Upstream& upstream, const Learner& learner, int64_t table,
                     Collected* collected, int threads) {
  using A = Accumulation<T>;
  RowsList tables;
  if (!list_tables(learner, [&](int64_t number) { return number == table; }, &tables)) return OUT_OF_MEMORY;
  return with_row_sums<T>(batch, upstream, tables, threads, [&](const LinearRowSums<A>& sums) {
    const int64_t count = sums.runs().count, dim = learner.tables[table].dim;
    Buffer<int64_t> rows(count);
    Buffer<A> all(count * dim);
    if (!rows || !all) return false;
    const bool done = for_each_row_sum(sums, threads, [&](const A* sum, const RunRange& range, int64_t u) {
      rows[u] = sums.runs().keys[u] - range.rows.first_key;
      memcpy(all.data() + u * dim, sum, static_cast<size_t>(dim) * sizeof(A));
    });
    if (done) *collected = {count, rows.release(), all.release()};
    return done;
  });
}

}  // namespace
}  // namespace embedfuse

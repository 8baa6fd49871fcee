// The summed gradient of every row, for callers that keep the optimizer to themselves.
#pragma once

#include "row_dots.h"
#include "row_update.h"

namespace embedfuse {
namespace {

// Writes each row's sum to its place in `out`, which is laid out like the table, or like its `parts` if there are any.
// False if there is no memory.
template <class T, class Sum>
bool write_row_sums(const RowSums<Accumulation<T>, Sum>& sums, const TableRows& table, const TablesAtHand* parts,
                    T* out, int threads) {
  return sums.for_each_row(threads, [&](const Accumulation<T>* sum, int64_t u) {
    const int64_t row = table.row_base + sums.row(u);
    const TableRows& part = parts == nullptr ? table : parts->owner(row);
    narrow_row(sum, table.dim, out + part.offset + (row - part.row_base) * part.stride);
  });
}

// The tables that the features read, whose sums lie side by side or, if `spread`, like the rows. False if there is no
// memory.
inline bool list_tables(const Batch& batch, TablesAtHand* list, bool spread = false) {
  if (!list->allocate(batch.feature_count)) return false;
  for (int64_t f = 0; f < batch.feature_count; ++f) {
    const Feature& feature = batch.features[f];
    // if sums are to be cut, the parts say to what length
    list->add({feature.row_base, feature.rows, feature.dim, feature.offset, feature.table,
               spread ? feature.stride : feature.dim, 0, __builtin_inf()});
  }
  return true;
}

// The tables that rows are described in. False if there is no memory.
inline bool list_tables(const Rows& rows, TablesAtHand* list) {
  if (!list->allocate(rows.table_count)) return false;
  for (int64_t t = 0; t < rows.table_count; ++t) list->add(rows_of(rows.tables[t], t));
  return true;
}

// `dots` may be null; if not, there are `rows`.
template <class T>
int64_t row_grad(const Batch& batch, const Upstream& upstream, const Rows* rows, void* out, void* dots, int threads) {
  using A = Accumulation<T>;
  TablesAtHand tables, parts;
  if (!list_tables(batch, &tables) || (rows != nullptr && !list_tables(*rows, &parts))) return OUT_OF_MEMORY;
  const Destination to{tables, rows == nullptr ? tables : parts, rows == nullptr ? nullptr : rows->table};
  const auto write = [&](const auto& sums, int64_t place, int own_threads) {
    return write_row_sums(sums, tables[place], rows == nullptr ? nullptr : &parts, static_cast<T*>(out), own_threads);
  };
  const bool enough =
      dots == nullptr ? for_each_table_sums<A>(batch, upstream, to, TABLE_TYPE<T>, threads, write)
                      : for_each_table_dots<T>(batch, upstream, to, static_cast<A*>(dots), threads, write);
  return enough ? DONE : OUT_OF_MEMORY;
}

template <class T>
int64_t row_square_sum(const Batch& batch, const Upstream& upstream, const Learner& learner, double* result,
                       int threads) {
  using A = Accumulation<T>;
  TablesAtHand tables;
  if (!list_tables(learner, [&](int64_t table) { return learner.tables[table].rule >= 0; }, &tables))
    return OUT_OF_MEMORY;
  // one number a run, then one a table, added up in order: so that the threads do not matter
  Buffer<double> of_table(tables.count());
  if (!of_table) return OUT_OF_MEMORY;
  for (int64_t t = 0; t < tables.count(); ++t) of_table[t] = 0;
  const bool enough = for_each_table_sums<A>(
      batch, upstream, {tables, tables, learner.table}, TABLE_TYPE<T>, threads,
      [&](const RowSums<A, LinearSum<A>>& sums, int64_t place, int own_threads) {
        Buffer<double> squares(sums.count());
        const bool done = squares && sums.for_each_row(own_threads, [&](const A* sum, int64_t u) {
          squares[u] = square_sum(sum, tables[place].dim);
        });
        for (int64_t u = 0; done && u < sums.count(); ++u) of_table[place] += squares[u];
        return done;
      });
  *result = 0;
  for (int64_t t = 0; t < tables.count(); ++t) *result += of_table[t];
  return enough ? DONE : OUT_OF_MEMORY;
}

template <class T>
int64_t collect_rows(const Batch& batch, const Upstream& upstream, const Learner& learner, int64_t table,
                     Collected* collected, int threads) {
  using A = Accumulation<T>;
  TablesAtHand tables;
  if (!list_tables(learner, [&](int64_t number) { return number == table; }, &tables)) return OUT_OF_MEMORY;
  const int64_t dim = learner.tables[table].dim;
  Buffer<int64_t> rows(0);
  Buffer<A> all(0);
  const bool enough = for_each_table_sums<A>(
      batch, upstream, {tables, tables, learner.table}, TABLE_TYPE<T>, threads,
      [&](const RowSums<A, LinearSum<A>>& sums, int64_t, int own_threads) {
        collected->count = sums.count();
        if (!rows.allocate(sums.count()) || !all.allocate(sums.count() * dim)) return false;
        return sums.for_each_row(own_threads, [&](const A* sum, int64_t u) {
          rows[u] = sums.row(u);
          memcpy(all.data() + u * dim, sum, static_cast<size_t>(dim) * sizeof(A));
        });
      });
  if (!enough || !rows || !all) return OUT_OF_MEMORY;
  collected->rows = rows.release();
  collected->sums = all.release();
  return DONE;
}

}  // namespace
}  // namespace embedfuse

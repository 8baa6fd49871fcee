// Which tables an update is about, and whose bags are which. Small tables go to one thread each, large ones to all.
#pragma once

#include "batch.h"

namespace embedfuse {
namespace {

// The rows of one table, where its sums go and where it is read.
struct TableRows {
  int64_t row_base, rows, dim, offset;
  int64_t table;   // in Group.tables
  int64_t stride;  // between the sums of rows that follow each other
  int64_t source;
  double max_norm;
};

inline TableRows rows_of(const Table& table, int64_t number) {
  return {table.row_base, table.rows, table.dim, table.offset, number, table.dim, table.source, table.max_norm};
}

// The tables at hand, ascending by ROW_BASE, which tells them apart. Few, so a plain array.
class TablesAtHand {
 public:
  bool allocate(int64_t most) { return tables_.allocate(most); }

  // A table that is there already is not added again, nor one without rows, whose ROW_BASE is another's, too.
  void add(const TableRows& table) {
    if (table.rows == 0) return;
    int64_t place = count_;
    for (; place > 0 && tables_[place - 1].row_base >= table.row_base; --place) {
      if (tables_[place - 1].row_base == table.row_base) return;
    }
    for (int64_t i = count_; i > place; --i) tables_[i] = tables_[i - 1];
    tables_[place] = table;
    ++count_;
  }
  int64_t count() const { return count_; }
  const TableRows& operator[](int64_t i) const { return tables_[i]; }

  // The table that a row is in, of all rows of all tables.
  const TableRows& owner(int64_t row) const {
    int64_t low = 0, high = count_;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (tables_[middle].row_base <= row ? low : high) = middle;
    }
    return tables_[low];
  }

 private:
  Buffer<TableRows> tables_;
  int64_t count_ = 0;
};

// The spans that read one table, in the order of the batch.
struct SpansOfTable {
  const int64_t* spans;  // numbers for `span_of`
  int64_t count;
  int64_t ids;
};

inline int64_t ids_of(const Batch& batch, const Span& span) {
  return batch.offsets[span.first_bag + batch.bags] - batch.offsets[span.first_bag];
}

// All spans, grouped by table.
class SpansByTable {
 public:
  // False if there is no memory.
  __attribute__((noinline)) bool prepare(const Batch& batch, const TablesAtHand& tables) {
    const int64_t spans = batch.records * batch.feature_count;
    if (!spans_.allocate(spans) || !of_table_.allocate(tables.count())) return false;
    int64_t next = 0;
    for (int64_t t = 0; t < tables.count(); ++t) {
      SpansOfTable& own = of_table_[t] = {spans_.data() + next, 0, 0};
      for (int64_t s = 0; s < spans; ++s) {
        const Span span = span_of(batch, s);
        if (span.feature->row_base != tables[t].row_base) continue;
        spans_[next++] = s;
        ++own.count;
        own.ids += ids_of(batch, span);
      }
    }
    return true;
  }
  const SpansOfTable& operator[](int64_t table) const { return of_table_[table]; }

 private:
  Buffer<int64_t> spans_;
  Buffer<SpansOfTable> of_table_;
};

// Calls `body(work, place, spans, threads)` for each table at hand, which returns false if there is no memory. `Work`
// is memory that one call leaves for the next; results must not depend on which call had it before.
template <class Work, class Body>
bool for_each_table(const Batch& batch, const TablesAtHand& tables, int threads, const Body& body) {
  SpansByTable spans;
  if (!spans.prepare(batch, tables)) return false;
  int64_t all_ids = 0;
  for (int64_t t = 0; t < tables.count(); ++t) all_ids += spans[t].ids;
  threads = threads_for(all_ids * 4, threads);
  // with this share of the ids or more, a table would keep its thread busy when the others have nothing left to do
  const int64_t large = threads == 1 ? INT64_MAX : larger<int64_t>(all_ids / (4 * threads), 4096);
  bool enough = true;
  int64_t next = 0;
  // `own_threads` together on each table of fewer than `below` ids and at least `from`
  const auto visit = [&](int64_t from, int64_t below, int own_threads) __attribute__((noinline)) {
    Work work;
    for (int64_t t = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); t < tables.count();
         t = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) {
      if (spans[t].ids < from || spans[t].ids >= below) continue;
      if (!body(work, t, spans[t], own_threads)) __atomic_store_n(&enough, false, __ATOMIC_RELAXED);
    }
  };
  if (threads > 1) visit(large, INT64_MAX, threads);
  next = 0;
  parallel(threads, [&](const Team&) { visit(1, large, 1); });
  return enough;
}

}  // namespace
}  // namespace embedfuse

// The summed gradient of every row of one table, one row after the other, for whoever consumes it.
#pragma once

#include "gather_sum.h"
#include "max_norm.h"
#include "row_runs.h"
#include "upstream.h"

namespace embedfuse {
namespace {

// Runs longer than this are summed in chunks of this length, and the chunks' sums in order: so one hot row keeps all
// threads busy, and the result depends on this number only, never on the threads.
constexpr int64_t CHUNK = 2048;
// Rows between the one whose sum is made and the one that is prefetched, where rows are read: BYTES_AHEAD of them, which
// is two of wide ones (1024 float32: 12 % less time than eight; Xeon of family 6 model 207, one thread, 2026-11).
constexpr int64_t MOST_ROWS_AHEAD = 8;
// Consecutive runs that one thread takes at once.
constexpr int64_t RUNS_AT_ONCE = 256;

// One block of columns of the sum of `count` entries. Prefetches up to `entry_count`: what follows is the next row's.
template <class G, class A, int WIDTH, bool TAIL>
void sum_entries(const Entry<A>* entries, int64_t count, int64_t entry_count, A* out, Columns columns) {
  BlockSum<G, A, WIDTH, TAIL> sum;
  for (int64_t i = 0; i < count; ++i) {
    if (i + columns.ahead < entry_count)
      sum.prefetch_block(static_cast<const G*>(entries[i + columns.ahead].row) + columns.first);
    sum.add(static_cast<const G*>(entries[i].row) + columns.first, entries[i].coefficient, columns.tail);
  }
  sum.write(out + columns.first, A(1), columns.tail);
}

// Sums entries that are gradient rows times a coefficient.
template <class A>
class LinearSum {
 public:
  using E = Entry<A>;
  static constexpr bool READS_ROWS = false;

  // For gradient rows of `dim` elements of type G.
  template <class G>
  static LinearSum of(int64_t dim) {
    return LinearSum(Blocks<Function>(dim, LANES<A>, sizeof(G), FUNCTIONS<G>), DTYPE<G> == DTYPE<A>);
  }
  void operator()(int64_t, const E* entries, int64_t count, int64_t entry_count, A* out) const {
    blocks_(entries, count, entry_count, out);
  }
  // Whether gradient rows are of type A.
  bool is_wide() const { return is_wide_; }

 private:
  using Function = void (*)(const E*, int64_t, int64_t, A*, Columns);
  template <class G>
  static constexpr Function FUNCTIONS[BLOCK][2] = EMBEDFUSE_WIDTHS(sum_entries, G, A);

  LinearSum(const Blocks<Function>& blocks, bool is_wide) : blocks_(blocks), is_wide_(is_wide) {}
  Blocks<Function> blocks_;
  bool is_wide_;
};

// Memory for the rows of one table after the other.
template <class A, class E>
struct SumsMemory {
  Runs<E> runs;
  Buffer<int64_t> long_runs, first_chunk;
  Buffer<A> partial, scratch;
};

// How rows of some type are cut, and their gradients.
template <class A>
struct Cut {
  void (*gradient)(const void* row, int64_t dim, double max_norm, A* g);
  A (*factor)(const void* row, int64_t dim, double max_norm);
  int64_t bytes;  // of an element of the rows

  template <class T>
  static constexpr Cut of() {
    return {[](const void* row, int64_t dim, double max_norm, A* g) {
              cut_gradient(static_cast<const T*>(row), dim, max_norm, g);
            },
            [](const void* row, int64_t dim, double max_norm) {
              return cut_factor(static_cast<const T*>(row), dim, max_norm);
            },
            sizeof(T)};
  }
};

// The rows of one table that sums are made for, where they can be read.
template <class A>
class SourceRows {
 public:
  SourceRows() = default;
  // `from` is what SOURCE of the table's `parts` counts from.
  SourceRows(const TableRows& table, const TablesAtHand& parts, const void* from, const Cut<A>& cut)
      : from_(static_cast<const char*>(from)), cut_(cut), row_base_(table.row_base) {
    int64_t count = 0;
    for (int64_t i = 0; i < parts.count(); ++i) {
      if (parts[i].row_base < row_base_ || parts[i].row_base >= row_base_ + table.rows) continue;
      any_cut_ |= is_cut(parts[i].max_norm);
      only_ = ++count == 1 ? &parts[i] : nullptr;
    }
    parts_ = &parts;
  }

  bool is_any_cut() const { return any_cut_; }
  void cut_gradient(int64_t row, A* g) const {
    const TableRows& part = part_of(row);
    if (is_cut(part.max_norm)) cut_.gradient(address(part, row), part.dim, part.max_norm, g);
  }
  // What elements of a row are multiplied by.
  A factor(int64_t row) const {
    const TableRows& part = part_of(row);
    return is_cut(part.max_norm) ? cut_.factor(address(part, row), part.dim, part.max_norm) : A(1);
  }
  const void* address(int64_t row) const { return address(part_of(row), row); }
  int64_t rows_ahead(int64_t dim) const {
    return smaller(larger<int64_t>(BYTES_AHEAD / (dim * cut_.bytes), 2), MOST_ROWS_AHEAD);
  }
  void prefetch_row(int64_t row) const {
    const TableRows& part = part_of(row);
    prefetch_lines(address(part, row), part.dim * cut_.bytes);
  }

 private:
  const TableRows& part_of(int64_t row) const { return only_ != nullptr ? *only_ : parts_->owner(row_base_ + row); }
  const void* address(const TableRows& part, int64_t row) const {
    return from_ + (part.source + (row_base_ + row - part.row_base) * part.dim) * cut_.bytes;
  }

  bool any_cut_ = false;
  const TableRows* only_ = nullptr;
  const TablesAtHand* parts_ = nullptr;
  const char* from_ = nullptr;
  Cut<A> cut_ = {};
  int64_t row_base_ = 0;
};

// The sums of all runs of one table, the long ones made by all threads beforehand.
template <class A, class Sum>
class RowSums {
 public:
  using E = typename Sum::E;

  RowSums(SumsMemory<A, E>& memory, const Sum& sum, int64_t dim, const SourceRows<A>& rows = {})
      : memory_(memory), sum_(sum), dim_(dim), rows_(rows) {}

  // False if there is no memory.
  __attribute__((noinline)) bool prepare(int threads) {
    const Runs<E>& runs = memory_.runs;
    for (int64_t u = 0; u < runs.count; ++u) long_runs_ += length(u) > CHUNK;
    if (long_runs_ == 0) return true;
    if (!memory_.long_runs.allocate(long_runs_) || !memory_.first_chunk.allocate(long_runs_ + 1)) return false;
    int64_t next = 0, chunks = 0;
    for (int64_t u = 0; u < runs.count; ++u) {
      if (length(u) <= CHUNK) continue;
      memory_.long_runs[next] = u;
      memory_.first_chunk[next++] = chunks;
      chunks += ceil_div(length(u), CHUNK);
    }
    memory_.first_chunk[next] = chunks;
    if (!memory_.partial.allocate(chunks * dim_)) return false;
    parallel_tasks(chunks, threads, [&](int64_t chunk, int) {
      const int64_t place = find(memory_.first_chunk.data(), chunk);
      const int64_t u = memory_.long_runs[place];
      const int64_t first = runs.starts[u] + (chunk - memory_.first_chunk[place]) * CHUNK;
      const int64_t count = smaller(first + CHUNK, runs.starts[u + 1]) - first;
      sum_(runs.rows[u], runs.entries.data() + first, count, count, memory_.partial.data() + chunk * dim_);
    });
    return true;
  }

  // `out[0 .. dim) =` the sum of run `u`.
  void operator()(int64_t u, A* out) const {
    add_up(u, out);
    if (rows_.is_any_cut()) rows_.cut_gradient(row(u), out);
  }

  // The one entry of run `u` if there is no other, and its row can be used as it is; else null.
  const E* only_entry(int64_t u) const {
    return length(u) == 1 && sum_.is_wide() && !rows_.is_any_cut() ? memory_.runs.entries.data() + memory_.runs.starts[u] : nullptr;
  }
  // Prefetches the gradient row `ahead` entries behind the first one of run `u`.
  void prefetch_gradient(int64_t u, int64_t ahead) const {
    const int64_t place = memory_.runs.starts[u] + ahead;
    if (sum_.is_wide() && place < memory_.runs.entry_count())
      prefetch_lines(memory_.runs.entries[place].row, dim_ * static_cast<int64_t>(sizeof(A)));
  }
  int64_t count() const { return memory_.runs.count; }
  int64_t row(int64_t u) const { return memory_.runs.rows[u]; }

  // Calls `body(first, last, scratch, row_size)` for ranges of runs; `scratch` has room for two rows of `row_size`.
  // False if there is no memory.
  template <class Body>
  bool for_each_range(int threads, const Body& body) const {
    // whole lines, so that no two threads write to one
    const int64_t row_size = ceil_div(dim_, LINE) * LINE;
    if (!memory_.scratch.allocate(threads * row_size * 2)) return false;
    A* const scratch = memory_.scratch.data();
    parallel_ranges(count(), RUNS_AT_ONCE, threads, [&](int64_t first, int64_t last, int thread) {
      body(first, last, scratch + thread * row_size * 2, row_size);
    });
    return true;
  }
  // Calls `take(sum, u)` with the sum of each run. False if there is no memory.
  template <class Take>
  bool for_each_row(int threads, const Take& take) const {
    const bool reads_rows = Sum::READS_ROWS || rows_.is_any_cut();
    const int64_t ahead = reads_rows ? rows_.rows_ahead(dim_) : 0;
    return for_each_range(threads, [&](int64_t first, int64_t last, A* sum, int64_t) {
      for (int64_t u = first; u < last; ++u) {
        if (reads_rows && u + ahead < last) rows_.prefetch_row(row(u + ahead));
        (*this)(u, sum);
        take(static_cast<const A*>(sum), u);
      }
    });
  }

 private:
  void add_up(int64_t u, A* out) const {
    const Runs<E>& runs = memory_.runs;
    const int64_t first = runs.starts[u];
    if (length(u) <= CHUNK) {
      sum_(row(u), runs.entries.data() + first, length(u), runs.entry_count() - first, out);
      return;
    }
    const int64_t place = find(memory_.long_runs.data(), u);
    for (int64_t i = 0; i < dim_; ++i) out[i] = 0;
    for (int64_t chunk = memory_.first_chunk[place]; chunk < memory_.first_chunk[place + 1]; ++chunk) {
      const A* partial = memory_.partial.data() + chunk * dim_;
      for (int64_t i = 0; i < dim_; ++i) out[i] += partial[i];
    }
  }
  int64_t length(int64_t u) const { return memory_.runs.starts[u + 1] - memory_.runs.starts[u]; }
  // The place of the last number, one a long run, that is not above `value`.
  int64_t find(const int64_t* numbers, int64_t value) const {
    int64_t low = 0, high = long_runs_;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (numbers[middle] <= value ? low : high) = middle;
    }
    return low;
  }

  SumsMemory<A, E>& memory_;
  Sum sum_;
  int64_t dim_, long_runs_ = 0;
  SourceRows<A> rows_;
};

// What one id receives: its weight times its bag's scale, times its bag's gradient.
template <class A>
struct MakeEntry {
  const GradRows<A>& grad;
  const A* scale;  // one a bag, or null

  bool operator()(const Span& span, int64_t bag, int64_t, A weight, Entry<A>* entry) const {
    *entry = {grad.row(span.first_row + bag, span.feature->column),
              scale == nullptr ? weight : weight * scale[span.first_bag + bag]};
    return true;
  }
};

// What sums of gradients must know of the tables' type.
template <class A>
struct TableType {
  Dtype dtype;
  LinearSum<A> (*narrow_sum)(int64_t dim);  // what sums gradient rows of that type
  Cut<A> cut;
};
template <class T>
constexpr TableType<Accumulation<T>> TABLE_TYPE = {DTYPE<T>, &LinearSum<Accumulation<T>>::template of<T>,
                                                   Cut<Accumulation<T>>::template of<T>()};

// The tables whose rows get sums, and where these rows can be read.
struct Destination {
  const TablesAtHand& tables;
  const TablesAtHand& parts;  // the tables again, or what they are made of
  const void* from;           // what SOURCE of the parts counts from
};

// Calls `consume(sums, place, threads)` for each table at hand, which returns false if there is no memory. The sums are
// those of `make_sum(table, rows)`.
template <class A, class Sum, class MakeEntry, class MakeSum, class Consume>
bool for_each_table_sums(const Batch& batch, const Destination& to, const Cut<A>& cut, int threads,
                         const MakeEntry& make_entry, const MakeSum& make_sum, const Consume& consume) {
  using Memory = SumsMemory<A, typename Sum::E>;
  return for_each_table<Memory>(
      batch, to.tables, threads, [&](Memory& memory, int64_t place, const SpansOfTable& spans, int own_threads) {
        const TableRows& table = to.tables[place];
        if (!memory.runs.template build<A>(batch, table, spans, own_threads, make_entry)) return false;
        const SourceRows<A> rows(table, to.parts, to.from, cut);
        RowSums<A, Sum> sums(memory, make_sum(table, rows), table.dim, rows);
        return sums.prepare(own_threads) && consume(sums, place, own_threads);
      });
}

// The same of gradient rows times coefficients.
template <class A, class Consume>
bool for_each_table_sums(const Batch& batch, const Upstream& upstream, const Destination& to, const TableType<A>& type,
                         int threads, const Consume& consume) {
  GradRows<A> grad;
  if (!grad.prepare(upstream.grad, type.dtype, batch.records * batch.bags, upstream.width, threads)) return false;
  const MakeEntry<A> make_entry{grad, static_cast<const A*>(upstream.scale)};
  const auto make_sum = grad.is_wide() ? &LinearSum<A>::template of<A> : type.narrow_sum;
  return for_each_table_sums<A, LinearSum<A>>(
      batch, to, type.cut, threads, make_entry,
      [&](const TableRows& table, const SourceRows<A>&) { return make_sum(table.dim); }, consume);
}

}  // namespace
}  // namespace embedfuse

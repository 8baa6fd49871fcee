// The summed gradient of every row in the batch, one row after the other, for whoever consumes it.
#pragma once

#include "row_runs.h"
#include "upstream.h"

namespace embedfuse {
namespace {

// Runs longer than this are summed in chunks of this length, and the chunks' sums in order: so that one hot row keeps all
// threads busy, and the result depends on this number only, never on the threads.
constexpr int64_t CHUNK = 2048;
// Consecutive runs that one thread takes at once. Sums over rows are made in groups of this size, too.
constexpr int64_t RUNS_AT_ONCE = 256;

// One block of columns of the sum of `count` entries. Prefetches up to `entry_count`: those behind belong to the next row.
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

  template <class G>
  static LinearSum of(int64_t dim) {
    return LinearSum(Blocks<Function>(dim, LANES<A>, sizeof(G), FUNCTIONS<G>));
  }
  void operator()(const E* entries, int64_t count, int64_t entry_count, A* out) const {
    blocks_(entries, count, entry_count, out);
  }

 private:
  using Function = void (*)(const E*, int64_t, int64_t, A*, Columns);
  template <class G>
  static constexpr Function FUNCTIONS[BLOCK][2] = EMBEDFUSE_WIDTHS(sum_entries, G, A);

  explicit LinearSum(const Blocks<Function>& blocks) : blocks_(blocks) {}
  Blocks<Function> blocks_;
};

// Sums of runs, the long ones prepared by all threads beforehand.
//
// `MakeSum` is a function from a table's dim to what sums entries of that width.
template <class A, class MakeSum>
class RowSums {
 public:
  using Sum = decltype((*static_cast<MakeSum*>(nullptr))(int64_t(0)));
  using E = typename Sum::E;

  RowSums(const Runs<E>& runs, const RowsList& tables, MakeSum make_sum)
      : make(make_sum), runs_(runs), tables_(tables) {}

  Sum sum_of(const Rows& rows) const { return make(rows.dim); }

  // False if there is no memory.
  bool prepare(int threads) {
    int64_t chunks = 0;
    for (int64_t u = 0; u < runs_.count; ++u) long_runs_ += length(u) > CHUNK;
    if (long_runs_ == 0) return true;
    if (!run_.allocate(long_runs_) || !first_chunk_.allocate(long_runs_ + 1)) return false;
    int64_t next = 0;
    for (int64_t u = 0; u < runs_.count; ++u) {
      if (length(u) <= CHUNK) continue;
      run_[next] = u;
      first_chunk_[next++] = chunks;
      chunks += ceil_div(length(u), CHUNK);
    }
    first_chunk_[next] = chunks;
    stride_ = tables_.largest_dim();
    if (!partial_.allocate(chunks * stride_)) return false;
    parallel_tasks(chunks, threads, [&](int64_t chunk, int) {
      const int64_t place = find(first_chunk_.data(), long_runs_, chunk);
      const int64_t u = run_[place];
      const int64_t first = runs_.starts[u] + (chunk - first_chunk_[place]) * CHUNK;
      const int64_t last = smaller(first + CHUNK, runs_.starts[u + 1]);
      const Sum sum = sum_of(tables_[tables_.find(runs_.keys[u])]);
      sum(runs_.entries.data() + first, last - first, last - first, partial_.data() + chunk * stride_);
    });
    return true;
  }

  // `out[0 .. dim) =` the sum of run `u`; `sum` is for rows of `dim` elements.
  void operator()(const Sum& sum, int64_t dim, int64_t u, A* out) const {
    const int64_t first = runs_.starts[u];
    if (length(u) <= CHUNK) {
      sum(runs_.entries.data() + first, length(u), runs_.entry_count() - first, out);
      return;
    }
    const int64_t place = find(run_.data(), long_runs_, u);
    memset(out, 0, static_cast<size_t>(dim) * sizeof(A));
    for (int64_t chunk = first_chunk_[place]; chunk < first_chunk_[place + 1]; ++chunk) {
      const A* partial = partial_.data() + chunk * stride_;
      for (int64_t i = 0; i < dim; ++i) out[i] += partial[i];
    }
  }

  MakeSum make;
  const Runs<E>& runs() const { return runs_; }
  const RowsList& tables() const { return tables_; }

 private:
  int64_t length(int64_t u) const { return runs_.starts[u + 1] - runs_.starts[u]; }
  // The last of `count` ascending numbers that is not above `value`.
  static int64_t find(const int64_t* numbers, int64_t count, int64_t value) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (numbers[middle] <= value ? low : high) = middle;
    }
    return low;
  }

  const Runs<E>& runs_;
  const RowsList& tables_;
  int64_t long_runs_ = 0, stride_ = 0;
  Buffer<int64_t> run_, first_chunk_;
  Buffer<A> partial_;
};

template <class A>
using MakeLinearSum = LinearSum<A> (*)(int64_t dim);
template <class A>
using LinearRowSums = RowSums<A, MakeLinearSum<A>>;

// Sorts a batch and prepares its sums: all that comes before a row is touched.
template <class A>
class BatchSums {
 public:
  // False if there is no memory. `make_narrow` is for gradient rows of the tables' type.
  bool prepare(const Batch& batch, const Upstream& upstream, const RowsList& tables, Dtype table,
               MakeLinearSum<A> make_narrow, int threads) {
    if (!grad_.prepare(upstream.grad, table, batch.records * batch.bags, upstream.width, threads)) return false;
    const A* scale = static_cast<const A*>(upstream.scale);
    const auto make_entry = [&](const Feature& feature, int64_t bag, int64_t row, int64_t, A weight, Entry<A>* entry) {
      *entry = {grad_.row(row, feature.column), scale == nullptr ? weight : weight * scale[bag]};
      return true;
    };
    if (!build_runs<A>(batch, tables, threads, make_entry, &runs_)) return false;
    sums_.make = grad_.is_wide() ? &LinearSum<A>::template of<A> : make_narrow;
    return sums_.prepare(threads);
  }
  const LinearRowSums<A>& sums() const { return sums_; }

  explicit BatchSums(const RowsList& tables) : sums_(runs_, tables, nullptr) {}

 private:
  GradRows<A> grad_;
  Runs<Entry<A>> runs_;
  LinearRowSums<A> sums_;
};

// Some consecutive runs of one table.
struct RunRange {
  const Rows& rows;
  int64_t group, first, last;
};

// Calls `body(range, scratch)` until all runs are done; `scratch` holds `scratch_rows` rows of any table.
// False if there is no memory.
template <class A, class MakeSum, class Body>
bool for_each_run_range(const RowSums<A, MakeSum>& sums, int64_t scratch_rows, int threads, const Body& body) {
  const auto& runs = sums.runs();
  const RowsList& tables = sums.tables();
  // whole lines, so that no two threads write to one
  const int64_t row_size = ceil_div(tables.largest_dim(), LINE) * LINE;
  threads = threads_for(runs.entry_count() * 4, threads);
  Buffer<A> scratch(threads * row_size * scratch_rows);
  if (!scratch) return false;
  parallel_tasks(ceil_div(runs.count, RUNS_AT_ONCE), threads, [&](int64_t group, int thread) {
    int64_t first = group * RUNS_AT_ONCE;
    const int64_t end = smaller(first + RUNS_AT_ONCE, runs.count);
    while (first < end) {
      const Rows& rows = tables[tables.find(runs.keys[first])];
      int64_t last = first + 1;
      while (last < end && runs.keys[last] < rows.last_key) ++last;
      body(RunRange{rows, group, first, last}, scratch.data() + thread * row_size * scratch_rows, row_size);
      first = last;
    }
  });
  return true;
}

}  // namespace
}  // namespace embedfuse

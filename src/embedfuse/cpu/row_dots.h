// Sums of gradients by row which, in passing, make the dot of each gradient with its row: the gradient of a weight.
#pragma once

#include "row_sums.h"

namespace embedfuse {
namespace {

// Entries whose dots are made together: their gradient rows stay close by while every block of columns has its turn.
constexpr int64_t DOTS_AT_ONCE = 16;

// One block of columns of the sum of `count` entries, which goes on with `out` if it is `resumed`; `products[i]` gets
// the block's part of the dot of entry `i`. Prefetches as `sum_entries` does.
template <class T, class G, class A, int WIDTH, bool TAIL>
void sum_and_multiply(const void* row, const PlacedEntry<A>* entries, int64_t count, int64_t entry_count, A* out,
                      bool resumed, Vector<A>* products, Columns columns) {
  using Sum = BlockSum<G, A, WIDTH, TAIL>;
  Sum sum;
  if (resumed) sum.resume(out + columns.first, columns.tail);
  Vector<A> block[WIDTH];
  Sum::load_block(static_cast<const T*>(row) + columns.first, columns.tail, block);
  for (int64_t i = 0; i < count; ++i) {
    if (i + columns.ahead < entry_count)
      sum.prefetch_block(static_cast<const G*>(entries[i + columns.ahead].row) + columns.first);
    const G* g = static_cast<const G*>(entries[i].row) + columns.first;
    products[i] += sum.add_and_multiply(g, entries[i].coefficient, block, columns.tail);
  }
  sum.write(out + columns.first, A(1), columns.tail);
}

// Sums entries as `LinearSum` does, to the last bit, and writes the dots where the ids stand.
template <class A>
class DotSum {
 public:
  using E = PlacedEntry<A>;
  static constexpr bool READS_ROWS = true;

  // For rows of type T and gradient rows of type G.
  template <class T, class G>
  static DotSum of(int64_t dim, const SourceRows<A>& rows, A* dots) {
    return DotSum(Blocks<Function>(dim, LANES<A>, sizeof(G), FUNCTIONS<T, G>), rows, dots);
  }
  void operator()(int64_t row, const E* entries, int64_t count, int64_t entry_count, A* out) const {
    const void* address = rows_.address(row);
    const A factor = rows_.factor(row);
    for (int64_t first = 0; first < count; first += DOTS_AT_ONCE) {
      Vector<A> products[DOTS_AT_ONCE] = {};
      const int64_t some = smaller(DOTS_AT_ONCE, count - first);
      blocks_(address, entries + first, some, entry_count - first, out, first != 0, products);
      for (int64_t i = 0; i < some; ++i) dots_[entries[first + i].position] = factor * sum_lanes<A>(products[i]);
    }
  }

 private:
  using Function = void (*)(const void*, const E*, int64_t, int64_t, A*, bool, Vector<A>*, Columns);
  template <class T, class G>
  static constexpr Function FUNCTIONS[BLOCK][2] = EMBEDFUSE_WIDTHS(sum_and_multiply, T, G, A);

  DotSum(const Blocks<Function>& blocks, const SourceRows<A>& rows, A* dots)
      : blocks_(blocks), rows_(rows), dots_(dots) {}
  Blocks<Function> blocks_;
  SourceRows<A> rows_;
  A* dots_;
};

// `MakeEntry` with the position.
template <class A>
struct MakePlacedEntry {
  MakeEntry<A> make;

  bool operator()(const Span& span, int64_t bag, int64_t position, A weight, PlacedEntry<A>* entry) const {
    entry->position = position;
    return make(span, bag, position, weight, entry);
  }
};

// Calls `consume` as `for_each_table_sums` does; the dots of a run are there once its sum is.
template <class T, class Consume>
bool for_each_table_dots(const Batch& batch, const Upstream& upstream, const Destination& to,
                         Accumulation<T>* dots, int threads, const Consume& consume) {
  using A = Accumulation<T>;
  GradRows<A> grad;
  if (!grad.prepare(upstream.grad, DTYPE<T>, batch.records * batch.bags, upstream.width, threads)) return false;
  const MakePlacedEntry<A> make_entry{{grad, static_cast<const A*>(upstream.scale)}};
  const auto make_sum = grad.is_wide() ? &DotSum<A>::template of<T, A> : &DotSum<A>::template of<T, T>;
  return for_each_table_sums<A, DotSum<A>>(
      batch, to, TABLE_TYPE<T>.cut, threads, make_entry,
      [&](const TableRows& table, const SourceRows<A>& rows) { return make_sum(table.dim, rows, dots); }, consume);
}

}  // namespace
}  // namespace embedfuse

// Backward into the optimizer: every row in the batch gets its summed gradient and takes one step, in place.
#pragma once

#include "row_sums.h"
#include "rules/registry.h"
#include "stochastic_rounding.h"

namespace embedfuse {
namespace {

// Rows to have on their way from memory while one is updated.
constexpr int64_t ROWS_AHEAD = 6;

// Where the rows of one table that learns lie.
template <class T>
class Learning {
 public:
  using A = Accumulation<T>;

  Learning(const Learner& learner, int64_t number)
      : table(learner.tables[number]),
        hyper(learner.hyper + number * HYPER_WIDTH),
        step(learner.steps[number]),
        rows_(static_cast<T*>(learner.table) + table.offset),
        slots_(static_cast<A*>(learner.slots)) {}

  T* row(int64_t number) const { return rows_ + number * table.dim; }
  template <class Rule>
  A* state(int64_t number, int slot) const {
    return slots_ + table.slots[slot] + number * state_size<Rule>();
  }
  // Row and state will be written, so they are asked for in a condition that allows it.
  template <class Rule>
  void prefetch_row(int64_t number) const {
    lines(row(number), table.dim * static_cast<int64_t>(sizeof(T)));
    for (int slot = 0; slot < Rule::ELEMENT_SLOTS + Rule::ROW_SLOTS; ++slot)
      lines(state<Rule>(number, slot), state_size<Rule>() * static_cast<int64_t>(sizeof(A)));
  }

  const Table& table;
  const double* hyper;
  const int64_t step;

 private:
  template <class Rule>
  int64_t state_size() const {
    return Rule::ROW_SLOTS != 0 ? 1 : table.dim;
  }
  static void lines(const void* address, int64_t bytes) {
    // of a very wide row the processor's own prefetcher brings the rest
    const int64_t end = smaller<int64_t>(bytes, 16 * LINE);
    for (int64_t byte = 0; byte < end; byte += LINE) prefetch_to_write(static_cast<const char*>(address) + byte);
  }

  T* rows_;
  A* slots_;
};

// Some runs of one table; `scratch` holds two rows.
template <class T>
struct RunRange {
  using A = Accumulation<T>;
  const RowSums<A, LinearSum<A>>& sums;
  int64_t first, last;
  A* scratch;
  int64_t row_size;
};

// Steps the rows of some runs.
template <class T, class Rule>
void update_rows(const Learner& learner, int64_t table, const RunRange<T>& range) {
  using A = Accumulation<T>;
  const Learning<T> learning(learner, table);
  const int64_t dim = learning.table.dim;
  const auto& sums = range.sums;
  RowStep<Rule, A> step(learning.hyper, learning.step, learner.grad_scale);
  const uint64_t seed = static_cast<uint64_t>(learning.hyper[ROUNDING_SEED]);
  A* const g = range.scratch;
  A* const wide = range.scratch + range.row_size;
  for (int64_t u = range.first; u < smaller(range.last, range.first + ROWS_AHEAD); ++u)
    learning.template prefetch_row<Rule>(sums.row(u));
  for (int64_t u = range.first; u < range.last; ++u) {
    if (u + ROWS_AHEAD < range.last) learning.template prefetch_row<Rule>(sums.row(u + ROWS_AHEAD));
    sums(u, g);
    T* row = learning.row(sums.row(u));
    A* const s0 = learning.template state<Rule>(sums.row(u), 0);
    A* const s1 = learning.template state<Rule>(sums.row(u), 1);
    if constexpr (sizeof(T) == sizeof(A)) {
      step(dim, row, g, s0, s1);
    } else {
      widen_row<T, A>(row, dim, wide);
      step(dim, wide, g, s0, s1);
      if (seed != 0) {
        const uint64_t element = static_cast<uint64_t>(sums.row(u) * dim);
        round_at_random<T>(wide, dim, seed, static_cast<uint64_t>(learning.step), element);
      }
      narrow_row<T, A>(wide, dim, row);
    }
  }
}

template <class T>
using UpdateRows = void (*)(const Learner&, int64_t, const RunRange<T>&);

#define EMBEDFUSE_NAME(NAME, RULE) NAME,
#define EMBEDFUSE_UPDATE(NAME, RULE) update_rows<T, RULE<Accumulation<T>>>,
constexpr const char* RULE_NAMES[] = {EMBEDFUSE_RULES(EMBEDFUSE_NAME)};
template <class T>
constexpr UpdateRows<T> UPDATES[] = {EMBEDFUSE_RULES(EMBEDFUSE_UPDATE)};
#undef EMBEDFUSE_NAME
#undef EMBEDFUSE_UPDATE

inline int64_t rule_of(const Learner& learner, int64_t table) {
  const int64_t rule = learner.tables[table].rule;
  return rule < 0 || rule >= learner.rule_count ? -1 : learner.rules[rule];
}

// The tables of a learner for which `wanted(number)` holds. False if there is no memory.
template <class Wanted>
bool list_tables(const Learner& learner, const Wanted& wanted, TablesAtHand* list) {
  if (!list->allocate(learner.table_count)) return false;
  for (int64_t t = 0; t < learner.table_count; ++t) {
    const Table& table = learner.tables[t];
    if (wanted(t)) list->add({table.row_base, table.rows, table.dim, table.offset, t});
  }
  return true;
}

template <class T>
int64_t row_update(const Batch& batch, const Upstream& upstream, const Learner& learner, int threads) {
  using A = Accumulation<T>;
  TablesAtHand tables;
  if (!list_tables(learner, [&](int64_t table) { return rule_of(learner, table) >= 0; }, &tables)) return OUT_OF_MEMORY;
  const bool enough = for_each_table_sums<A>(
      batch, upstream, tables, DTYPE<T>, &LinearSum<A>::template of<T>, threads,
      [&](const RowSums<A, LinearSum<A>>& sums, int64_t place, int own_threads) {
        const int64_t table = tables[place].table;
        const UpdateRows<T> update = UPDATES<T>[rule_of(learner, table)];
        return sums.for_each_range(own_threads, [&](int64_t first, int64_t last, A* scratch, int64_t row_size) {
          update(learner, table, RunRange<T>{sums, first, last, scratch, row_size});
        });
      });
  return enough ? DONE : OUT_OF_MEMORY;
}

}  // namespace
}  // namespace embedfuse

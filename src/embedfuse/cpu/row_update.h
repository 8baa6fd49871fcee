// Backward into the optimizer: every row in the batch gets its summed gradient and takes one step, in place.
#pragma once

#include "row_sums.h"
#include "rules/registry.h"
#include "stochastic_rounding.h"

namespace embedfuse {
namespace {

// Bytes of rows and state, and gradient rows, to have on their way from memory while one row is updated.
constexpr int64_t ROW_BYTES_AHEAD = 16384, GRADIENTS_AHEAD = 16;

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
  template <class Rule>
  void prefetch_row(int64_t number) const {
    prefetch_lines(row(number), table.dim * static_cast<int64_t>(sizeof(T)));
    for (int slot = 0; slot < Rule::ELEMENT_SLOTS + Rule::ROW_SLOTS; ++slot)
      prefetch_lines(state<Rule>(number, slot), state_size<Rule>() * static_cast<int64_t>(sizeof(A)));
  }
  // Rows between the one that is updated and the one that is prefetched.
  template <class Rule>
  int64_t rows_ahead() const {
    const int64_t state = state_size<Rule>() * (Rule::ELEMENT_SLOTS + Rule::ROW_SLOTS);
    const int64_t bytes = table.dim * static_cast<int64_t>(sizeof(T)) + state * static_cast<int64_t>(sizeof(A));
    return smaller<int64_t>(larger<int64_t>(ROW_BYTES_AHEAD / bytes, 2), 16);
  }

  const Table& table;
  const double* hyper;
  const int64_t step;

 private:
  template <class Rule>
  int64_t state_size() const {
    return Rule::ROW_SLOTS != 0 ? 1 : table.dim;
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
  const RowStep<Rule, A> step(learning.hyper, learning.step);
  const A grad_scale = static_cast<A>(learner.grad_scale);
  const uint64_t seed = static_cast<uint64_t>(learning.hyper[ROUNDING_SEED]);
  const int64_t ahead = learning.template rows_ahead<Rule>();
  A* const summed = range.scratch;
  A* const wide = range.scratch + range.row_size;
  for (int64_t u = range.first; u < smaller(range.last, range.first + ahead); ++u)
    learning.template prefetch_row<Rule>(sums.row(u));
  for (int64_t u = range.first; u < range.last; ++u) {
    if (u + ahead < range.last) learning.template prefetch_row<Rule>(sums.row(u + ahead));
    sums.prefetch_gradient(u, GRADIENTS_AHEAD);
    // what one id alone gives need not be summed first, which most rows of large tables gain from
    const Entry<A>* only = sums.only_entry(u);
    if (only == nullptr) sums(u, summed);
    const A* g = only == nullptr ? summed : static_cast<const A*>(only->row);
    const A factor = only == nullptr ? grad_scale : grad_scale * only->coefficient;
    T* row = learning.row(sums.row(u));
    A* const s0 = learning.template state<Rule>(sums.row(u), 0);
    A* const s1 = learning.template state<Rule>(sums.row(u), 1);
    if constexpr (sizeof(T) == sizeof(A)) {
      step(dim, row, g, factor, summed, s0, s1);
    } else {
      widen_row<T, A>(row, dim, wide);
      step(dim, wide, g, factor, summed, s0, s1);
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
    if (wanted(t)) list->add(rows_of(learner.tables[t], t));
  }
  return true;
}

template <class T>
int64_t row_update(const Batch& batch, const Upstream& upstream, const Learner& learner, int threads) {
  using A = Accumulation<T>;
  TablesAtHand tables;
  if (!list_tables(learner, [&](int64_t table) { return rule_of(learner, table) >= 0; }, &tables)) return OUT_OF_MEMORY;
  const bool enough = for_each_table_sums<A>(
      batch, upstream, {tables, tables, learner.table}, TABLE_TYPE<T>, threads,
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

// Backward into the optimizer: every row in the batch gets its summed gradient and takes one step, in place.
#pragma once

#include "row_sums.h"
#include "rules/registry.h"
#include "stochastic_rounding.h"

namespace embedfuse {
namespace {

// Rows to have on their way from memory while one is updated.
constexpr int64_t ROWS_AHEAD = 6;

// What is known of one table that learns.
template <class T>
class Learning {
 public:
  using A = Accumulation<T>;

  Learning(const Learner& learner, const Rows& rows)
      : table(learner.tables[rows.table]),
        hyper(learner.hyper + rows.table * HYPER_WIDTH),
        step(learner.steps[rows.table]),
        grad_scale(learner.grad_scale),
        rows_(static_cast<T*>(learner.table) + table.offset),
        slots_(static_cast<A*>(learner.slots)),
        first_key_(rows.first_key) {}

  T* row(int64_t key) const { return rows_ + (key - first_key_) * table.dim; }
  template <class Rule>
  A* state(int64_t key, int slot) const {
    return slots_ + table.slots[slot] + (key - first_key_) * (Rule::ROW_SLOTS != 0 ? 1 : table.dim);
  }
  // Row and state are written, so they are asked for in a state that allows it.
  template <class Rule>
  void prefetch_row(int64_t key) const {
    lines(row(key), table.dim * static_cast<int64_t>(sizeof(T)));
    for (int slot = 0; slot < Rule::ELEMENT_SLOTS + Rule::ROW_SLOTS; ++slot)
      lines(state<Rule>(key, slot), (Rule::ROW_SLOTS != 0 ? 1 : table.dim) * static_cast<int64_t>(sizeof(A)));
  }

  const Table& table;
  const double* hyper;
  const int64_t step;
  const double grad_scale;

 private:
  static void lines(const void* address, int64_t bytes) {
    // of a very wide row the processor's own prefetcher brings the rest
    const int64_t end = smaller<int64_t>(bytes, 16 * LINE);
    for (int64_t byte = 0; byte < end; byte += LINE) prefetch_to_write(static_cast<const char*>(address) + byte);
  }

  T* rows_;
  A* slots_;
  int64_t first_key_;
};

// Steps the rows of some runs of one table. `scratch` holds two rows.
template <class T, class Rule>
void update_rows(const LinearRowSums<Accumulation<T>>& sums, const Learner& learner, const RunRange& range,
                 Accumulation<T>* scratch, int64_t row_size) {
  using A = Accumulation<T>;
  const Learning<T> learning(learner, range.rows);
  const auto sum = sums.sum_of(range.rows);
  const int64_t dim = range.rows.dim;
  const int64_t* keys = sums.runs().keys.data();
  RowStep<Rule, A> step(learning.hyper, learning.step, learning.grad_scale);
  const uint64_t seed = static_cast<uint64_t>(learning.hyper[ROUNDING_SEED]);
  A* const g = scratch;
  A* const wide = scratch + row_size;
  for (int64_t u = range.first; u < smaller(range.last, range.first + ROWS_AHEAD); ++u)
    learning.template prefetch_row<Rule>(keys[u]);
  for (int64_t u = range.first; u < range.last; ++u) {
    if (u + ROWS_AHEAD < range.last) learning.template prefetch_row<Rule>(keys[u + ROWS_AHEAD]);
    sums(sum, dim, u, g);
    T* row = learning.row(keys[u]);
    A* const s0 = learning.template state<Rule>(keys[u], 0);
    A* const s1 = learning.template state<Rule>(keys[u], 1);
    if constexpr (sizeof(T) == sizeof(A)) {
      step(dim, row, g, s0, s1);
    } else {
      widen_row<T, A>(row, dim, wide);
      step(dim, wide, g, s0, s1);
      if (seed != 0) {
        const uint64_t element = static_cast<uint64_t>((keys[u] - range.rows.first_key) * dim);
        round_at_random<T>(wide, dim, seed, static_cast<uint64_t>(learning.step), element);
      }
      narrow_row<T, A>(wide, dim, row);
    }
  }
}

template <class T>
using UpdateRows = void (*)(const LinearRowSums<Accumulation<T>>&, const Learner&, const RunRange&, Accumulation<T>*,
                            int64_t);

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

// The tables of a learner for which `wanted(number)` holds.
template <class Wanted>
bool list_tables(const Learner& learner, const Wanted& wanted, RowsList* list) {
  if (!list->allocate(learner.table_count)) return false;
  for (int64_t t = 0; t < learner.table_count; ++t) {
    const Table& table = learner.tables[t];
    if (wanted(t)) list->add({table.row_base, table.row_base + table.rows, table.dim, table.offset, t});
  }
  return true;
}

// Sorts, sums and calls `consume(sums)`, which returns false if there is no memory.
template <class T, class Consume>
int64_t with_row_sums(const Batch& batch, const Upstream& upstream, const RowsList& tables, int threads,
                      const Consume& consume) {
  using A = Accumulation<T>;
  BatchSums<A> batch_sums(tables);
  const bool ready =
      batch_sums.prepare(batch, upstream, tables, DTYPE<T>, &LinearSum<A>::template of<T>, threads);
  return ready && consume(batch_sums.sums()) ? DONE : OUT_OF_MEMORY;
}

template <class T>
int64_t row_update(const Batch& batch, const Upstream& upstream, const Learner& learner, int threads) {
  using A = Accumulation<T>;
  RowsList tables;
  if (!list_tables(learner, [&](int64_t table) { return rule_of(learner, table) >= 0; }, &tables)) return OUT_OF_MEMORY;
  return with_row_sums<T>(batch, upstream, tables, threads, [&](const LinearRowSums<A>& sums) {
    return for_each_run_range(sums, 2, threads, [&](const RunRange& range, A* scratch, int64_t row_size) {
      UPDATES<T>[rule_of(learner, range.rows.table)](sums, learner, range, scratch, row_size);
    });
  });
}

}  // namespace
}  // namespace embedfuse

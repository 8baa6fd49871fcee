// The validity of ids, decided once: absent ones become -1, every bag gets a place for its default, ids find their shard.
#pragma once

#include "batch.h"

namespace embedfuse {
namespace {

// Where a row of a table lies that may be made of shards.
class Locator {
 public:
  explicit Locator(const Shards* shards) : shards_(shards) {}

  // The number of the row and where it starts; false if no shard has it. `id` is not negative.
  bool find(int64_t id, int64_t* row, int64_t* start) const {
    *row = *start = id;
    if (shards_ == nullptr) return true;
    const Shard& shard = shards_->shards[shards_->modulo ? id % shards_->count : last_from(id)];
    const int64_t within = shards_->modulo ? id / shards_->count : id - shard.rows_before;
    *row = shard.rows_before + within;
    *start = shard.start + within * shards_->stride;
    return within < shard.rows;
  }

 private:
  // The last shard that does not start behind row `id`, which is one with rows, if any is.
  int64_t last_from(int64_t id) const {
    int64_t low = 0, high = shards_->count;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (shards_->shards[middle].rows_before <= id ? low : high) = middle;
    }
    return low;
  }

  const Shards* shards_;
};

// Prepares some bags. Returns the first position of an id out of range.
template <class A>
int64_t prepare_bags(const Batch& batch, const BagRange& range, const Shards* shards, const Prepared& out) {
  const Feature& feature = *range.span.feature;
  const Ids<A> ids(batch, feature);
  const Locator locator(shards);
  int64_t bad = NO_POSITION;
  const auto put = [&](int64_t place, int64_t row, int64_t start, A weight) {
    out.rows[place] = row;
    if (out.starts != nullptr) out.starts[place] = start;
    if (out.weights != nullptr) static_cast<A*>(out.weights)[place] = weight;
  };
  for (int64_t bag = range.first; bag < range.last; ++bag) {
    // the number of the bag is also how many defaults were put before it
    const int64_t number = range.span.first_bag + bag, end = batch.offsets[number + 1];
    int64_t row, start;
    bool empty = true;
    for (int64_t position = batch.offsets[number]; position < end; ++position) {
      bool found = ids.in_table(position);
      if (found) {
        found = locator.find(ids.id(position), &row, &start);
        if (!found) bad = smaller(bad, position);
      } else if (ids.is_bad(position)) {
        bad = smaller(bad, position);
      }
      found = found && ids.counts(position);
      if (!found) row = start = -1;
      empty = empty && !found;
      put(position + number, row, start, ids.weight(position));
      out.places[position] = position + number;
    }
    const bool defaults = empty && feature.default_id != NO_DEFAULT && locator.find(feature.default_id, &row, &start);
    put(end + number, defaults ? row : -1, defaults ? start : -1, defaults ? A(1) : A(0));
    out.offsets[number] = batch.offsets[number] + number;
  }
  return bad;
}

template <class A>
int64_t prepare_ids(const Batch& batch, const Shards* shards, const Prepared& out, bool checked, int threads) {
  const int64_t bags = batch.records * batch.feature_count * batch.bags;
  threads = threads_for(batch.id_count + bags, threads);
  int64_t first_bad = NO_POSITION;
  const BagRanges ranges(batch, threads);
  parallel_tasks(ranges.count(), threads, [&](int64_t task, int) {
    const int64_t bad = prepare_bags<A>(batch, ranges[task], shards, out);
    if (bad != NO_POSITION) atomic_min(&first_bad, bad);
  });
  out.offsets[bags] = batch.id_count + bags;
  return checked && first_bad != NO_POSITION ? first_bad : DONE;
}

}  // namespace
}  // namespace embedfuse

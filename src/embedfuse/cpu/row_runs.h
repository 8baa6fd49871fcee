// From a batch to runs: for each table row in it, all that the row receives, in the order of the batch.
#pragma once

#include "batch.h"
#include "gather_sum.h"
#include "radix_sort.h"

namespace embedfuse {
namespace {

// The rows of one table, and where it lies.
struct Rows {
  int64_t first_key, last_key;  // keys are ROW_BASE + id
  int64_t dim, offset;
  int64_t table;  // in Group.tables
};

// The tables at hand, ascending by key. Few, so a plain array.
class RowsList {
 public:
  bool allocate(int64_t most) { return rows_.allocate(most); }

  // Keeps the order; a table that is there already is not added again.
  void add(const Rows& rows) {
    int64_t place = count_;
    for (; place > 0 && rows_[place - 1].first_key >= rows.first_key; --place) {
      if (rows_[place - 1].first_key == rows.first_key) return;
    }
    for (int64_t i = count_; i > place; --i) rows_[i] = rows_[i - 1];
    rows_[place] = rows;
    ++count_;
  }
  int64_t count() const { return count_; }
  const Rows& operator[](int64_t i) const { return rows_[i]; }
  int64_t first_key() const { return count_ == 0 ? 0 : rows_[0].first_key; }
  int64_t last_key() const { return count_ == 0 ? 0 : rows_[count_ - 1].last_key; }

  // The table that a key lies in.
  int64_t find(int64_t key) const {
    int64_t low = 0, high = count_;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (rows_[middle].first_key <= key ? low : high) = middle;
    }
    return low;
  }
  int64_t largest_dim() const {
    int64_t dim = 1;
    for (int64_t i = 0; i < count_; ++i) dim = larger(dim, rows_[i].dim);
    return dim;
  }
  bool has(int64_t first_key) const { return count_ != 0 && rows_[find(first_key)].first_key == first_key; }

 private:
  Buffer<Rows> rows_;
  int64_t count_ = 0;
};

// A row of the upstream gradient, as one id receives it.
template <class A>
struct Entry {
  const void* row;
  A coefficient;
};

// Runs of equal keys: run `u` is `entries[starts[u]] .. entries[starts[u + 1]]` and belongs to row `keys[u]`.
template <class E>
struct Runs {
  Buffer<E> entries;
  Buffer<int64_t> starts, keys;
  int64_t count = 0;

  int64_t entry_count() const { return count == 0 ? 0 : starts[count]; }
};

// Spans whose table is at hand, packed one behind the other.
struct PackedSpans {
  Buffer<int64_t> number, first;  // span, and the place of its first id
  int64_t count = 0, ids = 0;

  bool pack(const Batch& batch, const RowsList& tables) {
    const int64_t spans = batch.records * batch.feature_count;
    if (!number.allocate(spans) || !first.allocate(spans)) return false;
    for (int64_t s = 0; s < spans; ++s) {
      const Span span = span_of(batch, s);
      if (!tables.has(span.feature->row_base)) continue;
      number[count] = s;
      first[count++] = ids;
      ids += batch.offsets[span.first_bag + batch.bags] - batch.offsets[span.first_bag];
    }
    return true;
  }
};

template <class Item, class E>
class RunsBuilder {
 public:
  RunsBuilder(const Batch& batch, const RowsList& tables, const PackedSpans& spans, int threads)
      : batch_(batch), tables_(tables), spans_(spans), threads_(threads) {}

  // `make(feature, bag, row, position, entry)` fills in the entry of one id, or returns false to leave it out.
  template <class A, class Make>
  bool build(const Make& make, Runs<E>* runs) {
    Buffer<Item> items(spans_.ids), spare(spans_.ids);
    Buffer<E> unsorted(spans_.ids);
    if (!items || !spare || !unsorted) return false;
    fill<A>(make, items.data(), unsorted.data());
    const int64_t absent = absent_;
    // absent ids carry the key behind the last one and end up behind all others
    const uint64_t largest = static_cast<uint64_t>(range()) - (absent == 0 ? 1 : 0);
    const Item* sorted = radix_sort(items.data(), spare.data(), spans_.ids, largest, threads_);
    if (sorted == nullptr) return false;
    const int64_t count = spans_.ids - absent;
    if (!runs->entries.allocate(count)) return false;
    return find_runs(sorted, unsorted.data(), count, runs);
  }

 private:
  int64_t range() const { return tables_.last_key() - tables_.first_key(); }

  template <class A, class Make>
  void fill(const Make& make, Item* items, E* unsorted) {
    const int64_t bags_at_once = larger<int64_t>(1, smaller<int64_t>(batch_.bags, 512));
    const int64_t ranges = ceil_div(batch_.bags, bags_at_once);
    parallel_tasks(spans_.count * ranges, threads_, [&](int64_t task, int) {
      const int64_t packed = task / ranges;
      const Span span = span_of(batch_, spans_.number[packed]);
      const int64_t shift = spans_.first[packed] - batch_.offsets[span.first_bag];
      const Ids<A> ids(batch_, *span.feature);
      const int64_t base = span.feature->row_base - tables_.first_key();
      const int64_t first = task % ranges * bags_at_once, last = smaller(first + bags_at_once, batch_.bags);
      int64_t absent = 0;
      for (int64_t bag = first; bag < last; ++bag) {
        const int64_t number = span.first_bag + bag;
        for (int64_t position = batch_.offsets[number]; position < batch_.offsets[number + 1]; ++position) {
          const int64_t place = position + shift;
          int64_t key = range();
          if (ids.counts(position) &&
              make(*span.feature, number, span.first_row + bag, position, ids.weight(position), unsorted + place)) {
            key = base + ids.id(position);
          } else {
            ++absent;
          }
          set(items[place], place, key);
        }
      }
      __atomic_fetch_add(&absent_, absent, __ATOMIC_RELAXED);
    });
  }

  static void set(NarrowItem& item, int64_t place, int64_t key) {
    item = {static_cast<uint32_t>(place), static_cast<uint32_t>(key)};
  }
  static void set(WideItem& item, int64_t place, int64_t key) {
    item = {static_cast<uint64_t>(place), static_cast<uint64_t>(key)};
  }

  // Two sweeps, each thread over its share: count the runs that start there, then write them down.
  bool find_runs(const Item* sorted, const E* unsorted, int64_t count, Runs<E>* runs) {
    Buffer<int64_t> found(threads_ + 1);
    if (!found) return false;
    bool enough = true;
    parallel(threads_, [&](const Team& team) {
      const int64_t first = team.first(count), last = team.last(count);
      const auto starts_at = [=](int64_t i) { return i == 0 || sorted[i].key != sorted[i - 1].key; };
      int64_t own = 0;
      for (int64_t i = first; i < last; ++i) {
        runs->entries[i] = unsorted[sorted[i].position];
        own += starts_at(i);
      }
      found[team.thread] = own;
      team.wait();
      if (team.thread == 0) {
        int64_t sum = 0;
        for (int thread = 0; thread < team.threads; ++thread) {
          const int64_t here = found[thread];
          found[thread] = sum;
          sum += here;
        }
        runs->count = sum;
        enough = runs->starts.allocate(sum + 1) && runs->keys.allocate(sum);
        if (enough) runs->starts[sum] = count;
      }
      team.wait();
      if (!enough) return;
      int64_t next = found[team.thread];
      for (int64_t i = first; i < last; ++i) {
        if (!starts_at(i)) continue;
        runs->starts[next] = i;
        runs->keys[next++] = static_cast<int64_t>(sorted[i].key) + tables_.first_key();
      }
    });
    return enough;
  }

  const Batch& batch_;
  const RowsList& tables_;
  const PackedSpans& spans_;
  int threads_;
  int64_t absent_ = 0;
};

// Sorts the ids of the tables at hand into runs. False if there is no memory.
template <class A, class E, class Make>
bool build_runs(const Batch& batch, const RowsList& tables, int threads, const Make& make, Runs<E>* runs) {
  PackedSpans spans;
  if (!spans.pack(batch, tables)) return false;
  threads = threads_for(spans.ids, threads);
  const uint64_t limit = UINT32_MAX;
  const bool narrow =
      static_cast<uint64_t>(tables.last_key() - tables.first_key()) < limit && static_cast<uint64_t>(spans.ids) < limit;
  if (narrow) return RunsBuilder<NarrowItem, E>(batch, tables, spans, threads).template build<A>(make, runs);
  return RunsBuilder<WideItem, E>(batch, tables, spans, threads).template build<A>(make, runs);
}

}  // namespace
}  // namespace embedfuse

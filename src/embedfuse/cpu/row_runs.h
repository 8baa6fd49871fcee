// From a batch to runs: for each row of one table, all that the row receives, in the order of the batch.
#pragma once

#include "radix_sort.h"
#include "tables_at_hand.h"

namespace embedfuse {
namespace {

// A row of the upstream gradient, as one id receives it.
template <class A>
struct Entry {
  const void* row;
  A coefficient;
};

// The same with the position of the id.
template <class A>
struct PlacedEntry : Entry<A> {
  int64_t position;
};

// Runs of equal ids: run `u` is `entries[starts[u]] .. entries[starts[u + 1]]` and belongs to row `rows[u]`.
template <class E>
class Runs {
 public:
  Buffer<E> entries;
  Buffer<int64_t> starts, rows;
  int64_t count = 0;

  int64_t entry_count() const { return count == 0 ? 0 : starts[count]; }

  // Sorts the ids of one table. `make(span, bag, position, weight, entry)` fills in the entry of one id, or returns
  // false to leave it out; `bag` counts in the span. False if there is no memory.
  template <class A, class Make>
  __attribute__((noinline)) bool build(const Batch& batch, const TableRows& table, const SpansOfTable& spans,
                                       int threads, const Make& make) {
    count = 0;
    const uint64_t limit = UINT32_MAX;
    const bool narrow = static_cast<uint64_t>(table.rows) < limit && static_cast<uint64_t>(spans.ids) < limit;
    return narrow ? build<A>(batch, table, spans, threads, make, narrow_items_, narrow_spare_)
                  : build<A>(batch, table, spans, threads, make, wide_items_, wide_spare_);
  }

 private:
  template <class A, class Make, class Item>
  bool build(const Batch& batch, const TableRows& table, const SpansOfTable& spans, int threads, const Make& make,
             Buffer<Item>& items, Buffer<Item>& spare) {
    if (!items.allocate(spans.ids) || !spare.allocate(spans.ids) || !unsorted_.allocate(spans.ids)) return false;
    const int64_t absent = fill<A>(batch, table, spans, threads, make, items.data());
    // absent ids carry the number behind the last row and end up behind all others
    const uint64_t largest = static_cast<uint64_t>(table.rows) - (absent == 0 ? 1 : 0);
    const Item* sorted = radix_sort(items.data(), spare.data(), spans.ids, largest, threads);
    return sorted != nullptr && find_runs(sorted, spans.ids - absent, threads);
  }

  // Returns how many ids are absent.
  template <class A, class Make, class Item>
  int64_t fill(const Batch& batch, const TableRows& table, const SpansOfTable& spans, int threads, const Make& make,
               Item* items) {
    int64_t all_absent = 0, place = 0;
    for (int64_t s = 0; s < spans.count; ++s) {
      const Span span = span_of(batch, spans.spans[s]);
      const Ids<A> ids(batch, *span.feature);
      const int64_t* offsets = batch.offsets + span.first_bag;
      const int64_t shift = place - offsets[0];
      parallel_ranges(batch.bags, threads == 1 ? larger<int64_t>(batch.bags, 1) : 512, threads,
                      [&](int64_t first, int64_t last, int) {
        int64_t absent = 0;
        for (int64_t bag = first; bag < last; ++bag) {
          for (int64_t position = offsets[bag]; position < offsets[bag + 1]; ++position) {
            const int64_t here = position + shift;
            const bool counts = ids.counts(position) &&
                                make(span, bag, position, ids.weight(position), unsorted_.data() + here);
            items[here] = Item::of(here, counts ? ids.id(position) : table.rows);
            absent += !counts;
          }
        }
        __atomic_fetch_add(&all_absent, absent, __ATOMIC_RELAXED);
      });
      place += ids_of(batch, span);
    }
    return all_absent;
  }

  // Two sweeps: count the runs that start in each part, then write them down.
  template <class Item>
  bool find_runs(const Item* sorted, int64_t ids, int threads) {
    constexpr int64_t PART = 8192;
    const int64_t parts = ceil_div(ids, PART);
    if (!entries.allocate(ids) || !found_.allocate(parts)) return false;
    const auto starts_at = [=](int64_t i) { return i == 0 || sorted[i].key != sorted[i - 1].key; };
    parallel_ranges(ids, PART, threads, [&](int64_t first, int64_t last, int) {
      int64_t own = 0;
      for (int64_t i = first; i < last; ++i) {
        entries[i] = unsorted_[static_cast<int64_t>(sorted[i].position)];
        own += starts_at(i);
      }
      found_[first / PART] = own;
    });
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t here = found_[part];
      found_[part] = count;
      count += here;
    }
    if (!starts.allocate(count + 1) || !rows.allocate(count)) return false;
    starts[count] = ids;
    parallel_ranges(ids, PART, threads, [&](int64_t first, int64_t last, int) {
      int64_t next = found_[first / PART];
      for (int64_t i = first; i < last; ++i) {
        if (!starts_at(i)) continue;
        starts[next] = i;
        rows[next++] = static_cast<int64_t>(sorted[i].key);
      }
    });
    return true;
  }

  Buffer<NarrowItem> narrow_items_, narrow_spare_;
  Buffer<WideItem> wide_items_, wide_spare_;
  Buffer<E> unsorted_;
  Buffer<int64_t> found_;
};

}  // namespace
}  // namespace embedfuse

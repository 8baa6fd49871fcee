// Walking over the bags of a batch, and which ids count.
#pragma once

#include "engine.h"
#include "parallel.h"
#include "vectors.h"

namespace embedfuse {
namespace {

constexpr int64_t NO_POSITION = INT64_MAX;

// All bags of one feature in one record.
struct Span {
  const Feature* feature;
  int64_t first_bag;   // in Batch::offsets
  int64_t first_row;   // of the output or upstream gradient, for `first_bag`
};

inline Span span_of(const Batch& batch, int64_t number) {
  const int64_t record = number / batch.feature_count;
  return {batch.features + number % batch.feature_count, number * batch.bags, record * batch.bags};
}

inline int64_t largest_dim(const Batch& batch) {
  int64_t dim = 1;
  for (int64_t f = 0; f < batch.feature_count; ++f) dim = larger(dim, batch.features[f].dim);
  return dim;
}

inline bool are_sound(const Batch& batch) {
  const int64_t* const offsets = batch.offsets;
  const int64_t bags = all_bags(batch);
  // a sign bit tells of a negative offset, or of one that is smaller than the one before
  uint64_t signs = 0;
  for (int64_t bag = 0; bag < bags; ++bag) {
    const auto start = static_cast<uint64_t>(offsets[bag]), end = static_cast<uint64_t>(offsets[bag + 1]);
    signs |= end | (end - start);
  }
  return offsets[0] == 0 && static_cast<int64_t>(signs) >= 0 && offsets[bags] <= batch.id_count;
}

// Some bags of one span, small enough to be shared out among threads.
struct BagRange {
  Span span;
  int64_t first, last;  // counted in the span
};

class BagRanges {
 public:
  BagRanges(const Batch& batch, int threads) : batch_(batch) {
    // long enough to keep prefetching, short enough to keep all threads busy to the end
    constexpr int64_t IDS_IN_A_RANGE = 2048, RANGES_A_THREAD = 16;
    const int64_t every = larger<int64_t>(all_bags(batch), 1);
    const int64_t for_length = batch.id_count == 0 ? batch.bags : IDS_IN_A_RANGE * every / batch.id_count;
    const int64_t for_balance = every / (threads * RANGES_A_THREAD);
    size_ = larger<int64_t>(1, smaller(batch.bags, smaller(for_length, larger<int64_t>(for_balance, 16))));
    ranges_in_a_span_ = ceil_div(batch.bags, size_);
  }
  int64_t count() const { return batch_.records * batch_.feature_count * ranges_in_a_span_; }
  BagRange operator[](int64_t number) const {
    const int64_t first = number % ranges_in_a_span_ * size_;
    return {span_of(batch_, number / ranges_in_a_span_), first, smaller(first + size_, batch_.bags)};
  }

 private:
  const Batch& batch_;
  int64_t size_, ranges_in_a_span_;
};

// The ids of one feature that count.
template <class A>
class Ids {
 public:
  Ids(const Batch& batch, const Feature& feature)
      : ids_(batch.ids),
        wide_(batch.wide_ids),
        weights_(static_cast<const A*>(batch.weights)),
        rows_(static_cast<uint64_t>(feature.rows)),
        drops_negative_((feature.flags & DROP_NEGATIVE_IDS) != 0),
        drops_nonpositive_(weights_ != nullptr && (feature.flags & DROP_NONPOSITIVE_WEIGHTS) != 0) {}

  // The width is asked for every id and not built into the type: that costs no time that memory would not take anyway,
  // and halves the code.
  int64_t id(int64_t position) const {
    return wide_ ? static_cast<const int64_t*>(ids_)[position] : static_cast<const int32_t*>(ids_)[position];
  }
  A weight(int64_t position) const { return weights_ == nullptr ? A(1) : weights_[position]; }
  // One comparison for both ends: a negative id is a huge unsigned number.
  bool in_table(int64_t position) const { return static_cast<uint64_t>(id(position)) < rows_; }
  // An id that is not in its table, and not a negative one that was to be dropped.
  bool is_bad(int64_t position) const { return !in_table(position) && !(drops_negative_ && id(position) < 0); }
  bool counts(int64_t position) const {
    // so that a NaN does not count
    return in_table(position) && !(drops_nonpositive_ && !(weights_[position] > 0));
  }

 private:
  const void* ids_;
  bool wide_;
  const A* weights_;
  uint64_t rows_;
  bool drops_negative_, drops_nonpositive_;
};

// The sum that a bag's scale is made of: of `w ** MOMENT` over the ids that count.
template <class A>
inline A moment_of(A weight, int64_t moment) {
  return moment == 0 ? A(1) : moment == 1 ? weight : weight * weight;
}

template <class A>
inline A scale_of(A total, int64_t power) {
  if (power == 0) return A(1);
  if (total == 0) return A(0);
  return A(1) / (power == 2 ? total : square_root(total));
}

}  // namespace
}  // namespace embedfuse

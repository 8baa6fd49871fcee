// The gradient of each weight: how much each looked-up row agrees with the upstream gradient of its bag.
#pragma once

#include "max_norm.h"
#include "upstream.h"

namespace embedfuse {
namespace {

template <class T>
class CoefficientGradWorker {
 public:
  using A = Accumulation<T>;

  CoefficientGradWorker(const Batch& batch, const Upstream& upstream, const GradRows<A>& grad, const T* table, A* out,
                        A* scratch)
      : batch_(batch),
        scale_(static_cast<const A*>(upstream.scale)),
        grad_(grad),
        table_(table),
        out_(out),
        scratch_(scratch) {}

  void operator()(const BagRange& range) const {
    const Feature& feature = *range.span.feature;
    const Ids<A> ids(batch_, feature);
    for (int64_t bag = range.first; bag < range.last; ++bag) {
      const int64_t number = range.span.first_bag + bag;
      const int64_t begin = batch_.offsets[number], end = batch_.offsets[number + 1];
      const A* g = upstream_row(range.span.first_row + bag, feature);
      dots(ids, feature, begin, end, g);
      finish(ids, feature, begin, end, scale_ == nullptr ? A(1) : scale_[number]);
    }
  }

 private:
  const A* upstream_row(int64_t row, const Feature& feature) const {
    const void* g = grad_.row(row, feature.column);
    if (grad_.is_wide()) return static_cast<const A*>(g);
    widen_row<T, A>(static_cast<const T*>(g), feature.dim, scratch_);
    return scratch_;
  }

  void dots(const Ids<A>& ids, const Feature& feature, int64_t begin, int64_t end, const A* g) const {
    constexpr int64_t AHEAD = 16;
    const int64_t bytes = smaller<int64_t>(feature.dim * static_cast<int64_t>(sizeof(T)), 16 * LINE);
    const T* rows = table_ + feature.offset;
    const bool cut = is_cut(feature.max_norm);
    for (int64_t position = begin; position < end; ++position) {
      // the next bags are usually of the same feature; if not, a prefetch of nothing does no harm
      if (position + AHEAD < batch_.id_count && ids.in_table(position + AHEAD)) {
        const char* next = reinterpret_cast<const char*>(rows + ids.id(position + AHEAD) * feature.stride);
        for (int64_t byte = 0; byte < bytes; byte += LINE) prefetch(next + byte);
      }
      const T* row = rows + ids.id(position) * feature.stride;
      out_[position] = ids.counts(position) ? dot<T, A>(row, g, feature.dim) : A(0);
      if (cut && ids.counts(position)) out_[position] *= cut_factor(row, feature.dim, feature.max_norm);
    }
  }

  // From `s_i` to `scale * s_i`, less what the moment in the scale takes back.
  void finish(const Ids<A>& ids, const Feature& feature, int64_t begin, int64_t end, A scale) const {
    A total = 0, weighted = 0;
    const bool moves_scale = feature.power != 0 && feature.moment != 0;
    if (moves_scale) {
      for (int64_t position = begin; position < end; ++position) {
        if (!ids.counts(position)) continue;
        total += moment_of(ids.weight(position), feature.moment);
        weighted += ids.weight(position) * out_[position];
      }
    }
    const A factor = total == 0 ? A(0) : static_cast<A>(feature.power * feature.moment) / 2 / total * scale * weighted;
    for (int64_t position = begin; position < end; ++position) {
      const A slope = feature.moment == 2 ? ids.weight(position) : A(1);
      out_[position] = ids.counts(position) ? scale * out_[position] - factor * slope : A(0);
    }
  }

  const Batch& batch_;
  const A* scale_;
  const GradRows<A>& grad_;
  const T* table_;
  A* out_;
  A* scratch_;
};

template <class T>
int64_t coefficient_grad(const Batch& batch, const Upstream& upstream, const void* table, void* out, int threads) {
  using A = Accumulation<T>;
  threads = threads_for(batch.id_count, threads);
  GradRows<A> grad;
  const int64_t scratch_size = ceil_div(largest_dim(batch), LINE) * LINE;
  Buffer<A> scratch(threads * scratch_size);
  if (!scratch || !grad.prepare(upstream.grad, DTYPE<T>, batch.records * batch.bags, upstream.width, threads))
    return OUT_OF_MEMORY;
  const BagRanges ranges(batch, threads);
  parallel_tasks(ranges.count(), threads, [&](int64_t task, int thread) {
    const CoefficientGradWorker<T> worker(batch, upstream, grad, static_cast<const T*>(table),
                                              static_cast<A*>(out), scratch.data() + thread * scratch_size);
    worker(ranges[task]);
  });
  return DONE;
}

}  // namespace
}  // namespace embedfuse

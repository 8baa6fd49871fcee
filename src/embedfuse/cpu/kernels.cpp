// The engine for one instruction set: compiled once for each, with EMBEDFUSE_ISA naming it.
//
// All but the last function has internal linkage, and nothing of the standard library that could be shared between
// objects is used: so code for one instruction set never runs where another was chosen.
#include "coefficient_grad.h"
#include "max_pooling.h"
#include "pooled_lookup.h"
#include "prepare_ids.h"
#include "product_topk.h"
#include "row_grad.h"
#include "row_update.h"

#define EMBEDFUSE_JOIN_(a, b) a##b
#define EMBEDFUSE_JOIN(a, b) EMBEDFUSE_JOIN_(a, b)
#define EMBEDFUSE_STRING_(a) #a
#define EMBEDFUSE_STRING(a) EMBEDFUSE_STRING_(a)

namespace embedfuse {
namespace {

constexpr Kernels KERNELS = {
    EMBEDFUSE_STRING(EMBEDFUSE_ISA),
    RULE_NAMES,
    static_cast<int>(sizeof RULE_NAMES / sizeof *RULE_NAMES),
    are_sound,
    [](const Batch& batch, const void* table, Dtype dtype, void* out, int64_t width, void* scale, bool checked,
       int threads) {
      return with_dtype(dtype, [&](auto type) {
        return pooled_lookup<decltype(type)>(batch, table, out, width, scale, checked, threads);
      });
    },
    [](const Batch& batch, const void* table, Dtype dtype, void* out, int64_t width, int64_t* winners, bool checked,
       int threads) {
      return with_dtype(dtype, [&](auto type) {
        return max_lookup<decltype(type)>(batch, table, out, width, winners, checked, threads);
      });
    },
    [](const Batch& batch, const Matrix& grad, int64_t width, const int64_t* winners, void* out, Dtype dtype,
       int threads) {
      return with_dtype(dtype, [&](auto type) {
        return max_grad<decltype(type)>(batch, grad, width, winners, out, threads);
      });
    },
    [](const Batch& batch, const Upstream& upstream, const Learner& learner, int threads) {
      return with_dtype(learner.dtype, [&](auto type) {
        return row_update<decltype(type)>(batch, upstream, learner, threads);
      });
    },
    [](const Batch& batch, const Upstream& upstream, const Learner& learner, double* sum, int threads) {
      return with_dtype(learner.dtype, [&](auto type) {
        return row_square_sum<decltype(type)>(batch, upstream, learner, sum, threads);
      });
    },
    [](const Batch& batch, const Upstream& upstream, const Learner& learner, int64_t table, Collected* collected,
       int threads) {
      return with_dtype(learner.dtype, [&](auto type) {
        return collect_rows<decltype(type)>(batch, upstream, learner, table, collected, threads);
      });
    },
    [](const Batch& batch, const Upstream& upstream, const Rows* rows, void* out, Dtype dtype, void* dots,
       int threads) {
      return with_dtype(dtype, [&](auto type) {
        return row_grad<decltype(type)>(batch, upstream, rows, out, dots, threads);
      });
    },
    [](const Batch& batch, const Upstream& upstream, const void* table, Dtype dtype, void* out, int threads) {
      return with_dtype(dtype, [&](auto type) {
        return coefficient_grad<decltype(type)>(batch, upstream, table, out, threads);
      });
    },
    [](const Batch& batch, const Shards* shards, Dtype dtype, const Prepared& prepared, bool checked, int threads) {
      return dtype == Dtype::float64 ? prepare_ids<double>(batch, shards, prepared, checked, threads)
                                     : prepare_ids<float>(batch, shards, prepared, checked, threads);
    },
    [](const Matrix& a, int64_t n, const Matrix& b, int64_t m, int64_t rows, int64_t k, int64_t* ids, int threads) {
      return with_dtype(a.dtype, [&](auto type) {
        return product_topk<decltype(type)>(a.data, n, a.row_stride, b.data, m, b.row_stride, rows, k, ids, threads);
      });
    },
};

}  // namespace

const Kernels& EMBEDFUSE_JOIN(kernels_, EMBEDFUSE_ISA)() { return KERNELS; }

}  // namespace embedfuse

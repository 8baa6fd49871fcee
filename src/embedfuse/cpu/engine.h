// What the Python door and the kernels agree on: plain structs over raw addresses, and one table of functions.
//
// No tensor library is known here. Descriptors are those of plan.py; terms are those of torch/backends/__init__.py.
#pragma once

#include <cstdint>

namespace embedfuse {

enum class Dtype : int { float32, float16, bfloat16, float64 };

// Results of a function that is not a position.
constexpr int64_t DONE = -1;
constexpr int64_t OUT_OF_MEMORY = -2;

// One row of `Group.features` (plan.py).
struct Feature {
  int64_t table, offset, rows, dim, column, row_base, moment, power, flags, stride;
  double max_norm;
  int64_t default_id;
};
constexpr int64_t NO_DEFAULT = -1;
constexpr int64_t DROP_NEGATIVE_IDS = 1, DROP_NONPOSITIVE_WEIGHTS = 2;

// One row of `Group.tables` (plan.py).
struct Table {
  int64_t offset, rows, dim, row_base, rule, slots[2], source;
  double max_norm;
};

constexpr int64_t HYPER_WIDTH = 16;
// Place of the seed of stochastic rounding (optim/base.py).
constexpr int64_t ROUNDING_SEED = 15;

// The ids of all features; bag `(record * feature_count + feature) * bags + b`.
struct Batch {
  const Feature* features;
  int64_t feature_count;
  const void* ids;  // int64_t if `wide_ids`, else int32_t
  bool wide_ids;
  int64_t id_count;
  const int64_t* offsets;
  const void* weights;  // of the accumulation type, or null: all ones
  int64_t bags;
  int64_t records;
};

// static, so that no other instruction set gets it
static inline int64_t all_bags(const Batch& batch) { return batch.feature_count * batch.bags * batch.records; }

// A matrix of any float type and any strides, in elements.
struct Matrix {
  const void* data;
  Dtype dtype;
  int64_t row_stride, column_stride;
};

// The coefficients and upstream gradient of a batch.
struct Upstream {
  const void* scale;  // of the accumulation type, one a bag, or null: all ones
  Matrix grad;        // [records * bags, width]
  int64_t width;
};

// Where rows can be read, for the gradient of cutting them to a length and that of weights.
struct Rows {
  const void* table;  // what `Table::source` counts from; of the type of the sums
  const Table* tables;
  int64_t table_count;
};

// One table whose rows lie in several places, its shards.
struct Shard {
  int64_t rows_before, rows, start;
};
struct Shards {
  const Shard* shards;
  int64_t count;
  bool modulo;     // id `i` is row `i / count` of shard `i % count`; else ids number the rows shard after shard
  int64_t stride;  // from one row to the next, in the unit of the starts
};

// What `prepare_ids` makes; all but `offsets` and `places` have `id_count` + the number of bags elements.
struct Prepared {
  int64_t* rows;
  int64_t* starts;  // null without shards
  int64_t* offsets;
  void* weights;    // of the accumulation type, or null
  int64_t* places;  // [id_count]
};

// The tables that learn.
struct Learner {
  void* table;
  Dtype dtype;
  const Table* tables;
  int64_t table_count;
  const int64_t* rules;  // position in `Kernels::rule_names` for each value of Table::rule, or -1
  int64_t rule_count;
  void* slots;          // of the accumulation type
  const double* hyper;  // [table_count, HYPER_WIDTH]
  const int64_t* steps;
  double grad_scale;
};

// Rows and their summed gradients, as `collect_rows` found them; the arrays are the caller's to `free`.
struct Collected {
  int64_t count;
  int64_t* rows;  // [count], ascending, counted within the table
  void* sums;     // [count, dim] of the accumulation type
};

// Everything one instruction set offers. A function returns DONE, OUT_OF_MEMORY or, as said, a position in the ids.
struct Kernels {
  const char* name;
  const char* const* rule_names;
  int rule_count;
  // whether the bags of a batch go from 0 on, do not run backwards, and stay inside of the ids
  bool (*are_sound)(const Batch&);
  // returns the first position of an id out of range, if `checked` and there is one
  int64_t (*pooled_lookup)(const Batch&, const void* table, Dtype, void* out, int64_t width, void* scale, bool checked,
                           int threads);
  int64_t (*max_lookup)(const Batch&, const void* table, Dtype, void* out, int64_t width, int64_t* winners,
                        bool checked, int threads);
  int64_t (*max_grad)(const Batch&, const Matrix& grad, int64_t width, const int64_t* winners, void* out, Dtype,
                      int threads);
  int64_t (*row_update)(const Batch&, const Upstream&, const Learner&, int threads);
  int64_t (*row_square_sum)(const Batch&, const Upstream&, const Learner&, double* sum, int threads);
  // of the one table with number `table`, whatever its rule
  int64_t (*collect_rows)(const Batch&, const Upstream&, const Learner&, int64_t table, Collected*, int threads);
  // `rows` may be null, and `dots`, which need them
  int64_t (*row_grad)(const Batch&, const Upstream&, const Rows* rows, void* out, Dtype, void* dots, int threads);
  int64_t (*coefficient_grad)(const Batch&, const Upstream&, const void* table, Dtype, void* out, int threads);
  // `shards` may be null; `dtype` is that of the tables. Returns what `pooled_lookup` returns
  int64_t (*prepare_ids)(const Batch&, const Shards* shards, Dtype, const Prepared&, bool checked, int threads);
  // `a` and `b` are [rows, n] and [rows, m], of rows without gaps
  int64_t (*product_topk)(const Matrix& a, int64_t n, const Matrix& b, int64_t m, int64_t rows, int64_t k, int64_t* ids,
                          int threads);
};

const Kernels& kernels_baseline();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();

// The kernels in use, chosen once: the best this processor runs, capped by EMBEDFUSE_CPU_ISA.
// Throws std::runtime_error for an unknown name or one this processor lacks.
const Kernels& kernels();

// Whether this processor (and this build) runs `baseline`, `avx2` or `avx512`.
bool runs(const char* isa);

}  // namespace embedfuse

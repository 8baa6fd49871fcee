// The upstream gradient as rows of one type, neighbouring elements side by side; copied only if it is not like that.
#pragma once

#include "engine.h"
#include "parallel.h"
#include "vectors.h"

namespace embedfuse {
namespace {

// Calls `body(T{})` with the type of that code.
template <class Body>
auto with_dtype(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::float16: return body(Half{});
    case Dtype::bfloat16: return body(BFloat16{});
    case Dtype::float64: return body(double{});
    default: return body(float{});
  }
}

template <class T>
constexpr Dtype DTYPE = Dtype::float32;
template <>
constexpr Dtype DTYPE<Half> = Dtype::float16;
template <>
constexpr Dtype DTYPE<BFloat16> = Dtype::bfloat16;
template <>
constexpr Dtype DTYPE<double> = Dtype::float64;

// Rows of the tables' type if they come that way, else of the accumulation type A.
template <class A>
class GradRows {
 public:
  // False if there is no memory. With a `row_stride`, the rows will have it.
  bool prepare(const Matrix& grad, Dtype table, int64_t rows, int64_t width, int threads, int64_t row_stride = -1) {
    const bool side_by_side = grad.column_stride == 1 || width <= 1;
    const bool fits = side_by_side && (row_stride < 0 || row_stride == grad.row_stride);
    is_wide_ = !fits || grad.dtype != table || table == DTYPE<A>;
    if (fits && (grad.dtype == table || grad.dtype == DTYPE<A>)) {
      data_ = static_cast<const char*>(grad.data);
      row_bytes_ = grad.row_stride * element_bytes();
      return true;
    }
    if (!copy_.allocate(rows * width)) return false;
    data_ = reinterpret_cast<const char*>(copy_.data());
    row_bytes_ = width * element_bytes();
    with_dtype(grad.dtype, [&](auto type) { copy<decltype(type)>(grad, rows, width, threads); });
    return true;
  }
  // Whether the elements are of type A. If not, they are of the tables' type, which then has two bytes.
  bool is_wide() const { return is_wide_; }
  const void* row(int64_t number, int64_t column) const {
    return data_ + number * row_bytes_ + column * element_bytes();
  }

 private:
  int64_t element_bytes() const { return is_wide_ ? static_cast<int64_t>(sizeof(A)) : 2; }

  template <class G>
  void copy(const Matrix& grad, int64_t rows, int64_t width, int threads) {
    const G* from = static_cast<const G*>(grad.data);
    constexpr int64_t ROWS_AT_ONCE = 16;
    parallel_tasks(ceil_div(rows, ROWS_AT_ONCE), threads_for(rows * width, threads), [&](int64_t task, int) {
      const int64_t last = smaller(rows, (task + 1) * ROWS_AT_ONCE);
      for (int64_t r = task * ROWS_AT_ONCE; r < last; ++r)
        for (int64_t c = 0; c < width; ++c)
          copy_[r * width + c] = static_cast<A>(widen(from[r * grad.row_stride + c * grad.column_stride]));
    });
  }

  const char* data_ = nullptr;
  int64_t row_bytes_ = 0;
  bool is_wide_ = true;
  Buffer<A> copy_;
};

}  // namespace
}  // namespace embedfuse

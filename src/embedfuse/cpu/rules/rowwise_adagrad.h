// Row-wise Adagrad (optim/rowwise_adagrad.py).
#pragma once

#include "rule.h"

namespace embedfuse {
namespace {

// `a += mean(g²); w -= lr / (√a + ε) * g`, one `a` a row. Own: epsilon.
template <class A>
struct RowWiseAdagrad {
  static constexpr int ELEMENT_SLOTS = 0, ROW_SLOTS = 1;
  A rate, epsilon, row_rate = 0;

  RowWiseAdagrad(const double* hyper, int64_t)
      : rate(static_cast<A>(hyper[LEARNING_RATE])), epsilon(static_cast<A>(hyper[OWN])) {}

  void begin_row(A mean_square, A* a) {
    *a += mean_square;
    row_rate = rate / (square_root(*a) + epsilon);
  }
  void operator()(A& w, A g, A&, A&) const { w -= row_rate * g; }
};

}  // namespace
}  // namespace embedfuse

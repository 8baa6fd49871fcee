// Stochastic gradient descent with momentum (optim/sgd.py).
#pragma once

#include "rule.h"

namespace embedfuse {
namespace {

// `m = μ m + g; w -= lr * m`, or `w -= lr * (μ m + g)` after Nesterov. Own: momentum, nesterov.
template <class A>
struct Momentum {
  static constexpr int ELEMENT_SLOTS = 1, ROW_SLOTS = 0;
  A rate, momentum, share_of_m, share_of_g;

  Momentum(const double* hyper, int64_t)
      : rate(static_cast<A>(hyper[LEARNING_RATE])),
        momentum(static_cast<A>(hyper[OWN])),
        share_of_m(hyper[OWN + 1] != 0 ? momentum : A(1)),
        share_of_g(hyper[OWN + 1] != 0 ? A(1) : A(0)) {}

  void operator()(A& w, A g, A& m, A&) const {
    m = momentum * m + g;
    w -= rate * (share_of_m * m + share_of_g * g);
  }
};

}  // namespace
}  // namespace embedfuse

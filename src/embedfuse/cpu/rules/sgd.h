// Stochastic gradient descent (optim/sgd.py).
#pragma once

#include "rule.h"

namespace embedfuse {
namespace {

// `w -= lr * g`
template <class A>
struct Sgd {
  static constexpr int ELEMENT_SLOTS = 0, ROW_SLOTS = 0;
  A rate;

  Sgd(const double* hyper, int64_t) : rate(static_cast<A>(hyper[LEARNING_RATE])) {}
  void operator()(A& w, A g, A&, A&) const { w -= rate * g; }
};

}  // namespace
}  // namespace embedfuse

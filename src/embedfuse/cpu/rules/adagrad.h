// Adagrad (optim/adagrad.py).
#pragma once

#include "rule.h"

namespace embedfuse {
namespace {

// `a += g²; w -= lr * g / (√a + ε)`. Own: epsilon.
template <class A>
struct Adagrad {
  static constexpr int ELEMENT_SLOTS = 1, ROW_SLOTS = 0;
  A rate, epsilon;

  Adagrad(const double* hyper, int64_t)
      : rate(static_cast<A>(hyper[LEARNING_RATE])), epsilon(static_cast<A>(hyper[OWN])) {}

  void operator()(A& w, A g, A& a, A&) const {
    a += g * g;
    w -= rate * g / (square_root(a) + epsilon);
  }
};

}  // namespace
}  // namespace embedfuse

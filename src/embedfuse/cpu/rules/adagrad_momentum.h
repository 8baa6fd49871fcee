// Adagrad with momentum (optim/adagrad_momentum.py).
#pragma once

#include "rule.h"

namespace embedfuse {
namespace {

// `a = a + g²`, or with `beta2 < 1` `a = beta2 a + (1 - beta2) g²`; `s = g (a + ε)^(-1 / exponent)`; `m = μ m + s`;
// `w -= lr * m`, or `lr * (μ m + s)` after Nesterov. Own: momentum, nesterov, exponent, beta2, epsilon.
template <class A>
struct AdagradMomentum {
  static constexpr int ELEMENT_SLOTS = 2, ROW_SLOTS = 0;
  A rate, momentum, share_of_m, share_of_s, beta2, rest, epsilon, exponent;
  bool root;

  AdagradMomentum(const double* hyper, int64_t) {
    const double* own = hyper + OWN;
    const bool nesterov = own[1] != 0;
    rate = static_cast<A>(hyper[LEARNING_RATE]);
    momentum = static_cast<A>(own[0]);
    share_of_m = nesterov ? momentum : A(1);
    share_of_s = nesterov ? A(1) : A(0);
    beta2 = static_cast<A>(own[3]);
    rest = static_cast<A>(own[3] == 1 ? 1.0 : 1 - own[3]);
    epsilon = static_cast<A>(own[4]);
    exponent = static_cast<A>(-1 / own[2]);
    root = own[2] == 2;
  }

  void operator()(A& w, A g, A& a, A& m) const {
    a = beta2 * a + rest * (g * g);
    const A s = root ? g / square_root(a + epsilon) : g * power(a + epsilon, exponent);
    m = momentum * m + s;
    w -= rate * (share_of_m * m + share_of_s * s);
  }
};

}  // namespace
}  // namespace embedfuse

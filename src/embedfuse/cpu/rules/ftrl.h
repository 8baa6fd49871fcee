// FTRL-proximal (optim/ftrl.py).
#pragma once

#include "rule.h"

namespace embedfuse {
namespace {

// With `a' = a + g²` and `scale = lr` if the linear term is multiplied by it, else 1; `rate = lr / scale`:
// `z += scale * (g + 2 shrinkage w) - (a'ᵖ - aᵖ) / rate * w; w = (clip(z, -scale l1, scale l1) - z) / D` with
// `D = (a'ᵖ + beta) / rate + 2 scale l2`, and 0 where D is 0.
// Own: power, l1, l2, beta, multiply_linear_by_learning_rate, l2_shrinkage.
template <class A>
struct Ftrl {
  static constexpr int ELEMENT_SLOTS = 2, ROW_SLOTS = 0;
  A exponent, bound, twice_l2, beta, twice_shrinkage, scale, rate;
  bool root;

  Ftrl(const double* hyper, int64_t) {
    const double* own = hyper + OWN;
    const double scaled_by = own[4] != 0 ? hyper[LEARNING_RATE] : 1.0;
    exponent = static_cast<A>(own[0]);
    bound = static_cast<A>(scaled_by * own[1]);
    twice_l2 = static_cast<A>(2 * scaled_by * own[2]);
    beta = static_cast<A>(own[3]);
    twice_shrinkage = static_cast<A>(2 * own[5]);
    scale = static_cast<A>(scaled_by);
    rate = static_cast<A>(own[4] != 0 ? 1.0 : hyper[LEARNING_RATE]);
    root = own[0] == 0.5;
  }

  void operator()(A& w, A g, A& a, A& z) const {
    const A grown = a + g * g;
    const A old_power = root ? square_root(a) : power(a, exponent);
    const A new_power = root ? square_root(grown) : power(grown, exponent);
    a = grown;
    z += scale * (g + twice_shrinkage * w) - (new_power - old_power) / rate * w;
    const A denominator = (new_power + beta) / rate + twice_l2;
    const A quotient = (clip(z, -bound, bound) - z) / (denominator == 0 ? A(1) : denominator);
    w = denominator == 0 ? A(0) : quotient;
  }
};

}  // namespace
}  // namespace embedfuse

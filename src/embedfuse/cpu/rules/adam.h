// Adam and AdamW (optim/adam.py, optim/adamw.py), whose rows move alike.
#pragma once

#include "rule.h"

namespace embedfuse {
namespace {

// `m = β₁ m + (1 - β₁) g; v = β₂ v + (1 - β₂) g²`, then `w -= lr * m / √(v + ε²)`, or `lr * m / (√v + ε)`, or with bias
// correction `lr * (m / (1 - β₁ᵗ)) / (√(v / (1 - β₂ᵗ)) + ε)`.
// Own: beta_1, beta_2, epsilon, bias_correction, sum_inside_sqrt, log(beta_1), log(beta_2).
template <class A>
struct Adam {
  static constexpr int ELEMENT_SLOTS = 2, ROW_SLOTS = 0;
  A beta_1, beta_2, rest_1, rest_2, rate, root_correction, inside, outside;

  // the constants are made in double: in float 1 - 0.999 is wrong in its fifth digit
  Adam(const double* hyper, int64_t step) {
    const double* own = hyper + OWN;
    const double time = static_cast<double>(step), epsilon = own[2];
    const bool corrected = own[3] != 0, sum_inside = own[4] != 0;
    beta_1 = static_cast<A>(own[0]);
    beta_2 = static_cast<A>(own[1]);
    rest_1 = static_cast<A>(1 - own[0]);
    rest_2 = static_cast<A>(1 - own[1]);
    rate = static_cast<A>(hyper[LEARNING_RATE] / (corrected ? -::expm1(time * own[5]) : 1.0));
    root_correction = static_cast<A>(1 / __builtin_sqrt(corrected ? -::expm1(time * own[6]) : 1.0));
    inside = static_cast<A>(sum_inside ? epsilon * epsilon : 0.0);
    outside = static_cast<A>(sum_inside ? 0.0 : epsilon);
  }

  void operator()(A& w, A g, A& m, A& v) const {
    m = beta_1 * m + rest_1 * g;
    v = beta_2 * v + rest_2 * (g * g);
    w -= rate * m / (square_root(v + inside) * root_correction + outside);
  }
};

}  // namespace
}  // namespace embedfuse

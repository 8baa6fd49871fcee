// What every row rule gets: the common hyper-parameters, and the steps around the rule (optim/base.py, `apply_rule`).
//
// A rule is a struct over the accumulation type A with
//   ELEMENT_SLOTS, ROW_SLOTS   how many state numbers an element has, and a row (at most two in all)
//   Rule(hyper, step)          constants of one table for this step
//   begin_row(mean_square, s)  only with ROW_SLOTS: called once a row, with the mean of g² and the row's state
//   operator()(w, g, s0, s1)   one element; plain arithmetic, so that the compiler makes vectors of it
#pragma once

#include <cmath>
#include <cstdint>

#include "../vectors.h"

namespace embedfuse {
namespace {

// Places in the hyper-parameters of a table.
enum Hyper { LEARNING_RATE, GRADIENT_MIN, GRADIENT_MAX, DECAY, WEIGHT_MIN, WEIGHT_MAX, OWN };

inline float power(float base, float exponent) { return ::powf(base, exponent); }
inline double power(double base, double exponent) { return ::pow(base, exponent); }

// NaN stays NaN.
template <class A>
inline A clip(A value, A low, A high) {
  return value < low ? low : value > high ? high : value;
}

// One whole step of one row: clip the gradient, decay, the rule, clip the weight.
template <class Rule, class A>
class RowStep {
 public:
  RowStep(const double* hyper, int64_t step)
      : rule_(hyper, step),
        gradient_min_(static_cast<A>(hyper[GRADIENT_MIN])),
        gradient_max_(static_cast<A>(hyper[GRADIENT_MAX])),
        decay_(static_cast<A>(hyper[DECAY])),
        weight_min_(static_cast<A>(hyper[WEIGHT_MIN])),
        weight_max_(static_cast<A>(hyper[WEIGHT_MAX])),
        plain_(std::isinf(gradient_min_) && std::isinf(gradient_max_) && std::isinf(weight_min_) &&
               std::isinf(weight_max_) && decay_ == 0) {}

  // The gradient is `factor * g`; `s0` and `s1` are the row's state; `scratch` has room for a row, and may be `g`.
  // A call of its own, which tables of all types share.
  __attribute__((noinline)) void operator()(int64_t dim, A* w, const A* g, A factor, A* scratch, A* s0, A* s1) const {
    if (plain_) {
      step<true>(dim, w, g, factor, scratch, s0, s1);
    } else {
      step<false>(dim, w, g, factor, scratch, s0, s1);
    }
  }

 private:
  template <bool PLAIN>
  void step(int64_t dim, A* __restrict w, const A* g, A factor, A* scratch, A* __restrict s0, A* __restrict s1) const {
    Rule rule = rule_;
    if constexpr (Rule::ROW_SLOTS == 1) {
      for (int64_t i = 0; i < dim; ++i) scratch[i] = clipped<PLAIN>(factor * g[i]);
      rule.begin_row(square_sum(scratch, dim) / static_cast<A>(dim), s0);
      g = scratch;
      factor = 1;
    }
    const A* __restrict gradient = g;
    for (int64_t i = 0; i < dim; ++i) {
      A element = PLAIN ? w[i] : w[i] - decay_ * w[i];
      A unused = 0;
      rule(element, clipped<PLAIN>(factor * gradient[i]), Rule::ELEMENT_SLOTS > 0 ? s0[i] : unused,
           Rule::ELEMENT_SLOTS > 1 ? s1[i] : unused);
      w[i] = PLAIN ? element : clip(element, weight_min_, weight_max_);
    }
  }
  template <bool PLAIN>
  A clipped(A g) const {
    return PLAIN ? g : clip(g, gradient_min_, gradient_max_);
  }

  Rule rule_;
  A gradient_min_, gradient_max_, decay_, weight_min_, weight_max_;
  bool plain_;
};

}  // namespace
}  // namespace embedfuse

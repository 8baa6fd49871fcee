// Rows that are cut to a length: `c * e` with `c = MAX_NORM / ||e||` where `||e|| > MAX_NORM`; and the gradient of that.
#pragma once

#include "batch.h"

namespace embedfuse {
namespace {

inline bool is_cut(double max_norm) { return max_norm < __builtin_inf(); }

// Of a row whose square is more than its type holds, too.
template <class T>
inline Accumulation<T> length_of(const T* row, int64_t dim) {
  const Accumulation<T> square = square_sum(row, dim);
  if (square < static_cast<Accumulation<T>>(__builtin_inff())) return square_root(square);
  double wide = 0;
  for (int64_t i = 0; i < dim; ++i) wide += static_cast<double>(widen(row[i])) * static_cast<double>(widen(row[i]));
  return static_cast<Accumulation<T>>(square_root(wide));
}

template <class T>
inline Accumulation<T> cut_factor(const T* row, int64_t dim, double max_norm) {
  using A = Accumulation<T>;
  const A length = length_of(row, dim), longest = static_cast<A>(max_norm);
  return length > longest ? longest / length : A(1);
}

// `factors[i]` for the id at `first + i`; those of ids that do not count are not set.
template <class T>
void cut_factors(const Ids<Accumulation<T>>& ids, const Feature& feature, const T* rows, int64_t first, int64_t last,
                 Accumulation<T>* factors) {
  constexpr int64_t AHEAD = 16;
  for (int64_t position = first; position < last; ++position) {
    if (position + AHEAD < last && ids.in_table(position + AHEAD))
      prefetch_lines(rows + ids.id(position + AHEAD) * feature.stride, feature.dim * static_cast<int64_t>(sizeof(T)));
    if (!ids.counts(position)) continue;
    factors[position - first] = cut_factor(rows + ids.id(position) * feature.stride, feature.dim, feature.max_norm);
  }
}

// From the gradient of a cut row to that of the row: `c * (g - e * <e, g> / ||e||²)`, in place.
template <class T>
__attribute__((noinline)) void cut_gradient(const T* row, int64_t dim, double max_norm, Accumulation<T>* g) {
  using A = Accumulation<T>;
  const A length = length_of(row, dim), longest = static_cast<A>(max_norm);
  // so said that a row with a NaN keeps its gradient
  if (!(length > longest)) return;
  const A factor = longest / length, along = dot<T, A>(row, g, dim) / length / length;
  int64_t i = 0;
  for (; i + LANES<A> <= dim; i += LANES<A>)
    store<A, A>(g + i, broadcast(factor) * (load<A>(g + i) - broadcast(along) * load<T, A>(row + i)));
  for (; i < dim; ++i) g[i] = factor * (g[i] - along * widen(row[i]));
}

}  // namespace
}  // namespace embedfuse

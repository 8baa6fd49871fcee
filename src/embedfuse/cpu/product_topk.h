// The k best sums of one score of each of two vectors, in order; see torch/product_topk.py for what the order is.
#pragma once

#include "batch.h"
#include "parallel.h"

namespace embedfuse {
namespace {

// A score and where it stands. `level` counts infinities: 1, -1, and 4 for NaN; `value` is then 0.
struct Score {
  double value;
  int64_t level, place;
};

inline bool comes_first(const Score& a, const Score& b) {
  if (a.level != b.level) return a.level > b.level;
  if (a.value != b.value) return a.value > b.value;
  return a.place < b.place;
}

inline Score score_of(double value, int64_t place) {
  constexpr double LARGEST = 1.7976931348623157e308;
  if (value != value) return {0, 4, place};
  if (value > LARGEST) return {0, 1, place};
  if (value < -LARGEST) return {0, -1, place};
  return {value, 0, place};
}

// Scores of up to 32 bits and their places as one number, which is larger the earlier they come.
inline uint64_t key_of(float value, int64_t place) {
  // -0 equals 0, and all NaN are the same
  const uint32_t bits = float_to_bits(value + 0.0f);
  // without branches: signs are not to be foretold
  const uint32_t number = bits ^ ((0 - (bits >> 31)) | 0x80000000);
  const uint32_t order = value != value ? UINT32_MAX : number;
  return static_cast<uint64_t>(order) << 32 | (UINT32_MAX - static_cast<uint32_t>(place));
}
inline bool comes_first(uint64_t a, uint64_t b) { return a > b; }
inline Score key_of(double value, int64_t place) { return score_of(value, place); }

template <class T>
Score score_at(const T* scores, uint64_t key) {
  const int64_t place = UINT32_MAX - static_cast<uint32_t>(key);
  return score_of(widen(scores[place]), place);
}
inline Score score_at(const double*, const Score& key) { return key; }

template <class T>
using KeyOf = decltype(key_of(widen(T()), 0));

// Moves the element at `at` down a heap whose root is the one that comes last.
template <class Key>
void sift_down(Key* heap, int64_t count, int64_t at) {
  const Key moved = heap[at];
  for (int64_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
    if (child + 1 < count) child += comes_first(heap[child], heap[child + 1]);
    if (!comes_first(moved, heap[child])) break;
    heap[at] = heap[child];
    at = child;
  }
  heap[at] = moved;
}

// The `k` first scores in order; most of the others fall to one comparison with the last of them.
template <class T>
void best_scores(const T* scores, int64_t count, int64_t k, KeyOf<T>* heap, Score* best) {
  for (int64_t i = 0; i < k; ++i) heap[i] = key_of(widen(scores[i]), i);
  for (int64_t i = k / 2 - 1; i >= 0; --i) sift_down(heap, k, i);
  for (int64_t i = k; i < count; ++i) {
    const KeyOf<T> next = key_of(widen(scores[i]), i);
    if (!comes_first(next, heap[0])) continue;
    heap[0] = next;
    sift_down(heap, k, 0);
  }
  for (int64_t left = k - 1; left >= 0; --left) {
    best[left] = score_at(scores, heap[0]);
    heap[0] = heap[left];
    sift_down(heap, left, 0);
  }
}

// A sum: `value` with what rounding took from it, exactly (Knuth's two-sum).
struct Sum {
  double value, error;
  int64_t level, id;
};

inline Sum sum_of(const Score& a, const Score& b, int64_t id) {
  constexpr double LARGEST = 1.7976931348623157e308;
  // kept from the compiler's own ideas about sums: this file is compiled without -ffast-math
  const double value = a.value + b.value;
  const double part = value - a.value;
  const double error = (a.value - (value - part)) + (b.value - part);
  return {value, value <= LARGEST && value >= -LARGEST ? error : 0, a.level + b.level, id};
}

inline bool comes_first(const Sum& a, const Sum& b) {
  if (a.level != b.level) return a.level > b.level;
  if (a.value != b.value) return a.value > b.value;
  if (a.error != b.error) return a.error > b.error;
  return a.id < b.id;
}

// Each rank of the first half offers its best pair that is not taken; a rank opens when the one before it has given a
// pair away, which is better than all of its own. So about √k ranks are open, and 2 k sums are made.
inline void best_pairs(const Score* a, int64_t a_count, const Score* b, int64_t b_count, int64_t m, int64_t k,
                       Sum* offers, int64_t* next, int64_t* ids) {
  int64_t open = 1, first = 0;
  const auto offer = [&](int64_t rank) {
    offers[rank] = sum_of(a[rank], b[next[rank]], a[rank].place * m + b[next[rank]].place);
  };
  next[0] = 0;
  offer(0);
  for (int64_t taken = 0; taken < k; ++taken) {
    int64_t best = -1;
    for (int64_t rank = first; rank < open; ++rank) {
      if (next[rank] < b_count && (best < 0 || comes_first(offers[rank], offers[best]))) best = rank;
    }
    ids[taken] = offers[best].id;
    if (++next[best] < b_count) offer(best);
    if (best == open - 1 && open < a_count) {
      next[open] = 0;
      offer(open++);
    }
    while (first < open && next[first] >= b_count) ++first;
  }
}

// `ids` [rows, k] of the k best sums of rows of `a` [rows, n] and `b` [rows, m]; row strides in elements.
template <class T>
int64_t product_topk(const void* a, int64_t n, int64_t a_stride, const void* b, int64_t m, int64_t b_stride,
                     int64_t rows, int64_t k, int64_t* ids, int threads) {
  const int64_t a_count = smaller(n, k), b_count = smaller(m, k);
  threads = threads_for(rows * (n + m) / 4, threads);
  Buffer<Score> scores(threads * (a_count + b_count));
  Buffer<KeyOf<T>> heaps(threads * larger(a_count, b_count));
  Buffer<Sum> offers(threads * a_count);
  Buffer<int64_t> next(threads * a_count);
  if (!scores || !heaps || !offers || !next) return OUT_OF_MEMORY;
  parallel_ranges(rows, 16, threads, [&](int64_t from, int64_t to, int thread) {
    Score* best_a = scores.data() + thread * (a_count + b_count);
    Score* best_b = best_a + a_count;
    KeyOf<T>* heap = heaps.data() + thread * larger(a_count, b_count);
    for (int64_t row = from; row < to; ++row) {
      best_scores(static_cast<const T*>(a) + row * a_stride, n, a_count, heap, best_a);
      best_scores(static_cast<const T*>(b) + row * b_stride, m, b_count, heap, best_b);
      best_pairs(best_a, a_count, best_b, b_count, m, k, offers.data() + thread * a_count,
                 next.data() + thread * a_count, ids + row * k);
    }
  });
  return DONE;
}

}  // namespace
}  // namespace embedfuse

// The loop that all time is spent in: `Σ coefficient * row`, rows of any type anywhere in memory.
//
// Sums stay in registers, a block of columns at a time, while rows that come later are on their way from memory.
#pragma once

#include "buffer.h"
#include "vectors.h"

namespace embedfuse {
namespace {

// Vectors of one block of columns.
constexpr int BLOCK = 8;
// Bytes to have on their way from memory: enough to cover its latency, not so much that they push each other out.
constexpr int64_t BYTES_AHEAD = 8192;

// Which columns, and how far ahead to prefetch.
struct Columns {
  int64_t first;
  int tail;       // elements of the last vector, if it is not whole
  int64_t ahead;  // rows between the one that is added and the one that is prefetched
};

// The sum of one block: WIDTH vectors, the last one not whole if TAIL.
template <class T, class A, int WIDTH, bool TAIL>
class BlockSum {
 public:
  // `row` points at the first column of the block.
  void add(const T* row, A coefficient, int tail) {
    const Vector<A> factor = broadcast(coefficient);
    for (int k = 0; k < WHOLE; ++k) sum_[k] += factor * load<T, A>(row + k * LANES<A>);
    if constexpr (TAIL) sum_[WHOLE] += factor * load_some<T, A>(row + WHOLE * LANES<A>, tail);
  }
  // The same, and the products of its elements with those of `other`, which has WIDTH vectors, added up lane by lane.
  Vector<A> add_and_multiply(const T* row, A coefficient, const Vector<A>* other, int tail) {
    const Vector<A> factor = broadcast(coefficient);
    Vector<A> products[2] = {};
    for (int k = 0; k < WHOLE; ++k) {
      const Vector<A> value = load<T, A>(row + k * LANES<A>);
      sum_[k] += factor * value;
      products[k % 2] += other[k] * value;
    }
    if constexpr (TAIL) {
      const Vector<A> value = load_some<T, A>(row + WHOLE * LANES<A>, tail);
      sum_[WHOLE] += factor * value;
      products[1] += other[WHOLE] * value;
    }
    return products[0] + products[1];
  }
  // Goes on where a sum was left that `write` wrote with a scale of 1.
  void resume(const A* sum, int tail) { load_block(sum, tail, sum_); }
  // One block of a row.
  template <class Row>
  static void load_block(const Row* row, int tail, Vector<A>* block) {
    for (int k = 0; k < WHOLE; ++k) block[k] = load<Row, A>(row + k * LANES<A>);
    if constexpr (TAIL) block[WHOLE] = load_some<Row, A>(row + WHOLE * LANES<A>, tail);
  }
  template <class Out>
  void write(Out* out, A scale, int tail) const {
    const Vector<A> factor = broadcast(scale);
    for (int k = 0; k < WHOLE; ++k) store<Out, A>(out + k * LANES<A>, factor * sum_[k]);
    if constexpr (TAIL) store_some<Out, A>(out + WHOLE * LANES<A>, factor * sum_[WHOLE], tail);
  }
  static void prefetch_block(const T* row) {
    for (int line = 0; line < LINES; ++line) prefetch(reinterpret_cast<const char*>(row) + line * LINE);
    // a row that does not start with a line reaches into one more
    if (reinterpret_cast<uintptr_t>(row) % LINE != 0) prefetch(reinterpret_cast<const char*>(row) + BYTES - 1);
  }
  static void prefetch_block_to_write(T* row) {
    for (int line = 0; line < LINES; ++line) prefetch_to_write(reinterpret_cast<char*>(row) + line * LINE);
  }

 private:
  static constexpr int BYTES = WIDTH * LANES<A> * static_cast<int>(sizeof(T)), LINES = (BYTES + LINE - 1) / LINE;
  static constexpr int WHOLE = TAIL ? WIDTH - 1 : WIDTH;
  Vector<A> sum_[WIDTH] = {};
};

// How the columns of a row fall into blocks: `inner` for all but the last one.
template <class Function>
class Blocks {
 public:
  // `functions[width - 1][tail]` serves a block of `width` vectors. `bytes` is the size of an element.
  Blocks(int64_t dim, int64_t lanes, int64_t bytes, const Function (&functions)[BLOCK][2]) : step_(BLOCK * lanes) {
    count_ = ceil_div(dim, step_);
    const int64_t rest = dim - (count_ - 1) * step_;
    tail_ = static_cast<int>(rest % lanes);
    inner_ = functions[BLOCK - 1][0];
    last_ = functions[ceil_div(rest, lanes) - 1][tail_ != 0];
    ahead_ = smaller<int64_t>(larger<int64_t>(BYTES_AHEAD / (smaller(dim, step_) * bytes), 2), 64);
  }
  // Calls each block's function with `arguments` and its columns.
  template <class... Arguments>
  void operator()(Arguments&&... arguments) const {
    for (int64_t block = 0; block + 1 < count_; ++block) inner_(arguments..., Columns{block * step_, 0, ahead_});
    last_(arguments..., Columns{(count_ - 1) * step_, tail_, ahead_});
  }

 private:
  int64_t step_, count_, ahead_;
  int tail_;
  Function inner_, last_;
};

// All widths of a function template `NAME<types..., WIDTH, TAIL>`, as `Blocks` wants them.
#define EMBEDFUSE_WIDTH(NAME, WIDTH, ...) {NAME<__VA_ARGS__, WIDTH, false>, NAME<__VA_ARGS__, WIDTH, true>}
#define EMBEDFUSE_WIDTHS(NAME, ...)                                               \
  {EMBEDFUSE_WIDTH(NAME, 1, __VA_ARGS__), EMBEDFUSE_WIDTH(NAME, 2, __VA_ARGS__), \
   EMBEDFUSE_WIDTH(NAME, 3, __VA_ARGS__), EMBEDFUSE_WIDTH(NAME, 4, __VA_ARGS__), \
   EMBEDFUSE_WIDTH(NAME, 5, __VA_ARGS__), EMBEDFUSE_WIDTH(NAME, 6, __VA_ARGS__), \
   EMBEDFUSE_WIDTH(NAME, 7, __VA_ARGS__), EMBEDFUSE_WIDTH(NAME, 8, __VA_ARGS__)}

}  // namespace
}  // namespace embedfuse

// Memory that frees itself. The kernels use no standard container: its members are inline functions shared by all
// instruction sets, and the linker might keep the one that this processor cannot run.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace embedfuse {
namespace {

template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) { allocate(count); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { free(data_); }

  // Makes room for `count` elements; what was there is lost, unless there was room already. False without memory.
  bool allocate(int64_t count) {
    if (count <= room_ && data_ != nullptr) return true;
    free(data_);
    data_ = static_cast<T*>(malloc(static_cast<size_t>(count > 0 ? count : 1) * sizeof(T)));
    room_ = data_ == nullptr ? 0 : count;
    return data_ != nullptr;
  }
  explicit operator bool() const { return data_ != nullptr; }
  T* data() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }
  T* release() {
    T* data = data_;
    data_ = nullptr;
    room_ = 0;
    return data;
  }

 private:
  T* data_ = nullptr;
  int64_t room_ = 0;
};

template <class T>
T smaller(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T larger(T a, T b) {
  return a < b ? b : a;
}
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace
}  // namespace embedfuse

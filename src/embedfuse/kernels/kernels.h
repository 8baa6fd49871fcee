// Launches of compiled CUDA kernels: the driver's call, and which compiled form of a kernel a call needs.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;

using Address = uintptr_t;

// CUlaunchAttribute and CUlaunchConfig of cuda.h, the same since CUDA 11.8.
struct Attribute {
  int32_t which, nothing;
  uint32_t value[16];
};

struct Config {
  uint32_t grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  uint32_t count;
};

static_assert(sizeof(Attribute) == 72 && offsetof(Config, stream) == 32 && offsetof(Config, count) == 48);

// cuLaunchKernelEx
using Driver = int (*)(const Config*, void* function, void** arguments, void** extra);

constexpr int32_t COOPERATIVE = 2;
constexpr int NO_CONTEXT = 201;  // what the driver says to a thread that has done nothing on a device yet
constexpr size_t MOST = 64;      // arguments

// One launch, ready for the driver. Kernels that take 32 bits of a value read its first half.
struct Launch {
  Driver driver;
  void* function;
  uint32_t grid[3], threads, shared;
  bool together;  // its blocks wait for each other, so that all must run at once
  size_t count;
  int64_t values[MOST];

  // What the driver says, 0 if all is well; a full queue waits for the device, so others should have the GIL.
  int issue(Address stream) {
    Attribute attribute{COOPERATIVE, 0, {1}};
    const Config config{{grid[0], grid[1], grid[2]}, {threads, 1, 1}, shared, reinterpret_cast<void*>(stream),
                        &attribute, together};
    void* arguments[MOST];
    for (size_t i = 0; i < count; ++i) arguments[i] = values + i;
    return driver(&config, function, arguments, nullptr);
  }
};

// A second stream, and what it takes to have one stream wait for the other.
struct Beside {
  Address stream, ready, done;                 // the events are CUevents
  int (*record)(Address event, Address stream);  // cuEventRecord
  int (*hold)(Address stream, Address event, uint32_t flags);  // cuStreamWaitEvent

  // What is issued to `second` from now on waits for all that was issued to `first`.
  int wait(Address event, Address first, Address second) const {
    const int failed = record(event, first);
    return failed != 0 ? failed : hold(second, event, 0);
  }
};

inline uint32_t programs_of(int64_t found) {
  if (found < 1 || found > std::numeric_limits<int32_t>::max())
    throw std::out_of_range("a grid of " + std::to_string(found) + " programs");
  return static_cast<uint32_t>(found);
}

inline void refuse(int failed) {
  throw std::runtime_error("a kernel was not launched: error " + std::to_string(failed) + " of CUDA's driver");
}

inline int64_t number(PyObject* object) {
  const long long found = PyLong_AsLongLong(object);
  if (found == -1 && PyErr_Occurred()) throw nb::python_error();
  return found;
}

// An address, or 0 for None.
inline int64_t address(PyObject* object) { return object == Py_None ? 0 : number(object); }

inline size_t size(const nb::tuple& items) { return static_cast<size_t>(PyTuple_GET_SIZE(items.ptr())); }

// One of the items of a tuple, which must have it.
inline PyObject* item(const nb::tuple& items, size_t place) {
  if (place >= size(items)) throw std::invalid_argument("a tuple of more items");
  return PyTuple_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(place));
}

// All that a compiler may have looked at in the arguments of a call.
struct Kind {
  int64_t device;
  uint64_t crooked;       // pointers that are no multiples of 16
  uint8_t classes[MOST];  // of numbers
};

// The compiled forms of one kernel, by the kind of its calls.
class Kernels {
 public:
  Kernels(Address driver, size_t pointers, std::vector<int> seen)
      : driver_(reinterpret_cast<Driver>(driver)), pointers_(pointers), seen_(std::move(seen)) {
    if (pointers_ > MOST || pointers_ + seen_.size() + 2 > MOST)
      throw std::length_error("a kernel of more than 62 arguments");
  }

  Kernels(const Kernels&) = delete;

  size_t pointers() const { return pointers_; }
  size_t numbers() const { return seen_.size(); }

  void add(int64_t device, const nb::tuple& pointers, const nb::tuple& numbers, Address function, uint32_t threads,
           uint32_t shared, std::vector<uint8_t> taken) {
    int64_t values[MOST];
    if (taken.size() + 2 > MOST) throw std::length_error("a kernel that takes more than 62 arguments");
    for (const uint8_t place : taken)
      if (place >= pointers_ + seen_.size()) throw std::out_of_range("a kernel that takes an argument that is not there");
    auto form = std::make_unique<Form>();
    read(pointers, numbers, values);
    form->kind = kind_of(device, values);
    form->function = reinterpret_cast<void*>(function);
    form->threads = threads, form->shared = shared, form->taken = std::move(taken);
    forms_.push_back(std::move(form));
  }

  // Whether the form that a call needs is known: then all of the launch but its grid. `values`: pointers, numbers.
  bool prepare(int64_t device, const int64_t* values, Launch& launch) const {
    const Kind kind = kind_of(device, values);
    for (const auto& form : forms_) {
      if (std::memcmp(&form->kind, &kind, sizeof kind) != 0) continue;
      launch.driver = driver_, launch.function = form->function;
      launch.threads = form->threads, launch.shared = form->shared, launch.together = false;
      launch.count = 0;
      for (const uint8_t place : form->taken) launch.values[launch.count++] = values[place];
      // Triton's kernels end with two addresses of scratch memory, which ours have none of
      launch.values[launch.count++] = 0, launch.values[launch.count++] = 0;
      return true;
    }
    return false;
  }

  // Whether the form of this kind was known, and launched; not in a thread without a context, which Triton makes.
  bool operator()(int64_t device, Address stream, const nb::tuple& grid, const nb::tuple& pointers,
                  const nb::tuple& numbers) const {
    int64_t values[MOST];
    read(pointers, numbers, values);
    Launch launch;
    launch.grid[0] = launch.grid[1] = launch.grid[2] = 1;
    for (size_t axis = 0; axis < size(grid) && axis < 3; ++axis) launch.grid[axis] = programs_of(number(item(grid, axis)));
    if (!prepare(device, values, launch)) return false;
    int failed;
    {
      const nb::gil_scoped_release released;
      failed = launch.issue(stream);
    }
    if (failed != 0 && failed != NO_CONTEXT) refuse(failed);
    return failed == 0;
  }

 private:
  struct Form {
    Kind kind;
    void* function;
    uint32_t threads, shared;
    std::vector<uint8_t> taken;  // places, among pointers and then numbers, of its arguments
  };

  void read(const nb::tuple& pointers, const nb::tuple& numbers, int64_t* values) const {
    if (size(pointers) != pointers_ || size(numbers) != seen_.size())
      throw std::invalid_argument("as many pointers and numbers as the kernel has");
    for (size_t i = 0; i < pointers_; ++i) values[i] = address(item(pointers, i));
    for (size_t i = 0; i < seen_.size(); ++i) values[pointers_ + i] = number(item(numbers, i));
  }

  Kind kind_of(int64_t device, const int64_t* values) const {
    Kind kind{};
    kind.device = device;
    for (size_t i = 0; i < pointers_; ++i) kind.crooked |= static_cast<uint64_t>((values[i] & 15) != 0) << i;
    for (size_t i = 0; i < seen_.size(); ++i) {
      const int64_t value = values[pointers_ + i];
      const bool wide = value != static_cast<int32_t>(value);
      // as Triton does: 1, multiples of 16, and numbers of 64 bits have kernels of their own
      const int seen = !seen_[i] ? 0 : value == 1 ? 1 : (value & 15) == 0 ? 2 : 3;
      kind.classes[i] = static_cast<uint8_t>(seen * 2 + wide);
    }
    return kind;
  }

  Driver driver_;
  size_t pointers_;
  std::vector<int> seen_;
  std::vector<std::unique_ptr<Form>> forms_;
};

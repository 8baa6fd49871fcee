// Launches of compiled CUDA kernels: from Python's tuples to the driver, and nothing between.
//
// Python's own ways take the host two to three times as long as the driver does: Triton's launcher, and ctypes.
// Addresses and plain numbers in; `embedfuse/torch/backends/launching.py` is the door in front.
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
using namespace nb::literals;

namespace {

using Address = uintptr_t;
using Values = std::vector<int64_t>;

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

// What the driver says of a launch, 0 if all is well. Kernels that take 32 bits of a value read its first half.
int launch(Driver driver, void* function, const uint32_t (&grid)[3], uint32_t threads, uint32_t shared, Address stream,
           int64_t* values, size_t count, bool together) {
  Attribute attribute{COOPERATIVE, 0, {1}};
  const Config config{{grid[0], grid[1], grid[2]}, {threads, 1, 1}, shared, reinterpret_cast<void*>(stream),
                      &attribute, together};
  void* arguments[MOST];
  for (size_t i = 0; i < count; ++i) arguments[i] = values + i;
  // a full queue waits for the device
  const nb::gil_scoped_release released;
  return driver(&config, function, arguments, nullptr);
}

int64_t number(PyObject* object) {
  const long long found = PyLong_AsLongLong(object);
  if (found == -1 && PyErr_Occurred()) throw nb::python_error();
  return found;
}

size_t size(const nb::tuple& items) { return static_cast<size_t>(PyTuple_GET_SIZE(items.ptr())); }

PyObject* item(const nb::tuple& items, size_t place) {
  return PyTuple_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(place));
}

// All that a compiler may have looked at in the arguments of a call.
struct Kind {
  int64_t device;
  uint64_t crooked;     // pointers that are no multiples of 16
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

  void add(int64_t device, const nb::tuple& pointers, const nb::tuple& numbers, Address function, uint32_t threads,
           uint32_t shared, std::vector<uint8_t> taken) {
    int64_t values[MOST];
    if (taken.size() + 2 > MOST) throw std::length_error("a kernel that takes more than 62 arguments");
    for (const uint8_t place : taken)
      if (place >= pointers_ + seen_.size()) throw std::out_of_range("a kernel that takes an argument that is not there");
    auto form = std::make_unique<Form>();
    form->kind = read(device, pointers, numbers, values);
    form->function = reinterpret_cast<void*>(function);
    form->threads = threads, form->shared = shared, form->taken = std::move(taken);
    forms_.push_back(std::move(form));
  }

  // Whether the form of this kind was known, and launched; not in a thread without a context, which Triton makes.
  bool operator()(int64_t device, Address stream, const nb::tuple& grid, const nb::tuple& pointers,
                  const nb::tuple& numbers) const {
    int64_t values[MOST], arguments[MOST];
    const Kind kind = read(device, pointers, numbers, values);
    uint32_t shape[3] = {1, 1, 1};
    for (size_t axis = 0; axis < size(grid) && axis < 3; ++axis) {
      const int64_t programs = number(item(grid, axis));
      if (programs < 1 || programs > std::numeric_limits<int32_t>::max())
        throw std::out_of_range("a grid of " + std::to_string(programs) + " programs");
      shape[axis] = static_cast<uint32_t>(programs);
    }
    for (const auto& form : forms_) {
      if (std::memcmp(&form->kind, &kind, sizeof kind) != 0) continue;
      size_t count = 0;
      for (const uint8_t place : form->taken) arguments[count++] = values[place];
      // Triton's kernels end with two addresses of scratch memory, which ours have none of
      arguments[count++] = 0, arguments[count++] = 0;
      const int failed =
          launch(driver_, form->function, shape, form->threads, form->shared, stream, arguments, count, false);
      if (failed == NO_CONTEXT) return false;
      if (failed != 0)
        throw std::runtime_error("a kernel was not launched: error " + std::to_string(failed) + " of CUDA's driver");
      return true;
    }
    return false;
  }

 private:
  struct Form {
    Kind kind;
    void* function;
    uint32_t threads, shared;
    std::vector<uint8_t> taken;  // places, among pointers and then numbers, of its arguments
  };

  Kind read(int64_t device, const nb::tuple& pointers, const nb::tuple& numbers, int64_t* values) const {
    if (size(pointers) != pointers_ || size(numbers) != seen_.size())
      throw std::invalid_argument("as many pointers and numbers as the kernel has");
    Kind kind{};
    kind.device = device;
    for (size_t i = 0; i < pointers_; ++i) {
      PyObject* pointer = item(pointers, i);
      values[i] = pointer == Py_None ? 0 : number(pointer);
      kind.crooked |= static_cast<uint64_t>((values[i] & 15) != 0) << i;
    }
    for (size_t i = 0; i < seen_.size(); ++i) {
      const int64_t value = values[pointers_ + i] = number(item(numbers, i));
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

int launch_once(Address driver, Address function, uint32_t blocks, uint32_t threads, Address stream,
                const nb::tuple& arguments, bool together) {
  int64_t values[MOST];
  if (size(arguments) > MOST) throw std::length_error("a kernel of more than 64 arguments");
  for (size_t i = 0; i < size(arguments); ++i) values[i] = number(item(arguments, i));
  return launch(reinterpret_cast<Driver>(driver), reinterpret_cast<void*>(function), {blocks, 1, 1}, threads, 0, stream,
                values, size(arguments), together);
}

}  // namespace

NB_MODULE(_launch, module) {
  module.doc() = "Launches of compiled CUDA kernels.";
  // those that launch live as long as the process, in which nanobind sees a leak
  nb::set_leak_warnings(false);
  nb::class_<Kernels>(module, "Kernels", "The compiled forms of one kernel, by the kind of its calls.")
      .def(nb::init<Address, size_t, std::vector<int>>(), "driver"_a, "pointers"_a, "seen"_a,
           "`driver`: address of cuLaunchKernelEx. `seen`: for each number whether a compiler may look at it.")
      .def("add", &Kernels::add, "device"_a, "pointers"_a, "numbers"_a, "function"_a, "threads"_a, "shared"_a,
           "taken"_a, "Adds the form of calls of this kind, which takes some of the pointers and numbers.")
      .def("__call__", &Kernels::operator(), "device"_a, "stream"_a, "grid"_a, "pointers"_a, "numbers"_a,
           "Launches; False, and nothing else, if no form of this kind was added, or the thread has no context yet.");
  module.def("launch", &launch_once, "driver"_a, "function"_a, "blocks"_a, "threads"_a, "stream"_a, "arguments"_a,
             "together"_a,
             "Launches a kernel of its own making; what the driver says, 0 if all is well. `together`: its blocks wait "
             "for each other, so that all must run at once.");
}

// Launches that were written down once, for other batches: what their grids, numbers and addresses follow from.
//
// `embedfuse/torch/backends/program.py` writes them down while Python issues them for the first time.
#pragma once

#include "tensors.h"

// What a value is: a field of what is given, a constant, or made of two values before it.
enum class Made : int64_t { GIVEN, CONSTANT, SUM, PRODUCT, QUOTIENT };
// What is asked of two values.
enum class Asked : int64_t { LESS, EQUAL };

class Program {
 public:
  // `values`: triples (Made, left, right); `guards`: (Asked, left, right, answer); `size`: place of the bytes of memory
  // that the launches share, whose address is one more field. `steps`: (kernels, grid, arguments, aside); or, of a
  // kernel of its own making, (function, grid, arguments, driver, threads, together); or whether the second stream is
  // to wait for the first from there on, else the first for the second. A grid has one to three places.
  Program(const Reader& reader, size_t given, const nb::list& values, const nb::list& guards, size_t size,
          const nb::list& steps)
      : reader_(reader), given_(given), size_(size) {
    for (const nb::handle& one : values) {
      const auto made = nb::cast<nb::tuple>(one);
      const Value value{static_cast<Made>(number(item(made, 0))), number(item(made, 1)), number(item(made, 2))};
      const auto before = static_cast<int64_t>(values_.size());
      const bool of_two = value.made != Made::GIVEN && value.made != Made::CONSTANT;
      if (value.made < Made::GIVEN || value.made > Made::QUOTIENT ||
          (value.made == Made::GIVEN && (value.left < 0 || value.left > int64_t(FIELDS * given))) ||
          (of_two && (value.left < 0 || value.right < 0 || value.left >= before || value.right >= before)))
        throw std::invalid_argument("a value that follows from nothing");
      values_.push_back(value);
    }
    for (const nb::handle& one : guards) {
      const auto asked = nb::cast<nb::tuple>(one);
      const int64_t what = number(item(asked, 0));
      if (what != 0 && what != 1) throw std::invalid_argument("a question that nobody asks");
      guards_.push_back({static_cast<Asked>(what), place(number(item(asked, 1))),
                         place(number(item(asked, 2))), number(item(asked, 3)) != 0});
    }
    place(static_cast<int64_t>(size));
    for (const nb::handle& one : steps) add(one);
  }

  Program(const Program&) = delete;

  // Bytes of memory that the launches share; -1 if the batch needs other launches.
  int64_t bytes(const nb::tuple& given) const {
    const std::vector<int64_t> values = evaluated(given, 0);
    return fits(values) ? values[size_] : -1;
  }

  // Issues launches from number `start` on; returns the number of the first that Python must do, or of all.
  size_t run(const nb::tuple& given, Address memory, int64_t device, Address stream, const Beside& beside,
             size_t start) const {
    return issue(evaluated(given, static_cast<int64_t>(memory)), device, stream, beside, start);
  }

  // The same from the first on, of launches that share no memory; -1, and no launch, if the batch needs others.
  int64_t run_alone(const nb::tuple& given, int64_t device, Address stream, const Beside& beside) const {
    const std::vector<int64_t> values = evaluated(given, 0);
    if (!fits(values)) return -1;
    if (values[size_] != 0) throw std::invalid_argument("launches that share no memory");
    return static_cast<int64_t>(issue(values, device, stream, beside, 0));
  }

  // Grid, pointers and numbers of a launch.
  nb::tuple arguments(const nb::tuple& given, Address memory, size_t which) const {
    const std::vector<int64_t> values = evaluated(given, static_cast<int64_t>(memory));
    const Step& step = steps_.at(which);
    if (!step.kernels) throw std::invalid_argument("a launch of Triton's");
    nb::list grid, pointers, numbers;
    for (const size_t place : step.grid) grid.append(values[place]);
    for (size_t i = 0; i < step.arguments.size(); ++i)
      (i < step.kernels->pointers() ? pointers : numbers).append(values[step.arguments[i]]);
    return nb::make_tuple(nb::tuple(grid), nb::tuple(pointers), nb::tuple(numbers));
  }

  size_t length() const { return steps_.size(); }

 private:
  struct Value {
    Made made;
    int64_t left, right;
  };
  struct Guard {
    Asked asked;
    size_t left, right;
    bool answer;
  };
  struct Step {
    nb::object held;
    const Kernels* kernels;  // else a kernel of its own making, or nothing
    void* function;
    Driver driver;
    uint32_t threads;
    bool together, aside, forks, joins;
    std::vector<size_t> grid, arguments;  // places
  };

  size_t place(int64_t found) const {
    if (found < 0 || found >= static_cast<int64_t>(values_.size())) throw std::out_of_range("a value that is not there");
    return static_cast<size_t>(found);
  }

  std::vector<size_t> places(const nb::handle& found) const {
    const auto numbers = nb::cast<nb::tuple>(found);
    std::vector<size_t> made;
    for (size_t i = 0; i < ::size(numbers); ++i) made.push_back(place(number(item(numbers, i))));
    return made;
  }

  void add(const nb::handle& one) {
    Step step{};
    if (nb::isinstance<nb::bool_>(one)) {
      step.forks = nb::cast<bool>(one), step.joins = !step.forks;
    } else {
      const auto said = nb::cast<nb::tuple>(one);
      const nb::handle kernel = item(said, 0);
      step.grid = places(nb::handle(item(said, 1)));
      step.arguments = places(nb::handle(item(said, 2)));
      if (step.grid.empty() || step.grid.size() > 3) throw std::invalid_argument("a grid of one to three numbers");
      if (::size(said) == 4) {
        step.held = nb::borrow(kernel);
        step.kernels = nb::cast<const Kernels*>(kernel);
        if (!step.kernels) throw std::invalid_argument("a launch of no kernel");
        step.aside = number(item(said, 3)) != 0;
        if (step.arguments.size() != step.kernels->pointers() + step.kernels->numbers())
          throw std::invalid_argument("as many pointers and numbers as the kernel has");
      } else {
        step.function = reinterpret_cast<void*>(number(kernel.ptr()));
        step.driver = reinterpret_cast<Driver>(number(item(said, 3)));
        step.threads = static_cast<uint32_t>(number(item(said, 4)));
        step.together = number(item(said, 5)) != 0;
        if (step.arguments.size() > MOST) throw std::length_error("a kernel of more than 64 arguments");
      }
    }
    steps_.push_back(std::move(step));
  }

  // Whether a batch of these values needs these launches.
  bool fits(const std::vector<int64_t>& values) const {
    for (const Guard& guard : guards_) {
      const int64_t left = values[guard.left], right = values[guard.right];
      if ((guard.asked == Asked::LESS ? left < right : left == right) != guard.answer) return false;
    }
    return true;
  }

  size_t issue(const std::vector<int64_t>& values, int64_t device, Address stream, const Beside& beside,
               size_t start) const {
    std::vector<Launch> ready(steps_.size() - std::min(start, steps_.size()));
    size_t end = start;
    for (; end < steps_.size(); ++end)
      if (!prepare(steps_[end], device, values, ready[end - start])) break;
    const nb::gil_scoped_release released;
    for (size_t i = start; i < end; ++i) {
      const Step& step = steps_[i];
      const int failed = step.forks   ? beside.wait(beside.ready, stream, beside.stream)
                         : step.joins ? beside.wait(beside.done, beside.stream, stream)
                                      : ready[i - start].issue(step.aside ? beside.stream : stream);
      if (failed == NO_CONTEXT && steps_[i].kernels) return i;
      if (failed != 0) refuse(failed);
    }
    return end;
  }

  std::vector<int64_t> evaluated(const nb::tuple& given, int64_t memory) const {
    if (::size(given) != given_) throw std::invalid_argument("as many values as were given before");
    std::vector<int64_t> fields(FIELDS * given_ + 1), values(values_.size());
    for (size_t i = 0; i < given_; ++i) reader_.read(item(given, i), &fields[FIELDS * i]);
    fields.back() = memory;
    for (size_t i = 0; i < values_.size(); ++i) {
      const Value& value = values_[i];
      const auto left = static_cast<size_t>(value.left), right = static_cast<size_t>(value.right);
      switch (value.made) {
        case Made::GIVEN: values[i] = fields[left]; break;
        case Made::CONSTANT: values[i] = value.left; break;
        case Made::SUM: values[i] = wrapped(values[left]) + wrapped(values[right]); break;
        case Made::PRODUCT: values[i] = wrapped(values[left]) * wrapped(values[right]); break;
        case Made::QUOTIENT: values[i] = rounded_down(values[left], values[right]); break;
      }
    }
    return values;
  }

  // What is too large is wrong, but nothing worse.
  static uint64_t wrapped(int64_t value) { return static_cast<uint64_t>(value); }

  // As Python divides.
  static int64_t rounded_down(int64_t left, int64_t right) {
    if (right == 0) throw std::domain_error("a division by 0");
    if (right == -1) return static_cast<int64_t>(-wrapped(left));
    const int64_t quotient = left / right;
    return left % right != 0 && (left < 0) != (right < 0) ? quotient - 1 : quotient;
  }

  static bool prepare(const Step& step, int64_t device, const std::vector<int64_t>& values, Launch& launch) {
    if (step.forks || step.joins) return true;
    for (size_t axis = 0; axis < 3; ++axis)
      launch.grid[axis] = axis < step.grid.size() ? programs_of(values[step.grid[axis]]) : 1;
    int64_t arguments[MOST];
    for (size_t i = 0; i < step.arguments.size(); ++i) arguments[i] = values[step.arguments[i]];
    if (step.kernels) return step.kernels->prepare(device, arguments, launch);
    launch.driver = step.driver, launch.function = step.function;
    launch.threads = step.threads, launch.shared = 0, launch.together = step.together;
    launch.count = step.arguments.size();
    std::memcpy(launch.values, arguments, launch.count * sizeof *arguments);
    return true;
  }

  const Reader& reader_;
  size_t given_, size_;
  std::vector<Value> values_;
  std::vector<Guard> guards_;
  std::vector<Step> steps_;
};

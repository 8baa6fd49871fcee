// The engine as a Python module: plain numbers and addresses in, so that any array library can call it.
//
// `embedfuse.cpu` is the door in front: it turns arrays into these numbers, and checks them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "engine.h"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace embedfuse {
namespace {

using Address = uintptr_t;

template <class T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// A learner and the numbers of its rules.
struct OwningLearner {
  Learner learner;
  std::vector<int64_t> rules;
};

// Runs `function` without the interpreter lock; its position, or None where there is none.
template <class Function>
std::optional<int64_t> run(const Function& function) {
  int64_t result;
  {
    const nb::gil_scoped_release released;
    result = function(kernels());
  }
  if (result == OUT_OF_MEMORY) throw std::bad_alloc();
  return result == DONE ? std::nullopt : std::optional<int64_t>(result);
}

template <class T>
nb::object as_numpy(T* data, std::initializer_list<size_t> shape) {
  const nb::capsule owner(data, [](void* memory) noexcept { std::free(memory); });
  return nb::cast(nb::ndarray<nb::numpy, T>(data, shape, owner));
}

nb::tuple collect_rows(const Batch& batch, const Upstream& upstream, const OwningLearner& owning, int64_t table,
                       int threads) {
  Collected found{};
  run([&](const Kernels& k) { return k.collect_rows(batch, upstream, owning.learner, table, &found, threads); });
  const auto count = static_cast<size_t>(found.count);
  const auto dim = static_cast<size_t>(owning.learner.tables[table].dim);
  const nb::object rows = as_numpy(found.rows, {count});
  if (owning.learner.dtype == Dtype::float64)
    return nb::make_tuple(rows, as_numpy(static_cast<double*>(found.sums), {count, dim}));
  return nb::make_tuple(rows, as_numpy(static_cast<float*>(found.sums), {count, dim}));
}

bool prefer_large_pages(Address address, int64_t bytes) {
#ifdef __linux__
  const auto page = static_cast<Address>(sysconf(_SC_PAGESIZE));
  const Address first = (address + page - 1) / page * page, last = (address + static_cast<Address>(bytes)) / page * page;
  return first < last && madvise(at(first), last - first, MADV_HUGEPAGE) == 0;
#else
  (void)address, (void)bytes;
  return false;
#endif
}

Dtype dtype_of(int code) {
  if (code < 0 || code > static_cast<int>(Dtype::float64)) throw nb::value_error("`dtype` must be a code from 0 to 3");
  return static_cast<Dtype>(code);
}

[[noreturn]] void refuse_offsets(const Batch& batch) {
  const int64_t* const offsets = batch.offsets;
  std::string found = "a first value of " + std::to_string(offsets[0]);
  for (int64_t bag = all_bags(batch); bag-- > 0;)
    if (offsets[bag + 1] < offsets[bag] || offsets[bag + 1] > batch.id_count)
      found = std::to_string(offsets[bag]) + " before " + std::to_string(offsets[bag + 1]) + " at position " +
              std::to_string(bag + 1);
  throw nb::value_error(("`offsets` must start at 0, not decrease, and not exceed the number of ids, " +
                         std::to_string(batch.id_count) + ", got " + found +
                         ": were they changed after they were checked?")
                            .c_str());
}

void bind_arguments(nb::module_& module) {
  nb::class_<Batch>(module, "Batch")
      .def(
          "__init__",
          [](Batch* self, Address features, int64_t feature_count, Address ids, bool wide_ids, int64_t id_count,
             Address offsets, Address weights, int64_t bags, int64_t records) {
            new (self) Batch{at<const Feature>(features), feature_count,     at(ids), wide_ids, id_count,
                             at<const int64_t>(offsets),  at(weights), bags,    records};
            // everything else trusts offsets, which a caller may have changed since they were checked
            if (!kernels().are_sound(*self)) refuse_offsets(*self);
          },
          "features"_a, "feature_count"_a, "ids"_a, "wide_ids"_a, "id_count"_a, "offsets"_a, "weights"_a, "bags"_a,
          "records"_a);
  nb::class_<Upstream>(module, "Upstream")
      .def(
          "__init__",
          [](Upstream* self, Address scale, Address grad, int dtype, int64_t row_stride, int64_t column_stride,
             int64_t width) {
            new (self) Upstream{at(scale), {at(grad), dtype_of(dtype), row_stride, column_stride}, width};
          },
          "scale"_a, "grad"_a, "dtype"_a, "row_stride"_a, "column_stride"_a, "width"_a);
  nb::class_<Rows>(module, "Rows")
      .def(
          "__init__",
          [](Rows* self, Address table, Address tables, int64_t table_count) {
            new (self) Rows{at(table), at<const Table>(tables), table_count};
          },
          "table"_a, "tables"_a, "table_count"_a);
  nb::class_<Shards>(module, "Shards")
      .def(
          "__init__",
          [](Shards* self, Address described, int64_t count, bool modulo, int64_t stride) {
            new (self) Shards{at<const Shard>(described), count, modulo, stride};
          },
          "described"_a, "count"_a, "modulo"_a, "stride"_a);
  nb::class_<Prepared>(module, "Prepared")
      .def(
          "__init__",
          [](Prepared* self, Address rows, Address starts, Address offsets, Address weights, Address places) {
            new (self) Prepared{at<int64_t>(rows), at<int64_t>(starts), at<int64_t>(offsets), at(weights),
                                at<int64_t>(places)};
          },
          "rows"_a, "starts"_a, "offsets"_a, "weights"_a, "places"_a);
  nb::class_<OwningLearner>(module, "Learner")
      .def(
          "__init__",
          [](OwningLearner* self, Address table, int dtype, Address tables, int64_t table_count,
             std::vector<int64_t> rules, Address slots, Address hyper, Address steps, double grad_scale) {
            for (const int64_t rule : rules)
              if (rule >= kernels().rule_count) throw nb::value_error("`rules` must be numbers from `rule_names`");
            auto* made = new (self) OwningLearner{{}, std::move(rules)};
            made->learner = {at(table),
                             dtype_of(dtype),
                             at<const Table>(tables),
                             table_count,
                             made->rules.data(),
                             static_cast<int64_t>(made->rules.size()),
                             at(slots),
                             at<const double>(hyper),
                             at<const int64_t>(steps),
                             grad_scale};
          },
          "table"_a, "dtype"_a, "tables"_a, "table_count"_a, "rules"_a, "slots"_a, "hyper"_a, "steps"_a,
          "grad_scale"_a);
}

void bind_functions(nb::module_& module) {
  module.def(
      "pooled_lookup",
      [](const Batch& batch, Address table, int dtype, Address out, int64_t width, Address scale, bool checked,
         int threads) {
        return run([&](const Kernels& k) {
          return k.pooled_lookup(batch, at(table), dtype_of(dtype), at(out), width, at(scale), checked, threads);
        });
      },
      "batch"_a, "table"_a, "dtype"_a, "out"_a, "width"_a, "scale"_a, "checked"_a, "threads"_a);
  module.def(
      "max_lookup",
      [](const Batch& batch, Address table, int dtype, Address out, int64_t width, Address winners, bool checked,
         int threads) {
        auto* const positions = at<int64_t>(winners);
        return run([&](const Kernels& k) {
          return k.max_lookup(batch, at(table), dtype_of(dtype), at(out), width, positions, checked, threads);
        });
      },
      "batch"_a, "table"_a, "dtype"_a, "out"_a, "width"_a, "winners"_a, "checked"_a, "threads"_a);
  module.def(
      "max_grad",
      [](const Batch& batch, const Upstream& upstream, Address winners, Address out, int dtype, int threads) {
        run([&](const Kernels& k) {
          return k.max_grad(batch, upstream.grad, upstream.width, at<const int64_t>(winners), at(out), dtype_of(dtype),
                            threads);
        });
      },
      "batch"_a, "upstream"_a, "winners"_a, "out"_a, "dtype"_a, "threads"_a);
  module.def(
      "row_update",
      [](const Batch& batch, const Upstream& upstream, const OwningLearner& owning, int threads) {
        run([&](const Kernels& k) { return k.row_update(batch, upstream, owning.learner, threads); });
      },
      "batch"_a, "upstream"_a, "learner"_a, "threads"_a);
  module.def(
      "row_square_sum",
      [](const Batch& batch, const Upstream& upstream, const OwningLearner& owning, int threads) {
        double sum = 0;
        run([&](const Kernels& k) { return k.row_square_sum(batch, upstream, owning.learner, &sum, threads); });
        return sum;
      },
      "batch"_a, "upstream"_a, "learner"_a, "threads"_a);
  module.def("collect_rows", collect_rows, "batch"_a, "upstream"_a, "learner"_a, "table"_a, "threads"_a);
  module.def(
      "row_grad",
      [](const Batch& batch, const Upstream& upstream, const Rows& rows, Address out, int dtype, Address dots,
         int threads) {
        const Rows* const given = rows.tables == nullptr ? nullptr : &rows;
        run([&](const Kernels& k) {
          return k.row_grad(batch, upstream, given, at(out), dtype_of(dtype), at(dots), threads);
        });
      },
      "batch"_a, "upstream"_a, "rows"_a, "out"_a, "dtype"_a, "dots"_a, "threads"_a);
  module.def(
      "prepare_ids",
      [](const Batch& batch, const Shards& shards, int dtype, const Prepared& prepared, bool checked, int threads) {
        const Shards* const given = shards.shards == nullptr ? nullptr : &shards;
        return run([&](const Kernels& k) {
          return k.prepare_ids(batch, given, dtype_of(dtype), prepared, checked, threads);
        });
      },
      "batch"_a, "shards"_a, "dtype"_a, "prepared"_a, "checked"_a, "threads"_a);
  module.def(
      "product_topk",
      [](Address a, int64_t n, int64_t a_stride, Address b, int64_t m, int64_t b_stride, int dtype, int64_t rows,
         int64_t k, Address ids, int threads) {
        const Matrix first{at(a), dtype_of(dtype), a_stride, 1}, second{at(b), dtype_of(dtype), b_stride, 1};
        run([&](const Kernels& kernels) {
          return kernels.product_topk(first, n, second, m, rows, k, at<int64_t>(ids), threads);
        });
      },
      "a"_a, "n"_a, "a_stride"_a, "b"_a, "m"_a, "b_stride"_a, "dtype"_a, "rows"_a, "k"_a, "ids"_a, "threads"_a);
  module.def(
      "coefficient_grad",
      [](const Batch& batch, const Upstream& upstream, Address table, int dtype, Address out, int threads) {
        run([&](const Kernels& k) {
          return k.coefficient_grad(batch, upstream, at(table), dtype_of(dtype), at(out), threads);
        });
      },
      "batch"_a, "upstream"_a, "table"_a, "dtype"_a, "out"_a, "threads"_a);
}

}  // namespace
}  // namespace embedfuse

NB_MODULE(_engine, module) {
  using namespace embedfuse;
  bind_arguments(module);
  bind_functions(module);
  module.def("isa", [] { return kernels().name; });
  module.def("isas", [] {
    nb::list names;
    for (const char* name : {"baseline", "avx2", "avx512"})
      if (runs(name)) names.append(name);
    return names;
  });
  module.def("rule_names", [] {
    nb::list names;
    for (int rule = 0; rule < kernels().rule_count; ++rule) names.append(kernels().rule_names[rule]);
    return names;
  });
  module.def("prefer_large_pages", prefer_large_pages, "address"_a, "bytes"_a);
  module.attr("has_threads") =
#ifdef _OPENMP
      true;
#else
      false;
#endif
}

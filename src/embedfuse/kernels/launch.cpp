// Launches of compiled CUDA kernels: from tensors and numbers to the driver, and nothing between.
//
// Python's own ways take the host two to three times as long as the driver does: Triton's launcher, and ctypes.
// `embedfuse/torch/backends/launching.py` and `program.py` are the doors in front; what tensors are is DLPack's to say.
#include "bags.h"
#include "program.h"

using namespace nb::literals;

namespace {

// Whether two dicts hold the same objects in the same order.
bool same(const nb::dict& left, const nb::dict& right) {
  if (nb::len(left) != nb::len(right)) return false;
  PyObject *one, *other;
  Py_ssize_t at = 0, there = 0;
  while (PyDict_Next(left.ptr(), &at, nullptr, &one))
    if (!PyDict_Next(right.ptr(), &there, nullptr, &other) || one != other) return false;
  return true;
}

// never destroyed, since Python may be gone by then
Reader& reader = *new Reader;

int launch_once(Address driver, Address function, uint32_t blocks, uint32_t threads, Address stream,
                const nb::tuple& arguments, bool together) {
  if (size(arguments) > MOST) throw std::length_error("a kernel of more than 64 arguments");
  Launch launch{reinterpret_cast<Driver>(driver), reinterpret_cast<void*>(function), {blocks, 1, 1}, threads, 0,
                together, size(arguments), {}};
  for (size_t i = 0; i < launch.count; ++i) launch.values[i] = number(item(arguments, i));
  const nb::gil_scoped_release released;
  return launch.issue(stream);
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
  nb::class_<Beside>(module, "Beside", "A second stream, and events by which the streams wait for each other.")
      .def("__init__",
           [](Beside* made, Address stream, Address ready, Address done, Address record, Address hold) {
             new (made) Beside{stream, ready, done, reinterpret_cast<decltype(Beside::record)>(record),
                               reinterpret_cast<decltype(Beside::hold)>(hold)};
           },
           "stream"_a, "ready"_a, "done"_a, "record"_a, "hold"_a,
           "`record`, `hold`: addresses of cuEventRecord and cuStreamWaitEvent.");
  nb::class_<Program>(module, "Program", "Launches that were written down, for other batches.")
      .def("__init__",
           [](Program* made, size_t given, const nb::list& values, const nb::list& guards, size_t size,
              const nb::list& steps) { new (made) Program(reader, given, values, guards, size, steps); },
           "given"_a, "values"_a, "guards"_a, "size"_a, "steps"_a)
      .def("bytes", &Program::bytes, "given"_a,
           "Bytes of memory that the launches share; -1 if the batch needs other launches.")
      .def("run", &Program::run, "given"_a, "memory"_a, "device"_a, "stream"_a, "beside"_a, "start"_a,
           "Issues launches from number `start` on; the number of the first that Python must do, or of all.")
      .def("run_alone", &Program::run_alone, "given"_a, "device"_a, "stream"_a, "beside"_a,
           "The same from the first on, of launches that share no memory; -1, and no launch, if the batch needs others.")
      .def("arguments", &Program::arguments, "given"_a, "memory"_a, "which"_a, "Grid, pointers and numbers of a launch.")
      .def("__len__", &Program::length);
  module.def("learn_tensors", [](const nb::object& exchange, const nb::object& type, const nb::object& slowly) {
    reader.learn(exchange, type, slowly);
  }, "exchange"_a.none(), "type"_a, "slowly"_a, "Of `type`: by DLPack's exchange, or where that is None by `slowly`.");
  module.def("fields", [](const nb::object& thing) {
    int64_t found[FIELDS];
    reader.read(thing.ptr(), found);
    return nb::make_tuple(found[0], found[1], found[2], found[3], found[4], found[5]);
  }, "thing"_a.none(), "What programs see of a tensor, a number or None.");
  nb::class_<Places>(module, "Places", "Where matrices are to lie that share one memory.")
      .def(nb::init<std::vector<int64_t>, std::vector<int64_t>>(), "starts"_a, "widths"_a)
      .def("hold", [](const Places& places, const nb::list& matrices, const nb::object& origin) {
        return places.hold(reader, matrices, origin);
      }, "matrices"_a, "origin"_a, "Whether they do, row after row: so many bytes after the data of `origin`.")
      .def("hold_own", [](const Places& places, const nb::dict& held, const nb::dict& own, const nb::object& origin) {
        return places.hold_own(reader, held, own, origin);
      }, "held"_a, "own"_a, "origin"_a, "The same of the values of a dict, which must be those of another one: 0 if not; 2 if any wants a gradient.");
  module.attr("MOST_JOINED") = MOST_JOINED;
  module.def("join_bags", [](Address driver, Address function, const nb::list& ids, const nb::list& offsets,
                             const nb::object& all_ids, const nb::object& all_offsets, int64_t bags, int64_t places,
                             uint32_t threads, Address stream) {
    return join_bags(reader, driver, function, ids, offsets, all_ids, all_offsets, bags, places, threads, stream);
  }, "driver"_a, "function"_a, "ids"_a, "offsets"_a, "all_ids"_a, "all_offsets"_a, "bags"_a, "places"_a, "threads"_a,
     "stream"_a, "Launches `cuda/join_bags.cu`: see `bags.h`.");
  module.def("same", &same, "left"_a, "right"_a, "Whether two dicts hold the same objects in the same order.");
  module.def("launch", &launch_once, "driver"_a, "function"_a, "blocks"_a, "threads"_a, "stream"_a, "arguments"_a,
             "together"_a,
             "Launches a kernel of its own making; what the driver says, 0 if all is well. `together`: its blocks wait "
             "for each other, so that all must run at once.");
}

// The bags of several features, given to `cuda/join_bags.cu`.
#pragma once

#include "tensors.h"

constexpr size_t MOST_JOINED = 128;  // features: an argument has 4096 bytes at most

// as in join_bags.cu
struct JoinedBags {
  int64_t ids[MOST_JOINED];
  int64_t offsets[MOST_JOINED];
  int64_t first[MOST_JOINED + 1];
  int64_t bags;
  int32_t features, blocks;
};

static_assert(sizeof(JoinedBags) == (3 * MOST_JOINED + 1) * 8 + 16);

// What the driver says of the launch, 0 if all is well; -1, and no launch, if the tensors are not as the kernel wants
// them: of the very type, and on the device, of those that they are to be written to, and without strides.
//
// `ids`, `offsets`: of each feature; None for offsets of one id a bag. `places`: ids of a block.
inline int join_bags(const Reader& reader, Address driver, Address function, const nb::list& ids,
                     const nb::list& offsets, const nb::object& all_ids, const nb::object& all_offsets, int64_t bags,
                     int64_t places, uint32_t threads, Address stream) {
  const size_t features = nb::len(ids);
  if (features == 0 || features > MOST_JOINED || nb::len(offsets) != features || bags < 0 || places < 1) return -1;
  JoinedBags given;
  int64_t to_ids[FIELDS], to_offsets[FIELDS], found[FIELDS];
  reader.read(all_ids.ptr(), to_ids);
  reader.read(all_offsets.ptr(), to_offsets);
  const auto fits = [&](const nb::list& of, size_t feature, const int64_t* like) {
    PyObject* object = PyList_GET_ITEM(of.ptr(), static_cast<Py_ssize_t>(feature));
    if (!reader.is_plain(object)) return false;
    try {
      reader.read(object, found);
    } catch (const nb::python_error&) {
      // a kind of tensor that lies nowhere
      return false;
    }
    return found[1] == like[1] && (found[2] < 2 || found[4] == 1) && (found[0] != 0 || found[2] == 0);
  };
  int64_t number = 0;
  for (size_t feature = 0; feature < features; ++feature) {
    if (!fits(ids, feature, to_ids)) return -1;
    given.ids[feature] = found[0], given.first[feature] = number, given.offsets[feature] = 0;
    const int64_t own = found[2];
    number += own;
    if (PyList_GET_ITEM(offsets.ptr(), static_cast<Py_ssize_t>(feature)) == Py_None) {
      if (own != bags) return -1;
    } else {
      if (!fits(offsets, feature, to_offsets) || found[2] != bags + 1) return -1;
      given.offsets[feature] = found[0];
    }
  }
  const int64_t all = static_cast<int64_t>(features) * bags + 1;
  if (to_ids[2] != number || to_offsets[2] != all) return -1;
  given.first[features] = number, given.bags = bags, given.features = static_cast<int32_t>(features);
  const auto blocks_of = [&](int64_t count) { return (count + places - 1) / places; };
  const uint32_t blocks = programs_of(blocks_of(number) + blocks_of(all));
  given.blocks = static_cast<int32_t>(blocks_of(number));
  void* arguments[] = {&given, to_ids, to_offsets};
  const Config config{{blocks, 1, 1}, {threads, 1, 1}, 0, reinterpret_cast<void*>(stream), nullptr, 0};
  const nb::gil_scoped_release released;
  const int failed = reinterpret_cast<Driver>(driver)(&config, reinterpret_cast<void*>(function), arguments, nullptr);
  return failed == NO_CONTEXT ? -1 : failed;
}

// What launches must know of tensors, read by DLPack's exchange (dlpack 1.3), which PyTorch has since 2.10.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "kernels.h"

// DLTensor of dlpack.h
struct Tensor {
  void* data;
  int32_t device_type, device;
  int32_t dimensions;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* sizes;
  int64_t* strides;
  uint64_t offset;
};

// DLPackExchangeAPI of dlpack.h, as far as it is needed
struct Exchange {
  struct {
    uint32_t major, minor;
    void* older;
  } version;
  void *allocate, *from_object, *to_object;
  int (*read)(void* object, Tensor* tensor);
};

static_assert(sizeof(Tensor) == 48 && offsetof(Exchange, read) == 40);

constexpr size_t FIELDS = 6;  // of whatever is given: address or value, type, two sizes, two strides

// All that is given to a program, `FIELDS` values each; a number has its value first, None nothing but zeros.
class Reader {
 public:
  // `exchange`: PyTorch's capsule, or None where it has none; then `slowly` gives a tensor's fields.
  void learn(const nb::object& exchange, const nb::object& type, const nb::object& slowly) {
    if (!PyType_Check(type.ptr())) throw std::invalid_argument("a type");
    type_ = type, slowly_ = slowly, read_ = nullptr;
    if (exchange.is_none()) return;
    const auto* found = static_cast<const Exchange*>(PyCapsule_GetPointer(exchange.ptr(), "dlpack_exchange_api"));
    if (!found) throw nb::python_error();
    if (found->version.major == 1) read_ = found->read;
  }

  void read(PyObject* object, int64_t* fields) const {
    std::fill(fields, fields + FIELDS, 0);
    if (object == Py_None) return;
    if (PyLong_Check(object)) {
      fields[0] = number(object);
      return;
    }
    if (!type_ || !PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(type_.ptr())))
      throw std::invalid_argument("something that is no number, no tensor and not None");
    if (!read_) {
      const auto found = nb::cast<nb::tuple>(slowly_(nb::borrow(object)));
      for (size_t i = 0; i < FIELDS; ++i) fields[i] = number(item(found, i));
      return;
    }
    Tensor tensor;
    if (read_(object, &tensor) != 0) throw nb::python_error();
    fields[0] = static_cast<int64_t>(reinterpret_cast<Address>(tensor.data) + tensor.offset);
    fields[1] = type_of(tensor.device_type, tensor.device, tensor.dimensions, tensor.code, tensor.bits);
    for (int32_t axis = 0; axis < std::min(tensor.dimensions, 2); ++axis)
      fields[2 + axis] = tensor.sizes[axis], fields[4 + axis] = tensor.strides[axis];
  }

  // Whether it is a tensor, and of no kind of its own.
  bool is_plain(PyObject* object) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type_.ptr();
  }

  // One number for all that must be the same from batch to batch; never 0.
  static int64_t type_of(int64_t device_type, int64_t device, int64_t dimensions, int64_t code, int64_t bits) {
    return (((device_type * 4096 + device) * 256 + dimensions) * 256 + code) * 256 + bits;
  }

 private:
  nb::object type_, slowly_;
  int (*read_)(void*, Tensor*) = nullptr;
};

// Where matrices are to lie that share one memory.
class Places {
 public:
  // `starts`: bytes after the first byte of the memory; `widths`: columns.
  Places(std::vector<int64_t> starts, std::vector<int64_t> widths)
      : starts_(std::move(starts)), widths_(std::move(widths)) {
    if (starts_.size() != widths_.size()) throw std::invalid_argument("as many starts as widths");
  }

  // Whether they do, row after row, in the memory of `origin`.
  bool hold(const Reader& reader, const nb::list& matrices, const nb::object& origin) const {
    if (nb::len(matrices) != starts_.size()) return false;
    int64_t base[FIELDS];
    reader.read(origin.ptr(), base);
    for (size_t i = 0; i < starts_.size(); ++i)
      if (!holds(reader, PyList_GET_ITEM(matrices.ptr(), static_cast<Py_ssize_t>(i)), i, base[0])) return false;
    return true;
  }

  // The same of the values of a dict, which must be those of another one, too, in its order: 0 if not; 2 if any of them
  // wants a gradient, else 1.
  int hold_own(const Reader& reader, const nb::dict& held, const nb::dict& own, const nb::object& origin) const {
    if (nb::len(held) != starts_.size() || nb::len(own) != starts_.size()) return 0;
    int64_t base[FIELDS];
    reader.read(origin.ptr(), base);
    PyObject *one, *other;
    Py_ssize_t at = 0, there = 0;
    for (size_t i = 0; PyDict_Next(held.ptr(), &at, nullptr, &one); ++i)
      if (!PyDict_Next(own.ptr(), &there, nullptr, &other) || one != other || !holds(reader, one, i, base[0]))
        return 0;
    for (at = 0; PyDict_Next(held.ptr(), &at, nullptr, &one);)
      if (nb::cast<bool>(nb::borrow(one).attr("requires_grad"))) return 2;
    return 1;
  }

 private:
  bool holds(const Reader& reader, PyObject* matrix, size_t which, int64_t base) const {
    int64_t found[FIELDS];
    try {
      reader.read(matrix, found);
    } catch (const nb::python_error&) {
      // a kind of tensor that lies nowhere
      return false;
    }
    const bool in_order = (found[2] < 2 || found[4] == widths_[which]) && (found[3] < 2 || found[5] == 1);
    return found[0] == base + starts_[which] && in_order;
  }

  std::vector<int64_t> starts_, widths_;
};

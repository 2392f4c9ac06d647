// What _direct.py needs of PyTorch for a call that is recorded: a node that is C++'s. Compiled
// against the PyTorch that is installed (_native.py); what a call and its gradients mean is not
// said here.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/python_strings.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

[[noreturn]] void raise_python_error() {
  python_error error;
  error.persist();
  throw error;
}

THPObjectPtr owned(PyObject* object) {
  if (object == nullptr) raise_python_error();
  return THPObjectPtr(object);
}

/// gradients() of _autograd.py.
PyObject* gradients = nullptr;

constexpr const char* kNames = "names";  ///< in saved_data, where all others are options

/// A number of Python's own types.
c10::IValue value_of(PyObject* number) {
  if (PyBool_Check(number)) return number == Py_True;
  int overflow = PyLong_Check(number) ? 0 : 1;
  const int64_t integer = overflow == 0 ? PyLong_AsLongLongAndOverflow(number, &overflow) : 0;
  if (overflow == 0) return integer;
  return PyFloat_AsDouble(number);
}

THPObjectPtr object_of(const c10::IValue& value) {
  if (value.isBool()) return owned(PyBool_FromLong(value.toBool()));
  if (value.isInt()) return owned(PyLong_FromLongLong(value.toInt()));
  return owned(PyFloat_FromDouble(value.toDouble()));
}

/// None for a tensor that is not defined.
THPObjectPtr object_of(const at::Tensor& tensor) { return owned(THPVariable_Wrap(tensor)); }

template <class Items, class Make>
THPObjectPtr tuple_of(const Items& items, Make&& make) {
  THPObjectPtr tuple = owned(PyTuple_New(static_cast<Py_ssize_t>(items.size())));
  Py_ssize_t i = 0;
  for (const auto& item : items) PyTuple_SET_ITEM(tuple.get(), i++, make(item).release());
  return tuple;
}

struct AttentionBackward {
  static constexpr bool is_traceable = false;  // for compiled autograd, which calls it as it is

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    pybind11::gil_scoped_acquire gil;
    const auto text = [](const std::string& name) {
      return owned(PyUnicode_FromString(name.c_str()));
    };
    const auto wrap = [](const at::Tensor& tensor) { return object_of(tensor); };
    const variable_list saved = ctx->get_saved_variables();
    THPObjectPtr numbers = owned(PyDict_New());
    std::vector<std::string> names;
    for (const auto& [name, value] : ctx->saved_data) {
      if (name == kNames) {
        for (const c10::IValue& tensor : value.toListRef()) names.push_back(tensor.toStringRef());
      } else if (PyDict_SetItem(numbers, text(name), object_of(value)) != 0) {
        raise_python_error();
      }
    }
    std::vector<bool> needed;
    for (size_t i = 0; i < 3 + names.size(); ++i) needed.push_back(ctx->needs_input_grad(i));
    const THPObjectPtr found = owned(PyObject_CallFunctionObjArgs(
        gradients, tuple_of(saved, wrap).get(), numbers.get(), tuple_of(names, text).get(),
        tuple_of(needed, [](bool needs) { return owned(PyBool_FromLong(needs)); }).get(),
        object_of(grads[0]).get(), object_of(grads.size() > 1 ? grads[1] : at::Tensor()).get(),
        nullptr));
    variable_list results;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(found.get()); ++i) {
      PyObject* gradient = PyTuple_GET_ITEM(found.get(), i);
      results.push_back(gradient == Py_None ? at::Tensor() : THPVariable_Unpack(gradient));
    }
    return results;
  }
};

using AttentionNode = torch::autograd::CppNode<AttentionBackward>;

// A pointer to a node is std::shared_ptr up to PyTorch 2.11, and later c10::intrusive_ptr, with
// hooks for new nodes. `Node` makes what only one of them has depend on a template.
template <class Node = torch::autograd::Node>
auto make_node() {
  if constexpr (std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<Node>>) {
    return std::shared_ptr<AttentionNode>(new AttentionNode, [](Node* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<AttentionNode>();
  }
}
template <class Pointer>
void is_made(const Pointer& node) {
  if constexpr (requires { fire_node_creation_hooks(node); }) fire_node_creation_hooks(node);
}

/// record(q, k, v, (options, names, results, with_lse), *tensors): as Attention.apply, of results
/// that are computed.
PyObject* record(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  PyObject* call = arguments[3];
  PyObject *numbers = PyTuple_GET_ITEM(call, 0), *names = PyTuple_GET_ITEM(call, 1);
  PyObject* results = PyTuple_GET_ITEM(call, 2);
  const bool with_lse = PyTuple_GET_ITEM(call, 3) == Py_True;
  const at::Tensor& out = THPVariable_Unpack(PyTuple_GET_ITEM(results, 0));
  const at::Tensor& lse = THPVariable_Unpack(PyTuple_GET_ITEM(results, 1));
  variable_list inputs, saved;
  inputs.reserve(static_cast<size_t>(count) - 1);
  saved.reserve(static_cast<size_t>(count) + 1);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (i != 3) inputs.push_back(THPVariable_Unpack(arguments[i]));
  }
  saved.assign(inputs.begin(), inputs.begin() + 3);
  saved.push_back(out);
  saved.push_back(lse);
  saved.insert(saved.end(), inputs.begin() + 3, inputs.end());

  auto node = make_node();
  AutogradContext& ctx = node->ctx_;
  node->set_ctx_grad_fn(node);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  node->is_variable_input_.assign(inputs.size(), true);
  ctx.set_materialize_grads(false);
  PyObject *name = nullptr, *number = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(numbers, &at, &name, &number);) {
    ctx.saved_data[THPUtils_unpackString(name)] = value_of(number);
  }
  if (PyTuple_GET_SIZE(names) > 0) {
    std::vector<std::string> list;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
      list.push_back(THPUtils_unpackString(PyTuple_GET_ITEM(names, i)));
    }
    ctx.saved_data[kNames] = std::move(list);
  }
  torch::autograd::set_history(out, node);
  if (with_lse) torch::autograd::set_history(lse, node);
  ctx.save_for_backward(std::move(saved));
  node->save_variables_to_ctx();
  is_made(node);
  PyObject* result = with_lse ? results : PyTuple_GET_ITEM(results, 0);
  Py_INCREF(result);
  return result;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {{"record", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(record)),
                          METH_FASTCALL, nullptr},
                         {}};
PyModuleDef module{PyModuleDef_HEAD_INIT,
                   "fulgur_native",
                   nullptr,
                   -1,
                   methods,
                   nullptr,
                   nullptr,
                   nullptr,
                   nullptr};

}  // namespace

#define FULGUR_INIT_OF(name) PyInit_##name
#define FULGUR_INIT(name) FULGUR_INIT_OF(name)
PyMODINIT_FUNC FULGUR_INIT(TORCH_EXTENSION_NAME)() {
  PyObject* autograd = PyImport_ImportModule("fulgur.torch._autograd");
  if (autograd == nullptr) return nullptr;
  gradients = PyObject_GetAttrString(autograd, "gradients");
  Py_DECREF(autograd);
  return gradients == nullptr ? nullptr : PyModule_Create(&module);
}

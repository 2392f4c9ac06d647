/// Expressions of Python's calls: the native class that fulgur/_expressions.py builds them of, and
/// the tensors that they index.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "fulgur/expression.h"

namespace fulgur::python {

/// Adds Expr, TensorSymbol and parse_expression to the module.
void register_expressions(nanobind::module_& m);

/// The expression of an option, not given where the handle is null.
Expr expression_of(nanobind::handle option);

/// The tensors of a call by name, and the views of their gradients; either may be null.
std::vector<TensorBinding> bindings_of(nanobind::handle tensors, nanobind::handle gradients);

}  // namespace fulgur::python

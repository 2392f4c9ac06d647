/// What a plan says of the alternatives that it did not take.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "fulgur/details.h"

namespace fulgur::test {

/// Whether `rejected` names an alternative, by how its entry begins, and has `why` in its reason.
inline bool rejects(const Details& plan, std::string_view alternative, std::string_view why = "") {
  return std::ranges::any_of(plan.get<Details::Texts>("rejected"), [&](const std::string& entry) {
    return entry.starts_with(alternative) && entry.find(why) != std::string::npos;
  });
}

}  // namespace fulgur::test

#include "groups.h"

#include <fmt/format.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>
#include <vector>

#include "arrays.h"
#include "without_gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fulgur::python {
namespace {

/// Bytes as an array of NumPy, which lives as long as the step.
nb::object array_of(const std::byte* data, size_t size) {
  using Array = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;
  auto* const bytes = reinterpret_cast<uint8_t*>(const_cast<std::byte*>(data));
  return nb::cast(Array(bytes, {size}, nb::none()));
}

/// A function of Python as an Exchange, which is called from any thread: exchange(sends, receives),
/// lists of an array of uint8 for each rank.
Exchange exchange_by(nb::callable function) {
  // Its last owner may have no interpreter.
  const std::shared_ptr<nb::callable> shared(new nb::callable(std::move(function)),
                                             [](nb::callable* f) {
                                               const nb::gil_scoped_acquire locked;
                                               delete f;
                                             });
  return [shared](std::span<const std::span<const std::byte>> sends,
                  std::span<const std::span<std::byte>> receives) {
    const nb::gil_scoped_acquire locked;
    nb::list from, to;
    for (const auto& bytes : sends) from.append(array_of(bytes.data(), bytes.size()));
    for (const auto& bytes : receives) to.append(array_of(bytes.data(), bytes.size()));
    try {
      (*shared)(from, to);
    } catch (nb::python_error& error) {
      throw Error(Status::kUnavailable, nb::cast<std::string>(nb::str(error.value())));
    }
  };
}

Mask mask_of(int64_t left, int64_t right, int64_t chunk, bool top_left) {
  return {left, right, chunk, top_left};
}

}  // namespace

Distribution distribution_of(const std::string& sharding, int head_ranks, bool ring) {
  for (const auto& [name, value] :
       {std::pair{"contiguous", Sharding::kContiguous}, std::pair{"zigzag", Sharding::kZigzag},
        std::pair{"by_area", Sharding::kByArea}, std::pair{"by_page", Sharding::kByPage}}) {
    if (sharding == name) return {value, head_ranks, ring};
  }
  fail(fmt::format("sharding: got \"{}\", want contiguous, zigzag, by_area or by_page", sharding));
}

void register_groups(nb::module_& m) {
  nb::class_<Group>(m, "Group")
      .def_static(
          "from_env",
          [](double deadline) {
            const WithoutGil unlocked;
            return Group::from_env(deadline);
          },
          "deadline"_a)
      .def_static(
          "connect",
          [](int rank, int ranks, const std::string& host, int port, double deadline) {
            const WithoutGil unlocked;
            return Group::connect(rank, ranks, host, port, deadline);
          },
          "rank"_a, "ranks"_a, "host"_a, "port"_a, "deadline"_a)
      .def_static(
          "from_nccl",
          [](uintptr_t comm, double deadline) {
            const WithoutGil unlocked;
            return Group::from_nccl(reinterpret_cast<void*>(comm), deadline);
          },
          "comm"_a, "deadline"_a)
      .def_static("from_exchange",
                  [](int rank, int ranks, nb::callable function) {
                    return Group::from_exchange(rank, ranks, exchange_by(std::move(function)));
                  })
      .def_static("simulated", &Group::simulated)
      .def_prop_ro("rank", &Group::rank)
      .def_prop_ro("size", &Group::size)
      .def_prop_ro("dead", &Group::dead);
  m.def("rows_of_length", [](const std::string& sharding, int64_t length, int ranks, int rank,
                             int64_t left, int64_t right, int64_t chunk, bool top_left) {
    return rows_of(distribution_of(sharding, 1, false).sharding, length, ranks, rank,
                   mask_of(left, right, chunk, top_left));
  });
  m.def("rows_of_sequences",
        [](const std::string& sharding, const std::vector<int32_t>& cu_seqlens, int ranks, int rank,
           int64_t left, int64_t right, int64_t chunk, bool top_left) {
          return rows_of(distribution_of(sharding, 1, false).sharding, cu_seqlens, ranks, rank,
                         mask_of(left, right, chunk, top_left));
        });
}

}  // namespace fulgur::python

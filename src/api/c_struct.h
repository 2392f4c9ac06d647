// The structs of the C API begin with their size in the version that the caller was compiled with.
// New versions only add fields at the end.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/check.h"

namespace fulgur {

/// Whether a version of the struct may have this size. `min_size` is the size in the first version.
/// A size that is no multiple of the alignment would end within a field.
template <class Struct>
constexpr bool is_struct_size(size_t size, size_t min_size) {
  return size >= min_size && size % alignof(Struct) == 0;
}

/// The caller's struct in the version of this library. Fields that the caller's version lacks come
/// from `defaults`; fields that the library lacks must be 0.
template <class Struct>
Struct read_struct(const char* name, const Struct* given, size_t min_size, Struct defaults = {}) {
  if (given == nullptr) fail(name, "got null, want a struct");
  const size_t size = given->struct_size;
  if (!is_struct_size<Struct>(size, min_size)) {
    fail(name, "struct_size is {}, want the sizeof of the struct, at least {} and a multiple of {}",
         size, min_size, alignof(Struct));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (size > sizeof(Struct) &&
      std::any_of(bytes + sizeof(Struct), bytes + size, [](unsigned char b) { return b != 0; })) {
    fail(name,
         "struct_size is {}, this library knows {}, and what is after is not 0: it is newer than "
         "the library",
         size, sizeof(Struct));
  }
  std::memcpy(&defaults, given, std::min(size, sizeof(Struct)));
  return defaults;
}

/// Fills a caller's struct of `size` bytes; fields that this library lacks become 0.
template <class Struct>
void write_struct(Struct* to, size_t size, Struct mine) {
  mine.struct_size = size;
  auto* bytes = reinterpret_cast<unsigned char*>(to);
  std::memcpy(bytes, &mine, std::min(size, sizeof(Struct)));
  if (size > sizeof(Struct)) std::memset(bytes + sizeof(Struct), 0, size - sizeof(Struct));
}

}  // namespace fulgur

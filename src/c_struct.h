/// The structs of the C API begin with their size, as the caller was compiled to know them. Fields
/// are only ever added at their end.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "check.h"

namespace fulgur {

/// The caller's struct as this library knows it. What the caller's version lacks is that of
/// `defaults`; what the library lacks must be 0. `least`: its size in its first version.
template <class Struct>
Struct read_struct(const char* name, const Struct* given, size_t least, Struct defaults = {}) {
  if (given == nullptr) fail(name, "got null, want a struct");
  const size_t size = given->struct_size;
  if (size < least) {
    fail(name, "struct_size is {}, want the sizeof of the struct, at least {}", size, least);
  }
  // A size that ends inside a field would make half a pointer of it.
  if (size % alignof(Struct) != 0) {
    fail(name, "struct_size is {}, want the sizeof of the struct, a multiple of {}", size,
         alignof(Struct));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (size > sizeof(Struct) &&
      std::any_of(bytes + sizeof(Struct), bytes + size, [](unsigned char b) { return b != 0; })) {
    fail(name,
         "struct_size is {}, this library knows {}, and what is behind is not 0: it is newer than "
         "the library",
         size, sizeof(Struct));
  }
  std::memcpy(&defaults, given, std::min(size, sizeof(Struct)));
  return defaults;
}

/// Fills a caller's struct of `size` bytes; what this library does not know of becomes 0.
template <class Struct>
void write_struct(Struct* to, size_t size, Struct mine) {
  mine.struct_size = size;
  auto* bytes = reinterpret_cast<unsigned char*>(to);
  std::memcpy(bytes, &mine, std::min(size, sizeof(Struct)));
  if (size > sizeof(Struct)) std::memset(bytes + sizeof(Struct), 0, size - sizeof(Struct));
}

}  // namespace fulgur

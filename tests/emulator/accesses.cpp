// What the compiler calls before each access to memory in a kernel's text (-fsanitize=thread): the
// emulator takes the place of that sanitizer's library.
#include "machine.h"

namespace {

bool is_shared(const void* at) {
  const emulator::Block& block = *emulator::current->block;
  return static_cast<size_t>(static_cast<const unsigned char*>(at) - block.shared) <
         block.all_bytes;
}
void reads(const void* at, size_t bytes) {
  is_shared(at) ? emulator::current->reads(at, bytes) : emulator::current->reads_global(at, bytes);
}
void writes(const void* at, size_t bytes) {
  is_shared(at) ? emulator::current->writes(at, bytes)
                : emulator::current->writes_global(at, bytes);
}

}  // namespace

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read1(void* at) { reads(at, 1); }
void __tsan_read2(void* at) { reads(at, 2); }
void __tsan_read4(void* at) { reads(at, 4); }
void __tsan_read8(void* at) { reads(at, 8); }
void __tsan_read16(void* at) { reads(at, 16); }
void __tsan_write1(void* at) { writes(at, 1); }
void __tsan_write2(void* at) { writes(at, 2); }
void __tsan_write4(void* at) { writes(at, 4); }
void __tsan_write8(void* at) { writes(at, 8); }
void __tsan_write16(void* at) { writes(at, 16); }
void __tsan_unaligned_read2(void* at) { reads(at, 2); }
void __tsan_unaligned_read4(void* at) { reads(at, 4); }
void __tsan_unaligned_read8(void* at) { reads(at, 8); }
void __tsan_unaligned_read16(void* at) { reads(at, 16); }
void __tsan_unaligned_write2(void* at) { writes(at, 2); }
void __tsan_unaligned_write4(void* at) { writes(at, 4); }
void __tsan_unaligned_write8(void* at) { writes(at, 8); }
void __tsan_unaligned_write16(void* at) { writes(at, 16); }
void __tsan_read_range(void* at, size_t bytes) { reads(at, bytes); }
void __tsan_write_range(void* at, size_t bytes) { writes(at, bytes); }

}  // extern "C"

// Copies that are waited for: cp.async, bulk copies and TMA (PTX ISA 8.x).
#include <functional>
#include <memory>
#include <utility>

#include "fake_driver.h"
#include "instruction.h"

namespace emulator {

namespace {

/// Happens at once, at some time, or when it is waited for.
void start(Groups& groups, std::function<void()> action) {
  const auto done = std::make_shared<bool>(false);
  const auto once = [done, action = std::move(action)] {
    if (!std::exchange(*done, true)) action();
  };
  groups.open.actions.push_back(once);
  if (at_once())
    once();
  else if (at_once())
    later(once);
}

}  // namespace
void cp_async(Context& c, const Instruction& i) {
  const uint32_t address = c.get32(i.atoms[0]);
  const auto* const from = reinterpret_cast<const unsigned char*>(c.get(i.atoms[1]));
  const uint32_t size = c.get32(i.atoms[2]);
  const uint64_t bytes = i.atoms.size() > 3 ? c.get32(i.atoms[3]) : size;
  if (address % size != 0 || reinterpret_cast<uintptr_t>(from) % size != 0 || bytes > size)
    fail("a copy is not aligned");
  Block* const block = current->block;
  const View& seen = current->views.seen;
  current->reads_global(from, bytes);
  block->races.write(block->place_of(address, size), size, current->copies.access(), seen, seen);
  start(current->copies, [=] {
    unsigned char* const to = block->at(address, size);
    std::memset(to, 0, size);
    if (bytes > 0) std::memcpy(to, from, bytes);
  });
}
void cp_async_arrive(Context& c, const Instruction& i) {
  const Groups& copies = current->copies;
  std::vector<std::function<void()>> before = copies.open.actions;
  for (const Groups::Group& group : copies.closed)
    before.insert(before.end(), group.actions.begin(), group.actions.end());
  Block* const block = current->block;
  const uint32_t address = c.get32(i.atoms[0]);
  later([=, actor = copies.actor, last = copies.open.last] {
    for (const auto& action : before) action();
    Mbarrier& barrier = block->mbarrier(address);
    if (actor) barrier.views.arrived.seen.raise(*actor, last);
    arrive(barrier);
  });
}
void cp_async_commit(Context&, const Instruction&) { current->copies.commit(); }
void cp_async_wait(Context& c, const Instruction& i) { current->copies.finish(c.get(i.atoms[0])); }
void bulk_commit(Context&, const Instruction&) { current->stores.commit(); }
void bulk_wait(Context& c, const Instruction& i) {
  const uint64_t pending = c.get(i.atoms[0]);
  if (i.has("read"))
    current->stores.read(pending);
  else
    current->stores.finish(pending);
}

namespace {

/// Bytes of an element of a tensor map by its CUtensorMapDataType.
uint32_t element_bytes(const fulgur::test::FakeMap& map) {
  return map.type == 0 ? 1 : map.type == 5 ? 8 : map.type == 7 ? 4 : 2;
}

/// Calls move(address in shared memory, address in global memory or null, bytes) for each 16 bytes
/// of a box.
template <class Move>
void for_box(const fulgur::test::FakeMap& map, uint32_t shared, const int64_t (&at)[4],
             const Move& move) {
  const uint32_t bytes = element_bytes(map);
  const uint32_t row_bytes = map.box[0] * bytes;
  // Rows of 128, 64 or 32 bytes are swizzled, those of other multiples of 16 lie as they are.
  if (shared % 128 != 0 || row_bytes % 16 != 0 ||
      (map.swizzle != 0 && row_bytes != 16u << map.swizzle))
    fail("a box of an unknown layout");
  if (at[0] * bytes % 16 != 0) fail("a box that begins at no multiple of 16 bytes");
  const uint32_t chunks = (1u << map.swizzle) - 1;
  uint32_t line = 0;
  for (int64_t batch = 0; batch < map.box[3]; ++batch)
    for (int64_t head = 0; head < map.box[2]; ++head)
      for (int64_t row = 0; row < map.box[1]; ++row, ++line)
        for (uint32_t column = 0; column < map.box[0]; ++column) {
          const int64_t index[4] = {at[0] + column, at[1] + row, at[2] + head, at[3] + batch};
          const char* address = static_cast<const char*>(map.address) + index[0] * bytes;
          bool inside = index[0] >= 0 && index[0] < static_cast<int64_t>(map.dims[0]);
          for (int i = 1; i < 4; ++i) {
            inside = inside && index[i] >= 0 && index[i] < static_cast<int64_t>(map.dims[i]);
            address += index[i] * static_cast<int64_t>(map.byte_strides[i - 1]);
          }
          const uint32_t place = shared + line * row_bytes + column * bytes;
          move(place ^ (place >> 7 & chunks) << 4, inside ? const_cast<char*>(address) : nullptr,
               bytes);
        }
}
uint32_t bytes_of_box(const fulgur::test::FakeMap& map) {
  return map.box[0] * map.box[1] * map.box[2] * map.box[3] * element_bytes(map);
}

/// A load by the asynchronous proxy begins, and has landed.
void start_load(uint32_t barrier, uint32_t shared, uint32_t bytes) {
  Block& block = *current->block;
  Mbarrier& full = block.mbarrier(barrier);
  if (!full.actor)
    full.actor = block.races.add_actor("a load for the barrier at " + std::to_string(barrier));
  const Views& views = current->views;
  block.races.write(block.place_of(shared, bytes), bytes, {*full.actor, ++full.started},
                    views.fenced, views.loaded);
}
void landed(Block* block, uint32_t barrier, uint32_t bytes) {
  Mbarrier& full = block->mbarrier(barrier);
  full.bytes -= bytes;
  ++full.landed;
  full.settle();
}
/// A store by the asynchronous proxy begins: store(bytes) gets those that it reads, which may be
/// before it stores them.
template <class Store>
void start_store(uint32_t shared, uint32_t bytes, const Store& store) {
  Block* const block = current->block;
  block->races.read(block->place_of(shared, bytes), bytes, current->stores.access(),
                    current->views.fenced);
  const auto data = std::make_shared<std::vector<unsigned char>>();
  const auto read = [=] {
    const unsigned char* const from = block->at(shared, bytes);
    if (data->empty()) data->assign(from, from + bytes);
  };
  current->stores.open.reads.emplace_back(read);
  start(current->stores, [=] {
    read();
    store(data->data());
  });
}

}  // namespace

void tma_load(Context& c, const Instruction& i) {
  const uint32_t shared = c.get32(i.atoms[0]);
  const auto map = fulgur::test::FakeMap::of(reinterpret_cast<const void*>(c.get(i.atoms[1])));
  const int64_t at[4] = {int(c.get(i.atoms[2])), int(c.get(i.atoms[3])), int(c.get(i.atoms[4])),
                         int(c.get(i.atoms[5]))};
  const uint32_t barrier = c.get32(i.atoms[6]);
  Block* const block = current->block;
  start_load(barrier, shared, bytes_of_box(map));
  for_box(map, shared, at, [](uint32_t, const char* from, uint32_t bytes) {
    if (from != nullptr) current->reads_global(from, bytes);
  });
  later([=] {
    for_box(map, shared, at, [&](uint32_t to, const char* from, uint32_t bytes) {
      unsigned char* const there = block->at(to, bytes);
      if (from == nullptr)
        std::memset(there, 0, bytes);
      else
        std::memcpy(there, from, bytes);
    });
    landed(block, barrier, bytes_of_box(map));
  });
}
void tma_store(Context& c, const Instruction& i) {
  const auto map = fulgur::test::FakeMap::of(reinterpret_cast<const void*>(c.get(i.atoms[0])));
  const int64_t at[4] = {int(c.get(i.atoms[1])), int(c.get(i.atoms[2])), int(c.get(i.atoms[3])),
                         int(c.get(i.atoms[4]))};
  const uint32_t shared = c.get32(i.atoms[5]);
  for_box(map, shared, at, [](uint32_t, const char* to, uint32_t bytes) {
    if (to != nullptr) current->writes_global(to, bytes);
  });
  start_store(shared, bytes_of_box(map), [=](const unsigned char* data) {
    for_box(map, shared, at, [&](uint32_t from, char* to, uint32_t bytes) {
      if (to != nullptr) std::memcpy(to, data + (from - shared), bytes);
    });
  });
}
void bulk_load(Context& c, const Instruction& i) {
  const uint32_t shared = c.get32(i.atoms[0]), bytes = c.get32(i.atoms[2]),
                 barrier = c.get32(i.atoms[3]);
  const auto* const from = reinterpret_cast<const void*>(c.get(i.atoms[1]));
  if (shared % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
    fail("a bulk load is not aligned");
  Block* const block = current->block;
  start_load(barrier, shared, bytes);
  current->reads_global(from, bytes);
  later([=] {
    std::memcpy(block->at(shared, bytes), from, bytes);
    landed(block, barrier, bytes);
  });
}
void bulk_store(Context& c, const Instruction& i) {
  auto* const to = reinterpret_cast<float*>(c.get(i.atoms[0]));
  const uint32_t shared = c.get32(i.atoms[1]), bytes = c.get32(i.atoms[2]);
  if (shared % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(to) % 16 != 0)
    fail("a bulk store is not aligned");
  const bool adds = i.has("reduce");
  current->writes_global(to, bytes);
  start_store(shared, bytes, [=](const unsigned char* data) {
    const auto* const from = reinterpret_cast<const float*>(data);
    if (!adds) std::memcpy(to, from, bytes);
    for (size_t k = 0; adds && k < bytes / 4; ++k) to[k] += from[k];
  });
}

}  // namespace emulator

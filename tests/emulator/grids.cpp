#include "grids.h"

#include <algorithm>

#include "machine.h"

namespace emulator {
namespace {

/// Calls act(page, first cell, cells) for each page of [at, at + bytes).
template <class Act>
void for_pages(uintptr_t at, size_t bytes, size_t cell, size_t cells, const Act& act) {
  const uintptr_t end = (at + bytes + cell - 1) / cell;
  for (uintptr_t i = at / cell; i < end;) {
    const uintptr_t page = i / cells;
    const uintptr_t stop = std::min(end, (page + 1) * cells);
    act(page, i - page * cells, stop - i);
    i = stop;
  }
}

[[noreturn]] void fail_at(const char* did, const char* did_before) {
  fail(std::string("a kernel that starts early ") + did + " what a kernel before it " + did_before +
       ", and no griddepcontrol.wait orders the two");
}

}  // namespace

void Places::add(uintptr_t at, size_t bytes) {
  for_pages(at, bytes, kCell, kCells, [&](uintptr_t page, size_t first, size_t count) {
    if (page != last_) {
      at_last_ = &pages_[page];
      last_ = page;
    }
    for (size_t i = first; i < first + count; ++i) at_last_->set(i);
  });
}

bool Places::contains(uintptr_t at, size_t bytes) const {
  bool found = false;
  for_pages(at, bytes, kCell, kCells, [&](uintptr_t page, size_t first, size_t count) {
    const auto cells = pages_.find(page);
    for (size_t i = first; i < first + count && cells != pages_.end(); ++i)
      found = found || cells->second.test(i);
  });
  return found;
}

void Places::join(const Places& other) {
  for (const auto& [page, cells] : other.pages_) pages_[page] |= cells;
}

void Places::clear() { *this = {}; }

void Grids::start(bool early) {
  early_ = early;
  if (early) {
    before_.read.join(now_.read);
    before_.written.join(now_.written);
  } else {
    before_ = {};
  }
  now_ = {};
}

void Grids::read(const void* at, size_t bytes, bool waited) {
  const auto place = reinterpret_cast<uintptr_t>(at);
  if (early_ && !waited && before_.written.contains(place, bytes)) fail_at("reads", "writes");
  now_.read.add(place, bytes);
}

void Grids::write(const void* at, size_t bytes, bool waited) {
  const auto place = reinterpret_cast<uintptr_t>(at);
  if (early_ && !waited) {
    if (before_.written.contains(place, bytes)) fail_at("writes", "writes");
    if (before_.read.contains(place, bytes)) fail_at("writes", "reads");
  }
  now_.written.add(place, bytes);
}

}  // namespace emulator

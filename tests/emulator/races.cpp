#include "races.h"

#include <algorithm>

#include "machine.h"

namespace emulator {

void View::raise(Actor actor, uint32_t number) {
  if (actor >= known_.size()) known_.resize(actor + 1);
  known_[actor] = std::max(known_[actor], number);
}

void View::join(const View& other) {
  if (other.known_.size() > known_.size()) known_.resize(other.known_.size());
  for (size_t i = 0; i < other.known_.size(); ++i) known_[i] = std::max(known_[i], other.known_[i]);
}

void View::intersect(const View& other) {
  if (other.known_.size() < known_.size()) known_.resize(other.known_.size());
  for (size_t i = 0; i < known_.size(); ++i) known_[i] = std::min(known_[i], other.known_[i]);
}

Actor Races::add_actor(std::string name) {
  names_.push_back(std::move(name));
  return static_cast<Actor>(names_.size() - 1);
}

void Races::fail_at(size_t cell, const char* did, Access by, const char* did_before,
                    Access before) const {
  fail("a race: " + names_[by.actor] + " " + did + " byte " + std::to_string(cell * kCellBytes) +
       " of shared memory, which " + names_[before.actor] + " " + did_before +
       ", and nothing orders the two");
}

void Races::read(size_t at, size_t bytes, Access by, const View& writes) {
  for (size_t i = at / kCellBytes; i < (at + bytes + kCellBytes - 1) / kCellBytes; ++i) {
    Cell& cell = cells_[i];
    if (cell.written.number > writes.of(cell.written.actor))
      fail_at(i, "reads", by, "writes", cell.written);
    // A read that happened before this one need not be known any more: who knows of this one knows
    // of it, too.
    const auto known = [&](const Access& x) { return x.number <= writes.of(x.actor); };
    if (cell.more == 0 && (known(cell.read) || cell.read.actor == by.actor)) {
      cell.read = by;
      continue;
    }
    if (cell.more == 0) {
      if (free_.empty()) {
        more_.emplace_back();
        free_.push_back(static_cast<uint32_t>(more_.size()));
      }
      cell.more = free_.back();
      free_.pop_back();
      more_[cell.more - 1] = {cell.read};
    }
    auto& all = more_[cell.more - 1];
    const auto mine =
        std::find_if(all.begin(), all.end(), [&](const Access& x) { return x.actor == by.actor; });
    if (mine != all.end())
      *mine = by;
    else
      all.push_back(by);
  }
}

void Races::write(size_t at, size_t bytes, Access by, const View& writes, const View& reads) {
  for (size_t i = at / kCellBytes; i < (at + bytes + kCellBytes - 1) / kCellBytes; ++i) {
    Cell& cell = cells_[i];
    if (cell.written.number > writes.of(cell.written.actor))
      fail_at(i, "writes", by, "writes", cell.written);
    const auto check = [&](const Access& x) {
      if (x.number > reads.of(x.actor)) fail_at(i, "writes", by, "reads", x);
    };
    if (cell.more == 0) {
      check(cell.read);
    } else {
      std::for_each(more_[cell.more - 1].begin(), more_[cell.more - 1].end(), check);
      free_.push_back(cell.more);
    }
    cell = {by, {}, 0};
  }
}

}  // namespace emulator

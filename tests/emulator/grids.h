/// Finds accesses to global memory of a kernel that starts early (programmatic dependent launch)
/// which the kernels before it may still be at: what they write may not be read, and what they
/// access may not be written, by a thread that has not waited for their end.
///
/// Kernels run one after another here, so that what those before have accessed is known. They are
/// all from the last one on that came after everything: each of them may start before the one in
/// front of it has ended, if it lets it.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace emulator {

/// A set of places in memory.
class Places {
 public:
  void add(uintptr_t at, size_t bytes);
  bool contains(uintptr_t at, size_t bytes) const;
  void join(const Places& other);
  void clear();

 private:
  enum : size_t { kCell = 2, kCells = 2048 };  // an element is the least that a thread owns
  using Page = std::bitset<kCells>;

  std::unordered_map<uintptr_t, Page> pages_;
  uintptr_t last_ = ~uintptr_t{0};  ///< the page that was used last
  Page* at_last_ = nullptr;
};

/// What the kernel that runs and those before it do with global memory.
class Grids {
 public:
  /// A kernel starts, early or after all before it.
  void start(bool early);
  bool early() const { return early_; }
  /// A thread that runs accesses global memory; `waited`: or knows of one that has waited. Ends the
  /// process where nothing orders that.
  void read(const void* at, size_t bytes, bool waited);
  void write(const void* at, size_t bytes, bool waited);

 private:
  struct Footprint {
    Places read, written;
  };

  bool early_ = false;
  Footprint now_, before_;
};

}  // namespace emulator

/// Finds accesses to shared memory that nothing orders, whatever order the emulator runs them in.
///
/// Each actor numbers its accesses, and has a view: of everybody else's, up to which number they
/// happened before its next one. Views pass through barriers. An access is a race where another one
/// to the same bytes is not in its actor's view and one of the two writes (FastTrack, Flanagan and
/// Freund, PLDI 2009). Besides threads there are actors for what they start and wait for later:
/// copies and products run concurrently with the thread, from their start until a thread has
/// waited.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emulator {

using Actor = uint32_t;

/// Up to which number the accesses of each actor are known.
class View {
 public:
  uint32_t of(Actor actor) const { return actor < known_.size() ? known_[actor] : 0; }
  void raise(Actor actor, uint32_t number);
  void join(const View& other);
  void intersect(const View& other);  ///< what both know
  void clear() { known_.clear(); }

 private:
  std::vector<uint32_t> known_;
};

/// Tensor cores and bulk copies access memory through a proxy of their own (PTX ISA, "Proxies"):
/// they see what threads wrote after a fence alone, and may overtake loads in flight. A thread
/// arrives at an mbarrier without waiting for its loads (seen on an H200): what it has loaded may
/// be overwritten by a bulk copy when it has used what came, or after a fence.
struct Views {
  View seen;    ///< by loads and stores
  View fenced;  ///< by the asynchronous proxy, too
  View loaded;  ///< loads of these have returned

  void join(const Views& other) {
    seen.join(other.seen);
    fenced.join(other.fenced);
    loaded.join(other.loaded);
  }
  void raise(Actor actor, uint32_t number) {
    seen.raise(actor, number);
    fenced.raise(actor, number);
    loaded.raise(actor, number);
  }
  void clear() {
    seen.clear();
    fenced.clear();
    loaded.clear();
  }
};

struct Access {
  Actor actor = 0;
  uint32_t number = 0;  ///< 0: there was none
};

/// The accesses to the shared memory of a CTA.
class Races {
 public:
  explicit Races(size_t bytes) : cells_((bytes + kCellBytes - 1) / kCellBytes) {}

  Actor add_actor(std::string name);
  /// Ends the process where a write is not in the view.
  void read(size_t at, size_t bytes, Access by, const View& writes);
  /// Likewise where a write or a read is not in its view.
  void write(size_t at, size_t bytes, Access by, const View& writes, const View& reads);

 private:
  enum : size_t { kCellBytes = 2 };  // an element of 16 bits is the least that a thread owns
  struct Cell {
    Access written, read;
    uint32_t more = 0;  // reads: a place in more_, counted from 1
  };

  [[noreturn]] void fail_at(size_t cell, const char* did, Access by, const char* did_before,
                            Access before) const;

  std::vector<Cell> cells_;
  std::vector<std::vector<Access>> more_;
  std::vector<uint32_t> free_;  // of more_
  std::vector<std::string> names_;
};

}  // namespace emulator

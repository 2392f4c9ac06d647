#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "call/problem.h"
#include "cuda/common/card.h"
#include "cuda/device/gpu.h"
#include "cuda/jit/compile.h"
#include "engine/engine.h"

namespace fulgur::cuda {

/// The name of a tile of a family, by which plans are chosen, tuned and explained.
struct TileId {
  std::string family;  ///< "sm90_forward": one word
  int Br = 0, Bc = 0;
  bool operator==(const TileId&) const = default;
  /// "sm90_forward 192 x 80".
  std::string text() const;
};

/// Why a plan was chosen.
struct Reasons {
  std::vector<std::string> decisions, rejected;
  Details details;  ///< the decisions as data
};
/// An explanation with the reasons after its first sentence.
Explanation with_reasons(Explanation plan, const Reasons& reasons);

/// One tile of a family, planned for one problem.
class Candidate {
 public:
  virtual ~Candidate() = default;

  TileId tile;
  double cycles = 0;      ///< SM cycles that the cost model predicts
  int64_t workspace = 0;  ///< bytes that a run needs
  /// Why it is chosen only by tuning, or if there is no other candidate; empty if it may be chosen.
  std::string tuned_only;

  /// Explains the plan, without the reasons of the choice.
  virtual Explanation explain() const = 0;
  /// The kernels that it launches, that of the tile first.
  virtual std::vector<KernelUse> kernels() const = 0;
  virtual std::unique_ptr<const Executable> executable(Gpu& gpu, const Reasons& reasons) const = 0;
  /// The same tile with a kernel that appends new rows before it attends; null, and the reason, if
  /// there is none.
  virtual std::shared_ptr<const Candidate> fused(const Problem::Append&,
                                                 std::string* why_not) const;
};

using Candidates = std::vector<std::shared_ptr<const Candidate>>;

/// Kernels that share a source: one way to compute problems on one architecture.
class Family {
 public:
  virtual ~Family() = default;
  /// Whether the family is made for problems of this kind.
  virtual bool is_for(const Problem& problem) const = 0;
  /// Why it does not compute such a problem, and what it computes; empty if it computes it.
  virtual std::string rejects(const Problem& problem) const = 0;
  /// Every tile that fits the problem and the card. Adds the reasons of all others to `rejected`.
  virtual Candidates candidates(const Problem& problem, const Card& card,
                                std::vector<std::string>* rejected) const = 0;
  /// Candidates that calls like `problem` may have with any lengths and batch. Prewarming compiles
  /// these, too, as the samples of lengths that it plans might miss some.
  virtual Candidates reachable(const Problem&, const Card&) const { return {}; }
};

/// A tile, and the measured time of a call with it on a device.
struct MeasuredTile {
  TileId tile;
  double microseconds = 0;
  bool operator==(const MeasuredTile&) const = default;
};

}  // namespace fulgur::cuda

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

/// The tile of a kernel: what choosing, tuning, prewarming and explaining speak of.
struct TileId {
  std::string family;  ///< "sm90_forward": one word
  int Br = 0, Bc = 0;
  bool operator==(const TileId&) const = default;
  /// "sm90_forward 192 x 80".
  std::string text() const;
};

/// Why a plan is what it is.
struct Reasons {
  std::vector<std::string> decisions, rejected;
  Details details;  ///< the decisions as data
};
/// What a plan is, and why: after its first sentence.
Explanation with_reasons(Explanation plan, const Reasons& reasons);

/// One tile of a family, planned for one problem.
class Candidate {
 public:
  virtual ~Candidate() = default;

  TileId tile;
  double cycles = 0;      ///< of an SM, as the cost model predicts
  int64_t workspace = 0;  ///< bytes that a run wants
  /// Why the model takes it only where there is no other; empty when it may take it.
  std::string tuned_only;

  /// What it is, without why it was chosen.
  virtual Explanation explain() const = 0;
  /// What it launches, the kernel of the tile first.
  virtual std::vector<KernelUse> kernels() const = 0;
  virtual std::unique_ptr<const Executable> executable(Gpu& gpu, const Reasons& reasons) const = 0;
  /// The same tile where its kernel appends new rows, too, before it attends; null where it does
  /// not, and why.
  virtual std::shared_ptr<const Candidate> fused(const Problem::Append&,
                                                 std::string* why_not) const;
};

using Candidates = std::vector<std::shared_ptr<const Candidate>>;

/// Kernels that share a source: one way to compute problems on one architecture.
class Family {
 public:
  virtual ~Family() = default;
  /// Whether it is made for such problems at all.
  virtual bool is_for(const Problem& problem) const = 0;
  /// Why it does not compute one of these, and what it does compute; empty when it does.
  virtual std::string rejects(const Problem& problem) const = 0;
  /// Every tile that fits the problem and the card. `rejected` takes the others.
  virtual Candidates candidates(const Problem& problem, const Card& card,
                                std::vector<std::string>* rejected) const = 0;
  /// Candidates that calls like `problem` may get with any lengths and batch, which a walk over a
  /// few of these might miss: prewarming compiles them, too.
  virtual Candidates reachable(const Problem&, const Card&) const { return {}; }
};

/// A tile, and how long a call took with it on a device.
struct MeasuredTile {
  TileId tile;
  double microseconds = 0;
  bool operator==(const MeasuredTile&) const = default;
};

}  // namespace fulgur::cuda

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "fulgur/attention.h"
#include "problem.h"

namespace fulgur {

/// What an engine decided, for people.
struct Explanation {
  std::vector<std::string> decisions;  ///< one sentence each
  std::vector<std::string> rejected;   ///< alternatives: what and why not
  /// Tile of the score matrix of a head. Where q heads of a kv head share tiles, the first of them
  /// is meant: the tiles of the others begin where it ends.
  int64_t Br = 0, Bc = 0;
};

/// The tensors of one call, which outlive it.
using Call = std::variant<const ForwardArgs*, const BackwardArgs*>;

/// A problem planned by one engine: running it only computes. Runs may overlap.
class Executable {
 public:
  virtual ~Executable() = default;
  /// The call is of the pass that was planned, its shapes and pointers are checked, and so is the
  /// workspace, where one is given.
  virtual void run(const Call& call, const Run& run) const = 0;
  virtual Explanation explain() const = 0;
  virtual WorkspaceNeed workspace() const = 0;
};

/// One way to compute attention on one kind of device.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual std::string name() const = 0;
  virtual std::string description() const = 0;
  /// Why the engine cannot be used on this machine; empty when it can.
  virtual std::string unavailable() const = 0;
  /// Why the engine does not compute this problem, and what it does compute; empty when it does.
  virtual std::string rejects(const Problem& problem) const = 0;
  /// Why it is left to users who name the engine; empty when it is not.
  virtual std::string only_by_name(const Problem&) const { return {}; }
  /// `threads`: as Options says.
  virtual std::unique_ptr<const Executable> plan(const Problem& problem, int threads) const = 0;
  /// Throws Error(kInvalidArgument) when nothing may be planned while a call is made on the stream.
  virtual void check_plannable(const Problem&, const Run&) const {}
  /// Plans made under another number are out of date.
  virtual uint64_t generation() const { return 0; }
};

/// Every engine, in the order of preference.
std::span<const Engine* const> all_engines();

/// The first engine that computes the problem, or the one of this name. Appends to `rejected` why
/// the others were not chosen. Throws Error: kInvalidArgument for an unknown name, kUnavailable or
/// kUnsupported when none computes it.
const Engine& choose_engine(const Problem& problem, const std::string& name,
                            std::vector<std::string>* rejected);

}  // namespace fulgur

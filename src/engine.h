#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
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
  int64_t workspace_bytes = 0;
};

/// A problem planned by one engine: running it only computes.
class Executable {
 public:
  virtual ~Executable() = default;
  virtual void run(const ForwardArgs& args) = 0;
  virtual void run(const BackwardArgs& args) = 0;
  virtual Explanation explain() const = 0;
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
  virtual std::unique_ptr<Executable> plan(const Problem& problem) const = 0;
};

/// Every engine, in the order of preference.
std::span<const Engine* const> all_engines();

/// The first engine that computes the problem, or the one it names. Appends to `rejected` why the
/// others were not chosen. Throws Error: kInvalidArgument for an unknown name, kUnavailable or
/// kUnsupported when none computes it.
const Engine& choose_engine(const Problem& problem, std::vector<std::string>* rejected);

}  // namespace fulgur

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/hadamard.h"
#include "base/quantize.h"
#include "call/append_call.h"
#include "call/lengths.h"
#include "call/merge_call.h"
#include "call/problem.h"
#include "fulgur/attention.h"
#include "fulgur/details.h"
#include "fulgur/scores.h"
#include "kernels/host_device/prefix_split.h"

namespace fulgur {

/// What an engine decided.
struct Explanation {
  std::vector<std::string> decisions;  ///< one sentence each
  std::vector<std::string> rejected;   ///< alternatives: what and why not
  Details details;                     ///< the decisions as data
  /// Tile of the score matrix of a head. Where q heads of a kv head share tiles, the first of them
  /// is meant: the tiles of the others begin where it ends.
  int64_t Br = 0, Bc = 0;
};

/// How long a call is expected to take.
struct Estimate {
  double microseconds = 0;  ///< 0: not known
  std::string bound;        ///< what limits it: "memory" or "products"
  bool at_least = false;    ///< a part of the call is not counted
  std::string sentence;     ///< both for people
};

/// The tensors of one call, which outlive it.
using Call = std::variant<const ForwardArgs*, const BackwardArgs*, const ScoresArgs*>;

/// A problem planned by one engine: running it only computes. Runs may overlap.
class Executable {
 public:
  virtual ~Executable() = default;
  /// The call is of the pass that was planned, its shapes and pointers are checked, and so is the
  /// workspace, where one is given.
  virtual void run(const Call& call, const Run& run) const = 0;
  virtual Explanation explain() const = 0;
  /// What a call is expected to take whose sequences have these lengths, all of them the one where
  /// they are alike. It may measure what the machine can do.
  virtual Estimate estimate(const std::vector<Sequence>&) const { return {}; }
  virtual WorkspaceNeed workspace() const = 0;
};

/// The append of a forward call that brings new rows of K and V, before its attention, for one
/// problem. Runs may overlap.
class AppendStep {
 public:
  virtual ~AppendStep() = default;
  /// What a run wants of the workspace.
  virtual int64_t bytes() const = 0;
  /// Appends, with so many bytes of `memory`. Returns the keys that each sequence has afterwards,
  /// where they are in that memory, and null where the host has them.
  virtual const int32_t* append(const AppendCall& call, void* memory, const Run& run) const = 0;
};

/// What an engine does besides attention where a call is divided at the ends of shared prefixes
/// (plan/shared_prefix.h), for one problem. Runs may overlap.
class PrefixSteps {
 public:
  virtual ~PrefixSteps() = default;
  /// Bytes of K and V that a call which is not divided reads in the time that dividing it takes.
  virtual int64_t cost_bytes() const = 0;
  /// Bytes of the workspace for numbers in the host's memory, and the call with those moved there.
  virtual int64_t metadata_bytes() const = 0;
  virtual ForwardArgs moved(const ForwardArgs& args, const Run& run, void* numbers) const = 0;
  /// Writes the arguments of both parts to memory of the device.
  virtual void divide(const kernels::PrefixSplit& split, const Run& run) const = 0;
};

/// What an engine does besides attention where a call is over codes of keys that are rotated, or
/// less their means (plan/code_steps.h), for one problem. Runs may overlap.
class CodeSteps {
 public:
  virtual ~CodeSteps() = default;
  /// Bytes of the workspace for numbers in the host's memory.
  virtual int64_t bytes() const = 0;
  /// Rows of q as hadamard() rotates them.
  virtual void rotate(const HadamardCall& call, const Run& run) const = 0;
  /// LSE takes the products of q and k_mean, with so many bytes of `memory`. `args`: of the
  /// attention, q rotated.
  virtual void add_means(const ForwardArgs& args, void* memory, const Run& run) const = 0;
  /// `to` takes these products, scaled, of all rows side by side, in the order and dtype of LSE.
  virtual void multiply_means(const ForwardArgs& args, void* to, void* memory,
                              const Run& run) const = 0;
};

/// One way to compute attention on one kind of device, and what else a call does there: appending
/// to KV caches, merging partial results, and memory for the runs of composite plans. `threads`: as
/// Options says.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual std::string name() const = 0;
  virtual DeviceType device() const = 0;
  virtual std::string description() const = 0;
  /// Why the engine cannot be used on this machine; empty when it can.
  virtual std::string unavailable() const = 0;
  /// Why the engine does not compute this problem, and what it does compute; empty when it does.
  virtual std::string rejects(const Problem& problem) const = 0;
  /// Why it is left to users who name the engine; empty when it is not.
  virtual std::string only_by_name(const Problem&) const { return {}; }
  virtual std::unique_ptr<const Executable> plan(const Problem& problem, int threads) const = 0;
  /// The plan of a problem whose new rows the kernel that attends appends, too; null where it does
  /// not, and why.
  virtual std::unique_ptr<const Executable> plan_fused(const Problem&, std::string*) const {
    return {};
  }
  /// The step that appends the new rows of a problem by itself.
  virtual std::unique_ptr<const AppendStep> append_step(const Problem& problem,
                                                        int threads) const = 0;
  /// Null where it does not read shared prefixes once.
  virtual std::unique_ptr<const PrefixSteps> prefix_steps(const Problem&, int) const { return {}; }
  /// Those of a problem whose q is as its attention has it.
  virtual std::unique_ptr<const CodeSteps> code_steps(const Problem& problem,
                                                      int threads) const = 0;
  /// Calls `compute` with memory for a run on the device: the caller's, or the engine's own, as
  /// `need` says.
  virtual void with_workspace(Device device, const WorkspaceNeed& need, const Run& run,
                              const std::function<void(void*)>& compute) const = 0;
  /// Appends rows to caches, or gets ready for such calls. Throws Error: kUnsupported for what it
  /// does not take, kUnavailable without a device.
  virtual void append(const AppendCall& call, int threads, const Run& run) const = 0;
  virtual void prepare(const AppendCall&) const {}
  /// Merges partial results. Throws Error likewise.
  virtual void merge(const MergeCall& call, int threads, const Run& run) const = 0;
  /// Makes codes of numbers, or numbers of codes. Throws Error likewise.
  virtual void quantize(const QuantizeCall& call, int threads, const Run& run) const = 0;
  virtual void dequantize(const DequantizeCall& call, int threads, const Run& run) const = 0;
  /// Rotates rows by a Hadamard matrix. Throws Error likewise.
  virtual void hadamard(const HadamardCall& call, int threads, const Run& run) const = 0;
  /// Throws Error(kInvalidArgument) when nothing may be planned while a call is made on the stream.
  virtual void check_plannable(const Problem&, const Run&) const {}
  /// Plans made under another number are out of date.
  virtual uint64_t generation() const { return 0; }
};

/// The first of `engines` that computes the problem, or the one of this name. Appends to `rejected`
/// why the others were not chosen. Throws Error: kInvalidArgument for an unknown name, kUnavailable
/// or kUnsupported when none computes it.
const Engine& choose_engine(std::span<const Engine* const> engines, const Problem& problem,
                            const std::string& name, std::vector<std::string>* rejected);

}  // namespace fulgur

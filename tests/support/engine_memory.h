/// Where an engine computes. Tests keep their tensors in Storages, in the CPU's memory; an engine
/// that computes elsewhere gets copies of these.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "fulgur/merge.h"
#include "tensors.h"

namespace fulgur::test {

/// The device that an engine computes on, by the engine's name.
Device device_of(const std::string& engine);

/// The Storages that the tensors of some calls lie in, guard zones included, on the device of an
/// engine: on the CPU the Storages themselves, on cuda copies, made when a tensor is first asked
/// for.
class EngineMemory {
 public:
  explicit EngineMemory(const std::string& engine) : device_(device_of(engine)) {}
  ~EngineMemory();
  EngineMemory(const EngineMemory&) = delete;
  EngineMemory& operator=(const EngineMemory&) = delete;

  /// Memory of no Storage that tensors may lie in.
  void keep(std::span<std::byte> host) {
    if (device_ != Device{} && !host.empty()) add(host);
  }
  /// The tensor where the engine finds it. One that lies on the engine's device stays as it is.
  Tensor at(Tensor t);
  ForwardTensors at(const ForwardTensors& t);
  BackwardTensors at(const BackwardTensors& t);
  AppendTensors at(const AppendTensors& t);
  std::vector<TensorBinding> at(std::vector<TensorBinding> tensors);

  /// `options` with the longest packed sequences, which the library cannot read off a device.
  Options options(const ForwardTensors& t, const Options& options) const;
  Options options(const BackwardTensors& t, const Options& options) const;

  /// Copies the Storages to the engine again, and back from it when the device has done its work.
  void send() const;
  void bring_back() const;

 private:
  struct Copy {
    std::span<std::byte> host;
    std::byte* device;
  };
  const Copy& copy_of(const void* data);
  const Copy& add(std::span<std::byte> host);

  Device device_;
  std::vector<Copy> copies_;
};

/// Plans and runs in the memory of the engine that the options name.
void compute(const ForwardTensors& t, const Options& options, const Run& run = {});
void compute(const BackwardTensors& t, const Options& options, const Run& run = {});
/// The same of a call that appends rows first.
void compute(const ForwardTensors& t, const AppendTensors& rows, const Options& options,
             const Run& run = {});
/// The same of calls without a plan.
void compute(const AppendTensors& t, const Options& options, const Run& run = {});
void compute(const std::vector<Merged>& parts, const Merged& result, const std::string& engine);

}  // namespace fulgur::test

#include "cuda/jit/target.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <string_view>

#include "cuda/driver/trust.h"
#include "cuda/jit/nvrtc.h"
#include "fulgur/error.h"

namespace fulgur::cuda {
namespace {

constexpr const char* kVariable = "FULGUR_CUDA_TARGET";

/// The target of a name, of at least 7.5; none for other texts.
std::optional<Target> parsed(std::string_view name) {
  Target target;
  for (const auto& [prefix, form] :
       {std::pair<std::string_view, Target::Form>{"sm_", Target::Form::kCubin},
        {"compute_", Target::Form::kPtx}}) {
    if (!name.starts_with(prefix)) continue;
    target.form = form;
    name.remove_prefix(prefix.size());
    if (form == Target::Form::kCubin && name.ends_with('a')) {
      target.form = Target::Form::kSpecific;
      name.remove_suffix(1);
    }
    const auto [end, error] =
        std::from_chars(name.data(), name.data() + name.size(), target.capability);
    if (error != std::errc{} || end != name.data() + name.size()) return std::nullopt;
    return target.capability >= kMinCapability ? std::optional(target) : std::nullopt;
  }
  return std::nullopt;
}

std::string text_of(std::span<const int> capabilities) {
  std::string text;
  for (const int c : capabilities) text += (text.empty() ? "" : ", ") + capability_text(c);
  return text;
}

}  // namespace

std::string Target::name() const {
  return fmt::format("{}{}{}", form == Form::kPtx ? "compute_" : "sm_", capability,
                     form == Form::kSpecific ? "a" : "");
}

Capability features_of(const Target& target) {
  Capability row = capability_row(target.capability);
  const bool specific = target.form == Target::Form::kSpecific;
  row.has_setmaxnreg &= specific;
  row.has_wgmma &= specific;
  return row;
}

bool runs(int capability, const Target& target) {
  switch (target.form) {
    case Target::Form::kSpecific:
      return target.capability == capability;
    case Target::Form::kCubin:
      return target.capability / 10 == capability / 10 && target.capability <= capability;
    case Target::Form::kPtx:
      break;
  }
  return target.capability <= capability;
}

Target target_of(int capability, std::span<const int> listed) {
  if (capability == 90 && std::ranges::count(listed, 90) > 0) return Target{};
  Target best{0, Target::Form::kPtx};
  for (const auto form : {Target::Form::kCubin, Target::Form::kPtx}) {
    for (const int c : listed) {
      const Target target{c, form};
      if (c >= kMinCapability && c > best.capability && runs(capability, target)) best = target;
    }
    if (best.capability > 0) return best;
  }
  throw Error(Status::kUnavailable,
              fmt::format("NVRTC {} compiles for compute capability {}: nothing that {} runs",
                          nvrtc_identity(), text_of(listed), capability_text(capability)));
}

Target target_called(const std::string& name, const std::string& what,
                     std::span<const int> listed) {
  const std::optional<Target> target = parsed(name);
  if (!target || std::ranges::count(listed, target->capability) == 0) {
    throw Error(Status::kInvalidArgument,
                fmt::format("{}: got \"{}\", want sm_NN, sm_NNa or compute_NN (PTX), NN from {} on "
                            "and among what NVRTC {} compiles for: {}",
                            what, name, kMinCapability, nvrtc_identity(), text_of(listed)));
  }
  return *target;
}

std::optional<Target> forced_target() {
  const std::string name = trusted_environment(kVariable);
  if (name.empty()) return std::nullopt;
  return target_called(name, kVariable, nvrtc_capabilities());
}

std::string capability_text(int capability) {
  return fmt::format("{}.{}", capability / 10, capability % 10);
}

}  // namespace fulgur::cuda

#pragma once

#include <cstdint>
#include <functional>

#include "call/append_call.h"
#include "fulgur/attention.h"

namespace fulgur::cuda {

/// Launches the kernel that writes the rows. Throws Error: kUnsupported for what it does not take,
/// and as planning a call does.
void append(const AppendCall& call, const Run& run);

/// Loads that kernel. Throws Error likewise.
void prepare(const AppendCall& call);

// As part of a call that attends what it appends.

/// Memory of the device.
struct AppendMemory {
  void* numbers = nullptr;     ///< for lengths that lie in the host's memory
  int32_t* lengths = nullptr;  ///< (batch): takes the lengths attended
};
void append(const AppendCall& call, const AppendMemory& memory, const Run& run);

/// Loads its kernels for calls to come.
void prepare_append(Device device, DType dtype, bool host_numbers);

/// Calls `compute` with memory for a run: the caller's, or the device's own.
void with_workspace(Device device, int64_t bytes, const Run& run,
                    const std::function<void(void*)>& compute);

/// The first byte of a workspace that is neither the attention's nor kept zero.
int64_t free_from(const WorkspaceNeed& attention);

}  // namespace fulgur::cuda

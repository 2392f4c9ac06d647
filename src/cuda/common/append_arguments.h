#pragma once

#include "base/scales.h"
#include "call/append_call.h"
#include "kernels/common/append_params.h"

namespace fulgur::cuda {

constexpr int kCodeLanesLog2 = 5;  ///< that make codes of a head

/// Rows on their way from one tensor to another.
AppendRows rows_between(const void* from, const Layout& at, void* to, const Layout& to_at,
                        int64_t heads, int64_t dim, int64_t pairs);
/// What makes codes of this format, which new rows give their scales where these are of rows;
/// nothing where it is none.
AppendCodes codes_of(DType format, const Scaling& scaling);

/// The means of the columns of rows, which their codes have not.
void set_means(const Means& means, AppendRows& rows);

/// What a kernel that appends is told, but for the lengths. Throws Error(kUnsupported) for more
/// rows than it counts.
AppendParams append_params(const AppendCall& call);

/// Its lengths, which lie on the device.
void set_lengths(const AppendArgs& args, AppendParams& params);

}  // namespace fulgur::cuda

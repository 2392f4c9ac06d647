#pragma once

#include "base/scales.h"
#include "call/append_call.h"
#include "kernels/common/append_params.h"

namespace fulgur::cuda {

constexpr int kCodeLanesLog2 = 5;  ///< log2 of the lanes that quantize a head

/// The arguments that copy rows from one tensor to another.
AppendRows rows_between(const void* from, const Layout& at, void* to, const Layout& to_at,
                        int64_t heads, int64_t dim, int64_t pairs);
/// The arguments that quantize new rows to a format, with a scale of each row where scales are of
/// rows. Empty if the format has no codes.
AppendCodes codes_of(DType format, const Scaling& scaling);

/// Sets the means of columns, which are subtracted from rows before they are quantized.
void set_means(const Means& means, AppendRows& rows);

/// The arguments of a kernel that appends, but for the lengths. Throws Error(kUnsupported) for more
/// rows than an int counts.
AppendParams append_params(const AppendCall& call);

/// Sets the lengths, which lie on the device.
void set_lengths(const AppendArgs& args, AppendParams& params);

}  // namespace fulgur::cuda

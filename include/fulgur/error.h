#pragma once

#include <stdexcept>
#include <string>

#include "fulgur/export.h"

namespace fulgur {

/// Why a call failed. The values are those of `fulgur_status` in c.h.
enum class Status {
  kOk = 0,
  kInvalidArgument = 1,  ///< an argument is wrong: the message names it, what it got, what it wants
  kUnsupported = 2,      ///< valid, but no engine here computes it: the message says which and why
  kUnavailable = 3,      ///< an engine, driver, device or cache folder is missing or cannot be used
  kOutOfMemory = 4,
  kInternal = 5,
};

/// Every failure of the library. Nothing has been written when a call throws one.
class FULGUR_API Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  Status status() const noexcept { return status_; }

 private:
  Status status_;
};

}  // namespace fulgur

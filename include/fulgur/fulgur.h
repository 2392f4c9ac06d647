#pragma once

/// Exact attention: include this for the whole C++ API.
#include "fulgur/append.h"
#include "fulgur/attention.h"
#include "fulgur/codes/hadamard.h"
#include "fulgur/details.h"
#include "fulgur/distributed/plan.h"
#include "fulgur/error.h"
#include "fulgur/mask.h"
#include "fulgur/merge.h"
#include "fulgur/scores.h"
#include "fulgur/tensor.h"
#include "fulgur/version.h"

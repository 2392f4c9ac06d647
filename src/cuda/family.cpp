#include "cuda/family.h"

#include <fmt/format.h>

namespace fulgur::cuda {

std::string TileId::text() const { return fmt::format("{} {} x {}", family, Br, Bc); }

}  // namespace fulgur::cuda

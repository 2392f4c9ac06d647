#pragma once

#include "picture.h"

constexpr int64_t kRadius = 2;     // patches of 5 x 5 pixels
constexpr float kWidth = 1.5f;     // their pixels weigh exp(-distance^2 / (2 kWidth^2)), 1 in all
constexpr double kStrength = 0.2;  // h^2 in units of what noise alone makes of |f_i - f_j|^2

/// What denoising a picture took.
struct Cost {
  double seconds = 0, flops = 0;
};

/// Exact non-local means (Buades, Coll, Morel 2005) of a picture with Gaussian noise of standard
/// deviation sigma: every pixel becomes a mean of all pixels, weighted by how alike the patches
/// around them are.
Picture nonlocal_means(const Picture& noisy, float sigma, Cost* cost);

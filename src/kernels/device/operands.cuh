// The element types of a kernel's operands, from kernel_config.h.
#pragma once
#include "kernel_config.h"
#include "device/elements.cuh"

using ElementQ = ElementType<Element(kElementQ)>;
using ElementK = ElementType<Element(kElementK)>;
using ElementV = ElementType<Element(kElementV)>;
using ElementO = ElementType<Element(kElementO)>;

constexpr Operands kOperands = {ElementQ::kType, ElementK::kType, ElementV::kType, ElementO::kType};

// The operands of a product have the same type: S = Q K^T, O = P V and their gradients; but with Q of e4m3, K may be
// e5m2.
static_assert(ElementQ::kType == ElementK::kType || (ElementQ::kType == kE4M3 && ElementK::kType == kE5M2));

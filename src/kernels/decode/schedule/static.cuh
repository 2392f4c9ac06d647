// The base of schedules by which a CTA knows its work tiles in advance.
#pragma once
#include "decode/work_tile.cuh"

struct StaticSchedule {
  enum : int {
    kCombineKernel = 0,
    kFragments = 0,
    kOneTile = 0,
    kCombinesAtEnd = 0,
  };

  // No warp requests work tiles.
  struct Requests {
    template <class Schedule>
    __device__ __forceinline__ void begin_tile(const DecodeParams&, const Schedule&, int) {}
    template <class Schedule>
    __device__ __forceinline__ void after_load(const DecodeParams&, const Schedule&, int) {}
  };
};

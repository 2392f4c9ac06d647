#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <random>

#include "commands.h"
#include "flags.h"
#include "fulgur/cuda.h"
#include "io/array.h"
#include "placement.h"

namespace fulgur::app {
namespace {

using io::Array;

struct TuneRequest {
  ShapeFlags shape;
  std::string dtype = "bf16";
  bool backward = false, packed = false, alibi = false, seqused_q = false, seqused_k = false;
  OptionFlags flags;
};

/// Normally distributed: a card draws less power, and so runs faster, on simpler data. Large arrays
/// repeat themselves.
Array random_array(const char* name, DType dtype, const std::vector<int64_t>& shape) {
  Array array(dtype, shape, name);
  Array some(DType::kF32, {std::min<int64_t>(array.numel(), 1 << 20)});
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  auto* x = reinterpret_cast<float*>(some.data());
  std::generate_n(x, some.numel(), [&] { return normal(random); });
  some = some.converted(dtype);
  for (int64_t at = 0; at < array.size_bytes(); at += some.size_bytes()) {
    std::memcpy(array.data() + at, some.bytes().data(),
                static_cast<size_t>(std::min(some.size_bytes(), array.size_bytes() - at)));
  }
  return array;
}

/// The elements f(0), f(1), ...
template <class T, class Element>
Array vector_of(DType dtype, int64_t size, Element f) {
  Array array(dtype, {size});
  for (int64_t i = 0; i < size; ++i) reinterpret_cast<T*>(array.data())[i] = static_cast<T>(f(i));
  return array;
}

cuda::Tuned measure(const TuneRequest& r) {
  Options options = r.flags.options();
  Placement place(device_called("cuda", "tune"));
  const ShapeFlags s = r.shape.complete();
  const DType dtype = dtype_called(r.dtype);
  const auto shape = [&](const char* name, int64_t length, int64_t heads, int64_t dim) {
    const std::vector<int64_t> whole = {s.batch, length, heads, dim};
    io::size_bytes(dtype, whole, name);  // or it is too large
    return r.packed ? std::vector<int64_t>{s.batch * length, heads, dim} : whole;
  };
  const auto input = [&](const char* name, int64_t length, int64_t heads, int64_t dim) {
    return place.input(random_array(name, dtype, shape(name, length, heads, dim)));
  };
  std::deque<Array> results;  // never collected
  const auto output = [&](const char* name, int64_t length, int64_t heads, int64_t dim) {
    return place.output(results.emplace_back(dtype, shape(name, length, heads, dim)));
  };
  ForwardArgs args;
  args.q = input("q", s.sq, s.hq, s.d);
  args.k = input("k", s.sk, s.hk, s.d);
  args.v = input("v", s.sk, s.hk, s.dv);
  args.out = output("out", s.sq, s.hq, s.dv);
  const auto starts = [&](int64_t length) {  // of packed sequences
    return place.input(
        vector_of<int32_t>(DType::kI32, s.batch + 1, [&](int64_t b) { return b * length; }));
  };
  if (r.packed) {
    args.lengths.cu_seqlens_q = starts(s.sq);
    args.lengths.cu_seqlens_k = starts(s.sk);
    options.max_seqlen_q = s.sq;
    options.max_seqlen_k = s.sk;
  }
  const auto used = [&](int64_t length) {
    return place.input(vector_of<int32_t>(DType::kI32, s.batch, [&](int64_t) { return length; }));
  };
  if (r.seqused_q) args.lengths.seqused_q = used(s.sq);
  if (r.seqused_k) args.lengths.seqused_k = used(s.sk);
  if (r.alibi) {
    args.alibi_slopes = place.input(vector_of<float>(DType::kF32, s.hq, [&](int64_t h) {
      return std::exp2(-8.0 * static_cast<double>(h + 1) / static_cast<double>(s.hq));
    }));
  }
  if (!r.backward) return cuda::tune(args, options);
  const std::vector<int64_t> lse_shape =
      r.packed ? std::vector{s.hq, s.batch * s.sq} : std::vector{s.batch, s.hq, s.sq};
  args.lse = place.output(results.emplace_back(DType::kF32, lse_shape));
  forward(args, options);
  return cuda::tune(
      BackwardArgs{input("dout", s.sq, s.hq, s.dv), args.q, args.k, args.v, args.out, args.lse,
                   output("dq", s.sq, s.hq, s.d), output("dk", s.sk, s.hk, s.d),
                   output("dv", s.sk, s.hk, s.dv), args.alibi_slopes, args.lengths},
      options);
}

void tune(const TuneRequest& r) {
  const cuda::Tuned tuned = measure(r);
  fmt::print("{}: {}\n", tuned.device, tuned.shape_class);
  for (const cuda::TileTime& tile : tuned.tiles) {
    fmt::print("tile {:>27} {:>12.2f} us {:>6.2f}{}{}\n",
               fmt::format("{} {} x {}", tile.family, tile.Br, tile.Bc), tile.microseconds,
               tile.microseconds / tuned.tiles[0].microseconds,
               &tile == &tuned.tiles[0] ? "  taken from now on" : "",
               tile.predicted ? "  the cost model's choice" : "");
  }
  fmt::print("kept in {}\n", tuned.path);
}

}  // namespace

void add_tune(CLI::App& app) {
  auto r = std::make_shared<TuneRequest>();
  auto* command = app.add_subcommand(
      "tune", "Measure the tiles of a pass on the GPU and keep the fastest for its like");
  r->shape.add_to(*command);
  command->add_option("--dtype", r->dtype, "Default bf16")
      ->check(CLI::IsMember({"bf16", "f16", "f32"}))
      ->type_name("T");
  command->add_flag("--backward", r->backward, "The tiles of the gradient");
  command->add_flag("--packed", r->packed, "Packed sequences (cu_seqlens), of one length");
  command->add_flag("--alibi", r->alibi, "ALiBi slopes");
  command->add_flag("--seqused-q", r->seqused_q, "Lengths of the queries in use, all of them");
  command->add_flag("--seqused-k", r->seqused_k, "Lengths of the keys in use, all of them");
  r->flags.add_to(*command);
  command->footer(
      "The times go into the kernel cache (FULGUR_CACHE_DIR or ~/.cache/fulgur). Calls whose "
      "sizes\n"
      "round up to the same three binary digits take the fastest tile from then on, on GPUs of\n"
      "this model; `fulgur explain --device cuda` tells. Best on an idle GPU.\nExamples:\n"
      "  fulgur tune --batch 4 --sq 4096 --hq 16 --d 128 --causal\n"
      "  fulgur tune --batch 64 --sq 1 --sk 8192 --hq 32 --hk 8 --d 128 --seqused-k\n"
      "  fulgur tune --batch 4 --sq 4096 --hq 16 --d 128 --causal --backward");
  command->callback([r] { tune(*r); });
}

}  // namespace fulgur::app

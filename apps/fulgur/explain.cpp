#include <fmt/format.h>

#include "commands.h"
#include "flags.h"
#include "io/file.h"
#include "svg.h"

namespace fulgur::app {
namespace {

struct Shape {
  int64_t batch = 1, sq = 1024, sk = -1, hq = 8, hk = -1, d = 64, dv = -1;
  std::string dtype = "f32";
  bool backward = false;
  std::string svg;
  OptionFlags flags;
};

Plan plan_of(const Shape& s) {
  const int64_t sk = s.sk < 0 ? s.sq : s.sk, hk = s.hk < 0 ? s.hq : s.hk;
  const int64_t dv = s.dv < 0 ? s.d : s.dv;
  const auto tensor = [&](int64_t rows, int64_t heads, int64_t dim) {
    return Tensor::contiguous(nullptr, dtype_called(s.dtype), {s.batch, rows, heads, dim});
  };
  const Tensor q = tensor(s.sq, s.hq, s.d), out = tensor(s.sq, s.hq, dv);
  const Tensor k = tensor(sk, hk, s.d), v = tensor(sk, hk, dv);
  const Tensor lse = Tensor::contiguous(nullptr, DType::kF32, {s.batch, s.hq, s.sq});
  if (s.backward) return plan(BackwardArgs{out, q, k, v, out, lse, q, k, v}, s.flags.options());
  return plan(ForwardArgs{q, k, v, out, lse}, s.flags.options());
}

void explain(const Shape& s) {
  const Plan plan = plan_of(s);
  if (!s.svg.empty()) {
    if (s.batch * s.sq * s.hq == 0) io::fail("--svg", "a call without queries has no tiles");
    const int64_t sk = s.sk < 0 ? s.sq : s.sk;
    const std::string svg = tile_map_svg(plan.tiles(), s.sq, sk,
                                         fmt::format("Tiles of the score matrix, {} pass, d = {}",
                                                     s.backward ? "backward" : "forward", s.d));
    const io::Bytes pieces[] = {std::as_bytes(std::span(svg))};
    io::OutputFiles files;
    files.add(s.svg, pieces);
    files.commit();
  }
  const std::string text = plan.explain();
  fmt::print("{}{}", text, text.ends_with('\n') ? "" : "\n");
}

}  // namespace

void add_explain(CLI::App& app) {
  auto s = std::make_shared<Shape>();
  auto* command = app.add_subcommand(
      "explain", "The plan for a shape in words: engine, tiles, bytes, flops, what was rejected");
  const auto size = [&](const char* name, int64_t& value, const char* help) {
    command->add_option(name, value, help)->type_name("N")->check(CLI::NonNegativeNumber);
  };
  size("--batch", s->batch, "Sequences; default 1");
  size("--sq", s->sq, "Queries of a sequence; default 1024");
  size("--sk", s->sk, "Keys of a sequence; default sq");
  size("--hq", s->hq, "Heads of q; default 8");
  size("--hk", s->hk, "Heads of k and v; default hq");
  size("--d", s->d, "Head dim of q and k; default 64");
  size("--dv", s->dv, "Head dim of v; default d");
  add_dtype(*command, s->dtype, "Default f32");
  command->add_flag("--backward", s->backward, "The plan of the gradient");
  s->flags.add_to(*command);
  command->add_option("--svg", s->svg, "Draw the tiles (empty, partial, full) into this file")
      ->type_name("F.svg");
  command->footer(
      "Examples:\n"
      "  fulgur explain --sq 4096 --hq 32 --hk 8 --d 128 --dtype bf16 --causal --svg tiles.svg\n"
      "  fulgur explain --sq 1 --sk 16384 --hq 32 --hk 8 --d 128\n"
      "  fulgur explain --sq 4096 --window 512,0 --backward");
  command->callback([s] { explain(*s); });
}

}  // namespace fulgur::app

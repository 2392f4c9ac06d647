#include "program.h"

#include <fmt/format.h>

#include <cstdio>
#include <new>

#include "commands.h"
#include "fulgur/version.h"

namespace {

constexpr int kOk = 0, kError = 1, kUsage = 2;

/// Writes to stderr. Where even that fails, the exit status still reports the error.
void complain(const std::string& message) {
  std::fputs(("fulgur: " + message + "\n").c_str(), stderr);
}

int run(int argc, char** argv) {
  CLI::App app("Exact attention on tensors in .npy and .safetensors files.", "fulgur");
  app.set_version_flag("--version", "fulgur " FULGUR_VERSION);
  app.require_subcommand(1);
  app.footer(
      "Examples:\n"
      "  fulgur attend --q q.npy --k k.npy --v v.npy --out o.npy --causal\n"
      "  fulgur explain --sq 4096 --sk 4096 --hq 8 --d 128 --causal --svg tiles.svg\n"
      "  fulgur check\n"
      "`fulgur SUBCOMMAND --help` tells more. Exit status: 0 ok, 1 error, 2 wrong usage.");
  fulgur::app::add_attend(app);
  fulgur::app::add_check(app);
  fulgur::app::add_bench(app);
  fulgur::app::add_explain(app);
  fulgur::app::add_devices(app);
  fulgur::app::add_prewarm(app);
  fulgur::app::add_tune(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help, --version
    app.exit(e);
  } catch (const CLI::ParseError& e) {
    std::string command = "fulgur", message = e.what();
    for (const auto* sub : app.get_subcommands()) command += " " + sub->get_name();
    const auto unknown = app.remaining();
    if (app.get_subcommands().empty() && !unknown.empty()) {
      message = fmt::format("there is no subcommand {}", unknown[0]);
    }
    complain(fmt::format("{}\nSee `{} --help`.", message, command));
    return kUsage;
  }
  std::cout.flush();
  if (std::fflush(stdout) != 0 || !std::cout) throw std::runtime_error("cannot write to stdout");
  return kOk;
}

}  // namespace

namespace fulgur::app {

int run_program(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::bad_alloc&) {
    complain("out of memory");
  } catch (const std::exception& e) {
    complain(e.what());
  }
  return kError;
}

}  // namespace fulgur::app

#pragma once

#include <CLI/CLI.hpp>

/// The subcommands of the program. Each add_* declares one on `app`; parsing runs it. They throw
/// CLI::ParseError for wrong usage and std::exception for what fails.
namespace fulgur::app {

void add_attend(CLI::App& app);
void add_check(CLI::App& app);
void add_bench(CLI::App& app);
void add_explain(CLI::App& app);
void add_devices(CLI::App& app);
void add_prewarm(CLI::App& app);
void add_tune(CLI::App& app);

}  // namespace fulgur::app

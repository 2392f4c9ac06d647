#pragma once

namespace fulgur::app {

/// The program: parses, runs, prints; returns its exit status.
int run_program(int argc, char** argv);

}  // namespace fulgur::app

#include "program.h"

int main(int argc, char** argv) { return fulgur::app::run_program(argc, argv); }

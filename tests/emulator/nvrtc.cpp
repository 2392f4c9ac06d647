// An NVRTC whose code runs in the emulator: the host's compiler makes a library of a kernel's text,
// in which inline PTX has become calls of the emulator.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "translate.h"

namespace fs = std::filesystem;

namespace {

constexpr int kCapabilities[] = {75, 80, 86, 89, 90, 100, 120};

struct Program {
  fs::path folder;
  std::string name, log, image;
  ~Program() { fs::remove_all(folder); }
};

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// A text as the host's compiler reads it: most are of many kernels, and translated once.
void write(const fs::path& path, const std::string& text) {
  static std::map<std::string, std::string> known;
  auto found = known.find(text);
  if (found == known.end()) found = known.emplace(text, emulator::translated(text)).first;
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << found->second;
}

/// The value of __CUDA_ARCH__ for the options of a compilation: 900 for compute_90 and sm_90a.
std::string architecture(int count, const char* const* options) {
  for (const std::string_view option : std::span(options, static_cast<size_t>(count))) {
    if (!option.starts_with("--gpu-architecture=")) continue;
    const std::string_view digits = option.substr(option.find('_') + 1);
    return std::string(digits.substr(0, digits.find_first_not_of("0123456789"))) + "0";
  }
  return "520";
}

}  // namespace

extern "C" {

int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return 0;
}

int nvrtcGetNumSupportedArchs(int* count) {
  *count = std::size(kCapabilities);
  return 0;
}
int nvrtcGetSupportedArchs(int* to) {
  std::copy(std::begin(kCapabilities), std::end(kCapabilities), to);
  return 0;
}
int nvrtcCreateProgram(Program** program, const char* text, const char* name, int count,
                       const char* const* texts, const char* const* names) {
  char folder[] = "/tmp/fulgur_emulator_XXXXXX";
  if (mkdtemp(folder) == nullptr) return 1;
  *program = new Program{folder, name, {}, {}};
  write((*program)->folder / name, text);
  for (int i = 0; i < count; ++i) write((*program)->folder / names[i], texts[i]);
  return 0;
}

int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  const fs::path log = program->folder / "log", image = program->folder / "image.so";
  // With -fsanitize=thread accesses to memory call functions of the emulator, which finds races.
  const std::string command = EMULATOR_COMPILER
                              " -x c++ -std=c++20 -O1 -w -fPIC -fsanitize=thread -shared -nostdlib"
                              " --param tsan-instrument-func-entry-exit=0 -ffp-contract=off "
                              "-D__CUDACC__ -D__CUDA_ARCH__=" +
                              architecture(count, options) + " -include " EMULATOR_DEVICE_H " -I" +
                              program->folder.string() + " -o " + image.string() + " " +
                              (program->folder / program->name).string() +
                              " -x none " EMULATOR_DRIVER " >" + log.string() + " 2>&1";
  const int status = std::system(command.c_str());
  program->log = read(log);
  if (status != 0) return 6;
  program->log += "ptxas info : 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n";
  program->image = read(image);
  return 0;
}

int nvrtcGetProgramLogSize(Program* program, size_t* size) {
  *size = program->log.size() + 1;
  return 0;
}
int nvrtcGetProgramLog(Program* program, char* log) {
  std::memcpy(log, program->log.c_str(), program->log.size() + 1);
  return 0;
}
int nvrtcGetCUBINSize(Program* program, size_t* size) {
  *size = program->image.size() + sizeof(size_t);
  return 0;
}
/// The image begins with its size, because the driver gets no size with an image that it loads.
int nvrtcGetCUBIN(Program* program, char* image) {
  const size_t size = program->image.size();
  std::memcpy(image, &size, sizeof(size));
  std::memcpy(image + sizeof(size), program->image.data(), size);
  return 0;
}
/// What runs on the host is the same for every architecture.
int nvrtcGetPTXSize(Program*, size_t* size) {
  *size = 0;
  return 0;
}
int nvrtcGetPTX(Program*, char*) { return 0; }
int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return 0;
}

}  // extern "C"

// An NVRTC for tests on the fake driver, whose kernels do nothing: all that it makes of a text, at
// once and without a complaint, is the architecture that it was to compile for. libnvrtc.so.12
// is 12.0, libnvrtc.so.13 is 13.0, and without a number it is 11.0. FAKE_NVRTC_CAPABILITIES are
// those that it compiles for: "80 90".
#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace {

thread_local std::string image;
std::vector<int> capabilities() {
  const char* const listed = std::getenv("FAKE_NVRTC_CAPABILITIES");
  std::istringstream text(listed == nullptr ? "75 80 86 87 88 89 90 100 103 110 120 121" : listed);
  return {std::istream_iterator<int>(text), {}};
}
/// FAKE_NVRTC_SPILLS: bytes of registers that every kernel spills.
std::string log() {
  const char* const spills = std::getenv("FAKE_NVRTC_SPILLS");
  return std::string(spills == nullptr ? "0" : spills) + " bytes spill stores";
}

}  // namespace

extern "C" {

int nvrtcVersion(int* major, int* minor) {
  constexpr const char* kName = "libnvrtc.so.";
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&nvrtcVersion), &info);
  const char* const name = std::strstr(info.dli_fname, kName);
  *major = name == nullptr ? 11 : std::atoi(name + std::strlen(kName));
  *minor = 0;
  return 0;
}

int nvrtcGetNumSupportedArchs(int* count) {
  *count = static_cast<int>(capabilities().size());
  return 0;
}
int nvrtcGetSupportedArchs(int* to) {
  std::ranges::copy(capabilities(), to);
  return 0;
}
int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*,
                       const char* const*) {
  static int any = 0;
  *program = &any;
  return 0;
}
int nvrtcCompileProgram(void*, int, const char* const* options) {
  image = options[0];
  return 0;
}
int nvrtcGetProgramLogSize(void*, size_t* size) {
  *size = log().size() + 1;
  return 0;
}
int nvrtcGetProgramLog(void*, char* to) {
  const std::string text = log();
  std::memcpy(to, text.c_str(), text.size() + 1);
  return 0;
}
int nvrtcGetCUBINSize(void*, size_t* size) {
  *size = image.find("=compute_") == std::string::npos ? image.size() + 1 : 0;
  return 0;
}
int nvrtcGetPTXSize(void*, size_t* size) {
  *size = image.size() + 1;
  return 0;
}
int nvrtcGetPTX(void*, char* to) {
  std::memcpy(to, image.c_str(), image.size() + 1);
  return 0;
}
int nvrtcGetCUBIN(void*, char* to) {
  std::memcpy(to, image.c_str(), image.size() + 1);
  return 0;
}
int nvrtcDestroyProgram(void**) { return 0; }

}  // extern "C"

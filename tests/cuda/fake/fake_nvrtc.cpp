// An NVRTC for tests on the fake driver, whose kernels do nothing: all that it makes of a text, at
// once and without a complaint, is the architecture that it was to compile for. libnvrtc.so.12
// is 12.0, libnvrtc.so.13 is 13.0, and without a number it is 11.0.
#include <dlfcn.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

thread_local std::string image;
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
  *size = image.size() + 1;
  return 0;
}
int nvrtcGetCUBIN(void*, char* to) {
  std::memcpy(to, image.c_str(), image.size() + 1);
  return 0;
}
int nvrtcDestroyProgram(void**) { return 0; }

}  // extern "C"

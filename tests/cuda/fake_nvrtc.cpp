// An NVRTC for tests, which compiles nothing: libnvrtc.so.12 is 12.0, libnvrtc.so.13 is 13.0, and
// without a number it is 11.0.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

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

int nvrtcCreateProgram() { return 1; }
int nvrtcCompileProgram() { return 1; }
int nvrtcGetProgramLogSize() { return 1; }
int nvrtcGetProgramLog() { return 1; }
int nvrtcGetCUBINSize() { return 1; }
int nvrtcGetCUBIN() { return 1; }
int nvrtcDestroyProgram() { return 1; }

}  // extern "C"

# Writes OUTPUT, a C++ file that holds the text of FILES (paths below ROOT) as byte arrays:
#   cmake -DROOT=src/kernels "-DFILES=a.cu;b.cuh" -DOUTPUT=kernel_text.cpp -P embed_kernels.cmake
set(arrays "")
set(table "")
set(index 0)
foreach(file IN LISTS FILES)
  file(READ "${ROOT}/${file}" hex HEX)
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
  string(REGEX REPLACE "(................................................................................)"
                       "\\1\n" bytes "${bytes}")
  string(APPEND arrays "constexpr unsigned char kText${index}[] = {\n${bytes}};\n")
  string(APPEND table "      {\"${file}\", text(kText${index}, sizeof(kText${index}))},\n")
  math(EXPR index "${index} + 1")
endforeach()
file(WRITE "${OUTPUT}" "// Made by embed_kernels.cmake.
#include \"cuda/jit/sources.h\"

namespace fulgur::cuda {
namespace {

${arrays}
std::string text(const unsigned char* bytes, size_t size) {
  return std::string(reinterpret_cast<const char*>(bytes), size);
}

}  // namespace

KernelSources embedded_sources() {
  return {
${table}  };
}

}  // namespace fulgur::cuda
")

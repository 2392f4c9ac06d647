// Headers of .safetensors files from whoever wrote them: an error, whatever they hold.
#include "io/safetensors.h"

#include <gtest/gtest.h>

#include <string>

namespace fulgur::io {
namespace {

/// The message of reading a file with this header and four bytes of data; empty when it is read.
std::string message_of(const std::string& header) {
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(header.size() >> (8 * i) & 255);
  file += header + std::string(4, '\0');
  const std::string wanted[] = {"q"};
  try {
    parse_safetensors(std::as_bytes(std::span(file)), wanted, "file");
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kInvalidArgument);
    return error.what();
  }
  return {};
}

/// `depth` lists, one in the other.
std::string lists(size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); }

constexpr const char* kTooDeep = "file: the header nests lists and objects more than 16 deep";

// As deep as a file of 100 MB can nest: no stack takes a recursion of that.
TEST(Safetensors, DepthIsBounded) {
  for (const size_t depth : {size_t{200'000}, size_t{20'000'000}}) {
    const std::string deep = lists(depth);
    for (const std::string& header :
         {R"({"q":{"dtype":"F32","shape":)" + deep + R"(,"data_offsets":[0,4]}})",
          R"({"q":{"dtype":"F32","shape":[1],"data_offsets":)" + deep + "}}",
          R"({"q":{"dtype":)" + deep + R"(,"shape":[1],"data_offsets":[0,4]}})",
          R"({"__metadata__":)" + deep + "}", std::string(depth, '['), deep}) {
      EXPECT_EQ(message_of(header), kTooDeep) << header.substr(0, 40);
    }
  }
}

TEST(Safetensors, DepthThatIsStillRead) {
  const auto with = [](size_t depth) {
    return R"({"__metadata__":)" + lists(depth) +
           R"(,"q":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  };
  EXPECT_EQ(message_of(with(15)), "");
  EXPECT_EQ(message_of(with(16)), kTooDeep);
}

}  // namespace
}  // namespace fulgur::io

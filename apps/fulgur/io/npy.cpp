#include "io/npy.h"

#include <charconv>
#include <cstring>
#include <optional>

#include "io/file.h"

namespace fulgur::io {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kMaxHeader = 1 << 20;  // a header of four sizes takes about a hundred bytes

std::string_view text(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Text from a file, for messages: at most 32 characters, those that do not print as '?'.
std::string printable(std::string_view raw) {
  std::string out(raw.substr(0, 32));
  for (char& c : out) {
    if (c < ' ' || c > '~') c = '?';
  }
  return out;
}

/// Reads the header: the literal of a Python dict with the keys descr, fortran_order and shape.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, std::string_view name) : rest_(text), name_(name) {}

  struct Header {
    std::optional<std::string> descr;
    std::optional<bool> fortran_order;
    std::optional<std::vector<int64_t>> shape;
  };

  Header parse() {
    Header header;
    expect('{');
    while (!accept('}')) {
      const std::string key = string();
      expect(':');
      if (key == "descr") {
        set(header.descr, key, string());
      } else if (key == "fortran_order") {
        set(header.fortran_order, key, boolean());
      } else if (key == "shape") {
        set(header.shape, key, tuple());
      } else {
        fail(name_, "header has the unknown key '{}'", printable(key));
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    if (!rest_.empty()) malformed("the end");
    if (!header.descr) fail(name_, "header lacks the key 'descr'");
    if (!header.fortran_order) fail(name_, "header lacks the key 'fortran_order'");
    if (!header.shape) fail(name_, "header lacks the key 'shape'");
    return header;
  }

 private:
  template <class T>
  void set(std::optional<T>& value, const std::string& key, T now) {
    if (value) fail(name_, "header has the key '{}' twice", key);
    value = std::move(now);
  }

  [[noreturn]] void malformed(std::string_view want) {
    fail(name_, "header is malformed: got '{}', want {}", printable(rest_), want);
  }

  void skip_space() {
    const size_t n = rest_.find_first_not_of(" \t\r\n");
    rest_.remove_prefix(n == rest_.npos ? rest_.size() : n);
  }

  bool accept(char c) {
    skip_space();
    if (!rest_.starts_with(c)) return false;
    rest_.remove_prefix(1);
    return true;
  }

  void expect(char c) {
    if (!accept(c)) malformed(fmt::format("'{}'", c));
  }

  std::string string() {
    skip_space();
    if (!rest_.starts_with('\'') && !rest_.starts_with('"')) {
      malformed("a string (records are not supported)");
    }
    const size_t end = rest_.find(rest_[0], 1);
    if (end == rest_.npos) malformed("a string that ends");
    std::string value(rest_.substr(1, end - 1));
    rest_.remove_prefix(end + 1);
    return value;
  }

  bool boolean() {
    skip_space();
    for (const bool value : {false, true}) {
      const std::string_view word = value ? "True" : "False";
      if (rest_.starts_with(word)) {
        rest_.remove_prefix(word.size());
        return value;
      }
    }
    malformed("True or False");
  }

  std::vector<int64_t> tuple() {
    std::vector<int64_t> values;
    expect('(');
    while (!accept(')')) {
      skip_space();
      int64_t value = 0;
      const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
      if (error != std::errc{}) malformed("a size of at most 2^63 - 1");
      rest_.remove_prefix(end - rest_.data());
      values.push_back(value);
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
    return values;
  }

  std::string_view rest_, name_;
};

DType dtype_of(const std::string& descr, std::string_view name) {
  if (descr == "<f2") return DType::kF16;
  if (descr == "<f4") return DType::kF32;
  if (descr == "<f8") return DType::kF64;
  if (descr == "<i4") return DType::kI32;
  if (descr == "<i8") return DType::kI64;
  if (descr == "|b1") return DType::kBool;
  fail(name,
       "dtype is '{}', want little-endian float16, float32, float64, int32 or int64 "
       "('<f2', '<f4', '<f8', '<i4', '<i8'), or bool ('|b1')",
       printable(descr));
}

const char* descr_of(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return "<f2";
    case DType::kF32:
      return "<f4";
    case DType::kF64:
      return "<f8";
    case DType::kI32:
      return "<i4";
    case DType::kI64:
      return "<i8";
    case DType::kBool:
      return "|b1";
    default:
      break;
  }
  fail("dtype", ".npy files cannot hold {}", name_of(dtype));
}

}  // namespace

Array parse_npy(Bytes file, std::string_view name) {
  if (!text(file).starts_with(kMagic)) fail(name, "is not an .npy file: it lacks the magic bytes");
  if (file.size() < 8) fail(name, "is truncated: {} bytes end before the version", file.size());
  const auto byte = [&](size_t i) { return static_cast<size_t>(file[i]); };
  const size_t major = byte(6);
  if (major < 1 || major > 3) {
    fail(name, ".npy format version is {}.{}, want 1, 2 or 3", major, byte(7));
  }
  const size_t length_bytes = major == 1 ? 2 : 4, start = 8 + length_bytes;
  if (file.size() < start) fail(name, "is truncated: {} bytes end before the header", file.size());
  size_t length = 0;
  for (size_t i = 0; i < length_bytes; ++i) length |= byte(8 + i) << (8 * i);
  if (length > file.size() - start) {
    fail(name, "is truncated: the header takes {} bytes, {} are there", length,
         file.size() - start);
  }
  if (length > kMaxHeader) {
    fail(name, "the header takes {} bytes, want at most {}", length, kMaxHeader);
  }

  const auto header = HeaderParser(text(file.subspan(start, length)), name).parse();
  const DType dtype = dtype_of(*header.descr, name);
  if (*header.fortran_order) fail(name, "is in Fortran order, want C order");
  const Bytes data = file.subspan(start + length);
  const int64_t size = size_bytes(dtype, *header.shape, name);
  if (size != static_cast<int64_t>(data.size())) {
    fail(name, "holds {} bytes of data, want {} for {}", data.size(), size,
         Tensor::contiguous(nullptr, dtype, *header.shape).describe());
  }
  Array array(dtype, *header.shape, name);
  if (size > 0) std::memcpy(array.data(), data.data(), data.size());
  return array;
}

Array read_npy(const std::string& path, std::string_view name) {
  const InputFile file(path, name);
  return parse_npy(file.bytes(), name);
}

void write_npy(OutputFiles& files, const std::string& path, const Array& array) {
  std::string shape;
  for (const int64_t size : array.shape()) shape += fmt::format("{}, ", size);
  std::string header = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}",
                                   descr_of(array.dtype()), shape);
  // Spaces and a newline bring the data to a multiple of 64 bytes.
  const size_t start = kMagic.size() + 4;
  header.append(63 - (start + header.size()) % 64, ' ');
  header += '\n';
  std::string prefix(kMagic);
  prefix +=
      {'\1', '\0', static_cast<char>(header.size() & 255), static_cast<char>(header.size() >> 8)};
  prefix += header;
  const Bytes pieces[] = {std::as_bytes(std::span(prefix)), array.bytes()};
  files.add(path, pieces);
}

}  // namespace fulgur::io

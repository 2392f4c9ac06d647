#include "io/safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "io/file.h"

namespace fulgur::io {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxHeader = 100'000'000;
// The header, a tensor, its list: 3. Whatever else is there may be printed, which recurses.
constexpr int kMaxDepth = 16;

struct Name {
  DType dtype;
  const char* text;
};
constexpr Name kNames[] = {{DType::kF32, "F32"}, {DType::kF16, "F16"}, {DType::kBF16, "BF16"},
                           {DType::kF64, "F64"}, {DType::kI32, "I32"}, {DType::kBool, "BOOL"}};

/// A tensor as the header has it.
struct Entry {
  std::string name, dtype;
  std::vector<int64_t> shape;
  uint64_t begin, end;  // bytes, from the start of the data
};

/// A name from the file, quoted and in plain ASCII, for messages.
std::string quoted(const std::string& tensor) { return json(tensor).dump(-1, ' ', true); }

json parse_header(Bytes header, std::string_view name) {
  std::set<std::string> keys;
  using Event = json::parse_event_t;
  const auto check = [&](int depth, Event event, json& parsed) {
    if (depth >= kMaxDepth && (event == Event::object_start || event == Event::array_start)) {
      fail(name, "the header nests lists and objects more than {} deep", kMaxDepth);
    }
    if (depth == 1 && event == Event::key && !keys.insert(parsed.get<std::string>()).second) {
      fail(name, "the header has the tensor {} twice", quoted(parsed.get<std::string>()));
    }
    return true;
  };
  const auto* text = reinterpret_cast<const char*>(header.data());
  try {
    json parsed = json::parse(text, text + header.size(), check);
    if (!parsed.is_object()) fail(name, "the header is not a JSON object");
    return parsed;
  } catch (const json::parse_error& e) {
    fail(name, "the header is not JSON: error at its byte {}", e.byte);
  } catch (const json::out_of_range&) {
    fail(name, "the header has a number beyond the range of double");
  }
}

uint64_t number(const json& value, const std::string& where, std::string_view name) {
  // Half the range of uint64 keeps every size an int64.
  if (!value.is_number_unsigned() || value.get<uint64_t>() > INT64_MAX) {
    fail(name, "{}: got {}, want an integer from 0 to 2^63 - 1", where,
         value.dump(-1, ' ', true).substr(0, 32));
  }
  return value.get<uint64_t>();
}

Entry parse_entry(const std::string& tensor, const json& value, std::string_view name) {
  const auto field = [&](const char* key, auto is, const char* want) -> const json& {
    const auto found = value.is_object() ? value.find(key) : value.end();
    if (!value.is_object() || found == value.end() || !((*found).*is)()) {
      fail(name, "tensor {} lacks '{}', {}", quoted(tensor), key, want);
    }
    return *found;
  };
  Entry entry{tensor, field("dtype", &json::is_string, "a string").get<std::string>(), {}, 0, 0};
  const std::string where = fmt::format("tensor {}, shape", quoted(tensor));
  for (const json& size : field("shape", &json::is_array, "a list of sizes")) {
    entry.shape.push_back(static_cast<int64_t>(number(size, where, name)));
  }
  const json& offsets = field("data_offsets", &json::is_array, "a list [begin, end]");
  if (offsets.size() != 2) {
    fail(name, "tensor {}: 'data_offsets' has {} entries, want [begin, end]", quoted(tensor),
         offsets.size());
  }
  const std::string at = fmt::format("tensor {}, data_offsets", quoted(tensor));
  entry.begin = number(offsets[0], at, name);
  entry.end = number(offsets[1], at, name);
  return entry;
}

/// The entries fill the data from its start to its end, each byte once, as the format demands.
void check_offsets(std::vector<Entry>& entries, uint64_t data_bytes, std::string_view name) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t end = 0;
  for (const Entry& e : entries) {
    if (e.end < e.begin || e.end > data_bytes) {
      fail(name, "tensor {} has data_offsets [{}, {}], want a range within the {} bytes of data",
           quoted(e.name), e.begin, e.end, data_bytes);
    }
    if (e.begin != end) {
      fail(name, "tensor {} begins at {}, want {}: tensors must neither overlap nor leave gaps",
           quoted(e.name), e.begin, end);
    }
    end = e.end;
  }
  if (end != data_bytes) fail(name, "holds {} bytes of data, the tensors take {}", data_bytes, end);
}

Array copy(const Entry& e, Bytes data, std::string_view name) {
  const auto found = std::find_if(std::begin(kNames), std::end(kNames),
                                  [&](const Name& n) { return e.dtype == n.text; });
  if (found == std::end(kNames)) {
    fail(name, "tensor {} is {}, want F32, F16, BF16, F64, I32 or BOOL", quoted(e.name),
         quoted(e.dtype));
  }
  const std::string where = fmt::format("{}: tensor {}", name, quoted(e.name));
  const int64_t size = size_bytes(found->dtype, e.shape, where);
  if (static_cast<uint64_t>(size) != e.end - e.begin) {
    fail(where, "takes {} bytes, want {} for {}", e.end - e.begin, size,
         Tensor::contiguous(nullptr, found->dtype, e.shape).describe());
  }
  Array array(found->dtype, e.shape, where);
  if (size > 0) std::memcpy(array.data(), data.data() + e.begin, e.end - e.begin);
  return array;
}

}  // namespace

Arrays parse_safetensors(Bytes file, std::span<const std::string> wanted, std::string_view name) {
  if (file.size() < 8) fail(name, "is truncated: {} bytes, want at least 8", file.size());
  uint64_t length = 0;
  for (size_t i = 0; i < 8; ++i) length |= static_cast<uint64_t>(file[i]) << (8 * i);
  if (length > kMaxHeader) {
    fail(name, "is not a .safetensors file: the header would take {} bytes, at most {} are allowed",
         length, kMaxHeader);
  }
  if (length > file.size() - 8) {
    fail(name, "is truncated: the header takes {} bytes, {} are there", length, file.size() - 8);
  }
  const Bytes data = file.subspan(8 + length);

  std::vector<Entry> entries;
  const json header = parse_header(file.subspan(8, length), name);
  for (const auto& [tensor, value] : header.items()) {
    if (tensor != "__metadata__") entries.push_back(parse_entry(tensor, value, name));
  }
  check_offsets(entries, data.size(), name);
  Arrays arrays;
  for (const Entry& e : entries) {
    if (std::find(wanted.begin(), wanted.end(), e.name) != wanted.end()) {
      arrays.emplace(e.name, copy(e, data, name));
    }
  }
  return arrays;
}

Arrays read_safetensors(const std::string& path, std::span<const std::string> wanted,
                        std::string_view name) {
  const InputFile file(path, name);
  return parse_safetensors(file.bytes(), wanted, name);
}

void write_safetensors(OutputFiles& files, const std::string& path, const Arrays& arrays) {
  std::vector<const Arrays::value_type*> order;
  for (const auto& named : arrays) order.push_back(&named);
  // Wide elements first: every tensor is then aligned in the file.
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return size_of(a->second.dtype()) > size_of(b->second.dtype());
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  int64_t offset = 0;
  for (const auto* named : order) {
    const Array& array = named->second;
    const auto dtype = std::find_if(std::begin(kNames), std::end(kNames),
                                    [&](const Name& n) { return array.dtype() == n.dtype; });
    header[named->first] = {{"dtype", dtype->text},
                            {"shape", array.shape()},
                            {"data_offsets", {offset, offset + array.size_bytes()}}};
    offset += array.size_bytes();
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  std::string prefix;
  for (int i = 0; i < 8; ++i) prefix += static_cast<char>(uint64_t{text.size()} >> (8 * i) & 255);
  prefix += text;
  std::vector<Bytes> pieces = {std::as_bytes(std::span(prefix))};
  for (const auto* named : order) pieces.push_back(named->second.bytes());
  files.add(path, pieces);
}

}  // namespace fulgur::io

// Kernels that were once compiled without a defect. What the compiler makes of a kernel depends on
// its key alone, so that those need not be compiled by every run of the tests: a few, drawn anew
// each day, judge the ledger itself.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace fulgur::test {

/// A ledger's entry of a key of the kernel cache: its first 64 bits.
inline std::string ledger_entry(const std::string& key) { return key.substr(0, 16); }

/// A ledger as its file has it.
inline std::string ledger_text(const std::set<std::string>& ledger) {
  std::string text =
      "# Keys of kernels that NVRTC compiled without a defect; cuda_compile_test writes this file "
      "(CONTRIBUTING.md).\n";
  for (const std::string& entry : ledger) text += entry + "\n";
  return text;
}

/// The entries in a file's text.
inline std::set<std::string> read_ledger(const std::string& text) {
  std::set<std::string> ledger;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with('#')) ledger.insert(line);
  }
  return ledger;
}

/// Which of the kernels with some keys to compile.
struct ToCompile {
  std::vector<size_t> unknown;  ///< those that the ledger lacks
  std::vector<size_t> sample;   ///< some of the others
  size_t stale = 0;             ///< entries of the ledger that are none of the keys'
};

inline ToCompile to_compile(const std::vector<std::string>& keys,
                            const std::set<std::string>& ledger, size_t sample, uint64_t seed) {
  ToCompile result;
  std::vector<size_t> known;
  std::set<std::string> met;
  for (size_t i = 0; i < keys.size(); ++i) {
    const std::string entry = ledger_entry(keys[i]);
    (ledger.contains(entry) ? known : result.unknown).push_back(i);
    if (ledger.contains(entry)) met.insert(entry);
  }
  std::ranges::sample(known, std::back_inserter(result.sample), static_cast<std::ptrdiff_t>(sample),
                      std::mt19937_64(seed));
  result.stale = ledger.size() - met.size();
  return result;
}

}  // namespace fulgur::test

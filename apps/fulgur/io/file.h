#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/array.h"

namespace fulgur::io {

/// A regular file mapped for reading. Throws Error(kInvalidArgument) beginning with `name`.
class InputFile {
 public:
  InputFile(const std::string& path, std::string_view name);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  Bytes bytes() const { return bytes_; }

 private:
  Bytes bytes_;
};

/// Output files that appear complete, and all or none: add() writes each to a temporary file with
/// its target, commit() renames them once all are on disk. Without commit() nothing stays.
class OutputFiles {
 public:
  OutputFiles() = default;
  ~OutputFiles();
  OutputFiles(const OutputFiles&) = delete;
  OutputFiles& operator=(const OutputFiles&) = delete;

  /// Writes the pieces one after the other. Throws Error(kInvalidArgument) naming `path` and why.
  void add(const std::string& path, std::span<const Bytes> pieces);
  void commit();

 private:
  struct File {
    std::string path, temporary;
  };
  std::vector<File> files_;
};

/// Fails as OutputFiles would for a target that cannot be written, so that a long computation
/// does not end in such an error. Leaves no file of its own.
void check_writable(const std::string& path);

}  // namespace fulgur::io

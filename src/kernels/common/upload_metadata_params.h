// Arguments of common/upload_metadata.cu, the same for the host and the device.
#pragma once

constexpr int kStoredNumbers = 1000;  // at most, since all arguments of a kernel are no more than 4096 bytes

struct UploadMetadataParams {
  int* to;
  int count;
  int numbers[kStoredNumbers];
};

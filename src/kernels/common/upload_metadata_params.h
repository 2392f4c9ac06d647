// Arguments of common/upload_metadata.cu, the same for the host and the device.
#pragma once

constexpr int kStoredNumbers = 1000;  // maximum, as the arguments of a kernel have at most 4096 bytes

struct UploadMetadataParams {
  int* to;
  int count;
  int numbers[kStoredNumbers];
};

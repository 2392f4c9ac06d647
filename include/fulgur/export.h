#pragma once

/// Marks the symbols that the shared library exports; everything else is hidden.
#if defined(_WIN32)
#define FULGUR_API
#else
#define FULGUR_API __attribute__((visibility("default")))
#endif

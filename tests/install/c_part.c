#include <fulgur/c.h>
#include <string.h>

int version_is(const char* version) { return strcmp(fulgur_version(), version) == 0; }

# FULGUR_HIGHWAY_OPTIONS: of the files that Highway compiles once for each instruction set from these options on.
find_package(hwy REQUIRED)
set(FULGUR_HIGHWAY_OPTIONS)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  # The least that Highway compiles well on x86: every CPU since about 2011.
  set(FULGUR_HIGHWAY_OPTIONS -msse4.2 -mpclmul -maes)
  if(FULGUR_SANITIZE)
    # The best vectors that this machine has alone: sanitizers find the same in all, and each takes a minute to compile.
    include(CheckCXXSourceRuns)
    check_cxx_source_runs("int main() { return !__builtin_cpu_supports(\"avx512bw\"); }" FULGUR_HAS_AVX512)
    check_cxx_source_runs("int main() { return !__builtin_cpu_supports(\"avx2\"); }" FULGUR_HAS_AVX2)
    if(FULGUR_HAS_AVX512)
      set(FULGUR_HIGHWAY_OPTIONS -march=skylake-avx512)
    elseif(FULGUR_HAS_AVX2)
      set(FULGUR_HIGHWAY_OPTIONS -march=haswell -maes)
    endif()
    list(APPEND FULGUR_HIGHWAY_OPTIONS -DHWY_COMPILE_ONLY_STATIC)
  endif()
else()
  # Vectors of a length unknown to the compiler cannot be held in arrays, as the blocks of registers are; NEON serves
  # machines that have SVE.
  set(FULGUR_HIGHWAY_OPTIONS "-DHWY_DISABLED_TARGETS=(HWY_SVE|HWY_SVE2|HWY_SVE_256|HWY_SVE2_128|HWY_RVV)")
endif()
if(FULGUR_SANITIZE MATCHES address)
  # Checks in place double the time to compile what is inlined so much, and save less when it runs.
  list(APPEND FULGUR_HIGHWAY_OPTIONS -fsanitize-address-outline-instrumentation)
endif()
if(FULGUR_FUZZ)
  # Arguments decide little of the branches of numbers, from which a fuzzer would learn.
  list(APPEND FULGUR_HIGHWAY_OPTIONS -fno-sanitize=fuzzer-no-link)
endif()

# For 64-bit ARM, from x86: with Debian's cross compiler, the libraries that tools/arm_root.sh unpacks, and QEMU to run
# what was built.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

get_filename_component(arm_root ${CMAKE_CURRENT_LIST_DIR}/../build/arm-root ABSOLUTE)
set(arm_libraries ${arm_root}/usr/lib/aarch64-linux-gnu:${arm_root}/lib/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH ${arm_root} /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
foreach(mode LIBRARY INCLUDE PACKAGE)
  set(CMAKE_FIND_ROOT_PATH_MODE_${mode} ONLY)
endforeach()
foreach(language C CXX)
  set(CMAKE_${language}_FLAGS_INIT "-isystem ${arm_root}/usr/include -Wl,-rpath-link,${arm_libraries}")
endforeach()
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH=${arm_libraries})

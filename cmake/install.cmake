# What `cmake --install` puts where, and how other projects find it: find_package(fulgur) and
# pkg-config.
include(CMakePackageConfigHelpers)

install(TARGETS fulgur EXPORT fulgurTargets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fulgur DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fulgur)
install(EXPORT fulgurTargets NAMESPACE fulgur:: DESTINATION ${package_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/fulgurConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/fulgurConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may change the API.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fulgurConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fulgurConfig.cmake
              ${PROJECT_BINARY_DIR}/fulgurConfigVersion.cmake
        DESTINATION ${package_dir})

# A static library leaves it to the program to link what it uses.
if(NOT BUILD_SHARED_LIBS)
  set(pc_static_libs "-lfmt -lhwy ${OpenMP_CXX_FLAGS} -lstdc++")
endif()
file(RELATIVE_PATH pc_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(${CMAKE_CURRENT_LIST_DIR}/fulgur.pc.in ${PROJECT_BINARY_DIR}/fulgur.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/fulgur.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/README.md
        DESTINATION ${CMAKE_INSTALL_DOCDIR})

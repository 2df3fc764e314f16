# make install: the header, the library, the command, and what find_package and pkg-config need.
include(CMakePackageConfigHelpers)

set(FA_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/flashattn)
set(FA_INSTALL_TARGETS flashattn)
if(NOT BUILD_SHARED_LIBS)
    list(APPEND FA_INSTALL_TARGETS fa_threads) # a static library's users link what it links
endif()
install(TARGETS ${FA_INSTALL_TARGETS} EXPORT flashattnTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
        PUBLIC_HEADER DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT flashattnTargets NAMESPACE flashattn:: DESTINATION ${FA_PACKAGE_DIR})

configure_package_config_file(cmake/flashattnConfig.cmake.in
    "${PROJECT_BINARY_DIR}/flashattnConfig.cmake" INSTALL_DESTINATION ${FA_PACKAGE_DIR})
# A 0.x minor release may break callers; from 1.0 on only a major one may.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/flashattnConfigVersion.cmake"
    COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/flashattnConfig.cmake"
              "${PROJECT_BINARY_DIR}/flashattnConfigVersion.cmake"
        DESTINATION ${FA_PACKAGE_DIR})

# The way from the .pc file's directory back to the prefix, so that an installation can be moved.
file(RELATIVE_PATH FA_PC_PREFIX "/prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/prefix")
string(REGEX REPLACE "/$" "" FA_PC_PREFIX "${FA_PC_PREFIX}")
set(FA_PC_PRIVATE_LIBS "-lm -lpthread")
if(FA_CUDA_ENABLED AND CMAKE_DL_LIBS)
    string(APPEND FA_PC_PRIVATE_LIBS " -l${CMAKE_DL_LIBS}")
endif()
if(OpenMP_C_FOUND)
    string(APPEND FA_PC_PRIVATE_LIBS " ${OpenMP_C_FLAGS}")
endif()
set(FA_PC_STATIC_LIBS "")
if(NOT BUILD_SHARED_LIBS)
    if(UNIX AND NOT APPLE) # as fa_keep_loaded does
        string(APPEND FA_PC_PRIVATE_LIBS " -Wl,-z,nodelete")
    endif()
    set(FA_PC_STATIC_LIBS " ${FA_PC_PRIVATE_LIBS}")
endif()
configure_file(cmake/flashattn.pc.in "${PROJECT_BINARY_DIR}/flashattn.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/flashattn.pc" DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

if(TARGET flashattn_cli)
    install(TARGETS flashattn_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

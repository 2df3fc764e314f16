# The version has one home, include/flashattn.h; FA_VERSION and FA_SOVERSION are read from there.
set(FA_VERSION_HEADER "${CMAKE_CURRENT_LIST_DIR}/../include/flashattn.h")
file(STRINGS "${FA_VERSION_HEADER}" FA_VERSION_LINES REGEX "^#define FA_VERSION_(MAJOR|MINOR|PATCH) ")
foreach(part MAJOR MINOR PATCH)
    if(NOT "${FA_VERSION_LINES}" MATCHES "#define FA_VERSION_${part} +([0-9]+)")
        message(FATAL_ERROR "${FA_VERSION_HEADER}: FA_VERSION_${part} is not defined as a number")
    endif()
    set(FA_VERSION_${part} ${CMAKE_MATCH_1})
endforeach()
set(FA_VERSION ${FA_VERSION_MAJOR}.${FA_VERSION_MINOR}.${FA_VERSION_PATCH})

# Before 1.0 a minor release may break binaries, so it is part of the soname.
if(FA_VERSION_MAJOR EQUAL 0)
    set(FA_SOVERSION 0.${FA_VERSION_MINOR})
else()
    set(FA_SOVERSION ${FA_VERSION_MAJOR})
endif()

# A new version in the header must reach the soname and the package files.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${FA_VERSION_HEADER}")

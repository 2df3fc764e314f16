# fa_threads: what the library's objects compile and link with. Threads are the library's own
# (src/cpu/team.c); OpenMP says how many.
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
add_library(fa_threads INTERFACE)
target_link_libraries(fa_threads INTERFACE Threads::Threads m)
if(FA_OPENMP)
    find_package(OpenMP QUIET COMPONENTS C)
endif()
if(FA_OPENMP AND OpenMP_C_FOUND)
    target_link_libraries(fa_threads INTERFACE OpenMP::OpenMP_C)
else()
    message(STATUS "flashattn: OpenMP is off or was not found: the library will use one thread, "
                   "unless options.threads asks for more")
    target_compile_options(fa_threads INTERFACE -Wno-unknown-pragmas) # of tests that call from a region
endif()

# dlclose must not take away the code of threads that still wait for work (src/cpu/team.c), nor that
# which ends them. With a static library it is the user's shared object that stays.
function(fa_keep_loaded target)
    if(UNIX AND NOT APPLE)
        get_target_property(type ${target} TYPE)
        if(type STREQUAL "STATIC_LIBRARY")
            target_link_options(${target} INTERFACE LINKER:-z,nodelete)
        else()
            target_link_options(${target} PRIVATE LINKER:-z,nodelete)
        endif()
    endif()
endfunction()

# The common settings of an object library that is part of the library.
function(fa_configure_objects target)
    target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/include"
                               "${PROJECT_SOURCE_DIR}/src")
    target_compile_definitions(${target} PRIVATE FA_BUILD_SHARED=1)
    target_link_libraries(${target} PRIVATE fa_threads)
endfunction()

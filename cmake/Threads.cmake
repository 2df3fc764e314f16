# fa_threads: what the library's objects compile and link with.
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
    message(STATUS "flashattn: OpenMP is off or was not found: the library will use one thread")
    # Without OpenMP its pragmas are comments, and parameters that only they name are unused.
    target_compile_options(fa_threads INTERFACE -Wno-unknown-pragmas -Wno-unused-parameter)
endif()

# The common settings of an object library that is part of the library.
function(fa_configure_objects target)
    target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/include"
                               "${PROJECT_SOURCE_DIR}/src")
    target_compile_definitions(${target} PRIVATE FA_BUILD_SHARED=1)
    target_link_libraries(${target} PRIVATE fa_threads)
endfunction()

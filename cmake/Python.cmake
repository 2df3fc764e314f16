# The Python package's extension, flashattn._core: built by scikit-build-core from pyproject.toml. The
# library's objects are linked into it, so that a wheel is one file and needs no search path.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter ${SKBUILD_SABI_COMPONENT} Development.Module)

set(FA_PYTHON_SOURCES python/core/module.c python/core/options.c python/core/array.c
    python/core/xla_ffi.c python/core/ladder_call.c python/core/append_call.c python/core/torch_call.c)
option(FA_PYTHON_LADDER "The ladder's kernels in the Python extension, where CUDA is built" ON)
if(SKBUILD_SABI_VERSION)
    python_add_library(flashattn_python MODULE WITH_SOABI USE_SABI ${SKBUILD_SABI_VERSION}
                       ${FA_PYTHON_SOURCES})
else() # a free-threaded interpreter has no stable interface
    python_add_library(flashattn_python MODULE WITH_SOABI ${FA_PYTHON_SOURCES})
endif()
target_link_libraries(flashattn_python PRIVATE flashattn_internal)
if(FA_CUDA_ENABLED AND FA_PYTHON_LADDER)
    if(NOT TARGET fa_ladder)
        add_subdirectory(ladder)
    endif()
    target_link_libraries(flashattn_python PRIVATE fa_ladder)
    target_compile_definitions(flashattn_python PRIVATE FA_PYTHON_LADDER=1)
endif()
# The library's own symbols stay inside, for a process may hold another build of it too. Seen from outside
# are PyInit__core and the four handlers of xla_ffi.c.
target_link_options(flashattn_python PRIVATE LINKER:--exclude-libs,ALL)
# See glibc.c. Where glibc is older, Python itself has loaded the libraries that hold what it binds.
if(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|aarch64)$")
    include(CheckSymbolExists)
    check_symbol_exists(__GLIBC__ features.h FA_HAVE_GLIBC)
    if(FA_HAVE_GLIBC)
        target_sources(flashattn_python PRIVATE python/core/glibc.c)
        target_link_options(flashattn_python PRIVATE
            LINKER:--wrap=dlopen,--wrap=dlsym,--wrap=dlerror,--wrap=pthread_once
            LINKER:--wrap=pthread_create,--wrap=pthread_join,--wrap=pthread_attr_setstacksize
            LINKER:--wrap=pthread_key_create,--wrap=pthread_getspecific,--wrap=pthread_setspecific)
    endif()
endif()
set_target_properties(flashattn_python PROPERTIES OUTPUT_NAME _core)
install(TARGETS flashattn_python LIBRARY DESTINATION flashattn COMPONENT python)

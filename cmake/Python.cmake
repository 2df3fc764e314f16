# The Python package's extension, flashattn._core: built by scikit-build-core from pyproject.toml. The
# library's objects are linked into it, so that a wheel is one file and needs no search path.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter ${SKBUILD_SABI_COMPONENT} Development.Module)

set(FA_PYTHON_SOURCES python/core/module.c python/core/options.c python/core/array.c
    python/core/xla_ffi.c)
if(SKBUILD_SABI_VERSION)
    python_add_library(flashattn_python MODULE WITH_SOABI USE_SABI ${SKBUILD_SABI_VERSION}
                       ${FA_PYTHON_SOURCES})
else() # a free-threaded interpreter has no stable interface
    python_add_library(flashattn_python MODULE WITH_SOABI ${FA_PYTHON_SOURCES})
endif()
target_link_libraries(flashattn_python PRIVATE flashattn_internal)
# The library's own symbols stay inside, for a process may hold another build of it too. Seen from outside
# are PyInit__core and the two handlers of xla_ffi.c.
target_link_options(flashattn_python PRIVATE LINKER:--exclude-libs,ALL)
set_target_properties(flashattn_python PROPERTIES OUTPUT_NAME _core)
install(TARGETS flashattn_python LIBRARY DESTINATION flashattn COMPONENT python)

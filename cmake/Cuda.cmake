# The CUDA side of the build. There is no CUDA language and no runtime library in it: nvcc turns each
# kernel into a fatbin, which is embedded as bytes and handed to the driver at run time.
#
#   FA_CUDA=auto   the host code, and kernels for the GPU of this machine, if it has nvcc and a GPU
#   FA_CUDA=all    kernels for every architecture: 80 and 90a, and PTX for those to come; needs nvcc
#   FA_CUDA=off    nothing of CUDA is compiled
#   FA_CUDA=LIST   kernels for these architectures, for example "80;90a"; needs nvcc
#
# Gives FA_CUDA_SOURCES (host code), FA_CUDA_ARCHITECTURES (empty: no kernels), FA_CUDA_PTX, and the two
# functions below.
set(FA_CUDA auto CACHE STRING "CUDA: auto, all, off, or architectures, for example \"80;90a\"")
find_program(FA_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin
             DOC "The CUDA compiler")
mark_as_advanced(FA_NVCC)

set(FA_CUDA_SOURCES "")
set(FA_CUDA_ARCHITECTURES "")
set(FA_CUDA_PTX OFF)

# The architectures of the GPUs here, as nvcc calls them. 90 and what follows have instructions of
# their own, for which the name ends in an a.
function(fa_gpus_here result)
    set(${result} "" PARENT_SCOPE)
    find_program(FA_NVIDIA_SMI nvidia-smi)
    mark_as_advanced(FA_NVIDIA_SMI)
    if(NOT FA_NVIDIA_SMI OR CMAKE_CROSSCOMPILING)
        return()
    endif()
    execute_process(COMMAND "${FA_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE answer RESULT_VARIABLE status ERROR_QUIET TIMEOUT 30)
    if(NOT status EQUAL 0)
        return()
    endif()
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${answer}")
    set(found "")
    foreach(capability IN LISTS capabilities)
        string(REPLACE "." "" number ${capability})
        if(number GREATER_EQUAL 90)
            string(APPEND number a)
        endif()
        list(APPEND found ${number})
    endforeach()
    list(REMOVE_DUPLICATES found)
    set(${result} "${found}" PARENT_SCOPE)
endfunction()

# Sets FA_CUDA_ARCHITECTURES for auto, and says in one line why it is empty.
macro(fa_cuda_choose_automatically)
    if(NOT FA_NVCC)
        message(STATUS "flashattn: nvcc was not found: built without CUDA kernels")
    else()
        fa_gpus_here(fa_gpus)
        foreach(architecture IN LISTS fa_gpus)
            string(REGEX MATCH "^[0-9]+" number ${architecture})
            if(number GREATER_EQUAL 75)
                list(APPEND FA_CUDA_ARCHITECTURES ${architecture})
            else()
                message(STATUS "flashattn: no CUDA kernels for the GPU here: "
                               "architecture ${number}; they need 75 or later")
            endif()
        endforeach()
        if(NOT fa_gpus)
            message(STATUS "flashattn: no GPU here: built without CUDA kernels "
                           "(CUDA=all compiles them)")
        endif()
    endif()
endmacro()

if(FA_CUDA MATCHES "^(off|OFF|0|no|NO|false|FALSE)$")
    set(FA_CUDA_ENABLED OFF)
elseif(NOT UNIX OR APPLE)
    set(FA_CUDA_ENABLED OFF)
    message(STATUS "flashattn: no CUDA on ${CMAKE_SYSTEM_NAME}")
else()
    set(FA_CUDA_ENABLED ON)
    if(FA_CUDA STREQUAL "auto")
        fa_cuda_choose_automatically()
    elseif(NOT FA_CUDA STREQUAL "all" AND NOT FA_CUDA MATCHES "^[0-9]+a?([;,][0-9]+a?)*$")
        message(FATAL_ERROR "FA_CUDA is \"${FA_CUDA}\"; expected auto, all, off, or architectures, "
                            "for example \"80;90a\"")
    elseif(NOT FA_NVCC)
        message(FATAL_ERROR "FA_CUDA is \"${FA_CUDA}\", and nvcc was not found in PATH or under "
                            "CUDA_HOME; FA_CUDA=off needs none, -DFA_NVCC=... names it")
    elseif(FA_CUDA STREQUAL "all")
        set(FA_CUDA_ARCHITECTURES 80 90a)
        set(FA_CUDA_PTX ON)
    else()
        string(REPLACE "," ";" FA_CUDA_ARCHITECTURES "${FA_CUDA}")
        foreach(architecture IN LISTS FA_CUDA_ARCHITECTURES)
            string(REGEX MATCH "^[0-9]+" number ${architecture})
            if(number LESS 75)
                message(FATAL_ERROR "FA_CUDA names architecture ${architecture}; expected 75 or later")
            endif()
        endforeach()
        list(TRANSFORM FA_CUDA_ARCHITECTURES REPLACE "^90$" "90a")
        list(REMOVE_DUPLICATES FA_CUDA_ARCHITECTURES)
    endif()
endif()

if(FA_CUDA_ENABLED)
    file(GLOB FA_CUDA_SOURCES CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}"
         "${PROJECT_SOURCE_DIR}/src/cuda/*.c")
    set_source_files_properties(src/cuda/driver.c PROPERTIES
        COMPILE_DEFINITIONS _GNU_SOURCE=1) # secure_getenv
    target_link_libraries(fa_threads INTERFACE ${CMAKE_DL_LIBS})
    if(FA_CUDA_ARCHITECTURES)
        string(REPLACE ";" " " FA_CUDA_WORDS "${FA_CUDA_ARCHITECTURES}")
        if(FA_CUDA_PTX)
            string(APPEND FA_CUDA_WORDS " and PTX")
        endif()
        message(STATUS "flashattn: CUDA kernels for ${FA_CUDA_WORDS}, by ${FA_NVCC}")
    endif()
endif()
set_property(GLOBAL PROPERTY FA_CUDA_IMAGES_library "")
set_property(GLOBAL PROPERTY FA_CUDA_IMAGES_ladder "")

# Of the time of an image, dependencies take 0.15 s, the smallest compression 0.15 to 0.4 s, and those of CUDA's headers
# that kernels do not use 0.2 s for each reading: of no use where kernels are compiled only to be looked at.
option(FA_CUDA_ONCE "Kernels for this build alone: without dependency files, larger, from few of CUDA's headers" OFF)
mark_as_advanced(FA_CUDA_ONCE)

# Images that differ in their 16-bit type alone come from the same lines and have nearly the same registers. Without most
# of nvcc's optimizations an image takes a third of the time; the source is read, checked and assembled as before.
option(FA_CUDA_QUICK_TWINS "Of two kernels that differ in their 16-bit type alone, one with little optimization" OFF)
mark_as_advanced(FA_CUDA_QUICK_TWINS)

# The older compilers have no choice of compression, and no quick compilation.
set(FA_NVCC_FLAGS -O3 -std=c++17 -Xptxas -v)
set(FA_NVCC_QUICK "")
if(FA_CUDA_ARCHITECTURES)
    execute_process(COMMAND "${FA_NVCC}" --help OUTPUT_VARIABLE help ERROR_QUIET)
    if(help MATCHES "--compress-mode")
        set(compression size)
        if(FA_CUDA_ONCE)
            set(compression speed)
        endif()
        list(APPEND FA_NVCC_FLAGS --compress-mode=${compression})
    endif()
    if(FA_CUDA_QUICK_TWINS AND help MATCHES "--Ofast-compile")
        set(FA_NVCC_QUICK --Ofast-compile=max)
    elseif(FA_CUDA_QUICK_TWINS)
        message(STATUS "flashattn: this compiler has no --Ofast-compile: all kernels are optimized")
    endif()
endif()

# cmake/few_headers, if this compiler's headers have the names that it expects.
set(FA_CUDA_HEADERS "")
if(FA_CUDA_ARCHITECTURES AND FA_CUDA_ONCE)
    set(few "-I${PROJECT_SOURCE_DIR}/cmake/few_headers")
    file(WRITE "${PROJECT_BINARY_DIR}/few_headers.cu"
         "#include <math.h>\nextern \"C\" __global__ void k(float *x) { x[threadIdx.x] = exp2f(__shfl_sync(~0u, x[0], 1)); }\n")
    execute_process(COMMAND "${FA_NVCC}" --fatbin ${FA_NVCC_FLAGS} "${few}" -o few_headers.fatbin few_headers.cu
                    WORKING_DIRECTORY "${PROJECT_BINARY_DIR}" RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
    if(status EQUAL 0)
        set(FA_CUDA_HEADERS "${few}")
    else()
        message(STATUS "flashattn: kernels read all of CUDA's headers: some of those in cmake/few_headers are missing")
    endif()
endif()

# The -gencode options of a kernel for `oldest` and later architectures; 90: for Hopper alone, whose
# instructions no other architecture has. A cubin runs on its own major version only.
# All cubins come from one reading of the source, as of `oldest`, so that nvcc's front end, a good part
# of the work, runs once; a cubin is the same whichever others are built. each: the source is read for each
# architecture, and __CUDA_ARCH__ tells them apart.
function(fa_cuda_targets result oldest each)
    set(options "")
    foreach(architecture IN LISTS FA_CUDA_ARCHITECTURES)
        string(REGEX MATCH "^[0-9]+" number ${architecture})
        set(read_as ${oldest})
        if(each)
            set(read_as ${number})
        endif()
        if(oldest EQUAL 90)
            if(number EQUAL 90)
                list(APPEND options -gencode=arch=compute_90a,code=sm_90a)
            endif()
        elseif(number GREATER_EQUAL oldest)
            list(APPEND options -gencode=arch=compute_${read_as},code=sm_${number})
        endif()
    endforeach()
    if(FA_CUDA_PTX AND NOT oldest EQUAL 90)
        list(APPEND options -gencode=arch=compute_${oldest},code=compute_${oldest})
    endif()
    set(${result} "${options}" PARENT_SCOPE)
endfunction()

# Sets FA_CUDA_QUICK: of the images NAME,KERNEL,... those that are compiled with little optimization. For each kernel (the
# entry's name) it is the float16 image of the first pair, the bfloat16 image of the second, and so on, so that both types
# are optimized somewhere; none of a kernel that has one pair only.
function(fa_cuda_choose_quick)
    set(names "${ARGN}")
    list(TRANSFORM names REPLACE ",.*" "")
    set(quick "")
    set(kernels "")
    if(FA_NVCC_QUICK)
        foreach(image IN LISTS ARGN)
            string(REGEX REPLACE "^([^,]*),([^,]*).*" "\\1;\\2" image "${image}")
            list(POP_FRONT image name kernel)
            string(REGEX REPLACE "_bf16(_|$)" "_f16\\1" twin "${name}")
            if(twin STREQUAL name OR NOT twin IN_LIST names)
                continue()
            endif()
            list(APPEND kernels ${kernel})
            list(APPEND pairs_${kernel} ${twin} ${name})
        endforeach()
        list(REMOVE_DUPLICATES kernels)
    endif()
    foreach(kernel IN LISTS kernels)
        list(LENGTH pairs_${kernel} length)
        set(i 0) # the list is f16, bf16, f16, bf16, ...: elements 0, 3, 4, 7, ...
        while(length GREATER 2 AND i LESS length)
            math(EXPR other "${i} / 2 % 2 + ${i}")
            list(GET pairs_${kernel} ${other} name)
            list(APPEND quick ${name})
            math(EXPR i "${i} + 2")
        endwhile()
    endforeach()
    set(FA_CUDA_QUICK "${quick}" PARENT_SCOPE)
endfunction()

# fa_cuda_kernel(collection name source oldest definition...): compiles a source file, if this build is
# for an architecture that it runs on, into the image `name` of a collection (library or ladder). Beside
# <name>.fatbin lies <name>.log: the compiler's command, and what ptxas reports of registers and spills. A definition
# EACH_ARCHITECTURE=1 says that the source looks at __CUDA_ARCH__.
function(fa_cuda_kernel collection name source oldest)
    set(each OFF)
    if("EACH_ARCHITECTURE=1" IN_LIST ARGN)
        set(each ON)
    endif()
    fa_cuda_targets(targets ${oldest} ${each})
    if(NOT targets)
        return()
    endif()
    list(TRANSFORM ARGN PREPEND -D)
    # Names relative to here: nvcc does not escape blanks in the dependency file's target.
    set(list_dependencies -MMD -MF ${name}.d)
    set(depfile DEPFILE "${CMAKE_CURRENT_BINARY_DIR}/${name}.d")
    if(FA_CUDA_ONCE)
        set(list_dependencies "")
        set(depfile "")
    endif()
    set(quick "")
    if(name IN_LIST FA_CUDA_QUICK)
        set(quick ${FA_NVCC_QUICK})
    endif()
    add_custom_command(
        OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/${name}.fatbin"
        BYPRODUCTS "${CMAKE_CURRENT_BINARY_DIR}/${name}.log"
        COMMAND "${CMAKE_COMMAND}" -P "${PROJECT_SOURCE_DIR}/cmake/CompileKernel.cmake" --
                ${name}.log "${FA_NVCC}" --fatbin ${FA_NVCC_FLAGS} ${quick} ${targets} ${ARGN} ${FA_CUDA_HEADERS}
                "-I${PROJECT_SOURCE_DIR}/kernels" "-I${PROJECT_SOURCE_DIR}/src"
                ${list_dependencies} -o ${name}.fatbin "${source}"
        DEPENDS "${source}" "${PROJECT_SOURCE_DIR}/cmake/CompileKernel.cmake"
        ${depfile}
        WORKING_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}"
        COMMENT "Compiling CUDA kernel ${name}"
        VERBATIM)
    set_property(GLOBAL APPEND PROPERTY FA_CUDA_IMAGES_${collection} ${name})
endfunction()

# fa_cuda_images(target collection table index): an object library that holds a collection's images, and an array of
# them, `fa_cuda_image table[]`. index INDEXED: image `name` is element FA_VARIANT_<name>, and the elements of variants
# that this build has no image of have no data. Otherwise they stand in their order, and one without a name ends them.
function(fa_cuda_images target collection table index)
    get_property(names GLOBAL PROPERTY FA_CUDA_IMAGES_${collection})
    set(code "/* Made by cmake/Cuda.cmake. */\n#include \"cuda/driver.h\"\n#include \"cuda/images.h\"\n\n")
    set(rows "")
    set(fatbins "")
    foreach(name IN LISTS names)
        set(fatbin "${CMAKE_CURRENT_BINARY_DIR}/${name}.fatbin")
        list(APPEND fatbins "${fatbin}")
        set(quoted "${fatbin}")
        foreach(reader assembler compiler)
            string(REPLACE "\\" "\\\\" quoted "${quoted}")
            string(REPLACE "\"" "\\\"" quoted "${quoted}")
        endforeach()
        string(APPEND code "FA_CUDA_EMBED(fa_fatbin_${name}, \"${quoted}\")\n")
        if(index STREQUAL "INDEXED")
            string(APPEND rows "    [FA_VARIANT_${name}] =\n")
        endif()
        string(APPEND rows "    FA_CUDA_IMAGE(\"${name}\", fa_fatbin_${name}),\n")
    endforeach()
    set(length "")
    if(index STREQUAL "INDEXED")
        set(length FA_VARIANTS)
    endif()
    if(NOT rows OR NOT index STREQUAL "INDEXED")
        string(APPEND rows "    FA_CUDA_NO_IMAGE,\n")
    endif()
    string(APPEND code "\nfa_cuda_image ${table}[${length}] = {\n${rows}};\n")
    if(collection STREQUAL "library")
        string(APPEND code "\nconst char fa_cuda_architectures[] = \"${FA_CUDA_WORDS}\";\n")
    endif()
    set(file "${CMAKE_CURRENT_BINARY_DIR}/${collection}_images.c")
    set(written "")
    if(EXISTS "${file}")
        file(READ "${file}" written)
    endif()
    if(NOT written STREQUAL code)
        file(WRITE "${file}" "${code}")
    endif()
    add_library(${target} OBJECT "${file}" ${fatbins})
    set_source_files_properties("${file}" PROPERTIES OBJECT_DEPENDS "${fatbins}")
    fa_configure_objects(${target})
endfunction()

# The rows MACRO(argument, ...) of a table in a header, which begin at the start of a line, one list element each, as
# MACRO(argument,argument: without blanks and comments; text in quotes at the end is dropped. macro: a regular
# expression.
function(fa_cuda_read_table result header macro)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${header}")
    file(READ "${header}" text)
    string(REGEX REPLACE "/[*]([^*]|[*]+[^*/])*[*]+/" "" text "\n${text}")
    string(REGEX MATCHALL "\n${macro}[(](\"[^\"]*\"|[^()\"])*[)]" found "${text}")
    set(rows "")
    foreach(row IN LISTS found)
        string(REGEX REPLACE "^\n(.*)[)]$" "\\1" row "${row}")
        string(REGEX REPLACE ", *\"[^\"]*\"$" "" row "${row}")
        string(REGEX REPLACE "[ \n]+" "" row "${row}")
        list(APPEND rows "${row}")
    endforeach()
    set(${result} "${rows}" PARENT_SCOPE)
endfunction()

# The variants of a table like kernels/variants.h, one list element each: name,file,kernel,architecture,definition...
# A field `.name = value` becomes the definition NAME=value, but for those that are text.
function(fa_cuda_read_variants result header)
    fa_cuda_read_table(rows "${header}" "VARIANT[A-Z0-9_]*")
    set(variants "")
    foreach(row IN LISTS rows)
        string(REPLACE "(" ";" row "${row}")
        string(REPLACE "," ";" row "${row}")
        list(POP_FRONT row macro name)
        set(suffix "")
        if(macro STREQUAL "VARIANT_16BIT_SUFFIX")
            list(POP_FRONT row suffix)
        endif()
        set(definitions "")
        unset(text_FILE)
        unset(text_KERNEL)
        foreach(field IN LISTS row)
            if(NOT field MATCHES "^[.]([a-z0-9_]+)=(.+)$")
                message(FATAL_ERROR "${header}: ${name}: \"${field}\" is no `.field = value`")
            endif()
            string(TOUPPER "${CMAKE_MATCH_1}" key)
            set(value "${CMAKE_MATCH_2}")
            if(value MATCHES "^\"(.*)\"$")
                set(text_${key} "${CMAKE_MATCH_1}")
            else()
                string(APPEND definitions ",${key}=${value}")
            endif()
        endforeach()
        string(REGEX MATCH ",ARCHITECTURE=([0-9]+)" found "${definitions}")
        set(rest "${text_FILE},${text_KERNEL},${CMAKE_MATCH_1}${definitions}")
        if(macro STREQUAL "VARIANT")
            list(APPEND variants "${name},${rest}")
        else()
            list(APPEND variants "${name}_f16${suffix},${rest},ELEMENT=FA_ELEMENT_FLOAT16"
                                 "${name}_bf16${suffix},${rest},ELEMENT=FA_ELEMENT_BFLOAT16")
        endif()
    endforeach()
    set(${result} "${variants}" PARENT_SCOPE)
endfunction()

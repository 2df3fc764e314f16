# The instruction sets that the CPU engine is compiled for: FA_ENGINE_ISAS, and for each its flags.
include(CheckCCompilerFlag)

# A build whose subject is another one, or that tests on one machine alone, need not compile engines that it never runs.
set(FA_ISAS all CACHE STRING
    "Instruction sets beside the portable one: all that the compiler has, or a list, for example \"avx2,avx512\"")
mark_as_advanced(FA_ISAS)
set(FA_OPTIONAL_ISAS avx2 avx512 avx512_bf16 amx)
if(FA_ISAS STREQUAL "")
    message(FATAL_ERROR "FA_ISAS is empty; expected all, or some of portable ${FA_OPTIONAL_ISAS}")
endif()
string(REPLACE "," ";" FA_WANTED_ISAS "${FA_ISAS}")
set(FA_UNOPTIMIZED_ISAS "" CACHE STRING
    "Instruction sets whose engines are compiled without optimization, separated by commas: where they are not run (CI)")
mark_as_advanced(FA_UNOPTIMIZED_ISAS)
string(REPLACE "," ";" FA_UNOPTIMIZED "${FA_UNOPTIMIZED_ISAS}")
list(REMOVE_ITEM FA_WANTED_ISAS portable)
foreach(isa IN LISTS FA_WANTED_ISAS)
    if(NOT isa IN_LIST FA_OPTIONAL_ISAS AND NOT FA_ISAS STREQUAL "all")
        message(FATAL_ERROR "FA_ISAS is \"${FA_ISAS}\"; expected all, or some of ${FA_OPTIONAL_ISAS}")
    endif()
endforeach()

# Contraction into fused multiply-adds is wanted everywhere; -ffast-math never is: infinities and NaN
# have a meaning here. Debug gets -O1, for at -O0 every test would take minutes; so do sanitizers, for
# at -O3 compiling the engine with them takes minutes. Fuzzers draw small problems, and clang with
# sanitizers takes minutes even at -O1.
set(FA_ENGINE_FLAGS -ffp-contract=fast -fno-math-errno -O3)
if(FA_BUILD_FUZZERS)
    list(APPEND FA_ENGINE_FLAGS -O0)
elseif(FA_SANITIZE OR CMAKE_BUILD_TYPE STREQUAL "Debug")
    list(APPEND FA_ENGINE_FLAGS -O1)
endif()

set(FA_ENGINE_ISAS portable)
set(FA_ENGINE_FLAGS_PORTABLE "")
set(FA_ENGINE_FLAGS_AVX2 -mavx2 -mfma -mf16c)
set(FA_ENGINE_FLAGS_AVX512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c)
set(FA_ENGINE_FLAGS_AVX512_BF16 ${FA_ENGINE_FLAGS_AVX512} -mavx512bf16)
set(FA_ENGINE_FLAGS_AMX ${FA_ENGINE_FLAGS_AVX512_BF16} -mamx-tile -mamx-bf16)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND CMAKE_SIZEOF_VOID_P EQUAL 8)
    foreach(isa IN LISTS FA_OPTIONAL_ISAS)
        if(NOT FA_ISAS STREQUAL "all" AND NOT isa IN_LIST FA_WANTED_ISAS)
            continue()
        endif()
        string(TOUPPER ${isa} ISA)
        string(REPLACE ";" " " flags "${FA_ENGINE_FLAGS_${ISA}}")
        check_c_compiler_flag("${flags}" FA_COMPILES_${ISA})
        if(FA_COMPILES_${ISA})
            list(APPEND FA_ENGINE_ISAS ${isa})
            if(isa IN_LIST FA_UNOPTIMIZED)
                list(APPEND FA_ENGINE_FLAGS_${ISA} -O0)
            endif()
        else()
            message(STATUS "flashattn: this compiler has no ${isa}: built without it")
        endif()
    endforeach()
endif()

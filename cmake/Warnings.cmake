# Warnings for our own code; a project that embeds us by add_subdirectory keeps its own.
if(PROJECT_IS_TOP_LEVEL)
    add_compile_options(-Wall -Wextra -Wconversion -Wpedantic)
    if(FA_WERROR)
        add_compile_options(-Werror)
    endif()
endif()

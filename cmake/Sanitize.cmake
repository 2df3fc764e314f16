# FA_SANITIZE="address;undefined" or "thread": for every target, or a report would have blind spots.
if(FA_SANITIZE)
    string(REPLACE ";" "," FA_SANITIZE_FLAG "${FA_SANITIZE}")
    add_compile_options(-fsanitize=${FA_SANITIZE_FLAG} -fno-sanitize-recover=all
                        -fno-omit-frame-pointer)
    add_link_options(-fsanitize=${FA_SANITIZE_FLAG})
    # Tests that count on much memory or on allocation failures can ask.
    add_compile_definitions(FA_SANITIZED=1)
endif()

/*
 * Functions that glibc 2.34 moved from libdl and libpthread into libc. Linked on such a machine they would
 * carry that release's version, and the extension would load on nothing older. The linker's --wrap
 * (cmake/Python.cmake) leads calls of them here, where they are bound to the version that every glibc
 * has: a wheel then fits manylinux_2_28.
 */
#include <dlfcn.h>
#include <pthread.h>

#if defined(__x86_64__)
#define FIRST_VERSION "GLIBC_2.2.5"
#else
#define FIRST_VERSION "GLIBC_2.17" /* aarch64 */
#endif

#define BIND(type, name, parameters, arguments)                                                    \
    __asm__(".symver first_" #name "," #name "@" FIRST_VERSION);                                   \
    type first_##name parameters;                                                                  \
    type __wrap_##name parameters;                                                                 \
    type __wrap_##name parameters { return first_##name arguments; }

BIND(void *, dlopen, (const char *file, int mode), (file, mode))
BIND(void *, dlsym, (void *restrict handle, const char *restrict name), (handle, name))
BIND(char *, dlerror, (void), ())
BIND(int, pthread_once, (pthread_once_t * control, void (*function)(void)), (control, function))

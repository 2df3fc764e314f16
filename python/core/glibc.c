/*
 * Functions that glibc 2.34 moved from libdl and libpthread into libc. If they were linked on such
 * a machine, they would require that version, and the extension could not be loaded with an older
 * one. The linker's --wrap (cmake/Python.cmake) redirects calls of them to this file, where they
 * are bound to the version that every glibc has. So a wheel is compatible with manylinux_2_28.
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
BIND(int, pthread_create,
     (pthread_t * thread, const pthread_attr_t *attributes, void *(*function)(void *),
      void *argument),
     (thread, attributes, function, argument))
BIND(int, pthread_join, (pthread_t thread, void **result), (thread, result))
BIND(int, pthread_attr_setstacksize, (pthread_attr_t * attributes, size_t bytes),
     (attributes, bytes))
BIND(int, pthread_key_create, (pthread_key_t * key, void (*destructor)(void *)), (key, destructor))
BIND(void *, pthread_getspecific, (pthread_key_t key), (key))
BIND(int, pthread_setspecific, (pthread_key_t key, const void *value), (key, value))

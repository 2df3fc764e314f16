/* The family of kernels that the environment asks for. */
#include "cuda/family.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static struct {
    pthread_once_t once;
    char name[48]; /* "": none in particular */
} asked_for = {.once = PTHREAD_ONCE_INIT};

static void read_environment(void)
{
    const char *name = getenv("FA_CUDA_KERNEL");
    if (name) snprintf(asked_for.name, sizeof asked_for.name, "%s", name);
}

bool fa_cuda_asked_family(const fa_cuda_family **asked, char *why, size_t size)
{
    pthread_once(&asked_for.once, read_environment);
    *asked = NULL;
    if (!asked_for.name[0]) return true;
    *asked = fa_cuda_find_family(asked_for.name);
    if (*asked) return true;
    char names[64];
    fa_cuda_family_names(names, sizeof names);
    snprintf(why, size, "FA_CUDA_KERNEL is \"%s\"; expected one of the families of kernels: %s",
             asked_for.name, names);
    return false;
}

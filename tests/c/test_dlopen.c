/* The shared library is opened, used with threads, and closed: its threads must not lose their
 * code. */
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "flashattn.h"

enum { N = 64, HEADS = 8, D = 32, THREADS = 4, COUNT = N * HEADS * D };

typedef fa_status forward(const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                          const fa_tensor *out, float *lse, const fa_options *options);

static float data[4][COUNT];

static fa_tensor tensor(float *values)
{
    fa_tensor t = {values, FA_FLOAT32, {1, N, HEADS, D}, {COUNT, HEADS * D, D, 1}};
    return t;
}

/* The values are equal, so the result has this value whatever the weights are. */
static int use(void)
{
    void *library = dlopen(LIBRARY_PATH, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    forward *f;
    void *address = dlsym(library, "fa_forward");
    memcpy(&f, &address, sizeof f);
    fa_options options = FA_OPTIONS_INIT;
    options.threads = THREADS;
    for (int i = 0; i < COUNT; i++) data[2][i] = 3, data[3][i] = NAN;
    const fa_tensor q = tensor(data[0]), k = tensor(data[1]), v = tensor(data[2]),
                    out = tensor(data[3]);
    const fa_status status = f(&q, &k, &v, &out, NULL, &options);
    dlclose(library);
    usleep(20000); /* while its threads wait for work */
    for (int i = 0; i < COUNT; i++)
        if (!(fabsf(data[3][i] - 3) < 1e-5f)) return 1;
    return status == FA_OK ? 0 : 1;
}

static void *use_in_thread(void *failures)
{
    *(int *)failures += use();
    return NULL;
}

int main(void)
{
    int failures = 0;
    for (int n = 0; n < 3; n++) failures += use();
    for (int n = 0; n < 3; n++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, use_in_thread, &failures) != 0) return 1;
        pthread_join(thread, NULL);
    }
    usleep(50000);
    printf("%d failures\n", failures);
    return failures != 0;
}

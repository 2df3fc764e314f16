/*
 * The CPU's row of the table in backend.h: it calls the engine that dispatch.c chooses.
 */
#include "backend.h"

#include <math.h>
#include <stdio.h>

#include "append.h"
#include "dispatch.h"
#include "error.h"

static fa_status open_cpu(void) { return FA_OK; }

static fa_status get_engine(const fa_cpu_engine **engine)
{
    char why[256] = "";
    *engine = fa_cpu_engine_get(why, sizeof why);
    return *engine ? FA_OK : fa_fail(FA_ERROR_DEVICE, "%s", why);
}

static const char *const pass_names[] = {"forward", "backward", "decode", "weights"};

/* Sets the error message for an engine's status. A checked problem can only fail for lack of memory. */
static fa_status engine_status(fa_status status, const char *what)
{
    if (status == FA_OK) return FA_OK;
    return fa_fail(status, "fa_%s could not allocate its scratch memory on the CPU", what);
}

static fa_status run(const fa_arguments *a, const fa_problem *p)
{
    (void)a;
    const fa_cpu_engine *engine;
    FA_TRY(get_engine(&engine));
    fa_status status = FA_OK;
    switch (p->pass) {
    case FA_PASS_FORWARD: status = engine->forward(p); break;
    case FA_PASS_BACKWARD: status = engine->backward(p); break;
    case FA_PASS_DECODE: status = engine->decode(p); break;
    case FA_PASS_WEIGHTS: status = engine->weights(p); break;
    }
    return engine_status(status, pass_names[p->pass]);
}

static fa_status combine(const fa_combine_problem *c)
{
    const fa_cpu_engine *engine;
    FA_TRY(get_engine(&engine));
    return engine_status(engine->combine(c), "combine");
}

static fa_status append(const fa_append_call *call, const fa_append_problem *p)
{
    (void)call;
    fa_cpu_append(p);
    return FA_OK;
}

static fa_status dry_run(const fa_problem *p, fa_answer *answer)
{
    const fa_cpu_engine *engine;
    FA_TRY(get_engine(&engine));
    if (answer->wants_text) engine->describe(p, answer->text, sizeof answer->text);
    answer->workspace_bytes = 0; /* the CPU allocates its own scratch */
    return FA_OK;
}

static fa_status get_info(void *filled)
{
    fa_cpu_info *info = filled;
    const fa_cpu_engine *engine;
    FA_TRY(get_engine(&engine));
    (void)snprintf(info->isa, sizeof info->isa, "%s", engine->name);
    fa_cpu_engine_names(info->isas, sizeof info->isas);
    info->threads = fa_cpu_threads(0, INFINITY);
    info->vector_bits = engine->vector_bits;
    return FA_OK;
}

const fa_backend fa_cpu_backend = {.open = open_cpu,
                                   .run = run,
                                   .combine = combine,
                                   .append = append,
                                   .dry_run = dry_run,
                                   .get_info = get_info};

/* Random problems over the whole option space, a fixed range of numbers. */
#include "check.h"
#include "random_problem.h"

/* Sanitizers check code paths and sizes, which repeat sooner than numbers do. */
#ifdef FA_SANITIZED
enum { PROBLEMS = 150 };
#else
enum { PROBLEMS = 400 };
#endif

int main(void)
{
    static random_result result;
    const random_settings settings = {.device = FA_DEVICE_CPU};
    test_begin();
    for (uint64_t number = 0; number < PROBLEMS; number++) {
        random_problem_run(number, &settings, &result);
        CHECK(result.report.ok, "%s\n  %s\n  %s", result.report.message, result.description,
              result.reproduce);
    }
    return test_end();
}

/*
 * One sequence over the processes of an MPI program: each has some rows of q, k and v, and computes
 * the same rows of the causal attention of all of them. Keys and values go around in a ring.
 *
 *     mpicc ring.c $(pkg-config --cflags --libs flashattn) -lm -o ring
 *     mpirun -n 4 ./ring
 *
 * Prints, on rank 0, by how much the result differs from one call with all rows:
 *     4 ranks of 96 rows: largest difference 1.0e-07
 *
 * What it shows: a call on a part of the keys, whose place options.diagonal tells; the log-sum-exp that
 * comes with each part; fa_combine, which merges parts. For several GPUs the rows lie in their memory, the
 * messages are ncclSend and ncclRecv on a stream of their own, and the rest is the same.
 */
#include <flashattn.h>
#include <math.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 96, HEADS = 3, HEADS_KV = 1, DIM = 32 };
enum { QUERY = ROWS * HEADS * DIM, KEY = ROWS * HEADS_KV * DIM, LSE = ROWS * HEADS };

/* Keys, then values, of one rank. */
typedef struct block {
    float data[2 * KEY];
} block;

/* A rank's rows of the output, and their log-sum-exp. */
typedef struct part {
    float out[QUERY];
    float lse[LSE];
} part;

static void stop(const char *what)
{
    fprintf(stderr, "ring: %s\n", what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void check(fa_status status)
{
    if (status != FA_OK) stop(fa_last_error());
}

/* Numbers from -1 to 1 that follow from the row's position alone. */
static void fill(float *x, int64_t first, int64_t rows, int64_t width, uint32_t seed)
{
    for (int64_t i = 0; i < rows * width; i++) {
        uint32_t h = (uint32_t)(first * width + i) * 2654435761u + seed;
        h ^= h >> 15, h *= 2246822519u, h ^= h >> 13;
        x[i] = (float)(h >> 8) / (float)(1 << 23) - 1;
    }
}

static void fill_block(float *keys, float *values, int64_t first, int64_t rows)
{
    fill(keys, first, rows, HEADS_KV * DIM, 2);
    fill(values, first, rows, HEADS_KV * DIM, 3);
}

/* Queries of one rank against keys that begin `ahead` rows before them. */
static void attend(float *queries, block *b, int64_t ahead, part *result)
{
    fa_tensor q = fa_bshd(queries, FA_FLOAT32, 1, ROWS, HEADS, DIM);
    fa_tensor k = fa_bshd(b->data, FA_FLOAT32, 1, ROWS, HEADS_KV, DIM);
    fa_tensor v = fa_bshd(b->data + KEY, FA_FLOAT32, 1, ROWS, HEADS_KV, DIM);
    fa_tensor out = fa_bshd(result->out, FA_FLOAT32, 1, ROWS, HEADS, DIM);
    fa_options options = FA_OPTIONS_INIT;
    options.flags = FA_CAUSAL | FA_DIAGONAL;
    options.diagonal = ahead;
    check(fa_forward(&q, &k, &v, &out, result->lse, &options));
}

static void merge(part *total, part *other)
{
    static part both;
    const fa_tensor parts[] = {fa_bshd(total->out, FA_FLOAT32, 1, ROWS, HEADS, DIM),
                               fa_bshd(other->out, FA_FLOAT32, 1, ROWS, HEADS, DIM)};
    const float *lses[] = {total->lse, other->lse};
    const fa_tensor out = fa_bshd(both.out, FA_FLOAT32, 1, ROWS, HEADS, DIM);
    check(fa_combine(parts, lses, 2, &out, both.lse, NULL));
    memcpy(total, &both, sizeof both);
}

/* In step t a rank has the keys of rank - t; the next ones arrive while it works on them. */
static void ring(int rank, int ranks, part *total)
{
    static float queries[QUERY];
    static block blocks[2];
    static part other;
    fill(queries, (int64_t)rank * ROWS, ROWS, HEADS * DIM, 1);
    fill_block(blocks[0].data, blocks[0].data + KEY, (int64_t)rank * ROWS, ROWS);
    for (int t = 0; t < ranks; t++) {
        block *now = &blocks[t % 2], *next = &blocks[(t + 1) % 2];
        MPI_Request requests[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
        if (t + 1 < ranks) {
            MPI_Isend(now->data, 2 * KEY, MPI_FLOAT, (rank + 1) % ranks, t, MPI_COMM_WORLD,
                      &requests[0]);
            MPI_Irecv(next->data, 2 * KEY, MPI_FLOAT, (rank + ranks - 1) % ranks, t, MPI_COMM_WORLD,
                      &requests[1]);
        }
        /* Of later ranks' keys these queries see none. */
        if (t == 0) attend(queries, now, 0, total);
        else if (t <= rank) {
            attend(queries, now, (int64_t)t * ROWS, &other);
            merge(total, &other);
        }
        MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
    }
}

static float *numbers(int64_t count)
{
    float *x = malloc((size_t)count * sizeof(float));
    if (!x) stop("no memory");
    return x;
}

/* All rows in one call. */
static float *whole(int ranks)
{
    const int64_t n = (int64_t)ranks * ROWS;
    float *queries = numbers(n * HEADS * DIM), *result = numbers(n * HEADS * DIM);
    float *keys = numbers(n * HEADS_KV * DIM), *values = numbers(n * HEADS_KV * DIM);
    fill(queries, 0, n, HEADS * DIM, 1);
    fill_block(keys, values, 0, n);
    fa_tensor q = fa_bshd(queries, FA_FLOAT32, 1, n, HEADS, DIM);
    fa_tensor k = fa_bshd(keys, FA_FLOAT32, 1, n, HEADS_KV, DIM);
    fa_tensor v = fa_bshd(values, FA_FLOAT32, 1, n, HEADS_KV, DIM);
    fa_tensor out = fa_bshd(result, FA_FLOAT32, 1, n, HEADS, DIM);
    fa_options options = FA_OPTIONS_INIT;
    options.flags = FA_CAUSAL;
    check(fa_forward(&q, &k, &v, &out, NULL, &options));
    free(queries), free(keys), free(values);
    return result;
}

int main(int argc, char **argv)
{
    int rank, ranks, wrong = 0;
    static part mine;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    ring(rank, ranks, &mine);
    float *all = rank == 0 ? numbers((int64_t)ranks * QUERY) : NULL;
    MPI_Gather(mine.out, QUERY, MPI_FLOAT, all, QUERY, MPI_FLOAT, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        float *expected = whole(ranks), largest = 0;
        for (int64_t i = 0; i < (int64_t)ranks * QUERY; i++) {
            const float difference = fabsf(all[i] - expected[i]);
            if (!(difference <= largest)) largest = difference;
        }
        printf("%d ranks of %d rows: largest difference %.1e\n", ranks, ROWS, (double)largest);
        wrong = !(largest < 1e-5f);
        free(expected), free(all);
    }
    MPI_Finalize();
    return wrong;
}

/* Lengths and pages from .npy files. */
#include "lengths.h"

#include <inttypes.h>
#include <stdlib.h>

#include "output.h"
#include "npy.h"
#include "tensors.h"

/* One file's integers. */
typedef struct integers {
    const char *option, *path;
    int axes;
    int64_t shape[2];
    int32_t *data; /* NULL: the option was not given */
} integers;

/* Reads the file if there is one; axes: its required number of axes. */
static bool read_integers(integers *x, const char *option, const char *path, int axes)
{
    npy_array array;
    *x = (integers){.option = option, .path = path, .axes = axes};
    if (!path) return true;
    if (!cli_read_array(option, path, &array)) return false;
    bool fine = array.axes == axes;
    if (!fine)
        cli_error("%s %s has %d %s; expected %s", option, path, array.axes,
                  array.axes == 1 ? "axis" : "axes",
                  axes == 1 ? "1, with an integer for each sequence"
                            : "2: (batch, pages of a sequence)");
    for (int i = 0; fine && i < axes; i++) x->shape[i] = array.shape[i];
    if (fine) x->data = cli_integers_take(&array, option, path);
    free(array.data);
    return x->data != NULL;
}

/* ---- checks ---------------------------------------------------------------------------------- */

static bool check_count(const integers *x, int64_t expected, const char *of)
{
    if (!x->data || x->shape[0] == expected) return true;
    cli_error("%s %s has %" PRId64 " %s; expected %" PRId64 ", %s", x->option, x->path, x->shape[0],
              x->shape[0] == 1 ? "entry" : "entries", expected, of);
    return false;
}

/* Checks that entries begin at 0 or more, never decrease, and end within the tensor's rows. */
static bool check_cumulative(const integers *x, int64_t rows, const char *of)
{
    if (!x->data) return true;
    if (x->shape[0] < 1) {
        cli_error("%s %s has no entries; expected one more than there are sequences", x->option,
                  x->path);
        return false;
    }
    for (int64_t i = 0; i < x->shape[0]; i++) {
        const int32_t low = i ? x->data[i - 1] : 0;
        if (x->data[i] >= low && x->data[i] <= rows) continue;
        cli_error("%s %s: entry %" PRId64 " is %" PRId32 "; expected %" PRId32 " to %" PRId64
                  " (%s)",
                  x->option, x->path, i, x->data[i], low, rows, of);
        return false;
    }
    return true;
}

/* Checks that lengths fit into the rows of their sequences. */
static bool check_lengths(const integers *x, const int32_t *cumulative, int64_t rows)
{
    for (int64_t b = 0; x->data && b < x->shape[0]; b++) {
        const int64_t room = cumulative ? (int64_t)cumulative[b + 1] - cumulative[b] : rows;
        if (x->data[b] >= 0 && x->data[b] <= room) continue;
        cli_error("%s %s: entry %" PRId64 " is %" PRId32 "; expected 0 to %" PRId64
                  ", the rows of that sequence",
                  x->option, x->path, b, x->data[b], room);
        return false;
    }
    return true;
}

/* Checks the pages that the sequences use; later entries are not read. */
static bool check_pages(const integers *table, const int32_t *seqlens, const fa_tensor *k)
{
    const int64_t page = k->shape[1], pages = k->shape[0], entries = table->shape[1];
    for (int64_t b = 0; b < table->shape[0]; b++)
        for (int64_t i = 0; i * page < seqlens[b]; i++) {
            const int32_t entry = table->data[b * entries + i];
            if (entry >= 0 && entry < pages) continue;
            cli_error("%s %s: entry (%" PRId64 ", %" PRId64 ") is %" PRId32
                      "; expected 0 to %" PRId64 ", the pages of --k",
                      table->option, table->path, b, i, entry, pages - 1);
            return false;
        }
    return true;
}

static bool check_table(const integers *table, const integers *seqlens_k, const integers *cu_k,
                        const fa_tensor *k)
{
    if (!table->data) return true;
    const char *wrong = cu_k->data         ? "with --cu-seqlens-k; expected --seqlens-k"
                        : !seqlens_k->data ? "without --seqlens-k; expected both"
                                           : NULL;
    if (wrong) cli_error("--block-table is given %s", wrong);
    else if (k->shape[1] < 1 || table->shape[1] < 1)
        cli_error("--block-table %s has %" PRId64
                  " entries a sequence, and a page of --k has %" PRId64
                  " rows; expected at least 1",
                  table->path, table->shape[1], k->shape[1]);
    else return true;
    return false;
}

static int64_t longest(const integers *cu)
{
    int64_t max = 0;
    for (int64_t b = 0; b + 1 < cu->shape[0]; b++)
        if (cu->data[b + 1] - cu->data[b] > max) max = cu->data[b + 1] - cu->data[b];
    return max;
}

/* ---- loading --------------------------------------------------------------------------------- */

typedef struct files {
    integers seqlens_q, seqlens_k, cu_q, cu_k, table;
} files;

static bool read_files(files *f, const lengths_paths *p)
{
    return read_integers(&f->seqlens_q, "--seqlens-q", p->seqlens_q, 1) &&
           read_integers(&f->seqlens_k, "--seqlens-k", p->seqlens_k, 1) &&
           read_integers(&f->cu_q, "--cu-seqlens-q", p->cu_seqlens_q, 1) &&
           read_integers(&f->cu_k, "--cu-seqlens-k", p->cu_seqlens_k, 1) &&
           read_integers(&f->table, "--block-table", p->block_table, 2);
}

/* A packed tensor has one batch item. Otherwise it has as many as there are sequences; if nothing
 * is packed, that is the batch of --q. */
static bool check_batch(const char *name, const fa_tensor *t, bool packed, bool other_packed,
                        int64_t batch)
{
    if (t->shape[0] == (packed ? 1 : batch)) return true;
    cli_error("%s has a batch of %" PRId64 "; expected %" PRId64 ", as %s", name, t->shape[0],
              packed ? 1 : batch,
              packed         ? "its sequences are packed"
              : other_packed ? "there are sequences"
                             : "--q has");
    return false;
}

static bool check_all(const files *f, int64_t batch, const fa_tensor *q, const fa_tensor *k)
{
    const bool paged = f->table.data != NULL;
    const int64_t rows_k = paged ? k->shape[1] * f->table.shape[1] : k->shape[1];
    return check_cumulative(&f->cu_q, q->shape[1], "the rows of --q") &&
           check_cumulative(&f->cu_k, k->shape[1], "the rows of --k") &&
           check_count(&f->cu_q, batch + 1, "one more than sequences") &&
           check_count(&f->cu_k, batch + 1, "one more than sequences") &&
           check_count(&f->seqlens_q, batch, "one for each sequence") &&
           check_count(&f->seqlens_k, batch, "one for each sequence") &&
           check_count(&f->table, batch, "a row for each sequence") &&
           check_batch("--q", q, f->cu_q.data, f->cu_k.data, batch) &&
           (paged || check_batch("--k", k, f->cu_k.data, f->cu_q.data, batch)) &&
           check_lengths(&f->seqlens_q, f->cu_q.data, q->shape[1]) &&
           check_lengths(&f->seqlens_k, f->cu_k.data, rows_k) &&
           (!paged || check_pages(&f->table, f->seqlens_k.data, k));
}

static void set_options(const files *f, int64_t batch, fa_options *o)
{
    o->seqlens_q = f->seqlens_q.data;
    o->seqlens_k = f->seqlens_k.data;
    o->cu_seqlens_q = f->cu_q.data;
    o->cu_seqlens_k = f->cu_k.data;
    o->num_sequences = f->cu_q.data || f->cu_k.data ? batch : 0;
    if (f->cu_q.data) o->max_seqlen_q = longest(&f->cu_q);
    if (f->cu_k.data) o->max_seqlen_k = longest(&f->cu_k);
    o->block_table = f->table.data;
    o->block_table_stride = f->table.data ? f->table.shape[1] : 0;
}

bool lengths_load(lengths *l, const lengths_paths *paths, const fa_tensor *q, const fa_tensor *k,
                  fa_options *options)
{
    files f = {0};
    bool fine = read_files(&f, paths) && check_table(&f.table, &f.seqlens_k, &f.cu_k, k);
    const integers *cu = f.cu_q.data ? &f.cu_q : &f.cu_k;
    const int64_t batch = cu->data ? cu->shape[0] - 1 : q->shape[0];
    fine = fine && check_all(&f, batch, q, k);
    *l = (lengths){f.seqlens_q.data,
                   f.seqlens_k.data,
                   f.cu_q.data,
                   f.cu_k.data,
                   f.table.data,
                   batch,
                   f.table.data ? f.table.shape[0] * f.table.shape[1] : 0};
    if (fine) set_options(&f, batch, options);
    return fine;
}

void lengths_add_copies(const lengths *l, device_copies *copies, fa_options *o)
{
    const size_t each = (size_t)l->batch * sizeof(int32_t), sums = each + sizeof(int32_t);
    device_copies_add(copies, &o->seqlens_q, each, false);
    device_copies_add(copies, &o->seqlens_k, each, false);
    device_copies_add(copies, &o->cu_seqlens_q, sums, false);
    device_copies_add(copies, &o->cu_seqlens_k, sums, false);
    device_copies_add(copies, &o->block_table, (size_t)l->table_entries * sizeof(int32_t), false);
}

void lengths_free(lengths *l)
{
    free(l->seqlens_q);
    free(l->seqlens_k);
    free(l->cu_seqlens_q);
    free(l->cu_seqlens_k);
    free(l->block_table);
}

/* Packed codes into a sum: a table says what the codes of a byte stand for, in units of a scale. */
#include <stdint.h>

#include "byte_values.h"
#include "floats.h"
#include "past_cache.h"

#define STRETCH 4096 /* elements whose sum stays in the first cache, a multiple of 8 */

static inline int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Declares add_bytes_N: sum += the N values of each of `count` bytes, times a scale. */
#define ADD_BYTES(N)                                                                                                   \
    static inline void add_bytes_##N(                                                                                  \
        const uint8_t *packed, int64_t count, const float *table, float scale, float *sum) {                           \
        typedef float row __attribute__((vector_size(4 * N)));                                                         \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            row values, before;                                                                                        \
            __builtin_memcpy(&values, table + N * packed[i], sizeof values);                                           \
            __builtin_memcpy(&before, sum + N * i, sizeof before);                                                     \
            before += values * scale;                                                                                  \
            __builtin_memcpy(sum + N * i, &before, sizeof before);                                                     \
        }                                                                                                              \
    }

ADD_BYTES(1)
ADD_BYTES(2)
ADD_BYTES(4)
ADD_BYTES(8)

/* What codes stand for; `per_byte` of them are in a byte. */
struct book {
    const float *table; /* [256, per_byte] */
    int64_t per_byte;
    enum { BY_TABLE, INTEGERS, POWERS } meaning;
};

static struct book book_of(const float *table, int64_t per_byte) {
    struct book book = {table, per_byte, BY_TABLE};
    if (per_byte == 1 ? follows(table, integer_of) : per_byte == 2 && follows_halves(table))
        book.meaning = INTEGERS;
    else if (per_byte == 1 && follows(table, power_of))
        book.meaning = POWERS;
    return book;
}

static inline void add_bytes(struct book book, const uint8_t *bytes, int64_t count, float scale, float *sum) {
    switch (book.per_byte) {
    case 1:
        switch (book.meaning) {
        case INTEGERS: add_values_of(integer_of, bytes, count, scale, sum); break;
        case POWERS: add_values_of(power_of, bytes, count, scale, sum); break;
        default: add_bytes_1(bytes, count, book.table, scale, sum);
        }
        break;
    case 2:
        if (book.meaning == INTEGERS)
            add_halves(bytes, count, scale, sum);
        else
            add_bytes_2(bytes, count, book.table, scale, sum);
        break;
    case 4: add_bytes_4(bytes, count, book.table, scale, sum); break;
    default: add_bytes_8(bytes, count, book.table, scale, sum);
    }
}

/* sum[i - start] += value of code i * scale for start <= i < stop. */
static inline void add_block(
    struct book book, const uint8_t *packed, float scale, int64_t start, int64_t stop, float *sum) {
    const float *table = book.table;
    int64_t per_byte = book.per_byte;
    int64_t i = start;
    for (; i < stop && i % per_byte; i++)
        sum[i - start] += table[packed[i / per_byte] * per_byte + i % per_byte] * scale;
    int64_t count = (stop - i) / per_byte;
    add_bytes(book, packed + i / per_byte, count, scale, sum + i - start);
    for (i += count * per_byte; i < stop; i++)
        sum[i - start] += table[packed[i / per_byte] * per_byte + i % per_byte] * scale;
}

static void add_stretch(
    struct book book, const uint8_t *packed, const float *scales, int64_t block_numel, float sign, int64_t start,
    int64_t stop, float *sum) {
    for (int64_t i = start, end; i < stop; i = end) {
        end = smaller(stop, (i / block_numel + 1) * block_numel);
        float scale = sign * scales[i / block_numel];
        add_block(book, packed, scale, i, end, sum + i - start);
    }
}

/* The terms' elements start..stop-1 in their order, added to `sum`. */
static void add_terms(
    struct book book, const uint64_t *packed, const uint64_t *scales, int64_t num_terms, int64_t block_numel, float sign,
    int64_t start, int64_t stop, float *sum) {
    for (int64_t term = 0; term < num_terms; term++)
        add_stretch(
            book, (const uint8_t *)packed[term], (const float *)scales[term], block_numel, sign, start, stop, sum);
}

/* dense += (term 0 + term 1 + ...) / divisor; one term is added, or with sign -1 subtracted, without a sum between. */
void add_codes(
    const uint64_t *packed, const uint64_t *scales, int64_t num_terms, const float *table, int64_t per_byte,
    int64_t block_numel, float sign, float divisor, float *dense, int64_t numel) {
    float sum[STRETCH];
    struct book book = book_of(table, per_byte);
    for (int64_t start = 0; start < numel; start += STRETCH) {
        int64_t stop = smaller(numel, start + STRETCH);
        int direct = num_terms == 1 && divisor == 1;
        float *target = direct ? dense + start : sum;
        if (!direct)
            for (int64_t i = 0; i < STRETCH; i++)
                sum[i] = num_terms == 1 ? -0.0f : 0.0f; /* a zero keeps its sign where nothing is added to it */
        add_terms(book, packed, scales, num_terms, block_numel, sign, start, stop, target);
        if (!direct)
            for (int64_t i = start; i < stop; i++)
                dense[i] += sum[i - start] / divisor;
    }
}

/* out = elements first..first+numel-1 of (term 0 + term 1 + ...) / divisor: what `add_codes` leaves in zeros. */
void write_codes(
    const uint64_t *packed, const uint64_t *scales, int64_t num_terms, const float *table, int64_t per_byte,
    int64_t block_numel, float divisor, int64_t first, float *out, int64_t numel) {
    _Alignas(64) float sum[STRETCH];
    struct book book = book_of(table, per_byte);
    int64_t width = before_aligned(out); /* all others start aligned */
    for (int64_t start = 0; start < numel; start += width, width = STRETCH) {
        width = smaller(numel - start, width);
        for (int64_t i = 0; i < STRETCH; i++)
            sum[i] = 0;
        add_terms(book, packed, scales, num_terms, block_numel, 1, first + start, first + start + width, sum);
        divide(sum, width, divisor);
        for (int64_t i = 0; i < width; i++)
            sum[i] += 0.0f; /* no zero stays negative */
        copy_part(sum, width, numel, out + start);
    }
    finish_past_cache();
}

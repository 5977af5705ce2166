/* Sums of packed codes. A table gives the values of the codes in each byte, in units of the scale of a block. */
#include <stdint.h>

#include "byte_values.h"
#include "floats.h"
#include "nontemporal.h"

#define CHUNK 4096 /* elements per chunk, whose sums stay in the L1 cache; a multiple of 8 */

static inline int64_t min_int64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Defines add_bytes_N: adds scale * the N decoded values of each of `count` bytes to `sum`. */
#define ADD_BYTES(N)                                                                                                   \
    static inline void add_bytes_##N(                                                                                  \
        const uint8_t *packed, int64_t count, const float *table, float scale, float *sum) {                           \
        typedef float row __attribute__((vector_size(4 * N)));                                                         \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            row values, sums;                                                                                          \
            __builtin_memcpy(&values, table + N * packed[i], sizeof values);                                           \
            __builtin_memcpy(&sums, sum + N * i, sizeof sums);                                                         \
            sums += values * scale;                                                                                    \
            __builtin_memcpy(sum + N * i, &sums, sizeof sums);                                                         \
        }                                                                                                              \
    }

ADD_BYTES(1)
ADD_BYTES(2)
ADD_BYTES(4)
ADD_BYTES(8)

/* How to decode a byte, which holds `per_byte` codes: by a table lookup, or by a formula that gives the same values. */
struct codebook {
    const float *table; /* [256, per_byte] */
    int64_t per_byte;
    enum { NONE, INTEGERS, POWERS } formula;
};

static struct codebook codebook_of(const float *table, int64_t per_byte) {
    struct codebook codebook = {table, per_byte, NONE};
    if (per_byte == 1 ? matches_table(table, decode_integer) : per_byte == 2 && halves_match_table(table))
        codebook.formula = INTEGERS;
    else if (per_byte == 1 && matches_table(table, decode_power))
        codebook.formula = POWERS;
    return codebook;
}

static inline void add_bytes(struct codebook codebook, const uint8_t *bytes, int64_t count, float scale, float *sum) {
    switch (codebook.per_byte) {
    case 1:
        switch (codebook.formula) {
        case INTEGERS: add_decoded(decode_integer, bytes, count, scale, sum); break;
        case POWERS: add_decoded(decode_power, bytes, count, scale, sum); break;
        default: add_bytes_1(bytes, count, codebook.table, scale, sum);
        }
        break;
    case 2:
        if (codebook.formula == INTEGERS)
            add_halves(bytes, count, scale, sum);
        else
            add_bytes_2(bytes, count, codebook.table, scale, sum);
        break;
    case 4: add_bytes_4(bytes, count, codebook.table, scale, sum); break;
    default: add_bytes_8(bytes, count, codebook.table, scale, sum);
    }
}

/* sum[i - start] += scale * the value of code i, for start <= i < stop. */
static inline void add_block(
    struct codebook codebook, const uint8_t *packed, float scale, int64_t start, int64_t stop, float *sum) {
    const float *table = codebook.table;
    int64_t per_byte = codebook.per_byte;
    int64_t i = start;
    for (; i < stop && i % per_byte; i++)
        sum[i - start] += table[packed[i / per_byte] * per_byte + i % per_byte] * scale;
    int64_t count = (stop - i) / per_byte;
    add_bytes(codebook, packed + i / per_byte, count, scale, sum + i - start);
    for (i += count * per_byte; i < stop; i++)
        sum[i - start] += table[packed[i / per_byte] * per_byte + i % per_byte] * scale;
}

static void add_term(
    struct codebook codebook, const uint8_t *packed, const float *scales, int64_t block_numel, float sign,
    int64_t start, int64_t stop, float *sum) {
    for (int64_t i = start, end; i < stop; i = end) {
        end = min_int64(stop, (i / block_numel + 1) * block_numel);
        float scale = sign * scales[i / block_numel];
        add_block(codebook, packed, scale, i, end, sum + i - start);
    }
}

/* Adds elements start..stop-1 of all terms to `sum`, in order of the terms. */
static void add_terms(
    struct codebook codebook, const uint64_t *packed, const uint64_t *scales, int64_t num_terms, int64_t block_numel,
    float sign, int64_t start, int64_t stop, float *sum) {
    for (int64_t term = 0; term < num_terms; term++)
        add_term(
            codebook, (const uint8_t *)packed[term], (const float *)scales[term], block_numel, sign, start, stop, sum);
}

/* dense += (term 0 + term 1 + ...) / divisor, fp32 [numel]; element i of a term is sign * its scale * the value of its
   code. packed, scales: addresses of each term's codes, uint8 [ceil(numel / per_byte)], and scales, fp32 [ceil(numel /
   block_numel)]; table: fp32 [256, per_byte]; sign: 1 or -1; divisor > 0. */
void add_codes(
    const uint64_t *packed, const uint64_t *scales, int64_t num_terms, const float *table, int64_t per_byte,
    int64_t block_numel, float sign, float divisor, float *dense, int64_t numel) {
    float sum[CHUNK];
    struct codebook codebook = codebook_of(table, per_byte);
    for (int64_t start = 0; start < numel; start += CHUNK) {
        int64_t stop = min_int64(numel, start + CHUNK);
        int direct = num_terms == 1 && divisor == 1;
        float *target = direct ? dense + start : sum;
        if (!direct)
            for (int64_t i = 0; i < CHUNK; i++)
                sum[i] = num_terms == 1 ? -0.0f : 0.0f; /* adding a single term to -0.0 keeps its zeros' signs */
        add_terms(codebook, packed, scales, num_terms, block_numel, sign, start, stop, target);
        if (!direct)
            for (int64_t i = start; i < stop; i++)
                dense[i] += sum[i - start] / divisor;
    }
}

/* out = elements first..first+numel-1 of (term 0 + ...) / divisor, fp32 [numel], with the bits of 0 + `add_codes`. */
void write_codes(
    const uint64_t *packed, const uint64_t *scales, int64_t num_terms, const float *table, int64_t per_byte,
    int64_t block_numel, float divisor, int64_t first, float *out, int64_t numel) {
    _Alignas(64) float sum[CHUNK];
    struct codebook codebook = codebook_of(table, per_byte);
    int64_t width = numel_before_aligned(out); /* aligns all later chunks */
    for (int64_t start = 0; start < numel; start += width, width = CHUNK) {
        width = min_int64(numel - start, width);
        for (int64_t i = 0; i < CHUNK; i++)
            sum[i] = 0;
        add_terms(codebook, packed, scales, num_terms, block_numel, 1, first + start, first + start + width, sum);
        divide(sum, width, divisor);
        for (int64_t i = 0; i < width; i++)
            sum[i] += 0.0f; /* -0.0 becomes +0.0 */
        copy_chunk(sum, width, numel, out + start);
    }
    fence_nontemporal_stores();
}

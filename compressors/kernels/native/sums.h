/* Sums in fp64 in an order that vectors of any width, and other devices, can follow.

   Stretches of 1024 terms, the last one filled up with zeros, are folded in half until one is left; then the sums of
   the stretches likewise. Zeros at the end change nothing, so less than a stretch may be folded as any power of two. */
#ifndef SUMS_H
#define SUMS_H

#include <stdint.h>

#define SUM_STRETCH 1024
#define EIGHTH (SUM_STRETCH / 8)

typedef double (*sum_term)(float x, float limit);

static inline double magnitude_term(float x, float limit) {
    float magnitude = __builtin_fabsf(x);
    return magnitude > limit ? limit : magnitude;
}

static inline double square_term(float x, float limit) {
    double magnitude = magnitude_term(x, limit);
    return magnitude * magnitude;
}

static inline double positive_term(float x, float limit) {
    (void)limit;
    return x >= 0 ? x : 0;
}

static inline double negative_term(float x, float limit) {
    (void)limit;
    return x >= 0 ? 0 : x;
}

/* Folds `width` terms, a power of two, in place. */
static inline double folded(double *terms, int64_t width) {
    for (int64_t half = width / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; i++)
            terms[i] += terms[half + i];
    return terms[0];
}

/* The terms of 0 <= count <= SUM_STRETCH elements; the first three folds happen in registers. */
static inline __attribute__((always_inline)) double stretch_sum(
    const float *x, int64_t count, sum_term term, float limit) {
    float padded[SUM_STRETCH];
    double terms[EIGHTH];
    int64_t width = EIGHTH;
    while (width < count)
        width *= 2;
    if (count < width) {
        __builtin_memset(padded, 0, sizeof padded);
        __builtin_memcpy(padded, x, (uint64_t)count * sizeof *x);
        x = padded;
    }
    int64_t eighth = width / 8;
    for (int64_t i = 0; i < eighth; i++) {
        double t[8];
        for (int64_t j = 0; j < 8; j++)
            t[j] = term(x[i + j * eighth], limit);
        terms[i] = ((t[0] + t[4]) + (t[2] + t[6])) + ((t[1] + t[5]) + (t[3] + t[7]));
    }
    return folded(terms, eighth);
}

/* The sum of the sums of stretches, folded in place; 0 of none. */
static inline double folded_sum(double *sums, int64_t count) {
    while (count > 1) {
        int64_t stretches = 0;
        for (int64_t start = 0; start < count; start += SUM_STRETCH) {
            double terms[SUM_STRETCH] = {0};
            int64_t width = count - start < SUM_STRETCH ? count - start : SUM_STRETCH;
            __builtin_memcpy(terms, sums + start, (uint64_t)width * sizeof *sums);
            sums[stretches++] = folded(terms, SUM_STRETCH);
        }
        count = stretches;
    }
    return count ? sums[0] : 0;
}

#endif

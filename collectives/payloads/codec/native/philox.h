/* Philox4x32-10, counter-based random numbers: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".

   Number i of a key is word i % 64 / 16 of counter 16 * (i / 64) + i % 16: 64 numbers at a time come from 16
   neighbouring counters, with nothing to be put in order. */
#ifndef PHILOX_H
#define PHILOX_H

#include <stdint.h>

#define NUMBERS 64 /* of a stretch */
#define SHARED (2 * NUMBERS)
#define COUNTERS 16

typedef uint32_t philox_words __attribute__((vector_size(4 * COUNTERS)));
typedef uint64_t philox_wide __attribute__((vector_size(8 * COUNTERS))); /* a word in the low half of every lane */

#ifdef __clang__
#define WIDEST_REGISTERS __attribute__((min_vector_width(512))) /* where there are any; half the time */
#else
#define WIDEST_REGISTERS
#endif

/* Numbers 64 * stretch .. 64 * stretch + 63. */
WIDEST_REGISTERS static inline void random_stretch(uint64_t key, int64_t stretch, uint32_t *numbers) {
    const uint64_t low = 0xffffffff;
    uint32_t key_0 = (uint32_t)key, key_1 = (uint32_t)(key >> 32);
    philox_wide c[4] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
    c[0] += (uint64_t)(COUNTERS * stretch);
    c[1] = c[0] >> 32;
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        philox_wide product_0 = (c[0] & low) * 0xD2511F53, product_2 = (c[2] & low) * 0xCD9E8D57;
        c[0] = product_2 >> 32 ^ c[1] ^ key_0;
        c[1] = product_2;
        c[2] = product_0 >> 32 ^ c[3] ^ key_1;
        c[3] = product_0;
        key_0 += 0x9E3779B9;
        key_1 += 0xBB67AE85;
    }
    for (int word = 0; word < 4; word++) {
        philox_words narrow = __builtin_convertvector(c[word], philox_words);
        __builtin_memcpy(numbers + COUNTERS * word, &narrow, sizeof narrow);
    }
}

/* The same ones, and then each with its halves swapped: SHARED numbers, each as uniform, in half the time. Of two that
   share a word the upper halves, which decide all but once in 65536 times, are independent. */
static inline void shared_stretch(uint64_t key, int64_t stretch, uint32_t *numbers) {
    random_stretch(key, stretch, numbers);
    for (int64_t i = 0; i < NUMBERS; i++)
        numbers[NUMBERS + i] = numbers[i] << 16 | numbers[i] >> 16;
}

/* In [0, 1), a multiple of 2^-24. */
static inline float uniform(uint32_t number) {
    return (float)(int32_t)(number >> 8) * 0x1p-24f;
}

#endif

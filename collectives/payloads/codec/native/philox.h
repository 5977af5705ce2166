/* Philox4x32-10, counter-based random numbers: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".

   Number i of a key is word i % 64 / 16 of counter 16 * (i / 64) + i % 16. So 16 consecutive counters, computed in SIMD
   lanes, give 64 numbers in order, without a shuffle. */
#ifndef PHILOX_H
#define PHILOX_H

#include <stdint.h>

#define STRETCH 64 /* random numbers that one call computes */
#define SHARED_STRETCH (2 * STRETCH)
#define COUNTERS 16

typedef uint32_t philox_words __attribute__((vector_size(4 * COUNTERS)));
typedef uint64_t philox_wide __attribute__((vector_size(8 * COUNTERS))); /* each 64-bit lane holds a 32-bit word */

#ifdef __clang__
#define WIDEST_REGISTERS __attribute__((min_vector_width(512))) /* 512-bit registers, if there are any: half the time */
#else
#define WIDEST_REGISTERS
#endif

/* Writes numbers 64 * stretch .. 64 * stretch + 63 of the key. */
WIDEST_REGISTERS static inline void random_stretch(uint64_t key, int64_t stretch, uint32_t *numbers) {
    const uint64_t low = 0xffffffff;
    uint32_t key_0 = (uint32_t)key, key_1 = (uint32_t)(key >> 32);
    philox_wide counter[4] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
    counter[0] += (uint64_t)(COUNTERS * stretch);
    counter[1] = counter[0] >> 32;
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        philox_wide product_0 = (counter[0] & low) * 0xD2511F53, product_2 = (counter[2] & low) * 0xCD9E8D57;
        counter[0] = product_2 >> 32 ^ counter[1] ^ key_0;
        counter[1] = product_2;
        counter[2] = product_0 >> 32 ^ counter[3] ^ key_1;
        counter[3] = product_0;
        key_0 += 0x9E3779B9;
        key_1 += 0xBB67AE85;
    }
    for (int word = 0; word < 4; word++) {
        philox_words narrow = __builtin_convertvector(counter[word], philox_words);
        __builtin_memcpy(numbers + COUNTERS * word, &narrow, sizeof narrow);
    }
}

/* Writes SHARED_STRETCH numbers: those of `random_stretch`, then the same with their 16-bit halves swapped, which takes
   half the time per number. Each is uniform, and the upper halves of two numbers from one word are independent;
   rounding depends on the lower half only once in 65536 times. */
static inline void shared_stretch(uint64_t key, int64_t stretch, uint32_t *numbers) {
    random_stretch(key, stretch, numbers);
    for (int64_t i = 0; i < STRETCH; i++)
        numbers[STRETCH + i] = numbers[i] << 16 | numbers[i] >> 16;
}

/* Returns the upper 24 bits as a number in [0, 1). */
static inline float uniform(uint32_t number) {
    return (float)(int32_t)(number >> 8) * 0x1p-24f;
}

#endif

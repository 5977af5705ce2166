/* Eight magnitudes in geometric progression: products in fp64, one after another, to be rounded to fp32. */
#ifndef GEOMETRIC_H
#define GEOMETRIC_H

#define NUM_LEVELS 8
#define NEGATIVE 8 /* sign bit of a 4-bit code; the other bits are the number of the magnitude */

static inline void geometric_levels(double low, double ratio, double *levels) {
    double largest = 0x1.fffffep127;
    levels[0] = low;
    for (int j = 1; j < NUM_LEVELS; j++) {
        double next = levels[j - 1] * ratio;
        levels[j] = next < largest ? next : largest;
    }
}

#endif

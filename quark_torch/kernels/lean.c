/* Statistics of dense tensors in one read of their memory.

   Elements are taken in blocks that stay in the first cache. Within a block
   there are float32 lanes (float64 ones for float64 tensors) of distances from
   the mean of the block before, so that nothing cancels; blocks are joined in
   float64 by Chan's update. A NaN, an infinity or a square out of range shows
   in a block's sums, and only then is the block read again, slowly.

   This file is compiled once for each level of instructions, with LEVEL its
   name, and once with DISPATCH to choose among them. It knows nothing of Python. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#define INTERFACE 2

enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };
enum { NEAR_ZERO = 1, SATURATION = 2 };

/* Every field has eight bytes, so that it is packed and unpacked without padding. */
typedef struct {
    const void *data;   /* of the tensor, or after the update */
    const void *before; /* before the update, or NULL */
    int64_t count;
    int64_t dtype;
    int64_t wanted;
    double near_zero, low, high; /* numbers of the dtype, so that comparing is exact */
    int64_t outer, units, inner; /* dead units: the memory is [outer][units][inner]; 0 units: none */
    uint64_t near_zero_bits;     /* the near-zero epsilon in the dtype */
} Job;

typedef struct {
    int64_t finite, nan, inf, near_zero, saturated, dead;
    double mean, squares, minimum, maximum;
    double before_squares, variation; /* squares before the update; what differs between samples, or NAN */
} Result;

#define PASTE2(a, b) a##_##b
#define PASTE(a, b) PASTE2(a, b)

#ifndef DISPATCH

#define BLOCK 4096
#define INLINE static inline __attribute__((always_inline))
#define RUN PASTE(quark_run, LEVEL)

typedef struct {
    double mean, squares, minimum, maximum;
    int64_t finite, nan, inf, near_zero, saturated;
} Part;

static void join(Result *whole, const Part *part)
{
    if (part->finite) {
        int64_t count = whole->finite + part->finite;
        double share = (double)part->finite / (double)count;
        double distance = part->mean - whole->mean;
        whole->mean += distance * share;
        whole->squares += part->squares + distance * distance * (double)whole->finite * share;
        whole->finite = count;
        if (part->minimum < whole->minimum) whole->minimum = part->minimum;
        if (part->maximum > whole->maximum) whole->maximum = part->maximum;
    }
    whole->nan += part->nan;
    whole->inf += part->inf;
    whole->near_zero += part->near_zero;
    whole->saturated += part->saturated;
}

/* One pass over a block: four streams, so that the additions of one do not wait for those of another. */
#define DEFINE_BLOCK(NAME, T, I, ABS, LARGEST)                                                    \
    INLINE void NAME##_pass(const T *x, int64_t n, T shift, T epsilon, T low, T high,             \
                            int near_zero, int saturation, Part *part)                            \
    {                                                                                             \
        T s0 = 0, s1 = 0, s2 = 0, s3 = 0, q0 = 0, q1 = 0, q2 = 0, q3 = 0;                         \
        T lo = LARGEST, hi = -LARGEST;                                                            \
        I zeros = 0, ends = 0;                                                                    \
        int64_t quarter = n / 4;                                                                  \
        const T *x1 = x + quarter, *x2 = x1 + quarter, *x3 = x2 + quarter;                        \
        _Pragma("omp simd reduction(+:s0,s1,s2,s3,q0,q1,q2,q3,zeros,ends) reduction(min:lo) reduction(max:hi)") \
        for (int64_t i = 0; i < quarter; i++) {                                                   \
            T a = x[i], b = x1[i], c = x2[i], d = x3[i];                                          \
            T da = a - shift, db = b - shift, dc = c - shift, dd = d - shift;                     \
            s0 += da; s1 += db; s2 += dc; s3 += dd;                                               \
            q0 += da * da; q1 += db * db; q2 += dc * dc; q3 += dd * dd;                           \
            T lo1 = a < b ? a : b, lo2 = c < d ? c : d, hi1 = a > b ? a : b, hi2 = c > d ? c : d; \
            lo1 = lo1 < lo2 ? lo1 : lo2;                                                          \
            hi1 = hi1 > hi2 ? hi1 : hi2;                                                          \
            lo = lo1 < lo ? lo1 : lo;                                                             \
            hi = hi1 > hi ? hi1 : hi;                                                             \
            if (near_zero)                                                                        \
                zeros += (I)(ABS(a) <= epsilon) + (I)(ABS(b) <= epsilon)                          \
                       + (I)(ABS(c) <= epsilon) + (I)(ABS(d) <= epsilon);                         \
            if (saturation)                                                                       \
                ends += (I)((a <= low) | (a >= high)) + (I)((b <= low) | (b >= high))             \
                      + (I)((c <= low) | (c >= high)) + (I)((d <= low) | (d >= high));            \
        }                                                                                         \
        for (int64_t i = 4 * quarter; i < n; i++) {                                               \
            T a = x[i], da = a - shift;                                                           \
            s0 += da;                                                                             \
            q0 += da * da;                                                                        \
            lo = a < lo ? a : lo;                                                                 \
            hi = a > hi ? a : hi;                                                                 \
            if (near_zero) zeros += (I)(ABS(a) <= epsilon);                                       \
            if (saturation) ends += (I)((a <= low) | (a >= high));                                \
        }                                                                                         \
        double sum = ((double)s0 + s1) + ((double)s2 + s3);                                       \
        double squares = ((double)q0 + q1) + ((double)q2 + q3);                                   \
        part->finite = n;                                                                         \
        part->nan = part->inf = 0;                                                                \
        part->near_zero = zeros;                                                                  \
        part->saturated = ends;                                                                   \
        part->mean = (double)shift + sum / (double)n;                                             \
        part->squares = squares - sum * (sum / (double)n);                                        \
        part->minimum = lo;                                                                       \
        part->maximum = hi;                                                                       \
    }                                                                                             \
                                                                                                  \
    static __attribute__((noinline)) void NAME##_slowly(const T *x, int64_t n, const Job *job, Part *part) \
    {                                                                                             \
        memset(part, 0, sizeof *part);                                                            \
        part->minimum = INFINITY;                                                                 \
        part->maximum = -INFINITY;                                                                \
        for (int64_t i = 0; i < n; i++) {                                                         \
            double value = x[i];                                                                  \
            if (isnan(value)) { part->nan++; continue; }                                          \
            if (isinf(value)) { part->inf++; continue; }                                          \
            part->finite++;                                                                       \
            part->near_zero += fabs(value) <= job->near_zero;                                     \
            part->saturated += value <= job->low || value >= job->high;                           \
            if (value < part->minimum) part->minimum = value;                                     \
            if (value > part->maximum) part->maximum = value;                                     \
        }                                                                                         \
        double sum = 0, rest = 0, squares = 0, count = (double)part->finite;                      \
        if (!part->finite) return;                                                                \
        for (int64_t i = 0; i < n; i++)                                                           \
            if (isfinite((double)x[i])) sum += (double)x[i] / count;                              \
        for (int64_t i = 0; i < n; i++)                                                           \
            if (isfinite((double)x[i])) {                                                         \
                double distance = (double)x[i] - sum;                                             \
                rest += distance;                                                                 \
                squares += distance * distance;                                                   \
            }                                                                                     \
        part->mean = sum + rest / count;                                                          \
        part->squares = squares - rest * (rest / count);                                          \
    }                                                                                             \
                                                                                                  \
    INLINE void NAME##_block(const T *x, int64_t n, const Job *job, int near_zero, int saturation, Result *whole) \
    {                                                                                             \
        Part part;                                                                                \
        T shift = (T)whole->mean, epsilon = (T)job->near_zero, low = (T)job->low, high = (T)job->high; \
        if (!whole->finite) {                                                                     \
            int64_t few = n < 16 ? n : 16;                                                        \
            T sum = 0;                                                                            \
            for (int64_t i = 0; i < few; i++) sum += x[i];                                        \
            shift = isfinite(sum) ? sum / (T)few : 0;                                             \
        }                                                                                         \
        NAME##_pass(x, n, shift, epsilon, low, high, near_zero, saturation, &part);               \
        double offset = part.mean - (double)shift;                                                \
        if (offset * offset * (double)n > 4 * part.squares && offset != 0)                        \
            /* The shift was far off: what was left of the squares is mostly rounding. */         \
            NAME##_pass(x, n, (T)part.mean, epsilon, low, high, near_zero, saturation, &part);    \
        double peak = -part.minimum > part.maximum ? -part.minimum : part.maximum;                \
        if (!(part.squares < INFINITY) || !isfinite(part.mean)                                    \
            || (sizeof(T) == 4 && peak < 1e-10 && !(part.minimum == 0 && part.maximum == 0)))     \
            NAME##_slowly(x, n, job, &part);                                                      \
        if (part.squares < 0) part.squares = 0;                                                   \
        join(whole, &part);                                                                       \
    }                                                                                             \
                                                                                                  \
    static void NAME##_any(const T *x, int64_t n, const Job *job, Result *whole)                  \
    {                                                                                             \
        switch (job->wanted) {                                                                    \
        case 0: NAME##_block(x, n, job, 0, 0, whole); break;                                      \
        case NEAR_ZERO: NAME##_block(x, n, job, 1, 0, whole); break;                              \
        case SATURATION: NAME##_block(x, n, job, 0, 1, whole); break;                             \
        default: NAME##_block(x, n, job, 1, 1, whole);                                            \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    static double NAME##_square_sum(const T *x, int64_t n)                                        \
    {                                                                                             \
        T q0 = 0, q1 = 0;                                                                         \
        int64_t half = n / 2;                                                                     \
        const T *y = x + half;                                                                    \
        _Pragma("omp simd reduction(+:q0,q1)")                                                    \
        for (int64_t i = 0; i < half; i++) {                                                      \
            q0 += x[i] * x[i];                                                                    \
            q1 += y[i] * y[i];                                                                    \
        }                                                                                         \
        if (n & 1) q0 += x[n - 1] * x[n - 1];                                                     \
        double sum = (double)q0 + q1;                                                             \
        if (sum > 1e-20 && sum < INFINITY) return sum;                                            \
        sum = 0;                                                                                  \
        for (int64_t i = 0; i < n; i++)                                                           \
            if (isfinite((double)x[i])) sum += (double)x[i] * (double)x[i];                       \
        return sum;                                                                               \
    }

DEFINE_BLOCK(single, float, int32_t, fabsf, INFINITY)
DEFINE_BLOCK(twofold, double, int64_t, fabs, INFINITY)

static void widen_bfloat16(const uint16_t *from, float *to, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(&to[i], &bits, 4);
    }
}

static void widen_float16(const uint16_t *from, float *to, int64_t n)
{
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
    for (; i < n; i++) {
        uint32_t sign = (uint32_t)(from[i] & 0x8000) << 16, rest = from[i] & 0x7fff, bits;
        /* Subnormals are made from an integer, since a processor may be set to take them as zero. */
        float small = (float)(int32_t)rest * 5.9604644775390625e-8f;
        uint32_t small_bits;
        memcpy(&small_bits, &small, 4);
        bits = rest >= 0x7c00 ? 0x7f800000u | (rest << 13) : rest < 0x0400 ? small_bits : (rest << 13) + 0x38000000u;
        bits |= sign;
        memcpy(&to[i], &bits, 4);
    }
}

INLINE const float *take_single(const void *data, int64_t dtype, int64_t begin, int64_t n, float *space)
{
    switch (dtype) {
    case BFLOAT16: widen_bfloat16((const uint16_t *)data + begin, space, n); return space;
    case FLOAT16: widen_float16((const uint16_t *)data + begin, space, n); return space;
    default: return (const float *)data + begin;
    }
}

static void run_single(const Job *job, Result *results)
{
    float after_space[BLOCK], before_space[BLOCK];
    for (int64_t begin = 0; begin < job->count; begin += BLOCK) {
        int64_t n = job->count - begin < BLOCK ? job->count - begin : BLOCK;
        const float *after = take_single(job->data, job->dtype, begin, n, after_space);
        if (!job->before) {
            single_any(after, n, job, results);
            continue;
        }
        const float *before = take_single(job->before, job->dtype, begin, n, before_space);
        single_any(after, n, job, results + 1);
        results->before_squares += single_square_sum(before, n);
        for (int64_t i = 0; i < n; i++) after_space[i] = after[i] - before[i];
        single_any(after_space, n, job, results);
    }
}

static void run_twofold(const Job *job, Result *results)
{
    double space[BLOCK / 2];
    for (int64_t begin = 0; begin < job->count; begin += BLOCK / 2) {
        int64_t n = job->count - begin < BLOCK / 2 ? job->count - begin : BLOCK / 2;
        const double *after = (const double *)job->data + begin;
        if (!job->before) {
            twofold_any(after, n, job, results);
            continue;
        }
        const double *before = (const double *)job->before + begin;
        twofold_any(after, n, job, results + 1);
        results->before_squares += twofold_square_sum(before, n);
        for (int64_t i = 0; i < n; i++) space[i] = after[i] - before[i];
        twofold_any(space, n, job, results);
    }
}

/* Units none of whose elements exceeds the epsilon. Most live units show it in the
   first samples, so that only those that do not are looked at further. Magnitudes
   of floating point numbers are ordered as their bits are; a NaN is above all. */
#define DEFINE_DEAD(NAME, U)                                                                      \
    static int64_t NAME(const Job *job)                                                           \
    {                                                                                             \
        const U *x = job->data;                                                                   \
        const U mask = (U)~((U)1 << (8 * sizeof(U) - 1)), epsilon = (U)job->near_zero_bits;       \
        int64_t units = job->units, inner = job->inner, dead = units, row = 0, rows = 16;         \
        int64_t *left = malloc((size_t)units * sizeof *left);                                     \
        U *peaks = inner == 1 ? calloc((size_t)units, sizeof *peaks) : NULL;                      \
        if (!left || (inner == 1 && !peaks)) { free(left); free(peaks); return -1; }              \
        for (int64_t unit = 0; unit < units; unit++) left[unit] = unit;                           \
        while (peaks && row < job->outer && dead > units / 4) {                                   \
            int64_t end = row + rows < job->outer ? row + rows : job->outer;                      \
            for (; row < end; row++)                                                              \
                for (int64_t unit = 0; unit < units; unit++) {                                    \
                    U magnitude = x[row * units + unit] & mask;                                   \
                    peaks[unit] = magnitude > peaks[unit] ? magnitude : peaks[unit];              \
                }                                                                                 \
            dead = 0;                                                                             \
            for (int64_t unit = 0; unit < units; unit++)                                          \
                if (peaks[unit] <= epsilon) left[dead++] = unit;                                  \
            rows *= 2;                                                                            \
        }                                                                                         \
        for (; row < job->outer && dead; row++) {                                                 \
            int64_t still = 0;                                                                    \
            for (int64_t index = 0; index < dead; index++) {                                      \
                const U *of = x + (row * units + left[index]) * inner;                            \
                U peak = 0;                                                                       \
                for (int64_t begin = 0; begin < inner && peak <= epsilon; begin += 256) {         \
                    int64_t end = inner - begin < 256 ? inner : begin + 256;                      \
                    for (int64_t i = begin; i < end; i++) {                                       \
                        U magnitude = of[i] & mask;                                               \
                        peak = magnitude > peak ? magnitude : peak;                               \
                    }                                                                             \
                }                                                                                 \
                if (peak <= epsilon) left[still++] = left[index];                                 \
            }                                                                                     \
            dead = still;                                                                         \
        }                                                                                         \
        free(left);                                                                               \
        free(peaks);                                                                              \
        return dead;                                                                              \
    }

DEFINE_DEAD(dead_16, uint16_t)
DEFINE_DEAD(dead_32, uint32_t)
DEFINE_DEAD(dead_64, uint64_t)
#include "lean_variation.h"

void RUN(const Job *job, Result *results)
{
    for (int each = 0; each < (job->before ? 2 : 1); each++) {
        memset(&results[each], 0, sizeof *results);
        results[each].minimum = INFINITY;
        results[each].maximum = -INFINITY;
        results[each].variation = NAN;
    }
    if (job->dtype == FLOAT64) run_twofold(job, results);
    else run_single(job, results);
    /* Fewer elements near zero than one unit has: no unit is dead. */
    if (job->units && results->near_zero >= job->outer * job->inner)
        results->dead = job->dtype == FLOAT64 ? dead_64(job) : job->dtype == FLOAT32 ? dead_32(job) : dead_16(job);
    if (job->units) results->variation = job->dtype == FLOAT64 ? twofold_variation(job) : single_variation(job);
}

#else /* DISPATCH */

#ifdef HAVE_v4
void quark_run_v4(const Job *, Result *);
#endif
#ifdef HAVE_v3
void quark_run_v3(const Job *, Result *);
#endif
void quark_run_base(const Job *, Result *);

#define EXPORT __attribute__((visibility("default")))

/* What the caller must agree with. */
EXPORT int quark_interface(void) { return INTERFACE; }

/* The best level that this processor has, up to `limit`: 0 the base, 1 AVX2, 2 AVX-512. */
EXPORT int quark_level(int limit)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
             && __builtin_cpu_supports("f16c");
    (void)v3;
#ifdef HAVE_v4
    if (limit >= 2 && v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")
        && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
        return 2;
#endif
#ifdef HAVE_v3
    if (limit >= 1 && v3) return 1;
#endif
#endif
    (void)limit;
    return 0;
}

EXPORT void quark_measure(const Job *jobs, Result *results, int64_t count, int level)
{
    void (*run)(const Job *, Result *) = quark_run_base;
#ifdef HAVE_v3
    if (level == 1) run = quark_run_v3;
#endif
#ifdef HAVE_v4
    if (level == 2) run = quark_run_v4;
#endif
    (void)level;
    for (; count > 0; count--, jobs++) {
        run(jobs, results);
        results += jobs->before ? 2 : 1;
    }
}

#endif

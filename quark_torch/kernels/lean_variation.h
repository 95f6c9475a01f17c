/* Part of lean.c: how much of a tensor's energy differs between its samples.

   Samples are rows of the memory [outer][units * inner]. A few rows, evenly
   spaced, and the beginning of each are enough to see whether all are alike,
   and they are read again since the one pass over the tensor knows no rows. */

#define SAMPLES 6
#define SAMPLED 1024
#define STRETCH 256

/* Rows begin at whole shares of `outer`, so that the first one is always among them. */
INLINE int64_t find_row(const Job *job, int64_t sample, int64_t samples)
{
    return sample * job->outer / samples * job->units * job->inner;
}

INLINE const double *take_twofold(const void *data, int64_t dtype, int64_t begin, int64_t n, double *space)
{
    (void)dtype, (void)n, (void)space;
    return (const double *)data + begin;
}

/* Adds the squared distances from the mean over the rows, and the squares, of each position. */
#define DEFINE_STRETCH(NAME, T)                                                                   \
    INLINE void NAME##_stretch(const T *const *rows, int64_t samples, int64_t n, double *varied, double *squares) \
    {                                                                                             \
        T mean[STRETCH], v = 0, q = 0, share = 1 / (T)samples;                                    \
        memset(mean, 0, sizeof mean);                                                             \
        for (int64_t sample = 0; sample < samples; sample++) {                                    \
            const T *x = rows[sample];                                                            \
            for (int64_t i = 0; i < n; i++) mean[i] += x[i] * share;                              \
        }                                                                                         \
        for (int64_t sample = 0; sample < samples; sample++) {                                    \
            const T *x = rows[sample];                                                            \
            _Pragma("omp simd reduction(+:v,q)")                                                  \
            for (int64_t i = 0; i < n; i++) {                                                     \
                T distance = x[i] - mean[i];                                                      \
                v += distance * distance;                                                         \
                q += x[i] * x[i];                                                                 \
            }                                                                                     \
        }                                                                                         \
        *varied += v;                                                                             \
        *squares += q;                                                                            \
    }

DEFINE_STRETCH(single, float)
DEFINE_STRETCH(twofold, double)

/* NAN where a sampled element is not finite, or all are zero. Squares that may have left
   the range of T are made again, of the elements divided by the largest. */
#define DEFINE_VARIATION(NAME, T, ABS, LEAST)                                                     \
    static __attribute__((noinline)) double NAME##_variation_slowly(const Job *job, int64_t samples, int64_t length) \
    {                                                                                             \
        T space[SAMPLES][STRETCH], peak = 0;                                                      \
        double scaled[SAMPLES][STRETCH], varied = 0, squares = 0;                                 \
        const double *rows[SAMPLES];                                                              \
        for (int64_t sample = 0; sample < samples; sample++)                                      \
            for (int64_t begin = 0; begin < length; begin += STRETCH) {                           \
                int64_t n = length - begin < STRETCH ? length - begin : STRETCH;                  \
                const T *x = take_##NAME(job->data, job->dtype, find_row(job, sample, samples) + begin, n, *space); \
                _Pragma("omp simd reduction(max:peak)")                                           \
                for (int64_t i = 0; i < n; i++) peak = ABS(x[i]) > peak ? ABS(x[i]) : peak;       \
            }                                                                                     \
        if (peak == 0 || !isfinite(peak)) return NAN;                                             \
        for (int64_t begin = 0; begin < length; begin += STRETCH) {                               \
            int64_t n = length - begin < STRETCH ? length - begin : STRETCH;                      \
            for (int64_t sample = 0; sample < samples; sample++) {                                \
                int64_t at = find_row(job, sample, samples) + begin;                              \
                const T *x = take_##NAME(job->data, job->dtype, at, n, space[sample]);            \
                for (int64_t i = 0; i < n; i++) scaled[sample][i] = (double)x[i] / (double)peak;  \
                rows[sample] = scaled[sample];                                                    \
            }                                                                                     \
            twofold_stretch(rows, samples, n, &varied, &squares);                                 \
        }                                                                                         \
        return varied < squares ? varied / squares : 1;                                           \
    }                                                                                             \
                                                                                                  \
    static double NAME##_variation(const Job *job)                                                \
    {                                                                                             \
        int64_t samples = job->outer < SAMPLES ? job->outer : SAMPLES;                            \
        int64_t length = job->units * job->inner < SAMPLED ? job->units * job->inner : SAMPLED;   \
        double varied = 0, squares = 0;                                                           \
        T space[SAMPLES][STRETCH];                                                                \
        const T *rows[SAMPLES];                                                                   \
        if (samples < 2) return NAN;                                                              \
        for (int64_t begin = 0; begin < length; begin += STRETCH) {                               \
            int64_t n = length - begin < STRETCH ? length - begin : STRETCH;                      \
            for (int64_t sample = 0; sample < samples; sample++)                                  \
                rows[sample] = take_##NAME(job->data, job->dtype,                                 \
                                           find_row(job, sample, samples) + begin, n, space[sample]); \
            NAME##_stretch(rows, samples, n, &varied, &squares);                                  \
        }                                                                                         \
        if (isnan(squares)) return NAN; /* of a NaN only: a square of anything else is none */    \
        if (!(squares > LEAST && squares < INFINITY)) return NAME##_variation_slowly(job, samples, length); \
        return varied < squares ? varied / squares : 1;                                           \
    }

DEFINE_VARIATION(single, float, fabsf, 1e-20)
DEFINE_VARIATION(twofold, double, fabs, 1e-280)
